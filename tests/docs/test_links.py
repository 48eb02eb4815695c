"""Relative links and anchors in the pages lead somewhere, and every page can be reached from the README."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
OTHERS = ("benchmarks/RESULTS.md", "benchmarks/quality/results/tables.md", "tests/clients/README.md")
PAGES = (*sorted(ROOT.glob("*.md")), *(ROOT / page for page in OTHERS), *sorted((ROOT / "docs").glob("*.md")))
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
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


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150
