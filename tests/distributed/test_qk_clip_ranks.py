"""QK-Clip on sharded models: the bits of one rank, given each rank's own maxima."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardopt
from ranks.models import WAYS, make_net, set_gradients
from ranks.pool import Pool
from ranks.runs import SMALL, snapshot_of
from ranks.snapshot import assert_same

#: The small model's matrix of 192 rows as queries of 6 heads, and that of 66 rows of 32 as 3 pairs of keys.
HEADS: dict[str, Any] = {"up.*": [(20, 0.5), (12, 1.0)], "down.*": [(11, 0.5)]}
LARGEST = [50.0, 300.0, 1000.0, 99.0, 100.0, 101.0]


def _run(way: str, rank: int, size: int, options: dict[str, Any]) -> tuple[nn.Module, Any]:
    model = WAYS[way](make_net(torch.bfloat16 if "master_weight_bits" in options else torch.float32))
    optimizer = shardopt.AdamW8bit(model.parameters(), **SMALL, **options)
    for step in range(2):
        set_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()
        mine = [largest if size == 1 or head % size == rank else -largest for head, largest in enumerate(LARGEST)]
        found = shardopt.qk_clip_(model, {"": torch.tensor(mine)}, heads=HEADS, optimizer=optimizer)
        assert found[""].tolist() == LARGEST
    return model, optimizer


def _as_single(way: str, options: dict[str, Any]) -> None:
    got = snapshot_of(*_run(way, dist.get_rank(), dist.get_world_size(), options))
    expected = snapshot_of(*_run("single", 0, 1, options))
    assert_same(got, expected)


@pytest.mark.parametrize(
    ("world_size", "way", "options"),
    [
        (2, "ddp", {}),
        (3, "fsdp", {}),
        (3, "fsdp", {"master_weight_bits": 24}),
        (3, "fsdp columns", {}),
        (2, "tp", {}),
        (2, "hsdp", {}),
        (3, "fsdp1", {}),
        (3, "fsdp1 nested flat", {}),
    ],
    ids=str,
)
def test_as_single(ranks: Pool, world_size: int, way: str, options: dict[str, Any]) -> None:
    ranks.run(world_size, _as_single, way, options)


def _infinite() -> None:
    """On one rank: all raise."""
    model = WAYS["fsdp"](make_net())
    largest = torch.full((6,), float("nan") if dist.get_rank() else 200.0)
    with pytest.raises(FloatingPointError, match="got NaN or infinite logits"):
        shardopt.qk_clip_(model, {"": largest}, heads=HEADS)


def test_infinite_on_one_rank(ranks: Pool) -> None:
    ranks.run(2, _infinite)
