"""JSON from files that may be damaged, or made to do harm."""

from __future__ import annotations

import json
from typing import Any, TypeGuard

_MAX_NESTING = 16


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: the text is no JSON, has a key twice, or is nested deeper than any saved value.
    """
    try:
        value = json.loads(text if isinstance(text, str) else text.decode(), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as error:
        raise ValueError("bytes that are no UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("endless nesting") from error
    if not _is_flat(value, _MAX_NESTING):
        raise ValueError(f"nesting deeper than {_MAX_NESTING}")
    return value


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number that an offset or extent can be."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key that it has twice")
    return found


def _is_flat(value: object, levels: int) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(levels > 0 and _is_flat(item, levels - 1) for item in items)
