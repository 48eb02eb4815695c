"""Places of values in a JSON value: the keys and indices on the way to each."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from attack.forked import shown
from attack.rules import Json

Place = tuple[Any, ...]


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """The places of all values in a JSON value, apart from itself."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if type(value) is list else ()
    for key, item in items:
        yield (*place, key)
        yield from places(item, (*place, key))


def some_place(rng: Random, content: Json) -> Place:
    """One of any depth: there are far more deep ones than others."""
    place: Place = ()
    while True:
        value = at(content, place)
        keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
        if not keys or (place and rng.random() < 0.2):
            return place
        place = (*place, rng.choice(keys))


def at(value: Any, place: Place) -> Any:
    for key in place:
        value = value[key]
    return value


def put(value: Any, place: Place, new: Any) -> None:
    at(value, place[:-1])[place[-1]] = new


def shown_place(place: Place) -> str:
    return shown("/".join(map(str, place)))
