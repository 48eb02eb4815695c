"""How errors and reports show what comes from outside: on one line, and not all of what is long."""

from __future__ import annotations

import reprlib
from collections.abc import Collection

from torch import Tensor

_MAX_LISTED = 4
_MAX_CHARACTERS = 80

_repr = reprlib.Repr()  # neither endless nesting nor a __repr__ that fails can harm it
_repr.maxstring = _repr.maxother = _repr.maxlong = _MAX_CHARACTERS


def shown(value: object) -> str:
    """A value as Python writes it."""
    return " ".join(_repr.repr(value).split())


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
    listed = sorted(map(named, names))
    rest = len(listed) - _MAX_LISTED
    return ", ".join(listed[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")
