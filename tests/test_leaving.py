"""The job's process ends with its exit code and all that it said, and nothing of it is left to abort it after that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from train_job import ROOT

#: Aborts the process as gloo's threads do now and then: while Python dismantles itself. What keeps it cannot be seen
#: before that.
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
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("atexit.register(lambda: 1 / 0); return 0", 0, "ZeroDivisionError: division by zero"),  # as Python has it
    ],
)
def test_exit_codes_and_what_is_printed(end: str, code: int, said: str, tmp_path: Path) -> None:
    done = run(PROGRAM.format(end=end), cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert (done.stderr.splitlines() or [""])[-1] == said
    assert done.stdout.splitlines() == ["said", "a thread", "an exit handler"]


def test_output_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    done = run(PROGRAM.format(end="os.close(1); return 0"), cwd=tmp_path)
    assert done.returncode == 1
    assert "OSError: [Errno 9] Bad file descriptor" in done.stderr


@pytest.mark.parametrize("script", ["train.py", "quickstart.py"])
def test_the_scripts_end_so(script: str, tmp_path: Path) -> None:
    path = str(ROOT / "launch" / script)
    done = run(f"import runpy; runpy.run_path({path!r}, run_name='__main__')", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout
