"""The documentation site builds without a warning, and its pages are the repository's."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MISSING = [package for package in ("mkdocs", "material", "mkdocstrings") if find_spec(package) is None]


def test_the_site_has_every_page() -> None:
    """Without MkDocs: its navigation names every page of docs/, and no other."""
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    named = set(re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    outside = {"index.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/RESULTS.md"}
    outside |= {"benchmarks/quality/results/tables.md", "tests/clients/README.md"}
    assert named == pages | outside


@pytest.mark.skipif(MISSING != [], reason=f"{', '.join(MISSING)} not installed: pip install 'shardopt[docs]'")
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    front = (tmp_path / "index.html").read_text()
    assert "figures/memory.svg" in front
    assert "quickstart/" in front
    api = (tmp_path / "api" / "index.html").read_text()
    assert "AdamW8bit" in api
    assert re.findall(r".*:[a-z]+:(?:`|<code>).*", api) == [], "roles must not be shown raw"
    assert "::</p>" not in api
    assert re.search(r'<a [^>]*href="#shardopt[.\w]*"><code>', api), "roles must link to what the page has"
