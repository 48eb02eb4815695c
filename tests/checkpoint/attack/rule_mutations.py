"""Mutations of what an index says about files: token, lengths, and the rules by which tensors are in them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from random import Random
from typing import Any

from attack.forked import shown
from attack.json_values import SIZES, TOKENS
from attack.recut import rectangles
from attack.rules import Json, files_of_elements


def _token(rng: Random, content: Json) -> str:
    content["token"] = rng.choice(TOKENS)
    return shown(content["token"])


def _files(rng: Random, content: Json) -> str:
    """The list of files, longer or shorter, or with other numbers."""
    files = content["files"]
    one, number = rng.randrange(4), rng.choice(SIZES)
    how = rng.choice(["number", "number", "null", "add", "remove", "reverse", "swap", "shift", "many", "all"])
    column = rng.randrange(3)
    if how == "number":
        files[one][column] = number
    elif how == "null":
        files[one] = None
    elif how == "add":
        files.insert(rng.randrange(6), rng.choice([None, [number, 16, 0], [0, 0, 0], files[one], [], [1, 2], number]))
    elif how == "remove":
        del files[one]
    elif how == "reverse":
        files.reverse()
    elif how == "swap":
        other = rng.randrange(5)
        files[one], files[other] = files[other], files[one]
    elif how == "shift":  # the table's bytes for the data's
        more = rng.choice([1, 16, 64, -1, -16, files[one][0], files[one][1]])
        files[one][0], files[one][1] = files[one][0] - more, files[one][1] + more
    elif how == "many":
        files += [rng.choice([None, [0, 16, 0]])] * 100_000
    else:
        content["files"] = rng.choice([[], [None] * 5, [number] * 5, {"0": files[0]}, files * 1000])
    return f"{how} {one} {column} {shown(number)}"


def _rule(rng: Random, content: Json) -> str:
    """A number in a tensor's rule."""
    name, line = _tensor(rng, content)
    way = "cuts" if "cuts" in line else "range" if "range" in line else "parts"
    key = rng.choice(["start", way, way, way]) if way != "parts" else way
    number = rng.choice([*SIZES, *(_near(rng, line["shape"]) for _ in range(4))])
    if key == "start":
        line[key] = number
    elif not line[key]:
        line[key].append(rng.choice([number, [number] * 3, [0, 1, 1], [0, [], []]]))
    else:
        _put_number(rng, line[key], number)
    return f"{name} {way} {shown(number)}: {shown(line.get(key))}"


def _way(rng: Random, content: Json) -> str:
    """Describes a tensor in another of the three ways, rightly or nearly so; or in none, or in two."""
    name, line = _tensor(rng, content)
    shape = line["shape"]
    files = None if 0 in shape else files_of_elements(line)
    how = rng.choice(["parts", "parts", "none", "both", "other's", "one", "add a cut", "drop", "twice", "block"])
    rules = ("start", "cuts", "range", "parts")
    other = content["tensors"][rng.choice(list(content["tensors"]))]
    if how == "parts" and files is not None:  # harmless
        _drop(line, rules)
        line["parts"] = [list(part) for part in rectangles(files)]
    elif how == "none":
        _drop(line, rules)
    elif how == "both":
        line.update({key: copy.deepcopy(value) for key, value in other.items() if key in rules})
    elif how == "other's":
        _drop(line, rules)
        line.update({key: copy.deepcopy(value) for key, value in other.items() if key in rules})
    elif how == "one":
        _drop(line, rules)
        line.update(start=rng.randrange(6), cuts=[])
    elif how == "add a cut":
        _drop(line, ("range", "parts"))
        ways = rng.choice([1, 1, 2, 3, 4, rng.randrange(1, 9)])
        line["start"] = line.get("start", 0)
        line.setdefault("cuts", []).append([rng.randrange(len(shape) + 1), ways, rng.choice([1, 2, 2**62])])
    elif how == "drop" and line.get("cuts"):
        line["cuts"].pop()
    elif how == "twice" and line.get("cuts"):
        line["cuts"] *= rng.choice([2, 40, 70])
    elif how == "block" and "range" in line:
        if len(line["range"]) == 6:
            line["range"].pop()
        else:
            line["range"].append([rng.choice([1, 64, 128, 200, 2**62]), rng.choice([1, 128, 2**62])])
    return f"{how} {name}: {shown(line)}"


def _range(rng: Random, content: Json) -> str:
    """A range, of a tensor in any way so far, with numbers that are each in order but too large together."""
    name, line = _tensor(rng, content)
    large = [0, 1, 37, 2**31, 2**62, 2**63 - 1, 2**63 - 64]
    ways, stride = rng.choice([(1, 1), (1, 2**62), (2, 2), (4, 1), (5, 1)])
    dims = rng.randrange(len(line["shape"]) + 1)
    numbers = [ways, stride, rng.choice(large), rng.choice(large[1:]), dims]
    if dims == 2 and rng.random() < 0.5:
        of_block = line["shape"][1]
        row = rng.choice([of_block, 2**62, 2**63 - 1])
        numbers.append([row, max(-(-row // max(of_block, 1)), 1)])  # type: ignore[arg-type]
    _drop(line, ("cuts", "parts"))
    line.update(start=0 if ways > 1 else rng.randrange(5), range=numbers)
    return f"{name} {line}"


def _parts(rng: Random, content: Json) -> str:
    """Parts that do not fill their tensor, or twice, or elsewhere; few of these are harmless."""
    names = [name for name, line in content["tensors"].items() if len(line.get("parts", [])) > 1]
    name = rng.choice(names)
    line = content["tensors"][name]
    parts = line["parts"]
    one, other = rng.sample(range(len(parts)), 2)
    fields = rng.choice([[0], [1], [2], [1, 2]])
    dim = rng.randrange(len(line["shape"]))
    far = rng.choice([-1, 1, 100_000, 10**18, 2**63, -(10**18), True, 0.0, -0.0])
    how = rng.choice(["swap", "copy", "drop", "double", "order", "far", "transpose", "offset", "wide", "empty", "long"])
    if how == "swap":
        for field in fields:
            parts[one][field], parts[other][field] = parts[other][field], parts[one][field]
    elif how == "copy":
        for field in fields:
            parts[one][field] = copy.deepcopy(parts[other][field])
    elif how == "drop":
        del parts[one]
    elif how == "double":
        parts.insert(other, copy.deepcopy(parts[one]))
    elif how == "order":
        rng.shuffle(parts)
    elif how == "far":
        parts[one][1][dim] = far
    elif how == "transpose":
        parts[one][2] = parts[one][2][::-1]
    elif how == "offset":
        parts[one][1] = [offset + rng.randint(-3, 3) for offset in parts[one][1]]
    elif how == "empty":
        parts.append([one, [0] * len(line["shape"]), [0] * len(line["shape"])])
    elif how == "long":
        parts[one].append(far)
    else:
        parts[one][2][dim] += 1
        parts[other][2][dim] -= 1
    return f"{how} {fields if how in ('swap', 'copy') else ''} {far if how == 'far' else ''} in {name}, {one}, {other}"


def _large_extra(rng: Random, content: Json) -> str:
    """An extra tensor, whose shape no model knows: empty but wide, or larger than the data."""
    shape = rng.choice([[10**10], [2**31, 2], [0, 2**62, 4], [2**62], [10**18], [10**18, 0], [2**33, 0], [0] * 65])
    rules: list[Json] = [
        {"start": 0, "cuts": []},
        {"start": 0, "cuts": [[0, 4, 1]]},
        {"start": 0, "range": [4, 1, 0, max(math.prod(shape) // 4, 1), len(shape)]},
        {"start": 0, "range": [2**62, 1, 2**62, 1, 0]},
        {"start": 2**62, "cuts": [[0, 2**40, 2**40]]},
        {"parts": []},
        {"parts": [[0, [0] * len(shape), shape]]},
    ]
    how = rng.choice(["", "length", "another file", "null"])
    if how == "length":
        content["files"][0][0] = math.prod(shape) + 10**6
    elif how == "another file":  # whose length nobody looks at, unless it is used
        content["files"].append([2**62, 16, 0])
    rule = rng.choice(rules)
    content["tensors"]["extra.large"] = {"dtype": rng.choice(["uint8", "float64"]), "shape": shape, **rule}
    return f"{shown(shape)} {rule} {how}"


def _many_extras(rng: Random, content: Json) -> str:
    """Many ways, files, cuts or parts: slowly checked by a loop in a loop."""
    files = content["files"]
    hows = ["cuts", "range", "cuts of ones", "parts apart", "parts overlapping", "parts in bands", "parts in columns"]
    how = rng.choice([*hows, "parts of many dimensions"])
    count = rng.choice([2000, 5000])
    if how == "cuts":
        files += [None] * 100_000
        line: Json = {"shape": [10**6], "start": 0, "cuts": [[0, 100_000, 1]]}
    elif how == "range":
        files += [None] * 100_000
        line = {"shape": [10**6], "start": 0, "range": [100_000, 1, 0, 10, 1]}
    elif how == "cuts of ones":
        line = {"shape": [1] * 64, "start": 0, "cuts": [[dim, 1, 2**62] for dim in range(64)]}
    elif how == "parts in bands":  # each of them overlaps all others in the first dimension
        line = {"shape": [count, count], "parts": [[0, [0, i], [count, 1]] for i in range(count)]}
    elif how == "parts in columns":  # each of which is cut at an index of its own
        upper = [[0, [0, i], [i + 1, 1]] for i in range(2 * count)]
        line = {"shape": [2 * count + 1, 2 * count]}
        line["parts"] = [*upper, *([1, [i + 1, i], [2 * count - i, 1]] for i in range(2 * count))]
        rng.shuffle(line["parts"])
    elif how == "parts of many dimensions":  # of as many elements as the tensor, but anywhere
        line = {"shape": [4] * 16, "parts": []}
        for _ in range(4096):
            extents = rng.sample([4] * 4 + [2] * 12, 16)
            line["parts"].append([0, [rng.randint(0, 4 - extent) for extent in extents], extents])
    else:
        offsets = [0] * count if how == "parts overlapping" else range(count)
        line = {"shape": [count], "parts": [[i % 4, [offset], [1]] for i, offset in enumerate(offsets)]}
    for number in range(rng.choice([1, 1, 5])):
        content["tensors"][f"extra.many{number}"] = {"dtype": "uint8", **copy.deepcopy(line)}
    return f"{how} {count}"


def _tensor(rng: Random, content: Json) -> tuple[str, Json]:
    name = rng.choice(list(content["tensors"]))
    return name, content["tensors"][name]


def _near(rng: Random, shape: list[int]) -> int:
    return rng.choice([*shape, math.prod(shape), 1]) + rng.randint(-2, 2)


def _put_number(rng: Random, value: list[Any], number: Any) -> None:
    """Puts a number in the place of another one, at any depth."""
    while True:
        index = rng.randrange(len(value))
        if not isinstance(value[index], list) or not value[index]:
            value[index] = number
            return
        value = value[index]


def _drop(line: Json, keys: tuple[str, ...]) -> None:
    for key in keys:
        line.pop(key, None)


OF_RULES: list[Callable[[Random, Json], str]] = [
    *([_rule] * 3),
    *([_files, _way, _parts, _range] * 2),
    *(_token, _large_extra, _many_extras),
]
