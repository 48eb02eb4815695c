"""The job's process ends with its exit code and all that it said, and nothing of it is left to abort it after that."""

from __future__ import annotations

import os
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

threading.Thread(target=work).start()
atexit.register(print, "an exit handler")
sys.stderr = open(2, "w", buffering=1 << 16, closefd=False)  # written at the end
print("said", file=sys.stderr)

from lm.errors import leave
{before}
leave({code})
"""


def run(program: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    paths = f"import sys; sys.path.insert(0, {str(ROOT / 'launch')!r})"
    command = [sys.executable, "-c", paths + ABORTING + program, *(str(argument) for argument in arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("before", "code"), [("", 3), ("atexit.register(lambda: 1 / 0)", 0)], ids=["3", "failing handler"]
)
def test_threads_handlers_and_output_are_waited_for(before: str, code: int, tmp_path: Path) -> None:
    done = run(PROGRAM.format(before=before, code=code), cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[0] == "said"
    assert ("ZeroDivisionError: division by zero" in done.stderr) == bool(before)
    assert done.stdout.splitlines() == ["a thread", "an exit handler"]


def test_the_job_ends_so(tmp_path: Path) -> None:
    path = str(ROOT / "launch" / "train.py")
    done = run(f"import runpy; runpy.run_path({path!r}, run_name='__main__')", "--data", "/nowhere", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr == "train.py: error: data /nowhere not found: give a file or a folder of text\n"
