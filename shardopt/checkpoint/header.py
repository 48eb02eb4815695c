"""Encodes the header of a checkpoint as standard JSON, and decodes it.

JSON has no infinities and no NaN, which Python's own encoder writes as bare words that other parsers refuse. The
header has objects with one key in their place, as in the extended JSON of MongoDB::

    {"$numberDouble": "Infinity"}    {"$numberDouble": "-Infinity"}    {"$numberDouble": "NaN"}

A user's dict whose only key is ``$numberDouble`` is escaped: its key gets one more ``$``, as does a key that has more
than one ``$`` already. Bare words, which earlier versions wrote, are still read.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from shardopt.checkpoint.wording import named, shown

MOST_NESTED = 100  # levels of lists and dicts in an extra value; Python's parser fails at some 1,000, others earlier
_KEY = re.compile(r"\$+numberDouble")
_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def to_json(header: Any) -> str:
    """Encodes a header as JSON, with infinities and NaN as objects; TypeError for what JSON or a load cannot take."""
    encoded = _encoded(header, "", 0)
    try:
        return json.dumps(encoded, allow_nan=False)
    except (TypeError, ValueError) as error:  # ValueError: a whole number of thousands of digits
        raise TypeError(
            f"got a header that JSON cannot hold: {error}; pass tensors, numbers, text, and lists and dicts of the "
            "last two, such as scheduler.state_dict()"
        ) from None


def from_json(text: str | bytes) -> Any:
    """Decodes what :func:`to_json` writes; ValueError if it is no JSON, RecursionError if it is nested too deep."""
    return json.loads(text, object_hook=_decoded)


def _encoded(value: Any, name: str, depth: int) -> Any:
    """A value with objects in place of infinities and NaN; ``name``: its place in the header, ``depth`` levels down."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"$numberDouble": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if not isinstance(value, dict | list | tuple):
        return value
    if depth > MOST_NESTED + 1:  # the header, extra
        raise TypeError(
            f"{named(name)}: got lists and dicts nested more than {MOST_NESTED} deep, or in a circle, expected "
            "fewer; save a flat list, or a tensor"
        )
    if not isinstance(value, dict):
        return [_encoded(each, name, depth + 1) for each in value]
    encoded = {}
    for key, each in value.items():
        if not isinstance(key, str):
            raise TypeError(
                f"{named(name)}: got the key {shown(key)}, expected text, as JSON has no other keys; leave out what "
                "the constructor makes (milestones of MultiStepLR), or save a list of pairs"
            )
        encoded[key] = _encoded(each, f"{name}.{key}" if name else key, depth + 1)
    if len(encoded) == 1 and _KEY.fullmatch(key):
        return {f"${key}": encoded[key]}
    return encoded


def _decoded(parsed: dict[str, Any]) -> Any:
    """The number or dict that a JSON object stands for: the inverse of :func:`_encoded`, for one object."""
    if len(parsed) != 1:
        return parsed
    [(key, value)] = parsed.items()
    if not _KEY.fullmatch(key):
        return parsed
    if key.startswith("$$"):
        return {key[1:]: value}
    return _NUMBERS.get(value, parsed) if isinstance(value, str) else parsed
