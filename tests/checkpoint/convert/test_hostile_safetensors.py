"""Hostile safetensors files: converted and loaded they give the bits that were saved, or one line, and nothing changes.

Every node of the header, and of the JSON in its metadata, is replaced, removed, renamed and doubled; bytes are cut off,
added and flipped.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardopt
from helpers import everything
from ranks.models import set_gradients
from ranks.snapshot import assert_same
from safetensors_files import save_file
from shardopt import checkpoint
from shardopt.checkpoint import CheckpointError
from shardopt.checkpoint.convert import convert
from shardopt.optim import ShardedOptimizer

Run = tuple[nn.Module, ShardedOptimizer]


def made(steps: int) -> Run:
    """A quantized matrix with low bits, buffers, float32 state, and two param groups."""
    model = nn.Sequential(nn.Linear(40, 130, dtype=torch.bfloat16), nn.BatchNorm1d(130))
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters(), "betas": (0.5, 0.75)}]
    optimizer = shardopt.AdamW8bit(groups, master_weight_bits=24, min_quantized_numel=64)
    for step in range(steps):
        set_gradients(model, step)
        optimizer.step()
        model[1].running_mean += 1
    model.zero_grad()
    return model, optimizer


def bits_of(model: nn.Module, optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    return {**everything(optimizer), **{name: buffer.clone() for name, buffer in model.named_buffers()}}


def options_of(optimizer: ShardedOptimizer) -> list[tuple[list[int], str]]:
    return [
        ([id(p) for p in group["params"]], repr(sorted((k, v) for k, v in group.items() if k != "params")))
        for group in optimizer.param_groups
    ]


# --- JSON with keys that stand twice, and numbers and depths that Python's writer does not write


class Raw(str):
    """JSON as it stands."""


class Pairs(list[tuple[str, Any]]):
    """An object."""


def parsed(text: str | bytes) -> Any:
    return json.loads(text, object_pairs_hook=Pairs)


def dumped(value: Any) -> str:
    if isinstance(value, Raw):
        return value
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{dumped(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dumped, value)) + "]"
    return json.dumps(value)


DEEP = Raw("[" * 10_000 + "]" * 10_000)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1.5,
    Raw("1e400"),
    Raw("NaN"),
    Raw("9" * 30),
    Raw("9" * 5000),
    2**63,
    "",
    "F32",
    "a\nb",
    "\ud800",
    [],
    [None],
    [1, 2, 3],
    Pairs(),
    Pairs([("a", 1)]),
    DEEP,
    Raw('{"a":' * 600 + "1" + "}" * 600),
    Raw("[1,"),
)

Place = tuple[int, ...]


def places(value: Any) -> Iterator[Place]:
    """Of all nodes, the root's first."""
    yield ()
    items = [item for _, item in value] if isinstance(value, Pairs) else value if isinstance(value, list) else []
    for index, item in enumerate(items):
        yield from ((index, *place) for place in places(item))


def replaced(value: Any, place: Place, change: Callable[[Any], Any]) -> Any:
    """A copy in which one node is another one."""
    if not place:
        return change(value)
    first, *rest = place
    copy = type(value)(value)
    if isinstance(value, Pairs):
        copy[first] = (value[first][0], replaced(value[first][1], tuple(rest), change))
    else:
        copy[first] = replaced(value[first], tuple(rest), change)
    return copy


def changes(value: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Changes to a node, in words and as a function."""
    for index, other in enumerate(VALUES):
        yield f"value {index}", lambda _, other=other: other
    if isinstance(value, list):
        for index in range(len(value)):
            yield f"without {index}", lambda v, i=index: type(v)(v[:i] + v[i + 1 :])
            yield f"{index} twice", lambda v, i=index: type(v)([*v, v[i]])
    if isinstance(value, Pairs):
        for index, (key, _) in enumerate(value):
            for name in ("", "x", f"{key}x", "a\nb", value[0][0]):
                yield f"{key} as {name!r}", lambda v, i=index, n=name: Pairs([*v[:i], (n, v[i][1]), *v[i + 1 :]])
            yield f"{key} with another", lambda v, i=index: Pairs([*v, (v[i][0], None)])


class Mutation(NamedTuple):
    name: str
    content: Callable[[], bytes]


def mutations(content: bytes) -> list[Mutation]:
    end = 8 + int.from_bytes(content[:8], "little")
    header, data = parsed(content[8:end]), content[end:]
    (metadata_at,) = (i for i, (key, _) in enumerate(header) if key == "__metadata__")
    (ours_at,) = (i for i, (key, _) in enumerate(header[metadata_at][1]) if key == "shardopt")
    ours = parsed(header[metadata_at][1][ours_at][1])

    def rebuilt(changed: Any) -> bytes:
        text = dumped(changed).encode(errors="surrogatepass")
        return len(text).to_bytes(8, "little") + text + data

    def with_ours(changed: Any) -> bytes:
        return rebuilt(replaced(header, (metadata_at, ours_at), lambda _: dumped(changed)))

    found = []
    for tree, build, of in ((header, rebuilt, "header"), (ours, with_ours, "metadata")):
        for place in places(tree):
            node = tree
            for index in place:
                node = node[index][1] if isinstance(node, Pairs) else node[index]
            for name, change in changes(node):
                found.append(
                    Mutation(
                        f"{of} {place}: {name}",
                        lambda tree=tree, build=build, place=place, change=change: build(replaced(tree, place, change)),
                    )
                )
    return found


def damages(content: bytes, count: int) -> list[Mutation]:
    """Bytes cut off or added anywhere, and flipped in the header: what stands behind has no checksum."""
    rng = random.Random(0)
    end = 8 + int.from_bytes(content[:8], "little")
    found = [
        Mutation(f"header of {n}", lambda n=n: n.to_bytes(8, "little") + content[8:])
        for n in (0, 1, end - 9, end - 7, len(content) - 8, len(content) - 7, 10**8, 2**63, 2**64 - 1)
    ]
    for _ in range(count):
        length, position, bit = rng.randrange(len(content)), rng.randrange(end), rng.randrange(8)
        found.append(Mutation(f"{length} bytes", lambda n=length: content[:n]))
        found.append(Mutation(f"bit {bit} of byte {position}", lambda p=position, b=bit: flipped(content, p, 1 << b)))
        found.append(Mutation(f"byte {position} inverted", lambda p=position: flipped(content, p, 255)))
        found.append(Mutation(f"without byte {position}", lambda p=position: content[:p] + content[p + 1 :]))
    return [*found, Mutation("one byte more", lambda: content + b"\0")]


def flipped(content: bytes, position: int, mask: int) -> bytes:
    return content[:position] + bytes([content[position] ^ mask]) + content[position + 1 :]


# --- what becomes of them


class Target(NamedTuple):
    """A run that files are loaded into, and all that it has."""

    model: nn.Module
    optimizer: ShardedOptimizer
    bits: dict[str, Tensor]
    options: list[tuple[list[int], str]]

    @classmethod
    def fresh(cls) -> Target:
        run = made(steps=1)
        return cls(*run, bits_of(*run), options_of(run[1]))


def fault(path: Path, target: Target, saved: dict[str, Tensor]) -> tuple[str | None, bool]:
    """The fault in a conversion of a file and a load of the result, and whether it was loaded."""
    converted = path.with_name("converted")
    try:
        convert(path, converted)
        checkpoint.load(converted, target.model, target.optimizer)
    except Exception as error:  # any error is judged: most kinds are faults
        message, place = str(error), converted if converted.exists() else path
        if type(error) is not CheckpointError or not message.startswith(f"{place}: "):
            return repr(error)[:200], False
        if not message.isprintable() or len(message) > 1000:
            return f"not one short line: {message[:200]!r}", False
        try:
            assert_same(bits_of(target.model, target.optimizer), target.bits)
        except AssertionError as changed:
            return str(changed), False
        return (None if options_of(target.optimizer) == target.options else "changed options"), False
    finally:
        shutil.rmtree(converted, ignore_errors=True)
        assert os.listdir(path.parent) == [path.name]
    try:
        assert_same(bits_of(target.model, target.optimizer), saved)
        for group in target.optimizer.param_groups:
            target.optimizer.check_group(group)
        set_gradients(target.model, 3)
        target.optimizer.step()
    except Exception as error:  # any error is judged: most kinds are faults
        return f"loaded, then {error!r}"[:200], True
    return None, True


class Saved(NamedTuple):
    content: bytes
    bits: dict[str, Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    path = tmp_path_factory.mktemp("saved") / "run"
    run = made(steps=3)
    save_file(path, *run)
    return Saved(path.read_bytes(), bits_of(*run))


def assert_harmless(path: Path, found: list[Mutation], saved: Saved) -> None:
    target, faults, loaded = Target.fresh(), [], 0
    for name, content in found:
        path.write_bytes(content())
        wrong, was_loaded = fault(path, target, saved.bits)
        if wrong is not None:
            faults.append(f"{name}: {wrong}")
        if wrong is not None or was_loaded:
            target = Target.fresh()
        loaded += was_loaded
    assert not faults, f"{len(faults)} of {len(found)}:\n" + "\n".join(faults[:30])
    assert 0 < loaded < len(found) / 2  # neither is for want of trying


def test_mutations(tmp_path: Path, saved: Saved) -> None:
    found = random.Random(1).sample(mutations(saved.content), 300)
    assert_harmless(tmp_path / "run", found, saved)


def test_damages(tmp_path: Path, saved: Saved) -> None:
    assert_harmless(tmp_path / "run", damages(saved.content, 50), saved)


@pytest.mark.slow
def test_all_mutations(tmp_path: Path, saved: Saved) -> None:
    assert_harmless(tmp_path / "run", mutations(saved.content), saved)


@pytest.mark.slow
def test_many_damages(tmp_path: Path, saved: Saved) -> None:
    assert_harmless(tmp_path / "run", damages(saved.content, 1000), saved)
