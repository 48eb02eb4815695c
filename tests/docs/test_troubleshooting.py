"""Messages that docs/troubleshooting.md explains are messages of the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
MESSAGES = re.findall(r"^\| `(.+?)` \|", PAGE.read_text(), re.MULTILINE)


def texts() -> str:
    """All string constants of the package and setup.py, fields of f-strings left out."""
    constants = []
    for path in (ROOT / "setup.py", *sorted((ROOT / "shardopt").rglob("*.py"))):
        constants += [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    return "\n".join(text for text in constants if isinstance(text, str))


TEXTS = texts()


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 25


@pytest.mark.parametrize("message", MESSAGES)
def test_the_package_says_so(message: str) -> None:
    for part in message.split("..."):
        assert part.strip() in TEXTS, f"docs/troubleshooting.md has {part!r}, which no message of the package has"
