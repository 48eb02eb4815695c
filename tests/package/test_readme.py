"""Every Python snippet of the README and docs/ runs, as its text says: those of torch.distributed under torchrun."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from programs import Programs

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))

#: Ends a rank without the rest of Python's end, in which a thread of gloo now and then aborts the process.
LEAVE = """
import os, sys
sys.stdout.flush()
os._exit(0)
"""
SNIPPETS = [
    pytest.param(snippet, id=f"{page.stem} {number}")
    for page in PAGES
    for number, snippet in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
]


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) == sum(page.read_text().count("```python") for page in PAGES) >= 4


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet(programs: Programs, snippet: str, tmp_path: Path) -> None:
    if "init_process_group" not in snippet:
        programs.run(snippet, tmp_path)
        return
    script = tmp_path / "snippet.py"
    script.write_text(snippet + LEAVE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_first_screen_says_what_it_is() -> None:
    first = "\n".join(README.read_text().splitlines()[:42])
    for needed in ("bytes per parameter", "pip install", "fully_shard", "**Works:**", "**Not yet:**"):
        assert needed in first
