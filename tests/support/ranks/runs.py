"""Short runs that come out the same in whatever way parameters are sharded: of the model, and of any layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from helpers import CASES, Named
from ranks.flat import gathered, is_flat
from ranks.layouts import Layout, shard, values
from ranks.models import WAYS, make_net, named_parameters, set_gradients
from ranks.snapshot import Snapshot, assert_shards_of, entries, snapshot
from shardopt.optim import ShardedOptimizer

SMALL = {"min_quantized_numel": 64}


def make_optimizer(way: str, model: nn.Module, rule: str = "adamw", **options: Any) -> ShardedOptimizer:
    """The optimizer for a model sharded in one of the ``WAYS``; under "zero" the one around it."""
    case, options = CASES[rule], {**SMALL, **options}
    if way == "zero":
        hyper = {**case.hyper, **options}
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=case.optimizer, **hyper)
    return case.make(model.parameters(), **options)


def trained(
    way: str, steps: int, rule: str = "adamw", *, seed: int = 0, **options: Any
) -> tuple[nn.Module, ShardedOptimizer]:
    """The model sharded in one of the ``WAYS`` and its optimizer, after so many :func:`step_with`."""
    model = WAYS[way](make_net(seed=seed))
    optimizer = make_optimizer(way, model, rule, **options)
    for step in range(steps):
        step_with(model, optimizer, step)
    return model, optimizer


def single(steps: int, rule: str = "adamw", **options: Any) -> Snapshot:
    """The snapshot of the unsharded run after so many steps; each is taken once per process."""
    return _single(steps, rule, tuple(options.items()))


@lru_cache(maxsize=64)
def _single(steps: int, rule: str, options: tuple[tuple[str, Any], ...]) -> Snapshot:
    return snapshot_of(*trained("single", steps, rule, **dict(options)))


def step_with(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Takes the run's step of this number."""
    set_gradients(model, step)
    optimizer.step()
    optimizer.zero_grad()


def snapshot_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
    """The run in full; all ranks must call this."""
    if is_flat(model):
        return gathered(model, optimizer)
    return snapshot(named_parameters(model), optimizer)


class Pair:
    """Parameters, sharded and whole, each kind with an optimizer of its own: a param group per codec."""

    def __init__(self, rule: str, codecs: Sequence[str], ways: Sequence[Layout], **options: Any) -> None:
        self.layouts = {f"{codec} {layout}": layout for codec in codecs for layout in ways}
        self.whole: Named = {}
        self.sharded: Named = {}
        for index, (name, layout) in enumerate(self.layouts.items()):
            self.whole[name] = values(layout.shape, index, layout.dtype)
            self.sharded[name] = shard(self.whole[name].clone(), layout)
        options = {"min_quantized_numel": 256, **options}
        self.whole_optimizer, self.sharded_optimizer = (
            CASES[rule].make(_groups(params, codecs), **options) for params in (self.whole, self.sharded)
        )

    def gradients(self, seed: int) -> Named:
        return {
            name: values(layout.shape, seed + index, layout.dtype)
            for index, (name, layout) in enumerate(self.layouts.items())
        }

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        for name, layout in self.layouts.items():
            self.whole[name].grad = gradients[name]
            self.sharded[name].grad = shard(gradients[name], layout)
        self.whole_optimizer.step()
        self.sharded_optimizer.step()

    def compare(self) -> None:
        assert_shards_of(entries(self.sharded, self.sharded_optimizer), entries(self.whole, self.whole_optimizer))


def _groups(params: Mapping[str, Tensor], codecs: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"params": [param for name, param in params.items() if name.startswith(f"{codec} ")], "codec": codec}
        for codec in codecs
    ]
