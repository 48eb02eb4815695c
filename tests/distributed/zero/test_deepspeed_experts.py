"""Portable checkpoints of DeepSpeed's mixture of experts: each expert by its number in the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardopt
from ranks.deepspeed import config, import_deepspeed, make_engine
from ranks.layouts import values
from ranks.pool import Pool
from ranks.snapshot import Snapshot, assert_same, entries

WIDTH, EXPERTS = 40, 4


class Mixture(nn.Module):
    """A layer before a layer of experts, on ``parallel`` ranks."""

    def __init__(self, parallel: int, seed: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        expert = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.before = nn.Linear(WIDTH, WIDTH)
        options = {"num_experts": EXPERTS, "ep_size": parallel, "min_capacity": 8}
        self.moe = MoE(WIDTH, expert, **options)
        local = EXPERTS // parallel
        first = dist.get_rank() % parallel * local
        for name, param in self.named_parameters():
            head, experts, tail = name.partition("deepspeed_experts.")
            number = first + int(tail[0]) if experts else 0
            place = sum(map(ord, head + tail[1:]))
            param.data = values(tuple(param.shape), seed + 1000 * number + place) * 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, loss, _ = self.moe(self.before(x))
        return y.square().mean() + loss


def _engine(parallel: int, stage: int, steps: int, seed: int = 0) -> Any:
    import_deepspeed()
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    model = Mixture(parallel, seed)
    groups = split({"params": list(model.parameters()), "name": "all"})
    engine = make_engine(model, config(stage), model_parameters=groups)
    for step in range(steps):
        engine.backward(engine(values((4, 8, WIDTH), 10 * step + dist.get_rank())))
        engine.step()
    return engine


def _save(path: Path, parallel: int, stage: int) -> None:
    shardopt.checkpoint.save(path, _engine(parallel, stage, 2))


def _load_and_save(path: Path, parallel: int, stage: int, saved: Path) -> None:
    engine = _engine(parallel, stage, 1, seed=5)
    shardopt.checkpoint.load(path, engine)
    shardopt.checkpoint.save(saved, engine)
    engine.backward(engine(values((4, 8, WIDTH), 7)))
    engine.step()


def _loaded(path: Path) -> Snapshot:
    """On one rank, without ZeRO."""
    engine = _engine(1, 0, 0, seed=9)
    shardopt.checkpoint.load(path, engine)
    assert [group["name"] for group in engine.basic_optimizer.param_groups] == ["all", "ep_size_1"]
    return entries(dict(engine.module.named_parameters()), engine.basic_optimizer)


def _own_experts(path: Path) -> list[tuple[int, torch.Tensor]]:
    """The first weights of this rank's experts, by their numbers."""
    engine = _engine(2, 1, 0, seed=9)
    shardopt.checkpoint.load(path, engine)
    experts = engine.module.moe.deepspeed_moe.experts.deepspeed_experts
    return [(2 * dist.get_rank() + place, expert[0].weight.detach()) for place, expert in enumerate(experts)]


def test_any_to_any(deepspeed_ranks: Pool, tmp_path: Path) -> None:
    """From a rank that has all experts to 2 ranks, to 4, and back to one: all bits, each expert by its number."""
    paths = [tmp_path / name for name in ("one", "two", "four")]
    deepspeed_ranks.run(1, _save, paths[0], 1, 0)
    for world_size, stage, saved, loaded in ((2, 0, paths[0], paths[1]), (4, 2, paths[1], paths[2])):
        deepspeed_ranks.run(world_size, _load_and_save, saved, 2, stage, loaded)
    (expected,), *found = (deepspeed_ranks.run(1, _loaded, path) for path in paths)
    for (actual,) in found:
        assert_same(actual, expected)
    weights = [expected[f"moe.deepspeed_moe.experts.deepspeed_experts.{i}.0.weight"] for i in range(EXPERTS)]
    assert not torch.equal(weights[0], weights[-1])
    for own in deepspeed_ranks.run(2, _own_experts, paths[0]):
        for number, weight in own:
            assert torch.equal(weight, weights[number])
