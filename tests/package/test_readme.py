"""Every Python snippet of README and docs runs, as its text says: those of torch.distributed under torchrun."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
def test_snippet(snippet: str, tmp_path: Path) -> None:
    script = tmp_path / "snippet.py"
    ranks = "init_process_group" in snippet
    script.write_text(snippet + LEAVE if ranks else snippet)
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*command, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_first_screen_says_what_it_is() -> None:
    first = "\n".join(README.read_text().splitlines()[:42])
    for needed in ("bytes per parameter", "pip install", "fully_shard", "**Works:**", "**Not yet:**"):
        assert needed in first
