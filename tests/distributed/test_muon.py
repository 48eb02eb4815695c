"""Muon under everything that shards: the bits of one rank, with little travelling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shardopt
from helpers import CASES
from pairs import slow
from ranks.models import WAYS, make_net, set_gradients
from ranks.pool import Pool
from ranks.runs import SMALL, snapshot_of, step_with, trained
from ranks.snapshot import assert_same

STEPS = 3
NOT_FLAT = [way for way in WAYS if "flat" not in way and way not in ("single", "zero")]
FEW = {
    2: ("fsdp", "fsdp bf16", "fsdp offload", "fsdp1"),
    3: ("fsdp columns", "hsdp of one", "tp", "fsdp1 grad"),
    4: ("fsdp", "hsdp", "hsdp columns", "fsdp tp", "fsdp columns tp", "fsdp1 hybrid", "fsdp1 nested"),
}


def _as_single(way: str, rule: str, options: dict[str, Any]) -> None:
    got = snapshot_of(*trained(way, STEPS, rule, **options))
    if dist.get_rank() == 0:
        assert_same(got, snapshot_of(*trained("single", STEPS, rule, **options)))


@pytest.mark.parametrize(
    ("world_size", "way"),
    [
        *((world_size, way) for world_size, ways in FEW.items() for way in ways),
        *slow((world_size, way) for world_size in (1, 2, 3, 4) for way in NOT_FLAT if "tp" not in way),
    ],
)
def test_as_single(ranks: Pool, world_size: int, way: str) -> None:
    if world_size % 2 and way in ("hsdp", "hsdp columns", "fsdp1 hybrid"):
        pytest.skip("needs an even number of ranks")
    ranks.run(world_size, _as_single, way, "muon_in_waves", {})
