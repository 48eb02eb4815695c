"""Extra values of a save, at random: they come back exactly from JSON that every parser reads, or are refused by name.

A refused save changes nothing.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from attack.contents import Known, difference, fingerprint
from attack.forked import Outcome, call, fault, ok, shown
from attack.index_file import INDEX, strays

_known: list[Known] = []

#: Values that JSON has, or that the format writes.
PLAIN: list[Any] = [
    *(None, True, False, 0, -1, 10**400, 2**63, 1.5, -0.0, 5e-324, 1.7976931348623157e308, np.float64(0.1)),
    *([math.inf, -math.inf, math.nan, np.float64("inf"), np.float64("nan")] * 3),
    *("", "a", "NaN", "Infinity", "\ud800", "\0", "\u2028", "$numberDouble", "a" * 1000, [], {}, ()),
]
#: Values that neither has.
STRANGE: list[Callable[[], Any]] = [
    *(object, lambda: {1, 2}, lambda: b"bytes", lambda: np.float32(1), lambda: np.zeros(2), lambda: 1j),
    lambda: 10**5000,
    *(lambda: {1: "a"}, lambda: {None: 1}, lambda: {math.inf: 1}, lambda: {"a": {b"k": 1}}, lambda: {("a",): 1}),
    *(lambda: _circle([]), lambda: _circle({}), lambda: _deep(Random(0), 102, 1), lambda: _deep(Random(0), 2000, 1)),
    lambda: _deep(Random(0), 100_000, 1),
]
KEYS = ["a", "b", "", "$numberDouble", "$$numberDouble", "$$$numberDouble", "numberDouble", "\ud800", "a\nb", "k" * 300]


def prepare(base: Path) -> None:
    """Makes two contents, and a checkpoint of the first."""
    _known.append(Known(2))
    _known[-1].save(base / "before", 0)


def attack(seed: int, number: int, base: Path) -> Outcome:
    """Saves one set of extra values over a checkpoint."""
    rng = Random(f"extras {seed} {number}")
    folder = base / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base / "before", folder)
    extra = {f"value{i}": _value(rng, 0) for i in range(rng.randint(1, 6))}
    is_strange = rng.random() < 0.4
    if is_strange:
        place = rng.choice(list(extra))
        extra[place] = rng.choice([lambda x: x, lambda x: [x], lambda x: {"a": [1, (x,)]}])(rng.choice(STRANGE)())
    elif rng.random() < 0.3:
        extra["deep"] = _deep(rng, 98, rng.choice(PLAIN))
    outcome = call(lambda: _check(folder, extra, is_strange))
    return outcome._replace(attack="strange values" if is_strange else shown(extra))


def _check(folder: Path, extra: dict[str, Any], is_strange: bool) -> Outcome:
    known = _known[-1]
    try:
        known.save(folder, 1, **extra)
    except TypeError as error:
        if not is_strange:
            return fault("refused what JSON has", shown(str(error)))
        if not str(error).isprintable() or len(str(error)) > 600:
            return fault("a long error", shown(str(error)))
        k, found = known.load(folder)
        return ok("refused") if (k, found) == (0, {"k": 0}) else fault("a refused save changed something", shown(found))
    except BaseException as error:
        return fault(f"save: {type(error).__name__}", shown(str(error)))
    if is_strange:
        return fault("saved what JSON has not")
    try:
        json.loads((folder / INDEX).read_text(), parse_constant=_no_json)
    except ValueError as error:
        return fault("an index that is no JSON", str(error))
    k, found = known.load(folder)
    told = difference(fingerprint(found), fingerprint(_listed({"k": 1, **extra})))
    left = strays(folder)
    return fault("other values", f"{k} {told} {left}") if told or k != 1 or left else ok("exact")


def _no_json(constant: str) -> None:
    raise ValueError(f"the bare word {constant}")


def _value(rng: Random, depth: int) -> Any:
    kind = rng.random()
    if depth > 4 or kind < 0.5:
        return rng.choice(PLAIN)
    items = [_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    if kind < 0.65:
        return items
    if kind < 0.7:
        return tuple(items)
    return {rng.choice(KEYS): item for item in items}


def _deep(rng: Random, depth: int, value: Any) -> Any:
    for _ in range(depth):
        value = rng.choice([[value], (value,), {rng.choice(KEYS): value}])
    return value


def _circle(value: Any) -> Any:
    if isinstance(value, list):
        value.append({"a": value})
    else:
        value["a"] = [value]
    return value


def _listed(value: Any) -> Any:
    """A value as JSON has it: with lists for tuples, and plain numbers."""
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_listed(item) for item in value]
    return float(value) if isinstance(value, float) else value
