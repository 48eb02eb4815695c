"""Hooks of MkDocs: pages from outside of docs/ are part of the site, README.md as its front page.

Links between pages are written for the repository, where they also work; here they get the paths of the site.
Docstrings name objects by the roles of Sphinx, such as :class:`shardopt.AdamW`: here they become links to objects that
the API page has, and code elsewhere. The two colons before a block become one.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
#: Files outside of docs/, and their places on the site.
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CITATION.cff": "CITATION.cff",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "LICENSE": "LICENSE",
    "SECURITY.md": "SECURITY.md",
    "benchmarks/RESULTS.md": "benchmarks/RESULTS.md",
    "benchmarks/quality/results/tables.md": "benchmarks/quality/results/tables.md",
    "tests/clients/README.md": "tests/clients/README.md",
    **{
        str(path.relative_to(ROOT)): str(path.relative_to(ROOT))
        for pattern in ("benchmarks/results/*/*.json", "examples/*", "shardopt/**/*.py", "csrc/**/*.h")
        for path in ROOT.glob(pattern)
    },
}
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod|obj):<code>~?([^<]+)</code>")
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the files from outside of docs/."""
    for path, place in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Gives links the paths of the site."""
    place = page.file.src_uri
    path = next((outside for outside, at in OUTSIDE.items() if at == place), f"docs/{place}")

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[1]))
        at = OUTSIDE.get(target, target.removeprefix("docs/"))
        return f"]({posixpath.relpath(at, posixpath.dirname(place) or '.')}"

    return LINK.sub(moved, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Turns roles into references, which mkdocs-autorefs resolves, and ends sentences before blocks with one colon."""

    def reference(role: re.Match[str]) -> str:
        name = role[1] if "." in role[1] else f"shardopt.{role[1]}"
        return f'<autoref identifier="{name}" optional><code>{role[1]}</code></autoref>'

    return ROLE.sub(reference, html).replace("::</p>", ":</p>")
