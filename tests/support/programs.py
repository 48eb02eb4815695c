"""Runs programs, each in a process of its own that has imported torch and its compiler already: they take seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

#: Forks a process per program; it has one thread, as torch starts others only when it computes.
_SERVER = """
import json, os, runpy, signal, sys, traceback
import torch, torch._dynamo
for line in sys.stdin:
    script, folder, output = json.loads(line)
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(120)  # ends a program that hangs
            os.chdir(folder)
            sys.stdin.close()
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(file, 1)
            os.dup2(file, 2)
            runpy.run_path(script, run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Programs:
    """A server that runs programs."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
        )

    def run(self, program: str, folder: Path) -> None:
        """Runs a program in a folder.

        Raises:
            AssertionError: the program failed; the message is its output.
        """
        script, output = folder / "program.py", folder / "output.txt"
        script.write_text(program)
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([str(script), str(folder), str(output)]) + "\n")
        self._server.stdin.flush()
        code = self._server.stdout.readline().strip()
        assert code == "0", f"got exit code {code}\n{output.read_text()}"

    def close(self) -> None:
        """Ends the server."""
        self._server.communicate()
