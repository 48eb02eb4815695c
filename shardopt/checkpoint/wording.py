"""How errors and reports show what comes from outside: on one line, and not all of what is long."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Sequence

from torch import Tensor

_MAX_LISTED = 4
_MAX_CHARACTERS = 80  # of a name or number
_MAX_LIST_CHARACTERS = 160  # of several, or of a value made of them
_MAX_LINE_CHARACTERS = 300

_repr = reprlib.Repr()  # neither endless nesting nor a __repr__ that fails can harm it
_repr.maxstring = _repr.maxother = _repr.maxlong = _MAX_CHARACTERS


def shown(value: object) -> str:
    """A value as Python writes it."""
    return line(_repr.repr(value), _MAX_LIST_CHARACTERS)


def named(name: object) -> str:
    """A name as it is, where that is possible."""
    if isinstance(name, str) and name.isprintable() and 0 < len(name) <= _MAX_CHARACTERS:
        return name
    return shown(name)


def kind_of(value: object) -> str:
    """The dtype of a tensor; the type of anything else."""
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def few(names: Collection[object]) -> str:
    """The first of some names, in order."""
    return first_of(sorted(map(named, names)))


def first_of(texts: Sequence[str]) -> str:
    """The first of some texts, at least one and at most four; empty if there are none."""
    count = min(len(texts), 1)
    while count < min(len(texts), _MAX_LISTED) and len(", ".join(texts[: count + 1])) <= _MAX_LIST_CHARACTERS:
        count += 1
    rest = len(texts) - count
    return ", ".join(texts[:count]) + (f" and {rest} more" if rest else "")


def line(text: object, most: int = _MAX_LINE_CHARACTERS) -> str:
    """A text, such as another package's error, on one line and without its middle if it is long."""
    found = " ".join(str(text).split())
    half = most // 2 - 2
    return found if len(found) <= most else f"{found[:half]} ... {found[-half:]}"
