"""Mutations of a checkpoint's index and tables at random: any value by any other, and some that know the format.

Index and tables are one tree of dicts and lists here, so that rules, files and rows of tables are mutated alike.
"""

from __future__ import annotations

import copy
import json
import math
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from attack.forked import shown
from attack.index_file import INDEX, Chunk, Saved, file_name, fit_tables, table_of, with_checksum
from attack.recut import rectangles
from attack.rules import Json, files_of_elements


class Raw(NamedTuple):
    """A value that is written as it is, JSON or not."""

    text: str


DEEP = 100_000

#: For what is called something: lines, what UTF-8 has not, what a terminal obeys, and far too much.
NAMES = ["a\nb", "a\r\nb\u2028c" * 9, "\ud800", "\x1b[2J", "a" * 100_000, "a\n" * 50_000, "a/b" * 30, "", "__class__"]
#: For numbers that count bytes, files, elements or dimensions.
SIZES: list[Any] = [
    *(0, 1, 2, 3, 4, 5, 63, 64, 65, 200, 10**6, 2**31 - 1, 2**31, 2**32, 10**12, 2**53, 10**18, 2**62, 2**63 - 64),
    *(2**63 - 1, 2**63, 2**64, -1, -64, -(2**31), -(2**63)),
]
#: To take the place of any value.
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 10**18, 2**63 - 1, 2**63, -(2**63), 10**400, 0.0, 1.0, -0.5, 1e308),
    *(math.nan, math.inf, -math.inf, Raw("1e999"), Raw("1" * 5000), Raw("-0"), Raw("2.0e0")),
    *("", "abc", "1", "None", "__class__", "a" * 100_000, "\ud800", "a\0b", "../x", "/etc/passwd", "\n", "%s{0}"),
    *("a\nb" * 1000, ["a\nb" * 1000] * 9, [["a" * 70] * 7] * 7, [2**62] * 64, {"a\nb" * 100: "\ud800"}),
    *([], {}, [None], [[]], [-1], [1, 2, 3], [True, True], ["a"], [0, 10**18], [1] * 100, [1] * 100_000, [1.0, 2.0]),
    *({"a": 1}, {"": None}, {"dtype": "float32"}, [{}], [[1], [2]], {"shape": []}, [math.nan]),
    *({"$numberDouble": text} for text in ("NaN", "Infinity", "-Infinity", "nan", "1", 1, ["NaN"], {})),
    *({"$$numberDouble": "NaN"}, {"$numberDouble": "NaN", "a": 1}, Raw('{"\\u0024numberDouble": "NaN"}')),
    *(Raw("[" * DEEP + "]" * DEEP), Raw('{"a":' * DEEP + "1" + "}" * DEEP), Raw("[" * DEEP), Raw("\x7f"), Raw("{,}")),
]
#: To take the place of values of these names, or to be options of a param group.
OPTIONS: dict[str, list[Any]] = {
    "lr": ["abc", math.nan, math.inf, 1e39, -1.0, None, [1], True, {}, 10**400, 0.5, 0, "0.1", 2**63],
    "betas": [
        *([2, 3], [0.9], [0.9, 0.99, 0.999], [math.nan, 0.9], "ab", 0.9, None, [-0.1, 0.9], [0.8, 1], [0.5, 0.5]),
    ],
    "eps": ["x", -1.0, math.nan, math.inf, None, [1e-8], 1e-6, 10**400],
    "weight_decay": ["x", -1.0, math.nan, math.inf, None, [0], 0.25, 10**400],
    "codec": [7, "log9", None, "dynamic8", "fp32", "bf16", "companded8", ["log8"], {}, "__class__", "a\nb" * 1000],
    "block_size": [0, -1, 3, 10**18, 2**63, 64, 128.0, "128", None, True, [128]],
    "min_quantized_numel": [-1, 0, 10**400, "x", None, 1.5, 10**9],
    "master_weight_bits": [16, 32, None, "24", 24.0, -24, True, [24]],
    "nonfinite": ["x", None, 1, "raise", "propagate", ["skip"], {}],
    "maximize": ["x", 1, None, [], True],
    "amsgrad": [True, "x", None, 1],
    "stochastic_rounding": ["x", 1, None, True, []],
    "stochastic_rounding_seed": [-1, 2**64, "x", None, 1.5, 10**400, 3],
    "offload": ["state", "disk", 1, []],
    "params": [[], None, [0], "x"],
    "param_names": [["a"], None, 1],
    "a\nb" * 1000: [1],
    "\ud800": ["\n" * 1000],
}
KNOWN: dict[str, list[Any]] = {
    **OPTIONS,
    "dtype": [
        *("__class__", "float32.__mul__", "complex64", "quint8", "torch.float32", "Tensor", "load", "dtype", "float"),
        *("nn", "FLOAT32", "float8_e4m3fn", "float64", "int64", "bfloat16", "uint8", "int8", "bool", "bits8", "int32"),
        *("", " float32", "float32\0", "__dict__", "quint4x2", "uint7", 32, None, ["float32"], True),
    ],
    "token": [
        *("../x", "/etc/passwd", "a/b", "", ".", "..", "/", "/dev/zero", "/dev/stdin", "checkpoint.json", "~/x"),
        *("0123456789abcdef", "../0123456789abcdef", "0123456789abcdef\n", "0123456789abcde\u0661", "0123456789ABCDEF"),
        *("0123456789abcdef-0.bin", "0" * 15, "0" * 17, "\0" * 16, "a/../b/../c/../d", "a\0b", "\ud800", "a" * 100_000),
    ],
}
#: The fields that say in which file an element of a tensor is.
RULE = ("start", "cuts", "range", "parts")

#: The keys and indices on the way to a value.
Place = tuple[Any, ...]


class State:
    """A checkpoint that is being changed.

    Attributes:
        tree: the index; under "tables" the rows of each data file, as lists.
        data: the bytes of chunks in each data file.
        raw: bytes that take the place of the rows, by the number of the file.
        far: bytes that are far behind the others, with a hole between them, and where, by the number of the file.
        text: the index's text, in place of its content.
    """

    def __init__(self, saved: Saved) -> None:
        self.tree: Json = copy.deepcopy(saved.content)
        self.data, self._saved = list(saved.data), saved
        self.tree["tables"] = [[[*c[:3], [*c.offsets], [*c.shape]] for c in table] for table in saved.tables]
        self.raw: dict[int, bytes] = {}
        self.far: dict[int, tuple[int, bytes]] = {}
        self.text: bytes | None = None
        self._remember(self.tree["tensors"])

    @property
    def tables(self) -> list[list[Any]]:
        return self.tree["tables"]  # type: ignore[no-any-return]

    def fit_names(self) -> None:
        """Lets tables have the numbers that tensors have by now. A tensor that was renamed keeps its chunks."""
        tensors = self.tree.get("tensors")
        if not isinstance(tensors, dict) or sorted(tensors) == self._names or self.raw:
            return
        new = {id(line): name for name, line in tensors.items()}
        names = {name: new[id(line)] for name, line in self._lines.items() if id(line) in new}
        rows = self._chunks()
        fit_tables(rows, self._names, names, sorted(tensors))
        self.tree["tables"] = [[[*c] for c in table] for table in rows]
        self._remember(tensors)

    def _remember(self, tensors: Json) -> None:
        self._lines, self._names = dict(tensors), sorted(tensors)

    def _chunks(self) -> list[list[Chunk]]:
        return [[Chunk(*row[:3], tuple(row[3]), tuple(row[4])) for row in table] for table in self.tables]

    def write(self, folder: Path) -> None:
        """Writes the index and the data files that changed, with right checksums of the index and of tables."""
        files = self.tree.get("files")
        for number, rows in enumerate(self._chunks()):
            if [self.data[number], rows] == [self._saved.data[number], self._saved.tables[number]] and not (
                number in self.raw or number in self.far
            ):
                continue
            table = self.raw.get(number, table_of(rows))
            position, data = self.far.get(number, (0, b""))
            end = max(len(self.data[number]), position + len(data))
            with (folder / file_name(self._saved.content, number)).open("wb") as opened:
                for at_byte, part in ((0, self.data[number]), (position or end, data), (end, table)):
                    opened.seek(at_byte)
                    opened.write(part)
            if isinstance(files, list) and number < len(files) and isinstance(files[number], list):
                files[number][:] = [end, len(table), zlib.crc32(table)]
        del self.tree["tables"]
        (folder / INDEX).write_bytes(with_checksum(self._text() if self.text is None else self.text))

    def _text(self) -> bytes:
        for place in places(self.tree):  # what JSON's own encoder does not write
            if isinstance(at(self.tree, place), Raw):
                raw = at(self.tree, place).text
                put(self.tree, place, "@raw@")
                return json.dumps(self.tree)[:-1].replace('"@raw@"', raw).encode("utf-8", "surrogatepass")
        return json.dumps(self.tree)[:-1].encode()


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """The places of all values in a tree, apart from itself."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if type(value) is list else ()
    for key, item in items:
        yield (*place, key)
        yield from places(item, (*place, key))


def at(value: Any, place: Place) -> Any:
    for key in place:
        value = value[key]
    return value


def put(value: Any, place: Place, new: Any) -> None:
    at(value, place[:-1])[place[-1]] = new


def shown_place(place: Place) -> str:
    return shown("/".join(map(str, place)))


def is_in_rows(place: Place) -> bool:
    """Whether a place is in a table, whose rows hold nothing but numbers, or is one of the tables."""
    return place[0] == "tables"


def some_place(rng: Random, tree: Any, condition: Callable[[Place, Any], bool]) -> Place:
    """A place of any depth, of which there are far more deep ones than others; often in rules and tables."""
    while True:
        place: Place = ()
        if rng.random() < 0.4:
            name = rng.choice(list(tree["tensors"]))
            place = ("tensors", name, next((way for way in RULE[1:] if way in tree["tensors"][name]), "shape"))
        elif rng.random() < 0.4:
            place = ("tables", rng.randrange(4))
        while not place or rng.random() < 0.8:
            value = at(tree, place)
            keys = list(value) if isinstance(value, dict) else list(range(len(value))) if type(value) is list else []
            if not keys:
                break
            place = (*place, rng.choice(keys))
        if condition(place, at(tree, place)):
            return place


def is_number(place: Place, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _replace(rng: Random, state: State) -> str:
    place = some_place(rng, state.tree, lambda place, value: not is_in_rows(place))
    value = rng.choice(KNOWN.get(place[-1], VALUES) if rng.random() < 0.5 else VALUES)
    put(state.tree, place, copy.deepcopy(value))
    return f"{shown_place(place)} = {shown(value)}"


def _option(rng: Random, state: State) -> str:
    """In one param group or in both."""
    key, groups = rng.choice(list(OPTIONS)), state.tree["header"]["param_groups"]
    value = rng.choice(OPTIONS[key])
    for group in rng.sample(groups, rng.choice([1, len(groups)])):
        group["options"][key] = copy.deepcopy(value)
    return f"{shown(key)} = {shown(value)}"


def _number(rng: Random, state: State) -> str:
    """A number, far from what it was or near."""
    place = some_place(rng, state.tree, is_number)
    old = at(state.tree, place)
    new = rng.choice([*SIZES, *(old + more for more in (-64, -2, -1, 1, 2, 64, 2**64)), -old, 2 * old])
    if not is_in_rows(place) and rng.random() < 0.2:
        new = rng.choice([float(old), bool(old), str(old), [old], 10**400])
    put(state.tree, place, new)
    return f"{shown_place(place)} = {shown(new)} for {old}"


def _delete(rng: Random, state: State) -> str:
    place = some_place(rng, state.tree, lambda place, value: not is_in_rows(place) or len(place) == 3)
    del at(state.tree, place[:-1])[place[-1]]
    return shown_place(place)


def _rename(rng: Random, state: State) -> str:
    place = some_place(rng, state.tree, lambda place, value: isinstance(place[-1], str) and not is_in_rows(place))
    owner = at(state.tree, place[:-1])
    others = [key for key in owner if key != "tables"]
    odd = ["optimizer.", "extra.", "model.", "optimizer", "optimizer.weight.", ".step"]
    new = rng.choice([place[-1] + "_", place[-1].upper(), rng.choice(odd), rng.choice(others), rng.choice(NAMES)])
    owner[new] = owner.pop(place[-1])
    return f"{shown_place(place)} is now called {shown(new)}"


def _add(rng: Random, state: State) -> str:
    """A member of a dict: anything, or what another member is."""
    place = some_place(rng, state.tree, lambda place, value: isinstance(value, dict))
    owner = at(state.tree, place)
    names = ["crc", *RULE, "dtype", "params", "model.more", "optimizer.weight.more", "optimizer.more.step", "extra.k"]
    key = rng.choice([*names, *NAMES])
    value = rng.choice([*owner.values()]) if owner and rng.random() < 0.3 else rng.choice(VALUES)
    owner[key] = copy.deepcopy(value)
    return f"{shown_place((*place, key))} = {shown(value)}"


def _exchange(rng: Random, state: State) -> str:
    """Two values of one type: the one for the other, or both for each other. In tables, numbers of one column."""

    def kind(place: Place) -> Any:
        place_in_row = (len(place), place[3:4]) if is_in_rows(place) else None
        return type(at(state.tree, place)), place_in_row

    one = some_place(rng, state.tree, lambda place, value: not is_in_rows(place) or len(place) > 2)
    alike = [p for p in places(state.tree) if kind(p) == kind(one) and p[: len(one)] != one and one[: len(p)] != p]
    near = [p for p in alike if p[: max(len(p) - 2, 1)] == one[: max(len(one) - 2, 1)]]
    other = rng.choice(near if near and rng.random() < 0.7 else alike or [one])
    pairs, both = [(one, other)], rng.random() < 0.6
    if is_in_rows(one) and len(one) == 4 and one[3] and rng.random() < 0.5:  # position and checksum, or both corners
        column = {1: 2, 2: 1, 3: 4, 4: 3}[one[3]]
        pairs.append(((*one[:3], column), (*other[:3], column)))
    for one, other in pairs:
        a, b = copy.deepcopy(at(state.tree, one)), copy.deepcopy(at(state.tree, other))
        put(state.tree, one, b)
        if both:
            put(state.tree, other, a)
    return f"{[*map(shown_place, sum(pairs, ()))]} {'exchanged' if both else 'copied'}"


def _list(rng: Random, state: State) -> str:
    """The items of a list: in another order, some of them twice, or far too many."""
    place = some_place(rng, state.tree, lambda place, value: type(value) is list and place != ("tables",))
    items = at(state.tree, place)
    if is_in_rows(place) and len(place) == 3:  # a row
        place, items = (*place, 4), items[4]
    how = rng.choice(["reverse", "shuffle", "double", "repeat", "clear", "cut", "null"])
    if how == "reverse":
        items.reverse()
    elif how == "shuffle":
        rng.shuffle(items)
    elif how == "double" and items:
        items.insert(rng.randrange(len(items) + 1), copy.deepcopy(rng.choice(items)))
    elif how == "repeat":
        items *= rng.choice([2, 40, 70])
    elif how == "clear":
        items.clear()
    elif how == "cut":
        del items[rng.randrange(len(items) + 1) :]
    elif not is_in_rows(place):
        items += [rng.choice([None, [0, 16, 0]])] * rng.choice([1, 100_000])
    return f"{how} {shown_place(place)}"


def _sum(rng: Random, state: State) -> str:
    """Two numbers of a list, whose sum stays: edges of parts or chunks, or what a file has of data and of table."""

    def has_numbers(place: Place, value: Any) -> bool:
        return type(value) is list and len([x for x in value if is_number((), x)]) > 1 and place[-1] != "betas"

    place = some_place(rng, state.tree, has_numbers)
    items = at(state.tree, place)
    one, other = rng.sample([i for i, x in enumerate(items) if is_number((), x)], 2)
    more = rng.choice([1, -1, 16, 64, items[one], -items[other]])
    items[one], items[other] = items[one] - more, items[other] + more
    return f"{more} from {one} to {other} of {shown_place(place)}"


def _shape(rng: Random, state: State) -> str:
    """Another shape of as many elements, or of none, and a rule with it, or not."""
    name = rng.choice(list(state.tree["tensors"]))
    tensor = state.tree["tensors"][name]
    count = math.prod(tensor["shape"])
    alike = [tensor["shape"][::-1], [*tensor["shape"], 1], [1, *tensor["shape"]], [count], [1] * 70 + [count]]
    empty = [[], [0, 10**18], [10**18, 0, 2**62], [0] * 70]
    others = [[1] * 100_000, [10**18, 10**18], [2**32, 2**32], [-1, -count], [count, True], [float(count)]]
    tensor["shape"] = rng.choice([*alike, *empty, *others])
    how = _with_rule(rng, state, tensor) if rng.random() < 0.7 else ""
    return f"{name} {shown(tensor['shape'])} {how}"


def _rule(rng: Random, state: State) -> str:
    """Another rule, rightly or nearly so; or none, or two."""
    name = rng.choice(list(state.tree["tensors"]))
    return f"{name}: {_with_rule(rng, state, state.tree['tensors'][name])}"


def _with_rule(rng: Random, state: State, line: Json) -> str:
    shape = line["shape"]
    how = rng.choice(["the same by parts", "another's too", "another's", "none", "one file", "more cuts", "a range"])
    other = {key: value for key, value in rng.choice(list(state.tree["tensors"].values())).items() if key in RULE}
    rule: Json = {key: line.pop(key) for key in RULE if key in line}
    try:
        files = files_of_elements({**line, **rule}) if 0 not in shape and math.prod(shape) < 2**16 else None
    except (IndexError, TypeError, ValueError, OverflowError):
        files = None  # of a shape that has another rule
    if how == "the same by parts" and files is not None:  # harmless
        rule = {"parts": [list(part) for part in rectangles(files)]}
    elif how == "another's too":
        rule |= other
    elif how == "another's":
        rule = other
    elif how == "none":
        rule = {}
    elif how == "one file":
        rule = rng.choice([{"start": rng.randrange(6), "cuts": []}, {"parts": [[0, [0] * len(shape), shape]]}])
    elif how == "more cuts" and "cuts" in rule:
        rule["cuts"].append([rng.randrange(len(shape) + 1), rng.randrange(1, 9), rng.choice([1, 2, 2**62])])
    elif how == "a range":  # of numbers that are each in order but too large together
        large = [1, 37, 2**31, 2**62, 2**63 - 1, 2**63 - 64]
        dims = rng.randrange(len(shape) + 1)
        block = [[rng.choice([shape[1], 2**62]), rng.choice([1, 64, 2**62])]] if dims == 2 else []
        rule = {
            "start": 0,
            "range": [*rng.choice([(1, 2**62), (2, 2), (4, 1)]), *rng.choices(large, k=2), dims, *block],
        }
    line |= copy.deepcopy(rule)
    return f"{how} {shown(rule)}"


def _extra(rng: Random, state: State) -> str:
    """Extra tensors whose shapes no model knows: larger than the data; or slowly checked by a loop in a loop."""
    shape = rng.choice([[10**10], [2**31, 2], [0, 2**62, 4], [2**62], [10**18], [10**18, 0], [2**33, 0], [0] * 65])
    count, files = rng.choice([2000, 5000]), state.tree["files"]
    bands = [[0, [0, i], [count, 1]] for i in range(count)]  # each overlaps all others in the first dimension
    columns = [[0, [0, i], [i + 1, 1]] for i in range(count)]  # each is cut at an index of its own
    columns += [[1, [i + 1, i], [count - i, 1]] for i in range(count)]
    sizes = [rng.sample([4] * 4 + [2] * 12, 16) for _ in range(4096)]
    anywhere = [[0, [rng.randint(0, 4 - size) for size in each], each] for each in sizes]
    lines: dict[str, Json] = {
        "large, cut": {"shape": shape, "start": 0, "cuts": [[0, 4, 1]]},
        "large, in a range": {"shape": shape, "start": 0, "range": [4, 1, 0, max(math.prod(shape), 1), len(shape)]},
        "large, in a part": {"shape": shape, "parts": [[0, [0] * len(shape), shape]]},
        "large, in no part": {"shape": shape, "parts": []},
        "large, far": {"shape": shape, "start": 2**62, "cuts": [[0, 2**40, 2**40]]},
        "many cuts": {"shape": [10**6], "start": 0, "cuts": [[0, 100_000, 1]]},
        "many ranges": {"shape": [10**6], "start": 0, "range": [100_000, 1, 0, 10, 1]},
        "cuts of ones": {"shape": [1] * 64, "start": 0, "cuts": [[dim, 1, 2**62] for dim in range(64)]},
        "parts apart": {"shape": [count], "parts": [[i % 4, [i], [1]] for i in range(count)]},
        "parts that overlap": {"shape": [count], "parts": [[i % 4, [0], [1]] for i in range(count)]},
        "parts in bands": {"shape": [count, count], "parts": bands},
        "parts in columns": {"shape": [count + 1, count], "parts": rng.sample(columns, len(columns))},
        "parts of many dimensions": {"shape": [4] * 16, "parts": anywhere},
    }
    how = rng.choice(list(lines))
    if "large" not in how:
        files += [None] * (100_000 if how.startswith("many") else 0)
    elif rng.random() < 0.5:
        files[0][0] = math.prod(shape) + 10**6
    else:
        files.append([2**62, 16, 0])  # whose length nobody looks at, unless it is used
    for number in range(rng.choice([1, 1, 5])):
        state.tree["tensors"][f"extra.more{number}"] = {"dtype": "uint8", **copy.deepcopy(lines[how])}
    return f"{how} {shown(shape)} {count}"


def _rows(rng: Random, state: State) -> str:
    """Chunks in other places: far behind, in another file with their bytes; as one, without elements."""
    file, row, chunk = _row(rng, state)
    _, position, _, offsets, extents = chunk
    how = rng.choice(["far", "move", "merge", "empty", "behind"])
    if how == "far":  # at a position that 32 bits do not hold, or nearly so
        place = rng.choice([2**31, 2**32, 2**33, 2**36]) + rng.choice([0, 1, 64])
        state.far[file] = place, state.data[file][position : position + 2**16]
        chunk[1] = place + rng.choice([0, 0, 0, 1, -1, -place, 2**32, 2**16])
    elif how == "move":
        to = (file + rng.randrange(1, 4)) % 4
        chunk[1] = len(state.data[to])
        state.data[to] += state.data[file][position : position + 2**16]
        state.tables[to].append(state.tables[file].pop(row))
    elif how == "merge" and extents and row + 1 < len(state.tables[file]):
        extents[0] += state.tables[file].pop(row + 1)[4][:1] == [1] or 1
    elif how == "empty":
        empty = [chunk[0], rng.choice([0, position]), 0, offsets, [0] * len(extents)]
        state.tables[file] += [empty] * rng.choice([1, 1, 5000, 50_000])
    elif how == "behind":  # the tensor's dimensions
        dims = rng.choice([0, 0, 1, 60])
        offsets += [*[0] * dims, rng.choice([0, 0, 1, -1, 2**63 - 1])]
        extents += [*[1] * dims, rng.choice([1, 0, 2, -1, 2**62])]
    return f"{how} row {row} of file {file}, {shown(chunk)}"


def _table(rng: Random, state: State) -> str:
    """The bytes of a table, or its numbers of rows and dimensions."""
    file, _, _ = _row(rng, state)
    table = table_of(state._chunks()[file])
    count, dims = struct.unpack_from("<2Q", table)
    place, more = rng.randrange(len(table)), rng.choice([-1, 1, 2**59, 2**60, 2**64 - 1])
    heads = [((count + more) % 2**64, dims), (count, (dims + more) % 2**64), (2**60, 2**4), (0, 0)]  # of 2**64 bytes
    changed = {
        "empty": b"",
        "cut": table[:place],
        "longer": table + rng.choice([b"\0", b"\0" * 16, table]),
        "flip": table[:place] + bytes([table[place] ^ (1 << rng.randrange(8))]) + table[place + 1 :],
        "random": table[:16] + rng.randbytes(len(table) - 16),
        "ones": table[:16] + b"\xff" * (len(table) - 16),
        "data": state.data[file][: rng.choice([15, 16, 1000])],
        "head": struct.pack("<2Q", *rng.choice(heads)) + table[16:],
        "head only": bytes(16),
    }
    how = rng.choice([*changed, "head", "head"])
    state.raw[file] = changed[how]
    return f"{how} at {place} of file {file}"


def _row(rng: Random, state: State) -> tuple[int, int, list[Any]]:
    file = rng.randrange(4)
    row = rng.randrange(len(state.tables[file]))
    return file, row, state.tables[file][row]


def _text(rng: Random, state: State) -> str:
    """Not the JSON of an object, though its checksum is right."""
    content = json.dumps({key: value for key, value in state.tree.items() if key != "tables"})[:-1]
    plain = content.encode()
    place = rng.randrange(len(plain))
    few = b'{"format": "shardopt", "format_version": 2'
    texts = {
        "truncated": plain[:place],
        "flipped": plain[:place] + bytes([plain[place] ^ (1 << rng.randrange(8))]) + plain[place + 1 :],
        "not UTF-8": plain[:place] + b"\xff\xfe" + plain[place:],
        "NUL": plain[:place] + b"\0" + plain[place:],
        "BOM": b"\xef\xbb\xbf" + plain,
        "UTF-16": content.encode("utf-16"),
        "list": b'["shardopt"',
        "comma": plain + b",",
        "empty": b"",
        "nothing": few,
        "few": few + b', "header": {}, "token": "' + b"0" * 16 + b'", "files": [], "tensors": {}',
        "space": plain + b" " * 10**6,
        "deep": b'{"format": "shardopt", "a": ' + b"[" * DEEP,
        "two": plain + b"}" + plain,
    }
    how = rng.choice(list(texts))
    state.text = texts[how]
    return f"{how} at {place} of {len(plain)}"


#: The more often, the more likely.
MUTATIONS: list[Callable[[Random, State], str]] = [
    *([_replace, _number] * 5),
    *([_exchange, _list] * 5),
    *([_option] * 3),
    *([_delete, _rename, _add, _rule, _extra, _rows] * 2),
    *(_sum, _shape, _table, _text),
]


def mutated(rng: Random, saved: Saved) -> tuple[str, State]:
    """A mutation's description, and the checkpoint."""
    state = State(saved)
    mutate = rng.choice(MUTATIONS)
    description = f"{mutate.__name__.strip('_')}: {mutate(rng, state)}"
    if rng.random() < 0.7:
        state.fit_names()
    return description, state
