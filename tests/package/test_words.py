"""Sentences of the code begin with a verb or a noun, so that a reader need not guess what a pronoun stands for."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BEGINNING = re.compile(r"(?:^|(?<=[.!?] ))(What|That of|Those|The same|It|Its|They)\b")


FOLDERS = ("shardopt", "tests", "benchmarks", "launch", "examples", "docs")


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings and blocks of comments, with the lines where they begin."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            if token.start[0] != last + 1:
                yield last, " ".join(block)
                block = []
            block.append(token.string.lstrip("#: "))
            last = token.start[0]
    yield last, " ".join(block)


def riddles(source: str) -> list[tuple[int, str]]:
    sentences = ((line, " ".join(text.split())) for line, text in texts(source))
    return [(line, text[at.start() :][:60]) for line, text in sentences for at in BEGINNING.finditer(text)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_sentence_begins_with_a_pronoun(folder: str) -> None:
    found = {
        str(path.relative_to(ROOT)): riddles(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    assert found
    assert not {path: sentences for path, sentences in found.items() if sentences}


@pytest.mark.parametrize(
    "source",
    [
        '"""What a step needs."""',
        'def f():\n    """Takes one.\n\n    It is small.\n    """',
        "x = 1\n# Those of others\n",
    ],
)
def test_riddles_are_found(source: str) -> None:
    assert len(riddles(source)) == 1
