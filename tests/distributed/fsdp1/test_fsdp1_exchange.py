"""The exchange among ranks of FSDP1 for the blocks that they share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ranks.collectives import counted_collectives
from ranks.flat import shared_blocks
from ranks.layouts import Shape
from ranks.pool import Pool
from ranks.runs import step_with, trained


def _count(way: str, rule: str, options: dict[str, Any]) -> list[list[tuple[str, int]]]:
    """The collectives of three steps; in the last one nothing has a gradient."""
    model, optimizer = trained(way, 0, rule, **options)
    found = []
    for step in range(2):
        with counted_collectives() as collectives:
            step_with(model, optimizer, step)
        found.append(collectives)
    with counted_collectives() as collectives:
        optimizer.step()
    return [*found, collectives]


@pytest.mark.parametrize(
    ("world_size", "way", "rule", "options", "rounds"),
    [
        (3, "fsdp1", "adamw", {}, 2),
        (3, "fsdp1 flat", "adamw", {}, 2),
        (4, "fsdp1 nested", "adamw", {"codec": "companded8"}, 1),
        (4, "fsdp1 nested", "lion", {}, 1),
        (3, "fsdp1", "momentum", {"codec": "dynamic8", "block_size": 16}, 1),
        (3, "fsdp1", "adamw", {"nonfinite": "raise"}, 3),  # one to agree that gradients are finite
        (3, "fsdp1", "adamw", {"codec": "fp32"}, 0),
        (3, "fsdp1 none", "adamw", {}, 0),
        (3, "fsdp1 none flat", "adamw", {}, 0),
        (1, "fsdp1", "adamw", {}, 0),
        (2, "zero", "adamw", {}, None),
    ],
)
def test_one_collective_per_round(
    ranks: Pool, world_size: int, way: str, rule: str, options: dict[str, Any], rounds: int | None
) -> None:
    """However many parameters there are, and whether or not anything has a gradient; before the first, one to agree."""
    for steps in ranks.run(world_size, _count, way, rule, options):
        names = [[name for name, _ in step] for step in steps]
        if rounds is None:  # ZeRO's own
            assert all(name.startswith("broadcast") for step in names for name in step)
        else:
            agreed = world_size > 1 and "none" not in way
            assert names == [["allreduce"] * (rounds + agreed), *[["allreduce"] * rounds] * 2]


def _exchanged_bytes() -> tuple[int, int]:
    model, optimizer = trained("fsdp1", 0)
    with counted_collectives() as collectives:
        step_with(model, optimizer, 0)
    shared = shared_blocks(model, 128)
    roll = 8 * (1 + sum(1 for blocks in shared.values() if blocks))
    return collectives[1][1] - roll, sum(
        len(shared[name]) for name, shape in model.bare_shapes.items() if is_coded(shape)
    )


def test_bytes_of_a_round(ranks: Pool) -> None:
    """Two extremes of four bytes, per cut block and moment, on all ranks."""
    for found, cut in ranks.run(4, _exchanged_bytes):
        assert cut > 0
        assert found == cut * 2 * 2 * 4


def is_coded(shape: Shape) -> bool:
    """Whether the tests' options quantize a parameter: rows of 32 elements do."""
    return len(shape) > 1 and torch.Size(shape[1:]).numel() >= 32
