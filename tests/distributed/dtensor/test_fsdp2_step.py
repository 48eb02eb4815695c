"""Sharded = unsharded, bit for bit, for models that torch shards: FSDP2, HSDP, tensor parallel and both, DDP."""

from __future__ import annotations

import pytest
import torch

from helpers import CODEC_NAMES, RULES
from ranks.models import WAYS, make_net, named_parameters, set_gradients
from ranks.pool import Pool
from ranks.snapshot import assert_same, assert_shards_of, entries, snapshot
from slow_cases import slow

#: The ways to shard that a world of so many ranks has.
WAYS_OF_WORLD = [
    *((1, way) for way in ("fsdp", "tp")),
    *((2, way) for way in ("fsdp", "fsdp columns", "tp", "hsdp of one", "ddp")),
    *((3, way) for way in ("fsdp", "fsdp columns", "tp", "hsdp of one")),
    *((4, way) for way in ("fsdp", "fsdp columns", "fsdp tp", "fsdp columns tp", "hsdp", "hsdp columns", "tp", "ddp")),
]
SMALL = {"min_quantized_numel": 64}


def _same_gradients(way: str, rule: str, codec: str, dtype: torch.dtype) -> None:
    whole, sharded = make_net(dtype), WAYS[way](make_net(dtype))
    params, sharded_params = named_parameters(whole), named_parameters(sharded)
    assert list(params) == list(sharded_params)
    optimizer, sharded_optimizer = (
        RULES[rule].make(model.parameters(), codec=codec, **SMALL) for model in (whole, sharded)
    )
    for step in range(3):
        for model, stepped in ((whole, optimizer), (sharded, sharded_optimizer)):
            set_gradients(model, step)
            stepped.step()
    expected = entries(params, optimizer)
    assert_shards_of(entries(sharded_params, sharded_optimizer), expected)
    assert_same(snapshot(sharded_params, sharded_optimizer), expected)


FP32, BF16 = torch.float32, torch.bfloat16
CASES = [
    *((FP32, *on) for on in [(1, "fsdp"), (2, "fsdp"), (2, "tp"), (2, "hsdp of one"), (2, "ddp")]),
    *((FP32, *on) for on in [(3, "fsdp columns"), (3, "tp")]),
    *((FP32, 4, way) for way in ("fsdp", "fsdp columns", "fsdp tp", "fsdp columns tp", "hsdp", "hsdp columns", "tp")),
    *((BF16, *on) for on in [(1, "tp"), (2, "fsdp columns"), (3, "fsdp"), (3, "hsdp of one")]),
    *((BF16, 4, way) for way in ("fsdp tp", "fsdp columns tp", "hsdp", "hsdp columns", "ddp")),
]
ALL_CASES = [(dtype, *on) for dtype in (FP32, BF16) for on in WAYS_OF_WORLD]


@pytest.mark.parametrize(("dtype", "world_size", "way"), [*CASES, *slow(ALL_CASES, besides=CASES)])
def test_same_gradients(ranks: Pool, world_size: int, way: str, dtype: torch.dtype) -> None:
    ranks.run(world_size, _same_gradients, way, "adamw", "log8", dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "way"), WAYS_OF_WORLD)
@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("rule", ["adamw", "lion", "nesterov"])
def test_same_gradients_sweep(ranks: Pool, world_size: int, way: str, rule: str, codec: str) -> None:
    ranks.run(world_size, _same_gradients, way, rule, codec, torch.float32)
