"""Held gradients that are on the host in part: what came to .grad goes there before the norm is taken."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardopt
from ranks.layered import batch
from ranks.offload import offload_from_cpu
from ranks.snapshot import assert_same
from test_held_gradients import Loop


class Dropped(nn.Module):
    """A layer that each forward pass runs another number of times, in a reentrant checkpoint each."""

    def __init__(self, times: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed, self.layer, self.last = nn.Embedding(50, 32), nn.Linear(32, 32), nn.Linear(32, 8)
        self.times, self.passes = times, 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        self.passes += 1
        for _ in range(self.times[self.passes % len(self.times)]):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return self.last(x)


@pytest.mark.parametrize("times", [(2, 1), (3, 1, 0), (0, 1, 2, 3, 1)], ids=str)
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_checkpoints_whose_number_changes(micro_batches: int, times: tuple[int, ...]) -> None:
    results = []
    with offload_from_cpu():
        for held in (True, False):
            results.append(Loop(held, model=Dropped(times), micro_batches=micro_batches, max_norm=1e-3).run(6))
    assert_same(*results)


def test_gradients_that_are_set_after_the_backward_pass() -> None:
    found = []
    with offload_from_cpu():
        for held in (True, False):
            loop = Loop(held, micro_batches=2)
            other = copy.deepcopy(loop.model)
            for model in (loop.model, other):
                model(batch(int(model is other))).square().mean().backward()
            for param, copied in zip(loop.model.parameters(), other.parameters(), strict=True):
                param.grad = copied.grad if param.grad is None else param.grad + copied.grad
            found.append(shardopt.clip_grad_norm_(loop.model.parameters(), 1e-3, optimizer=loop.optimizer))
            loop.optimizer.step()
            found.append(loop.result())
    assert torch.equal(found[0], found[2])
    assert_same(found[1], found[3])


def test_a_gradient_too_many_that_is_set_after_the_backward_pass() -> None:
    with offload_from_cpu():
        loop = Loop(True)
        loop.backward(0)
        for param in loop.model.parameters():
            param.grad = torch.ones_like(param)
        with pytest.raises(RuntimeError, match=r"got gradient 2 since the last optimizer.step\(\), expected 1 at most"):
            shardopt.clip_grad_norm_(loop.model.parameters(), 1.0, optimizer=loop.optimizer)
