"""Sentences of the code begin with a verb or a noun, so that a reader need not guess what a pronoun stands for."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Of C++: a string, which may have "//" in it, or a comment, in a group.
STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|(//[^\n]*|/\*.*?\*/)', re.DOTALL)
BEGINNING = re.compile(r"(?:^|(?<=[.!?] ))(What|That of|Those|The same|It|Its|They)\b")


FOLDERS = ("shardopt", "csrc", "tests", "benchmarks", "launch", "examples", "docs")


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


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments of C++, with the lines where they begin; comments on successive lines of their own are one."""
    block: list[str] = []
    first = following = 0
    for match in STRING_OR_COMMENT.finditer(source):
        if not match[1]:
            continue
        before = source[: match.start()]
        line, is_alone = before.count("\n") + 1, not before.rpartition("\n")[2].strip()
        if line != following or not is_alone:
            yield first, " ".join(block)
            block, first = [], line
        block += (part.strip("/* ") for part in match[1].splitlines())
        following = line + len(match[1].splitlines()) if is_alone else 0
    yield first, " ".join(block)


#: Of a source file, by its suffix: the function that finds its texts.
READERS = {".py": texts, ".h": comments, ".cpp": comments, ".cu": comments}


def riddles(texts: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    sentences = ((line, " ".join(text.split())) for line, text in texts)
    return [(line, text[at.start() :][:60]) for line, text in sentences for at in BEGINNING.finditer(text)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_sentence_begins_with_a_pronoun(folder: str) -> None:
    found = {
        str(path.relative_to(ROOT)): riddles(READERS[path.suffix](path.read_text(encoding="utf-8")))
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in READERS
    }
    assert found
    assert not {path: sentences for path, sentences in found.items() if sentences}
