"""Hostile state dicts: import_state imports them, or raises one line and changes nothing.

Every node of other packages' state dicts is replaced by things of other types, removed and renamed.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import Parameter

import shardopt
from foreign_states import GROUPS, KINDS, STATES, made_up, stepped
from helpers import everything
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.checkpoint import import_state
from shardopt.optim import ShardedOptimizer

#: A matrix that all packages quantize, and a vector that none does.
SHAPES = ((8, 512), (7,))
#: Packages, and the kind of optimizer of bitsandbytes whose state has another form.
SOURCES = [*STATES, "torch", "AdEMAMix"]


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


class Unprintable:
    def __repr__(self) -> str:
        raise KeyError("no repr")


THINGS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "-1": lambda: -1,
    "inf": lambda: float("inf"),
    "empty text": lambda: "",
    "text": lambda: "a\nb",
    "number": lambda: 10**30,
    "empty list": list,
    "list": lambda: [1.0, "a"],
    "deep": lambda: nested(10_000),
    "empty dict": dict,
    "dict": lambda: {"a": {"b": torch.ones(3)}, 3: 4},
    "unprintable": Unprintable,
    "type": lambda: Parameter,
    "three": lambda: torch.ones(3),
    "number in a tensor": lambda: torch.tensor(2.0),
    "no numbers": lambda: torch.ones(0),
    "integers": lambda: torch.ones(8, 512, dtype=torch.int64),
    "bytes": lambda: torch.ones(8, 512, dtype=torch.uint8),
    "truths": lambda: torch.ones(8, 512, dtype=torch.bool),
    "halves": lambda: torch.ones(16, dtype=torch.float16),
    "complex": lambda: torch.ones(8, 512, dtype=torch.complex64),
    "meta": lambda: torch.ones(8, 512, device="meta"),
    "sparse": lambda: torch.ones(8, 512).to_sparse(),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "256 integers": lambda: torch.arange(256),
}


def state_dict_of(source: str) -> dict[str, Any]:
    if source == "torch":
        theirs = torch.optim.AdamW(params())
        stepped(theirs)
        return theirs.state_dict()
    state_of, group = (
        (STATES[source], GROUPS[source]) if source in STATES else (KINDS[source].state, KINDS[source].group)
    )
    states = {index: state_of(made_up(shape, index))[0] for index, shape in enumerate(SHAPES)}
    return {"state": states, "param_groups": [{"lr": 0.5, **group, "params": [0, 1]}]}


def params() -> list[Parameter]:
    return [Parameter(values(shape, seed)) for seed, shape in enumerate(SHAPES)]


def target(source: str) -> ShardedOptimizer:
    ours = shardopt.AdEMAMix8bit if source == "AdEMAMix" else shardopt.AdamW8bit
    optimizer = ours(params(), codec="dynamic8", block_size=256, min_quantized_numel=64)
    stepped(optimizer, 1)
    return optimizer


Place = tuple[Any, ...]


def children(node: Any) -> dict[Any, Any]:
    if isinstance(node, dict):
        return dict(node)
    if isinstance(node, list | tuple):
        return dict(enumerate(node))
    return dict(vars(node)) if type(node).__name__ == "OptimState8bit" else {}


def places(node: Any) -> Iterator[Place]:
    """Of all nodes, the root's first."""
    yield ()
    for key, child in children(node).items():
        yield from ((key, *place) for place in places(child))


def changed(node: Any, place: Place, change: Callable[[Any], Any]) -> Any:
    """A copy in which one node is another one."""
    if not place:
        return change(node)
    first, *rest = place
    found = copy.copy(node)
    child = changed(children(node)[first], tuple(rest), change)
    if isinstance(node, tuple):
        return tuple(child if index == first else item for index, item in enumerate(node))
    if isinstance(node, dict | list):
        found[first] = child
    else:
        setattr(found, first, child)
    return found


def without(node: Any, key: Any) -> Any:
    if isinstance(node, list | tuple):
        return type(node)(item for index, item in enumerate(node) if index != key)
    found = copy.copy(node)
    del (found if isinstance(node, dict) else vars(found))[key]
    return found


def renamed(node: dict[Any, Any], key: Any, name: Any) -> dict[Any, Any]:
    return {name if other == key else other: value for other, value in node.items()}


class Mutation(NamedTuple):
    name: str
    state_dict: Callable[[], Any]


def mutations(state_dict: dict[str, Any]) -> Iterator[Mutation]:
    for place in places(state_dict):
        node = state_dict
        for key in place:
            node = children(node)[key]
        kinds: dict[str, Callable[[Any], Any]] = {
            f"as {name}": lambda _, t=thing: t() for name, thing in THINGS.items()
        }
        for key in children(node):
            kinds[f"without {key}"] = lambda n, k=key: without(n, k)
            if isinstance(node, dict):
                names = ("x", "a\nb", 3, None, ("a", 1), next(iter(node)))
                kinds |= {f"{key} as {x!r}": lambda n, k=key, x=x: renamed(n, k, x) for x in names}
        for name, change in kinds.items():
            yield Mutation(f"{place} {name}", lambda p=place, c=change: changed(state_dict, p, c))


def options_of(optimizer: ShardedOptimizer) -> str:
    return repr([[(k, v) for k, v in group.items() if k != "params"] for group in optimizer.param_groups])


def fault(optimizer: ShardedOptimizer, state_dict: Any) -> tuple[str | None, bool]:
    """The fault in an import of a state dict, and whether it was imported."""
    before, options = everything(optimizer), options_of(optimizer)
    try:
        report = import_state(optimizer, state_dict)
    except Exception as error:  # any error is judged: most kinds are faults
        message = str(error)
        if type(error) is not ValueError:
            return repr(error)[:200], False
        if not message.isprintable() or len(message) > 1000:
            return f"not one short line: {message[:200]!r}", False
        try:
            assert_same(everything(optimizer), before)
        except AssertionError as difference:
            return str(difference), False
        return (None if options_of(optimizer) == options else "changed options"), False
    try:
        str(report)
        (group,) = optimizer.param_groups
        for param in group["params"]:
            like = optimizer._internals.state_of(param, group).new(torch.device("meta"))
            assert {k: (x.dtype, x.shape) for k, x in optimizer.state.get(param, like).items()} == {
                k: (x.dtype, x.shape) for k, x in like.items()
            }
        stepped(optimizer, 1)
    except Exception as error:  # any error is judged: most kinds are faults
        return f"imported, then {error!r}"[:200], True
    return None, True


def assert_harmless(source: str, found: list[Mutation]) -> None:
    optimizer, faults, imported = target(source), [], 0
    for name, state_dict in found:
        wrong, was_imported = fault(optimizer, state_dict())
        if wrong is not None:
            faults.append(f"{name}: {wrong}")
        if wrong is not None or was_imported:
            optimizer = target(source)
        imported += was_imported
    assert not faults, f"{len(faults)} of {len(found)}:\n" + "\n".join(faults[:40])
    assert 0 < imported < len(found) / 2  # neither is for want of trying


@pytest.mark.parametrize("source", SOURCES)
def test_mutations(source: str) -> None:
    assert_harmless(source, random.Random(0).sample(list(mutations(state_dict_of(source))), 150))


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_all_mutations(source: str) -> None:
    assert_harmless(source, list(mutations(state_dict_of(source))))
