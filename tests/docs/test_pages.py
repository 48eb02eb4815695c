"""The pages: links lead somewhere, every page can be reached, the site builds, and messages are the package's."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import shardopt
from shardopt import estimate

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
OTHERS = ("benchmarks/RESULTS.md", "benchmarks/quality/results/tables.md", "tests/clients/README.md")
PAGES = (*sorted(ROOT.glob("*.md")), *(ROOT / page for page in OTHERS), *sorted((ROOT / "docs").rglob("*.md")))
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
MISSING = [package for package in ("mkdocs", "material", "mkdocstrings") if find_spec(package) is None]
#: Messages that docs/troubleshooting.md explains.
MESSAGES = re.findall(r"^\| `(.+?)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
assert len(MESSAGES) > 25
LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The files that a page links to, with anchors; not those of other sites."""
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if not re.match(r"[a-z]+:", link):
            file, _, anchor = link.partition("#")
            yield (page.parent / file).resolve() if file else page, anchor


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{page.name} links to {target}, which does not exist"
        assert not anchor or anchor in anchors(target), f"{page.name} links to #{anchor}, which {target.name} lacks"


def test_every_page_can_be_reached() -> None:
    reached, pending = {README}, [README]
    while pending:
        new = {target for target, _ in links(pending.pop()) if target.suffix == ".md"} - reached
        reached |= new
        pending += new
    assert set(PAGES) <= reached, f"not linked to: {sorted(page.name for page in set(PAGES) - reached)}"


def test_the_site_has_every_page() -> None:
    """Without MkDocs: its navigation names every page of docs/, and no other."""
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    named = set(re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert named == pages | {"index.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", *OTHERS}


def test_a_whole_program_is_the_example() -> None:
    """The blocks of docs/finetune.md, one after the other, are examples/fsdp2_finetune.py without its docstring."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "finetune.md").read_text(), re.M | re.S)
    assert "\n".join(blocks) == (ROOT / "examples" / "fsdp2_finetune.py").read_text().partition('"""\n\n')[2]


@pytest.mark.slow  # launch/docs.sh builds it, too
@pytest.mark.skipif(MISSING != [], reason=f"{', '.join(MISSING)} not installed: pip install 'shardopt[docs]'")
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    front = (tmp_path / "index.html").read_text()
    assert "figures/front.svg" in front
    assert "quickstart/" in front
    api = "".join(path.read_text() for path in sorted((tmp_path / "api").rglob("index.html")))
    assert re.findall(r".*:[a-z]+:(?:`|<code>).*", api) == [], "roles must not be shown raw"
    assert "::</p>" not in api
    assert 'href="../options/#shardopt.state.options.Options"' in api, "**options must link to the options"
    names = {*shardopt.__all__, *shardopt.checkpoint.__all__, *estimate.__all__, "Options", "ordered_gradients"} - {
        "Outcome"
    }
    assert names <= set(re.findall(r'<h[34] id="shardopt[.\w]*\.(\w+)"', api))


def texts() -> str:
    """All string constants of the package and setup.py, fields of f-strings left out."""
    constants = []
    for path in (ROOT / "setup.py", *sorted((ROOT / "shardopt").rglob("*.py"))):
        constants += [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    return "\n".join(text for text in constants if isinstance(text, str))


TEXTS = texts()


@pytest.mark.parametrize("message", MESSAGES)
def test_the_package_says_so(message: str) -> None:
    for part in message.split("..."):
        assert part.strip() in TEXTS, f"docs/troubleshooting.md has {part!r}, which no message of the package has"
