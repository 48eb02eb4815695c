"""Sharded = unsharded, bit for bit, where DTensors shard dim 2 and up, or leave ranks with several ranges of a dim."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.placement_types import _StridedShard

from helpers import CODEC_NAMES, RULES
from ranks.layouts import DEEP, Layout, deep_layouts
from ranks.pool import Pool
from ranks.runs import Pair
from ranks.snapshot import local
from slow_cases import slow
from weight_formats import FORMATS

STEPS = 3


def _is_scattered(way: Layout) -> bool:
    """Whether some rank may hold several ranges of a dim."""
    strided = [p for p in way.placements if isinstance(p, _StridedShard)]
    return any(getattr(way.placements[-1], "dim", None) != p.dim or len(way.placements) == 1 for p in strided)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("rule", "codecs", "weights", "block_size", "world_size"),
    [
        ("adamw", ["log8"], None, 128, 4),
        ("adamw", ["log4"], "bf16 24", 128, 3),
        ("adamw", ["log8"], "bf16 stochastic", 128, 4),
        ("lamb", ["log8", "fp32"], "bf16 stochastic", 128, 2),
        *slow(
            [
                ("muon", ["log8"], "bf16 24", 128, 4),
                ("repaid_adamw", ["companded8"], None, 128, 4),
                ("prodigy", ["log8"], None, 128, 4),
                *((rule, [*CODEC_NAMES], None, size, n) for rule in RULES for size in (16, 128) for n in (2, 3, 4)),
                *(("adamw", ["log8", "fp32"], each, 64, n) for each in FORMATS for n in (2, 3, 4)),
            ]
        ),
    ],
)
def test_sharded_as_whole(rule: str, codecs: list[str], weights: str | None, block_size: int, world_size: int) -> None:
    ways = deep_layouts(dist.get_world_size())
    if "muon" in rule:  # each rank has to hold one range of each dim
        ways = [way for way in ways if not _is_scattered(way)]
    options = {}
    if weights is not None:
        dtype, options = FORMATS[weights]
        ways = [way._replace(dtype=dtype) for way in ways]
    pair = Pair(rule, codecs, ways, block_size=block_size, **options)
    for step in range(STEPS):
        pair.step(pair.gradients(seed=1000 * (step + 1)))
    pair.compare()


def _scales_change_in_place() -> None:
    """Scales that further pieces of a block are decoded with change, too."""
    pair = Pair("lamb", ["log8"], [Layout((5, 7, 40), (2,), (DEEP,), torch.float32)])
    for step in range(STEPS):
        pair.step(pair.gradients(seed=step))
        for optimizer in (pair.whole_optimizer, pair.sharded_optimizer):
            (state,) = optimizer.state.values()
            local(state["exp_avg_scales"]).mul_(0.5)
    pair.compare()


def test_scales_that_change_in_place(ranks: Pool) -> None:
    ranks.run(2, _scales_change_in_place)


@pytest.mark.ranks(2)
def test_the_default_dtype_is_not_that_of_scales() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        _scales_change_in_place()
    finally:
        torch.set_default_dtype(torch.float32)
