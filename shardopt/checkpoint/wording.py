"""Formats untrusted values, such as names read from files, for an error message: on one line, and short."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Sequence

from torch import Tensor

_MAX_LISTED = 4
_MAX_CHARACTERS = 80  # of a name or number
_MAX_LIST_CHARACTERS = 160  # of a list of names, or of a nested value
_MAX_LINE_CHARACTERS = 300

_repr = reprlib.Repr()  # safe from endless nesting and from a __repr__ that fails
_repr.maxstring = _repr.maxother = _repr.maxlong = _MAX_CHARACTERS


def shown(value: object) -> str:
    """The shortened repr of a value."""
    return one_line(_repr.repr(value), _MAX_LIST_CHARACTERS)


def named(name: object) -> str:
    """A name unchanged if it is printable and short, else its shortened repr."""
    if isinstance(name, str) and name.isprintable() and 0 < len(name) <= _MAX_CHARACTERS:
        return name
    return shown(name)


def kind_of(value: object) -> str:
    """A tensor's dtype, or the name of any other value's type, for an error message."""
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def few(names: Collection[object]) -> str:
    """The first few of the sorted names, and how many more there are."""
    return first_of(sorted(map(named, names)))


def first_of(texts: Sequence[str]) -> str:
    """Joins the first one to four texts by commas, as many as fit, and says how many more there are; empty for none."""
    count = min(len(texts), 1)
    while count < min(len(texts), _MAX_LISTED) and len(", ".join(texts[: count + 1])) <= _MAX_LIST_CHARACTERS:
        count += 1
    rest = len(texts) - count
    return ", ".join(texts[:count]) + (f" and {rest} more" if rest else "")


def one_line(text: object, most: int = _MAX_LINE_CHARACTERS) -> str:
    """A text, such as another package's error, on one line of at most ``most`` characters, without its middle."""
    shortened = " ".join(str(text).split())
    half = (most - len(" ... ")) // 2
    return shortened if len(shortened) <= most else f"{shortened[:half]} ... {shortened[-half:]}"
