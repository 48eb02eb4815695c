"""The scripts in benchmarks/ start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import measuring

BENCHMARKS = Path(measuring.__file__).parent

#: Modules that scripts import, and nobody runs.
MODULES = ("/measuring.py", "/result_bars.py", "/results.py")

HELP = """
import runpy, sys
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    print("script", script)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert end.code == 0, (script, end.code)
"""


def test_every_script_starts() -> None:
    """In one process, which imports PyTorch once."""
    scripts = sorted(str(script) for script in BENCHMARKS.glob("*.py"))
    command = [sys.executable, "-c", HELP, *scripts]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    usages = [text.partition("\n")[2] for text in done.stdout.split("script ")[1:] if "\n" in text]
    helped = [script for script, usage in zip(scripts, usages, strict=True) if usage.startswith("usage: ")]
    assert helped == [script for script in scripts if not script.endswith(MODULES)]
