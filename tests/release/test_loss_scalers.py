"""Held gradients under loss scalers that have an _unscale_grads_ of their own, or leave step() out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from helpers import Snapshot
from ranks.offload import offload_from_cpu
from ranks.pool import Pool
from ranks.snapshot import assert_same
from shardopt.optim.base import ShardedOptimizer
from test_held_gradients import Loop


def calls_its_base_class() -> GradScaler:
    class Calling(GradScaler):
        def _unscale_grads_(self, *args: Any) -> dict[torch.device, Tensor]:
            return super()._unscale_grads_(*args)

    return Calling("cpu", init_scale=1024.0, growth_interval=2)


def sharded() -> GradScaler:
    return ShardedGradScaler("cpu", init_scale=1024.0, growth_interval=2)


def _run(make: Any, held: bool, max_norm: float | None) -> Snapshot:
    loop = Loop(held, scale=1.0, max_norm=max_norm)
    loop.scaler = make()  # its class may be newer than the release
    original = loop.loss

    def loss(number: int) -> Tensor:
        return original(number) * (torch.inf if number == 10 else 1.0)

    loop.loss = loss  # type: ignore[method-assign]
    return loop.run()


def _compare(make: Any, max_norm: float | None) -> None:
    with offload_from_cpu():
        assert_same(_run(make, True, max_norm), _run(make, False, max_norm))


@pytest.mark.parametrize("max_norm", [None, 1e-3])
@pytest.mark.parametrize("make", [calls_its_base_class, sharded])
def test_classes_of_scalers(ranks: Pool, make: Any, max_norm: float | None) -> None:
    ranks.run(1, _compare, make, max_norm)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_step_that_the_scaler_leaves_out(micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are thrown away though only the model's zero_grad() is called, also those of too few passes."""
    monkeypatch.setattr(ShardedOptimizer, "_step_supports_amp_scaling", False)
    results = []
    with offload_from_cpu():
        for held in (True, False):
            loop = Loop(held, micro_batches=micro_batches, scale=1024.0, max_norm=1e-3)
            assert loop.scaler is not None
            monkeypatch.setattr(loop.optimizer, "zero_grad", loop.model.zero_grad)
            loop.step(0)
            (loop.loss(1) * torch.inf).backward()
            loop.scaler.unscale_(loop.optimizer)
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()
            loop.model.zero_grad()
            loop.step(2)
            results.append(loop.result())
    assert_same(*results)
