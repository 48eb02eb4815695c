"""Weights in full precision, on shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ranks.models import WAYS, make_net, named_parameters
from ranks.runs import make_optimizer, snapshot_of, step_with
from ranks.snapshot import assert_same, in_full
from shardopt.layout import FlatBuffer, FlatShard, shard_of
from weight_formats import FORMATS

STEPS = 2

each_way = pytest.mark.parametrize(
    ("world_size", "way"),
    [
        *((2, way) for way in ("ddp", "fsdp columns", "fsdp1", "zero")),
        *((3, way) for way in ("fsdp", "tp", "fsdp1 flat")),
        *((4, way) for way in ("fsdp tp", "fsdp1 hybrid flat")),
    ],
)


def _trained(way: str, weights: str) -> tuple[Any, Any]:
    dtype, options = FORMATS[weights]
    model = WAYS[way](make_net(dtype))
    optimizer = make_optimizer(way, model, **options)
    for step in range(STEPS):
        step_with(model, optimizer, step)
    return model, optimizer


def _assert_parts(param: Tensor, found: Tensor, name: str, whole: dict[str, Tensor]) -> None:
    """Demands that what was found for a parameter, or for a flat one of several, is this rank's part of the whole."""
    shard = shard_of(param)
    if isinstance(shard, FlatBuffer):
        for segment in shard.segments:
            elements = whole[segment.name].flatten()[segment.shard.start : segment.shard.end]
            assert_same({segment.name: segment.of(found)}, {segment.name: elements})
    elif isinstance(shard, FlatShard):
        assert_same({name: found}, {name: whole[name].flatten()[shard.start : shard.end]})
    else:
        assert_same({name: in_full(found)}, {name: whole[name]})


@pytest.mark.ranks
@each_way
@pytest.mark.parametrize("weights", ["bf16 24", pytest.param("bf16 32", marks=pytest.mark.slow), "fp16 24"])
def test_as_single(way: str, weights: str, world_size: int) -> None:
    """The weights are those of an unsharded run, and loading them brings back every bit."""
    single, expected = _trained("single", weights)
    weights_of = expected.full_precision_parameters()
    whole = {name: weights_of[param] for name, param in single.named_parameters()}
    model, optimizer = _trained(way, weights)
    own = getattr(optimizer, "optim", optimizer)  # that inside a ZeroRedundancyOptimizer
    actual = own.full_precision_parameters()
    assert actual
    for name, param in named_parameters(model).items():
        if param in actual:
            assert type(actual[param]) is type(param.detach())
            _assert_parts(param, actual[param], name, whole)
    before = snapshot_of(model, optimizer)
    for param, x in actual.items():
        param.data.mul_(2)
        if param in own.state:  # a rank with none of its elements has not stepped it
            own.state[param]["master_low_bits"].fill_(3)
        assert x.dtype == torch.float32
    own.load_full_precision_parameters(actual)
    assert_same(snapshot_of(model, optimizer), before)


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "way"), [(3, "fsdp"), (2, "tp"), (3, "fsdp1"), (2, "fsdp1 flat")])
def test_loading_before_the_first_step(way: str, world_size: int) -> None:
    dtype, options = FORMATS["bf16 24"]
    runs = []
    for each in (way, "single"):
        model = WAYS[each](make_net(dtype))
        optimizer = make_optimizer(each, model, **options)
        halves = {param: x / 3 for param, x in optimizer.full_precision_parameters().items()}
        optimizer.load_full_precision_parameters(halves)
        for step in range(STEPS):
            step_with(model, optimizer, step)
        runs.append(snapshot_of(model, optimizer))
    assert_same(*runs)


@pytest.mark.ranks(2)
def test_weights_sharded_otherwise_are_refused() -> None:
    _, optimizer = _trained("fsdp", "bf16 24")
    weights = {param: x.full_tensor() for param, x in optimizer.full_precision_parameters().items()}
    with pytest.raises(ValueError, match=r"expected .* placed \(Shard\(dim=0\),\)"):
        optimizer.load_full_precision_parameters(weights)
