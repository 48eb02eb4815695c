"""Mutations of the JSON of an index, at random: any value by any other, and what only who knows the format would do."""

from __future__ import annotations

import copy
import json
import math
import os
import zlib
from collections.abc import Callable
from random import Random

from attack.forked import shown
from attack.hostile_values import DEEP, DTYPES, FILES, NAMES, OPTIONS, VALUES, Raw
from attack.index_file import ITEMSIZES, Json
from attack.json_places import at, places, put, shown_place, some_place


def mutated(rng: Random, content: Json) -> tuple[str, bytes]:
    """A mutation's description, and the index's text up to its checksum."""
    content = copy.deepcopy(content)
    mutate = rng.choice(list(MUTATIONS))
    description = f"{mutate.__name__.strip('_')}: {mutate(rng, content)}"
    for place in list(places(content)):  # what JSON's own encoder does not write
        if isinstance(at(content, place), Raw):
            raw = at(content, place).text
            put(content, place, "@raw@")
            return description, json.dumps(content)[:-1].replace('"@raw@"', raw).encode("utf-8", "surrogatepass")
    text = content.pop("@text@", None)
    return description, json.dumps(content)[:-1].encode() if text is None else text


def _replace_any(rng: Random, content: Json) -> str:
    place = some_place(rng, content)
    value = rng.choice(VALUES)
    put(content, place, copy.deepcopy(value))
    return f"{shown_place(place)} = {shown(value)}"


def _change_number(rng: Random, content: Json) -> str:
    numbers = [p for p in places(content) if isinstance(at(content, p), int) and not isinstance(at(content, p), bool)]
    place = rng.choice(numbers)
    old = at(content, place)
    others = [
        old + 1,
        old - 1,
        -old,
        2 * old,
        old + 64,
        -1,
        float(old),
        bool(old),
        str(old),
        old + 2**64,
        10**18,
        [old],
    ]
    new = rng.choice(others)
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
    key = rng.choice(["more", "__class__", "", "_replace", "crc", "chunks", "dtype", "params", "lr", *NAMES[:5]])
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


def _chunks(rng: Random, content: Json) -> str:
    """Chunks that do not fill their tensor, or twice, or elsewhere; few of these are harmless."""
    name = rng.choice([name for name, tensor in content["tensors"].items() if len(tensor["chunks"]) > 1])
    tensor = content["tensors"][name]
    chunks = tensor["chunks"]
    one, other = rng.sample(range(len(chunks)), 2)
    fields = rng.choice(
        [["offsets"], ["shape"], ["offsets", "shape"], ["file"], ["file", "position", "bytes", "crc32"], ["position"]]
    )
    dim = rng.randrange(len(tensor["shape"]))
    far = rng.choice([-1, 1, 100_000, 10**18, 2**63, -(10**18), True, 0.0, -0.0])
    how = rng.choice(["swap", "copy", "drop", "double", "order", "far", "transpose", "offset", "wide"])
    if how == "swap":
        for field in fields:
            chunks[one][field], chunks[other][field] = chunks[other][field], chunks[one][field]
    elif how == "copy":
        chunks[one].update({field: copy.deepcopy(chunks[other][field]) for field in fields})
    elif how == "drop":
        del chunks[one]
    elif how == "double":
        chunks.insert(other, copy.deepcopy(chunks[one]))
    elif how == "order":
        rng.shuffle(chunks)
    elif how == "far":
        chunks[one]["offsets"][dim] = far
    elif how == "transpose":
        chunks[one]["shape"] = chunks[one]["shape"][::-1]
    elif how == "offset":
        chunks[one]["offsets"] = [offset + rng.randint(-3, 3) for offset in chunks[one]["offsets"]]
    else:
        chunks[one]["shape"][dim] += 1
        chunks[other]["shape"][dim] -= 1
    return f"{how} {fields if how in ('swap', 'copy') else ''} {far if how == 'far' else ''} in {name}, {one}, {other}"


def _shape(rng: Random, content: Json) -> str:
    """Another shape of as many elements, or of none, of a whole tensor or a chunk too."""
    name = rng.choice(list(content["tensors"]))
    tensor = content["tensors"][name]
    count = math.prod(tensor["shape"])
    shapes = [
        tensor["shape"][::-1],
        [*tensor["shape"], 1],
        [1, *tensor["shape"]],
        [count],
        [],
        [0, 10**18],
        [10**18, 0, 2**62],
        [0] * 70,
        [1] * 70 + [count],
        [1] * 100_000,
        [10**18, 10**18],
        [2**32, 2**32],
        [-1, -count],
        [count, True],
        [float(count)],
    ]
    tensor["shape"] = rng.choice(shapes)
    how = rng.choice(["", "one chunk", "no chunk", "chunks alike"])
    if how == "one chunk":
        tensor["chunks"] = [{**tensor["chunks"][0], "offsets": [0] * len(tensor["shape"]), "shape": tensor["shape"]}]
        tensor["chunks"][0]["bytes"] = math.prod(tensor["shape"]) * ITEMSIZES[tensor["dtype"]]
    elif how == "no chunk":
        tensor["chunks"] = []
    elif how == "chunks alike":
        for chunk in tensor["chunks"]:
            chunk["shape"] = chunk["shape"][::-1]
            chunk["offsets"] = chunk["offsets"][::-1]
    return f"{name} {shown(tensor['shape'])} {how}"


def _dtype(rng: Random, content: Json) -> str:
    name, dtype = rng.choice(list(content["tensors"])), rng.choice(DTYPES)
    content["tensors"][name]["dtype"] = dtype
    return f"{name} {dtype!r}"


def _file(rng: Random, content: Json) -> str:
    """The name of a data file, in one chunk or everywhere."""
    old, new = rng.choice(list(content["files"])), rng.choice(FILES)
    how = rng.choice(["chunk", "everywhere", "listed"])
    chunks = [c for tensor in content["tensors"].values() for c in tensor["chunks"] if c["file"] == old]
    if how == "everywhere":
        for chunk in chunks:
            chunk["file"] = new
    elif how == "chunk":
        rng.choice(chunks)["file"] = new
    if isinstance(new, str | int | None):
        length = rng.choice([content["files"][old], 0, 10**6, None])
        content["files"][new] = os.path.getsize(new) if length is None and os.path.isfile(str(new)) else length
    return f"{how} {shown(new)} for {old}"


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
        rng.choice(
            [
                list.pop,
                list.reverse,
                lambda names: names.extend(names),
                lambda names: names.append("more"),
                lambda names: names.extend(NAMES),
            ]
        )(group["parameters"])
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
    versions = [0, 2, 99, -1, 1.0, True, "1", None, [1], {"a": 1}, float("nan"), 10**400, Raw("1" * 5000), Raw("1.0e0")]
    content[key] = rng.choice(versions)
    return f"{key} = {shown(content[key])}"


def _tensors(rng: Random, content: Json) -> str:
    """A tensor renamed, added, removed, or described by what another one is."""
    tensors = content["tensors"]
    one, other = rng.sample(list(tensors), 2)
    names = ["more", "model.more", "optimizer.weight.more", "optimizer.more.step", "optimizer.", "extra.", "model."]
    name = rng.choice(
        [
            *names,
            "extra.k",
            "extra.more",
            "optimizer",
            "\ud800",
            "optimizer.weight.",
            ".step",
            "a" * 10**5,
        ]
    )
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
        content["tensors"][prefix + name] = {"dtype": "uint8", "shape": [0], "chunks": []}
        how += f" {prefix}"
    elif how == "version":
        content["format_version"] = name
    elif how == "optimizer":
        header["optimizer"] = name
        content["tensors"]["optimizer.weight.more"] = {"dtype": "uint8", "shape": [0], "chunks": []}
    elif how == "parameter":
        rng.choice(header["param_groups"])["parameters"][0] = name
    elif how == "codec":
        rng.choice(header["param_groups"])["options"]["codec"] = name
    else:
        for group in header["param_groups"][: 1 if how == "option" else None]:
            group["options"][name] = 1
    return f"{how} {name[:9]!a}"


def _large_extra(rng: Random, content: Json) -> str:
    """Extra tensors, whose shapes no model knows: empty but wide, or larger than their data."""
    shape = rng.choice([[10**10], [2**31, 2], [0, 2**62, 4], [2**62], [10**18], [10**18, 0], [2**33, 0], [0] * 65])
    chunks = rng.choice([[], content["tensors"]["extra.rng"]["chunks"]])
    if rng.random() < 0.5 and chunks:
        (name, length), *_ = content["files"].items()
        chunks = [{**chunks[0], "file": name, "shape": shape, "offsets": [0] * len(shape)}]
        chunks[0]["bytes"] = math.prod(shape)
        content["files"][name] = rng.choice([length, math.prod(shape) + 10**6])
    content["tensors"]["extra.large"] = {"dtype": "uint8", "shape": shape, "chunks": copy.deepcopy(chunks)}
    return f"{shown(shape)} in {len(chunks)} chunks"


def _many_chunks(rng: Random, content: Json) -> str:
    """Rightly described, or all alike; in any case slowly checked by a loop in a loop."""
    count = rng.choice([2000, 5000])
    first = content["tensors"]["extra.rng"]["chunks"][0]
    one = {**first, "shape": [1], "bytes": 1, "offsets": [0]}
    how = rng.choice(["apart", "overlapping", "empty"])
    chunks = [{**one, "offsets": [0 if how == "overlapping" else index]} for index in range(count)]
    if how == "empty":
        chunks = [{**one, "shape": [0], "bytes": 0, "crc32": 0, "offsets": [index]} for index in range(count)]
    content["tensors"]["extra.many"] = {"dtype": "uint8", "shape": [0 if how == "empty" else count], "chunks": chunks}
    if how == "apart":
        for chunk in chunks:
            chunk["crc32"] = zlib.crc32(b"\0")
    return f"{how} {count}"


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
        "nothing": b'{"format": "shardopt", "format_version": 1',
        "few": b'{"format": "shardopt", "format_version": 1, "header": {}, "files": {}, "tensors": {}',
        "NUL": plain[:place] + b"\0" + plain[place:],
        "space": plain + b" " * 10**6,
        "deep": b'{"format": "shardopt", "a": ' + b"[" * DEEP,
        "two": plain + b"}" + plain,
    }
    how = rng.choice(list(texts))
    content["@text@"] = texts[how]
    return f"{how} at {place} of {len(plain)}"


#: The more often, the more likely.
MUTATIONS: list[Callable[[Random, Json], str]] = [
    *([_replace_any] * 5),
    *([_chunks] * 4),
    *([_option, _name] * 3),
    *([_change_number, _delete, _header, _file] * 2),
    *(_rename, _add, _duplicate_key, _swap, _shape, _dtype, _version, _tensors, _text, _large_extra, _many_chunks),
]
