"""Mutations of the JSON of an index, at random: any value by any other, and what only who knows the format would do.

Mutations of rules and tables are in :mod:`attack.rule_mutations` and :mod:`attack.table_mutations`.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from random import Random

from attack.forked import shown
from attack.index_file import Saved
from attack.json_values import DEEP, DTYPES, NAMES, OPTIONS, VALUES, Raw, at, places, put, shown_place, some_place
from attack.rule_mutations import OF_RULES
from attack.rules import Json
from attack.table_mutations import OF_TABLES, State

#: A tensor without elements.
EMPTY = {"dtype": "uint8", "shape": [0], "start": 0, "cuts": []}


def mutated(rng: Random, saved: Saved) -> tuple[str, bytes, dict[int, dict[int, bytes]]]:
    """A mutation's description, the index's text up to its checksum, and changed data files as bytes by position."""
    state = State(*copy.deepcopy(saved))
    mutate = rng.choice(list(MUTATIONS))
    if mutate in OF_TABLES:
        description = f"{mutate.__name__.strip('_')}: {mutate(rng, state)}"  # type: ignore[arg-type]
    else:
        description = f"{mutate.__name__.strip('_')}: {mutate(rng, state.content)}"  # type: ignore[arg-type]
    if rng.random() < 0.7:
        description += state.fit_names()
    files = state.files()
    content = state.content
    for place in list(places(content)):  # what JSON's own encoder does not write
        if isinstance(at(content, place), Raw):
            raw = at(content, place).text
            put(content, place, "@raw@")
            text = json.dumps(content)[:-1].replace('"@raw@"', raw).encode("utf-8", "surrogatepass")
            return description, text, files
    text = content.pop("@text@", None)
    return description, json.dumps(content)[:-1].encode() if text is None else text, files


def _replace_any(rng: Random, content: Json) -> str:
    place = some_place(rng, content)
    value = rng.choice(VALUES)
    put(content, place, copy.deepcopy(value))
    return f"{shown_place(place)} = {shown(value)}"


def _change_number(rng: Random, content: Json) -> str:
    numbers = [p for p in places(content) if isinstance(at(content, p), int) and not isinstance(at(content, p), bool)]
    place = rng.choice(numbers)
    old = at(content, place)
    near = [old + 1, old - 1, -old, 2 * old, old + 64, old + 2**64]
    new = rng.choice([*near, -1, 10**18, float(old), bool(old), str(old), [old]])
    put(content, place, new)
    return f"{shown_place(place)} = {shown(new)} for {old}"


def _delete(rng: Random, content: Json) -> str:
    place = some_place(rng, content)
    del at(content, place[:-1])[place[-1]]
    return shown_place(place)


def _rename(rng: Random, content: Json) -> str:
    place = rng.choice([p for p in places(content) if isinstance(p[-1], str)])
    owner = at(content, place[:-1])
    new = rng.choice(
        [place[-1] + "_", "", place[-1].upper(), "__class__", "self", rng.choice([*owner]), rng.choice(NAMES)]
    )
    owner[new] = owner.pop(place[-1])
    return f"{shown_place(place)} is now called {new!r}"


def _add(rng: Random, content: Json) -> str:
    place = rng.choice([(), *(p for p in places(content) if isinstance(at(content, p), dict))])
    known = ["crc", "start", "cuts", "range", "parts", "dtype", "params", "lr"]
    key = rng.choice([*known, "more", "__class__", "", "_replace", *NAMES[:5]])
    value = rng.choice(VALUES)
    at(content, place)[key] = copy.deepcopy(value)
    return f"{shown_place((*place, key))} = {shown(value)}"


def _duplicate_key(rng: Random, content: Json) -> str:
    place = rng.choice([p for p in places(content) if isinstance(p[-1], str)])
    value = rng.choice([v for v in VALUES if not isinstance(v, Raw)] + [at(content, place)])
    owner = at(content, place[:-1])
    both = [json.dumps(owner[place[-1]]), json.dumps(value)]
    rng.shuffle(both)
    members = [f"{json.dumps(key)}: {json.dumps(item)}" for key, item in owner.items() if key != place[-1]]
    members += [f"{json.dumps(place[-1])}: {text}" for text in both]
    raw = "{" + ", ".join(members) + "}"
    if len(place) > 1:
        put(content, place[:-1], Raw(raw))
    else:
        content["@text@"] = raw[:-1].encode()
    return f"{shown_place(place)} twice, as {shown(both)}"


def _swap(rng: Random, content: Json) -> str:
    every = list(places(content))
    one = rng.choice(every)
    kind = type(at(content, one))
    alike = [p for p in every if type(at(content, p)) is kind and p[: len(one)] != one and one[: len(p)] != p]
    other = rng.choice(alike or [one])
    a, b = copy.deepcopy(at(content, one)), copy.deepcopy(at(content, other))
    put(content, one, b)
    put(content, other, a)
    return f"{shown_place(one)} with {shown_place(other)}"


def _shape(rng: Random, content: Json) -> str:
    """Another shape of as many elements, or of none, and the rule with it, or not."""
    name = rng.choice(list(content["tensors"]))
    tensor = content["tensors"][name]
    count = math.prod(tensor["shape"])
    alike = [tensor["shape"][::-1], [*tensor["shape"], 1], [1, *tensor["shape"]], [count], [1] * 70 + [count]]
    empty = [[], [0, 10**18], [10**18, 0, 2**62], [0] * 70]
    others = [[1] * 100_000, [10**18, 10**18], [2**32, 2**32], [-1, -count], [count, True], [float(count)]]
    tensor["shape"] = rng.choice([*alike, *empty, *others])
    how = rng.choice(["", "one file", "no part", "parts alike"])
    if how != "":
        for key in ("start", "cuts", "range", "parts"):
            tensor.pop(key, None)
    if how == "one file":
        tensor.update(start=rng.randrange(4), cuts=[])
    elif how == "no part":
        tensor["parts"] = []
    elif how == "parts alike":
        tensor["parts"] = [[file, [0] * len(tensor["shape"]), tensor["shape"]] for file in range(2)]
    return f"{name} {shown(tensor['shape'])} {how}"


def _dtype(rng: Random, content: Json) -> str:
    name, dtype = rng.choice(list(content["tensors"])), rng.choice(DTYPES)
    content["tensors"][name]["dtype"] = dtype
    return f"{name} {dtype!r}"


def _header(rng: Random, content: Json) -> str:
    header = content["header"]
    how = rng.choice(["delete", "replace", "group", "parameters", "names"])
    key = rng.choice(list(header))
    value = rng.choice(VALUES)
    group = rng.choice(header["param_groups"])
    if how == "delete":
        del header[key]
    elif how == "replace":
        header[key] = copy.deepcopy(value)
    elif how == "group":
        rng.choice([list.reverse, list.clear, list.pop, lambda groups: groups.append(copy.deepcopy(group))])(
            header["param_groups"]
        )
    elif how == "parameters":
        group["parameters"] = copy.deepcopy(value)
    else:
        names = group["parameters"]
        group["parameters"] = rng.choice([names[:-1], names[::-1], names * 2, [*names, "more"], [*names, *NAMES]])
    return f"{how} {key} {shown(value)} {content['header'].get('param_groups')!r:.50}"


def _option(rng: Random, content: Json) -> str:
    group = rng.randrange(len(content["header"]["param_groups"]))
    key = rng.choice(list(OPTIONS))
    value = rng.choice(OPTIONS[key])
    for index, saved in enumerate(content["header"]["param_groups"]):
        if index == group or rng.random() < 0.5:
            saved["options"][key] = copy.deepcopy(value)
    return f"group {group} {key} = {shown(value)}"


def _version(rng: Random, content: Json) -> str:
    key = rng.choice(["format", "format_version"])
    numbers = [0, 1, 3, 99, -1, 2.0, float("nan"), 10**400, Raw("1" * 5000), Raw("2.0e0")]
    content[key] = rng.choice([*numbers, True, "2", None, [1], {"a": 1}])
    return f"{key} = {shown(content[key])}"


def _tensors(rng: Random, content: Json) -> str:
    """A tensor renamed, added, removed, or described by what another one is."""
    tensors = content["tensors"]
    one, other = rng.sample(list(tensors), 2)
    names = ["more", "model.more", "optimizer.weight.more", "optimizer.more.step", "extra.k", "extra.more"]
    odd = ["optimizer.", "extra.", "model.", "optimizer", "\ud800", "optimizer.weight.", ".step", "a" * 10**5]
    name = rng.choice(names + odd)
    how = rng.choice(["add", "rename", "remove", "exchange", "alias"])
    if how == "add":
        tensors[name] = copy.deepcopy(tensors[one])
    elif how == "rename":
        tensors[name] = tensors.pop(one)
    elif how == "remove":
        del tensors[one]
    elif how == "exchange":
        tensors[one], tensors[other] = tensors[other], tensors[one]
    else:
        tensors[one] = copy.deepcopy(tensors[other])
    return f"{how} {one}, {other}, {shown(name)}"


def _name(rng: Random, content: Json) -> str:
    """A name of one of :data:`NAMES`, of what is otherwise right."""
    name, header = rng.choice(NAMES), content["header"]
    how = rng.choice(["tensor", "tensor", "tensor", "option", "options", "optimizer", "parameter", "version", "codec"])
    if how == "tensor":
        prefix = rng.choice(["model.", "optimizer.", "optimizer.weight.", "extra.", ""])
        content["tensors"][prefix + name] = dict(EMPTY)
        how += f" {prefix}"
    elif how == "version":
        content["format_version"] = name
    elif how == "optimizer":
        header["optimizer"] = name
        content["tensors"]["optimizer.weight.more"] = dict(EMPTY)
    elif how == "parameter":
        rng.choice(header["param_groups"])["parameters"][0] = name
    elif how == "codec":
        rng.choice(header["param_groups"])["options"]["codec"] = name
    else:
        for group in header["param_groups"][: 1 if how == "option" else None]:
            group["options"][name] = 1
    return f"{how} {name[:9]!a}"


def _text(rng: Random, content: Json) -> str:
    """Not the JSON of an object, though its checksum is right."""
    plain = json.dumps(content)[:-1].encode()
    place = rng.randrange(len(plain))
    texts = {
        "truncated": plain[:place],
        "flipped": plain[:place] + bytes([plain[place] ^ (1 << rng.randrange(8))]) + plain[place + 1 :],
        "not UTF-8": plain[:place] + b"\xff\xfe" + plain[place:],
        "BOM": b"\xef\xbb\xbf" + plain,
        "UTF-16": json.dumps(content)[:-1].encode("utf-16"),
        "list": b'["shardopt"',
        "comma": plain + b",",
        "empty": b"",
        "only": b'{"format": "shardopt"',
        "nothing": b'{"format": "shardopt", "format_version": 2',
        "few": b'{"format": "shardopt", "format_version": 2, "header": {}, "token": "'
        + b"0" * 16
        + b'", "files": [], "tensors": {}',
        "NUL": plain[:place] + b"\0" + plain[place:],
        "space": plain + b" " * 10**6,
        "deep": b'{"format": "shardopt", "a": ' + b"[" * DEEP,
        "two": plain + b"}" + plain,
    }
    how = rng.choice(list(texts))
    content["@text@"] = texts[how]
    return f"{how} at {place} of {len(plain)}"


#: The more often, the more likely.
MUTATIONS: list[Callable[..., str]] = [
    *([_replace_any] * 5),
    *([_option, _name] * 3),
    *([_change_number, _delete, _header] * 2),
    *(_rename, _add, _duplicate_key, _swap, _shape, _dtype, _version, _tensors, _text),
    *(OF_RULES * 2),
    *(OF_TABLES * 2),
]
