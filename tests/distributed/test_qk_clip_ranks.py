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


WRONG: dict[str, dict[str, Any]] = {
    "shape": {"max_logits": {"": torch.ones(2, 3)}},
    "kind": {"max_logits": {"": [1.0]}},
    "missing": {"max_logits": {}},
    "heads": {"max_logits": {"": torch.ones(3)}},
    "threshold": {"threshold": -1.0},
    "other threshold": {"threshold": 99.0},
    "other heads": {"heads": {"up.*": [(32, 0.5)], "down.*": [(11, 0.5)]}},
    "pattern": {"heads": {"q_proj.*": "query"}},
    "no mapping": {"heads": None},
}
OWN = {
    "shape": r"got a tensor of shape \(2, 3\)",
    "kind": "got a list",
    "heads": r"down\.weight: got 2 heads beside 3|got 6 heads beside 3",
    "threshold": "threshold: got -1.0",
    "pattern": "got a pattern that matches no parameter",
    "no mapping": "heads: got a NoneType",
}
DIFFERENCES = {
    "missing": r"got ranks that differ in max_logits\[''\]: 6 heads on rank 0 and none on rank 1",
    "other threshold": "got ranks that differ in threshold: 100.0 on rank 0 and 99.0 on rank 1",
    "other heads": "got ranks that differ in heads: .*12.* on rank 0 and .*32.* on rank 1",
}


def _wrong(what: str) -> None:
    """Arguments of one rank are wrong: all ranks raise, none waits, and all go on afterwards."""
    model = WAYS["fsdp"](make_net())
    before = {name: param.to_local().clone() for name, param in model.named_parameters()}  # type: ignore[attr-defined]
    given: dict[str, Any] = {"max_logits": {"": torch.full((6,), 200.0)}, "heads": HEADS}
    if dist.get_rank() == 1:
        given |= WRONG[what]
    elsewhere = rf"got arguments that rank 1 refuses.*: \w+Error: .*({OWN.get(what)})"
    message = DIFFERENCES.get(what) or (OWN[what] if dist.get_rank() == 1 else elsewhere)
    with pytest.raises(Exception, match=message) as caught:
        shardopt.qk_clip_(model, **given)
    assert dist.get_rank() == 1 or caught.type is RuntimeError
    assert_same({name: param.to_local() for name, param in model.named_parameters()}, before)  # type: ignore[attr-defined]
    shardopt.qk_clip_(model, {"": torch.full((6,), 200.0)}, heads=HEADS)


@pytest.mark.parametrize("what", WRONG)
def test_wrong_on_one_rank(ranks: Pool, what: str) -> None:
    ranks.run(2, _wrong, what)


def _stages() -> None:
    """Two stages of a pipeline have other modules; each takes the maxima of its own ranks."""
    stage, place = divmod(dist.get_rank(), 2)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = nn.ModuleDict({f"stage{stage}": make_net()})
    largest = torch.tensor(LARGEST) * (1 + stage) * (1 if place else 0.5)
    found = shardopt.qk_clip_(model, {f"stage{stage}": largest}, heads=HEADS, group=groups[stage])
    expected = nn.ModuleDict({f"stage{stage}": make_net()})
    whole = {f"stage{stage}": torch.tensor(LARGEST) * (1 + stage)}
    shardopt.qk_clip_(expected, whole, heads=HEADS, group=groups[stage])
    assert_same(found, whole)
    assert_same(dict(model.named_parameters()), dict(expected.named_parameters()))
    with pytest.raises(RuntimeError, match=r"max_logits\['stage0'\]: 6 heads on rank 0 and none on rank 2.*or group="):
        shardopt.qk_clip_(model, whole, heads=HEADS)


def test_stages_of_a_pipeline(ranks: Pool) -> None:
    ranks.run(4, _stages)
