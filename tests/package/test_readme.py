"""Python snippets of the README and docs/ run: those of torch.distributed on two ranks, as under torchrun."""

import re
from pathlib import Path

import pytest

from needed import needs
from programs import Programs
from train_job import free_port
from versions import needs_fsdp2_on_the_cpu

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
#: Pages that need files: test_moving_over.py runs the recipes of one, test_examples.py the program of the other.
WITH_FILES = ("moving_over", "finetune")
PAGES = (README, *sorted(page for page in (ROOT / "docs").glob("*.md") if page.stem not in WITH_FILES))

#: Makes a program two ranks, with the variables that torchrun sets.
BEGIN = """
import os, signal
other = os.fork()
signal.alarm(120)  # a fork does not inherit it: ends a rank that waits for one that raised
rank = str(int(other == 0))
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "FREE_PORT"}
"""
#: Ends a rank without the rest of Python's end, in which a thread of gloo now and then aborts the process.
LEAVE = """
import os, sys
sys.stdout.flush()
os._exit(other and os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""
#: Frameworks of docs/clients.md.
FRAMEWORKS = ("accelerate", "lightning", "megatron", "torchtitan", "transformers")


def used(snippet: str) -> list[str]:
    """The frameworks that a snippet imports, perhaps by ``shardopt.clients``."""
    imports = r"^(from|import) (shardopt\.clients\.)?"
    return [name for name in FRAMEWORKS if re.search(rf"{imports}{name}\b", snippet, re.MULTILINE)]


def marks_of(snippet: str) -> list[pytest.MarkDecorator]:
    return [needs(*used(snippet)), *([needs_fsdp2_on_the_cpu] if "import fully_shard" in snippet else [])]


SNIPPETS = [
    pytest.param(snippet, id=f"{page.stem} {number}", marks=marks_of(snippet))
    for page in PAGES
    for number, snippet in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
]


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) == sum(page.read_text().count("```python") for page in PAGES) >= 4


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet(programs: Programs, snippet: str, tmp_path: Path) -> None:
    if "init_process_group" in snippet:
        snippet = BEGIN.replace("FREE_PORT", str(free_port())) + snippet + LEAVE
    programs.run(snippet, tmp_path)


def test_the_tests_that_the_table_of_clients_names_exist() -> None:
    """Each row of the table of frameworks and modes names tests that exist."""
    table = (ROOT / "tests" / "clients" / "README.md").read_text().partition("\n| mode |")[2]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    for row in rows:
        named = re.findall(r"`(?:(test_\w+\.py)(?:::)?)?(test_\w+)?`", row)
        assert named, row
        file = ""
        for name, test in named:
            file = name or file
            (path,) = (ROOT / "tests").rglob(file)
            assert not test or f"def {test}(" in path.read_text(), f"{file} has no {test}"
