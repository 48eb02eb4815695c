"""Places in a JSON value, and values to put there: of wrong types, out of range, far too many."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

from attack.forked import shown
from attack.rules import Json


class Raw(NamedTuple):
    """A value that is written as it is, JSON or not."""

    text: str


DEEP = 100_000

#: For what is called something: lines, what UTF-8 has not, what a terminal obeys, and far too much.
NAMES = ["a\nb", "a\r\nb\u2028c" * 9, "\ud800", "\x1b[2J", "a" * 100_000, "a\n" * 50_000, "a/b" * 30, ""]

#: To take the place of any value.
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 63, 10**9, 10**18, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400),
    *(0.0, 1.0, -0.5, 1e308, float("nan"), float("inf"), -float("inf"), Raw("1e999"), Raw("1" * 5000), Raw("-0")),
    *("", "abc", "1", "None", "__class__", "a" * 100_000, "\ud800", "a\0b", "../x", "/etc/passwd", "\n", "%s{0}"),
    *("a\nb" * 1000, ["a\nb" * 1000] * 9, [["a" * 70] * 7] * 7, [2**62] * 64, {"a\nb" * 100: "\ud800"}),
    *([], {}, [None], [[]], [0], [-1], [1, 2, 3], [True, True], ["a"], [10**18] * 3, [0, 10**18], [1] * 100),
    *({"a": 1}, {"": None}, {"dtype": "float32"}, [{}], [[1], [2]], {"shape": []}, [1.0, 2.0], [float("nan")]),
    *({"$numberDouble": text} for text in ("NaN", "Infinity", "-Infinity", "nan", "1", 1, ["NaN"], {})),
    *({"$$numberDouble": "NaN"}, {"$numberDouble": "NaN", "a": 1}, Raw('{"\\u0024numberDouble": "NaN"}')),
    *(Raw("[" * DEEP + "]" * DEEP), Raw('{"a":' * DEEP + "1" + "}" * DEEP), Raw("[" * DEEP), Raw("\x7f"), Raw("{,}")),
]
DTYPES: list[Any] = [
    *(
        "__class__",
        "float32.__mul__",
        "complex64",
        "quint8",
        "torch.float32",
        "Tensor",
        "load",
        "dtype",
        "float",
        "int",
    ),
    *("nn", "ops", "_C", "FLOAT32", "float8_e4m3fn", "float64", "int64", "bfloat16", "uint8", "int8", "bool", "bits8"),
    *("", " float32", "float32\0", "__dict__", "classes", "quint4x2", "uint7", "int32", 32, None, ["float32"], True),
]
#: For the token that names of data files begin with.
TOKENS: list[Any] = [
    *("../x", "/etc/passwd", "a/b", "", ".", "..", "/", "/dev/zero", "/dev/stdin", "checkpoint.json", "/proc/self/mem"),
    *("0123456789abcdef", "../0123456789abcdef", "0123456789abcdef\n", "0123456789abcde\u0661", "0123456789ABCDEF"),
    *("0123456789abcdef-0.bin", "0" * 15, "0" * 17, "1" * 1000, "a\nb", "\0" * 16, "a/../b/../c/../d"),
    *("a\0b", "\ud800", "~/x", "C:\\x", "a" * 300, "a" * 100_000, "//etc/hosts", "./checkpoint.json", 1, None, ["a"]),
]
#: For numbers that count files, elements or dimensions.
SIZES: list[Any] = [
    *(0, 1, 2, 3, 4, 5, 63, 64, 65, 200, 10**6, 2**31 - 1, 2**31, 2**32, 10**12, 2**53, 10**18, 2**62, 2**63 - 1),
    *(2**63, 2**64, 10**400, -1, -(2**31), -(2**63), True, 1.0, 0.5, "1", None, [1], float("nan"), float("inf")),
]
#: For the columns of a table, of 4 and of 8 bytes.
COLUMNS = [0, 1, 2, 63, 64, 65, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 64, 2**63 - 1, -1, -2, -64, -(2**63)]
OPTIONS: dict[str, list[Any]] = {
    "lr": ["abc", float("nan"), float("inf"), 1e39, -1.0, None, [1], True, {}, 10**400, 0.5, 0, "0.1", 2**63],
    "betas": [
        *([2, 3], [0.9], [0.9, 0.99, 0.999], [float("nan"), 0.9], "ab", 0.9, None, [-0.1, 0.9], [0.8, 1], [0.5, 0.5]),
    ],
    "eps": ["x", -1.0, float("nan"), float("inf"), None, [1e-8], 1e-6, 10**400],
    "weight_decay": ["x", -1.0, float("nan"), float("inf"), None, [0], 0.25, 10**400],
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
    "device_state_budget": ["2 GiB", "x", -1, 10**400, 1.5],
    "differentiable": [True, "x"],
    "params": [[], None, [0], "x"],
    "param_names": [["a"], None, 1],
    "initial_lr": [0.1, "x"],
    "__class__": ["x"],
    "a\nb" * 1000: [1],
    "\ud800": ["\n" * 1000],
}


#: The keys and indices on the way to a value.
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
