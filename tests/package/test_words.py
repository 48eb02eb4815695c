"""Sentences of the code begin with a verb or a noun, so that a reader need not guess what a pronoun stands for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: How comments begin, by a file's suffix.
MARKS = {".py": "#", ".h": "//", ".cpp": "//", ".cu": "//"}
BEGINNING = re.compile(r"(?:^|(?<=[.!?] ))(What|That of|Those|The same|It|Its|They)\b")


FOLDERS = ("shardopt", "csrc", "tests", "benchmarks", "launch", "examples", "docs")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings, and blocks of comments on lines of their own, with the lines where they begin."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)) if path.suffix == ".py" else ():
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""
    for block in re.finditer(rf"(?:^[ \t]*{MARKS[path.suffix]}.*\n)+", source, re.MULTILINE):
        lines = (line.lstrip(" \t#:/") for line in block[0].splitlines())
        yield source.count("\n", 0, block.start()) + 1, " ".join(lines)


def riddles(path: Path) -> list[tuple[int, str]]:
    sentences = ((line, " ".join(text.split())) for line, text in texts(path))
    return [(line, text[at.start() :][:60]) for line, text in sentences for at in BEGINNING.finditer(text)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_sentence_begins_with_a_pronoun(folder: str) -> None:
    paths = [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in MARKS]
    found = {str(path.relative_to(ROOT)): riddles(path) for path in paths}
    assert found
    assert not {path: sentences for path, sentences in found.items() if sentences}
