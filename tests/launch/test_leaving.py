"""The job's process ends with its exit code and all that it said, and nothing of it is left to abort it after that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from train_job import ROOT

#: Aborts the process as gloo's threads do now and then: while Python dismantles itself. The object is deleted then, and
#: not sooner, as sys refers to it.
ABORTING = """
import atexit, os, sys, threading, time

class Aborting:
    def __del__(self, abort=os.abort):
        abort()

sys.aborting = Aborting()
"""

PROGRAM = """
def work():
    time.sleep(0.3)
    print("a thread")

def main():
    threading.Thread(target=work).start()
    atexit.register(print, "an exit handler")
    print("said")
    {end}

from lm.leaving import leave
leave(main)
"""


def run(program: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    paths = f"import sys; sys.path.insert(0, {str(ROOT / 'launch')!r})"
    command = [sys.executable, "-c", paths + ABORTING + program, *(str(argument) for argument in arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def test_python_aborts_where_the_job_does_not(tmp_path: Path) -> None:
    assert run("", cwd=tmp_path).returncode < 0


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("return 0", 0, ""),
        ("return 3", 3, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(2)", 2, ""),
        ("sys.exit('in one line')", 1, "in one line"),
        ("raise ValueError('an error')", 1, "ValueError: an error"),
        ("sys.exit(130)", 130, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("atexit.register(lambda: 1 / 0); return 0", 0, "ZeroDivisionError: division by zero"),  # as Python has it
    ],
)
def test_exit_codes_and_what_is_printed(end: str, code: int, said: str, tmp_path: Path) -> None:
    done = run(PROGRAM.format(end=end), cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert (done.stderr.splitlines() or [""])[-1] == said
    assert done.stdout.splitlines() == ["said", "a thread", "an exit handler"]


@pytest.mark.parametrize("end", ["os.close(1); return 0", "os.close(1); raise ValueError"])
def test_output_that_cannot_be_written_is_an_error(end: str, tmp_path: Path) -> None:
    done = run(PROGRAM.format(end=end), cwd=tmp_path)
    assert done.returncode == 120
    assert "OSError: [Errno 9] Bad file descriptor" in done.stderr


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("import _thread; threading.Timer(0.1, _thread.interrupt_main).start(); return 3", 3),  # Ctrl-C while it waits
        ("threading._shutdown = lambda: 1 / 0; return 3", 3),
        ("atexit._run_exitfuncs = lambda: 1 / 0; return 3", 3),
        ("sys.stdout.close(); return 3", 3),
        ("sys.stdout = None; return 3", 3),
    ],
)
def test_a_step_that_fails_skips_no_other(end: str, code: int, tmp_path: Path) -> None:
    """Standard error is buffered here, so that only the last step writes it."""
    buffered = "sys.stderr = open(2, 'w', buffering=1 << 16, closefd=False); print('to the end', file=sys.stderr)"
    done = run(PROGRAM.format(end=f"{buffered}; {end}"), cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[0] == "to the end"
    if "stdout" not in end:
        assert "said" in done.stdout.splitlines()
        assert ("an exit handler" in done.stdout.splitlines()) == ("_run_exitfuncs" not in end)


PYTHON_ENDS = [
    ("sys.exit(2)", "pass"),
    ("raise KeyboardInterrupt", "pass"),
    ("raise ValueError", "pass"),
    ("return 0", "os.close(1)"),
    ("raise KeyboardInterrupt", "os.close(1)"),
    ("return 0", "atexit.register(lambda: 1 / 0)"),
]


@pytest.mark.parametrize(("end", "before"), PYTHON_ENDS)
def test_exit_codes_are_pythons(end: str, before: str, tmp_path: Path) -> None:
    program = f"import atexit, os, sys\ndef main():\n    print('said')\n    {before}\n    {end}\n"
    paths = f"import sys; sys.path.insert(0, {str(ROOT / 'launch')!r})\n"
    codes = []
    for last in ("sys.exit(main())", "from lm.leaving import leave\nleave(main)"):
        command = [sys.executable, "-c", paths + program + last]
        codes.append(subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120, check=False).returncode)
    assert codes[0] == codes[1]


@pytest.mark.parametrize("script", ["train.py", "quickstart.py"])
def test_the_scripts_end_so(script: str, tmp_path: Path) -> None:
    path = str(ROOT / "launch" / script)
    done = run(f"import runpy; runpy.run_path({path!r}, run_name='__main__')", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout
