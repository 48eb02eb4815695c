"""Ordered gradients of models whose trained parameters change, with parameters without elements, beside threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardopt
from message_problem import assert_same_bits
from ordered_problem import can_replace_reduce_scatter
from ranks.pool import Pool


class Mlp(nn.Module):
    """Two matrices of as many elements, whose rows differ; gradients of more magnitudes than a scale has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(128, 260, bias=False), nn.Linear(260, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scales = torch.logspace(-8, 2, 128)
        return self.down(torch.tanh(self.up(x * scales))) * scales


class WithoutElements(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Parameter(torch.empty(0, 5)), nn.Parameter(torch.empty(5, 0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.rows.sum() + self.columns.sum()


def _loss(model: nn.Module, number: int) -> Tensor:
    return model(torch.randn(4, 128, generator=torch.Generator().manual_seed(number))).square().mean()


def _trains_one_and_the_other(wrap: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
    model, found = Mlp(), []
    model.down.requires_grad_(False)
    wrap(model)
    shardopt.comm.ordered_gradients(model, micro_batches=2, wire="e4m3")
    for trained, frozen in ((model.up, model.down), (model.down, model.up), (model.up, model.down)):
        trained.requires_grad_(True)
        frozen.requires_grad_(False)
        for number in range(2):
            _loss(model, number).backward()
        grad = trained.weight.grad
        found.append(grad.full_tensor() if hasattr(grad, "full_tensor") else grad)
        model.zero_grad()
    trained.requires_grad_(True)
    _loss(model, 0).backward()
    frozen.requires_grad_(True)
    trained.requires_grad_(False)
    if wrap is fully_shard:
        with pytest.raises(RuntimeError, match="got other trained parameters than in the step's first"):
            _loss(model, 1).backward()
    return found


def _trains_matrices_in_turn() -> None:
    for wanted, found in zip(*map(_trains_one_and_the_other, (nn.Module.train, fully_shard)), strict=True):
        assert_same_bits(found, wanted)


@pytest.mark.skipif(not can_replace_reduce_scatter, reason="PyTorch's FSDP2 cannot be hooked before 2.9")
def test_matrices_of_as_many_elements_are_trained_in_turn(ranks: Pool) -> None:
    """Codes have the blocks of the rows that are trained now."""
    ranks.run(1, _trains_matrices_in_turn)


def _without_elements(wrap: Callable[[nn.Module], nn.Module]) -> None:
    found = []
    for kind in (Mlp, WithoutElements):
        model = wrap(kind())
        shardopt.comm.ordered_gradients(model, micro_batches=2)
        optimizer = shardopt.AdamW8bit(model.parameters())
        for _ in range(2):
            for number in range(2):
                _loss(model, number).backward()
            shardopt.clip_grad_norm_(model.parameters(), 1.0, optimizer=optimizer)
            optimizer.step()
            optimizer.zero_grad()
        found.append([param.detach() for param in model.parameters() if param.numel()])
    for wanted, actual in zip(*found, strict=True):
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize("wrap", [nn.Module.train, DistributedDataParallel])
def test_parameters_without_elements(ranks: Pool, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """FSDP2 refuses them itself."""
    ranks.run(1, _without_elements, wrap)


def _steps_elsewhere() -> None:
    model = Mlp()
    shardopt.comm.ordered_gradients(model, micro_batches=2)
    optimizer = shardopt.AdamW8bit(model.parameters())
    other = nn.Linear(3, 3)
    others = torch.optim.SGD(other.parameters(), lr=1.0)

    def in_a_thread(_: Tensor) -> None:
        def step() -> None:
            others.step()
            with torch.no_grad():
                _loss(model, 0)

        thread = threading.Thread(target=step)
        thread.start()
        thread.join()

    model.up.weight.register_hook(in_a_thread)  # within the backward pass, after its first gradient
    for _ in range(2):
        for number in range(2):
            _loss(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_other_threads_do_not_end_a_backward_pass(ranks: Pool) -> None:
    ranks.run(1, _steps_elsewhere)
