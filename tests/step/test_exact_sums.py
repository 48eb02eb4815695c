"""Sums over whole parameters: exact, whatever the order, the threads and the instruction set."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
from helpers import with_gradient
from kernel_problem import using
from shardopt import _C
from shardopt.layout import Shard, UnknownShardError, assign


def sums_of(param: Tensor, gradient: Tensor) -> list[tuple[Fraction, int]]:
    """The sums of the squares of a parameter and its gradient, and how many terms of each were NaN or Inf."""
    held = Parameter(param.clone())
    optimizer = shardopt.LARS([held], lr=0.0, momentum=0.0, codec="fp32", nonfinite="propagate")
    with_gradient(held, gradient)
    optimizer.step()
    tables = optimizer._internals.stepper._tables
    assert tables is not None
    (sums,) = tables._sums.values()
    (buffer,) = sums._buffers[None].values()
    found = []
    for *digits, lost in buffer.tolist():
        total = sum(digit << (32 * i) for i, digit in enumerate(digits))
        found.append((Fraction(total) * Fraction(2) ** _C.sum_lowest_bit, lost))
    return found


def exact(x: Tensor) -> Fraction:
    return sum((Fraction(v) ** 2 for v in x.double().flatten().tolist()), Fraction(0))


def spread_over(shape: tuple[int, ...], orders: float, seed: int) -> Tensor:
    """Numbers of both signs whose magnitudes are spread over so many orders of ten."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = 10.0 ** ((torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5) * orders)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * magnitude).float()


@pytest.mark.parametrize("target", _C.cpu_targets())
@pytest.mark.parametrize("orders", [0, 3, 8, 20, 60])
@pytest.mark.parametrize("shape", [(1,), (7,), (64, 130), (3, 4099)], ids=str)
def test_exact(shape: tuple[int, ...], orders: float, target: str) -> None:
    values = [spread_over(shape, orders, seed) for seed in (1, 2)]
    with using(target, threads=2):
        assert sums_of(*values) == [(exact(x), 0) for x in values]


@pytest.mark.parametrize("target", _C.cpu_targets())
def test_least_and_largest_numbers(target: str) -> None:
    least, largest = 2.0**-149, 2.0**128 - 2.0**104
    values = torch.tensor([0.0, -0.0, least, -least, largest, -largest, 1.0, 2.0**-126, 3 * least, 0.5] * 60)
    few = torch.full((600,), least)
    with using(target, threads=1):
        assert sums_of(values, few) == [(exact(values), 0), (exact(few), 0)]


@pytest.mark.parametrize("target", _C.cpu_targets())
def test_nan_and_inf_are_counted(target: str) -> None:
    values = spread_over((3, 700), 5, seed=3)
    spoilt = values.clone()
    spoilt.view(-1)[::100] = math.nan
    spoilt.view(-1)[1::300] = -math.inf
    finite = torch.where(torch.isfinite(spoilt), spoilt, 0.0)
    with using(target, threads=1):
        assert sums_of(values, spoilt) == [(exact(values), 0), (exact(finite), 28)]


def test_a_million_elements_on_any_number_of_threads() -> None:
    values = [spread_over((1009, 1009), 6, seed) for seed in (4, 5)]
    found = []
    for threads in (1, 2, 3):
        with using(_C.cpu_targets()[0], threads):
            found.append(sums_of(*values))
    assert found[0] == [(exact(x), 0) for x in values] == found[1] == found[2]


class Rows(Shard):
    """Some rows of a parameter, which does not say who has the others."""

    def __init__(self, global_shape: tuple[int, ...], rows: int) -> None:
        super().__init__(global_shape, (rows, *global_shape[1:]))


def test_a_shard_that_does_not_know_the_other_parts_is_refused() -> None:
    param = Parameter(torch.ones(8, 130))
    assign(param, Rows((16, 130), 8))
    with_gradient(param, torch.ones(8, 130))
    shardopt.AdamW([param]).step()
    before = param.detach().clone()
    with pytest.raises(UnknownShardError, match=r"Rows\.parts to say which ranks hold the others"):
        shardopt.LAMB([param]).step()
    assert torch.equal(param.detach(), before)


def test_sgds_momentum_is_none_for_lars() -> None:
    """SGD adds up gradients, LARS gradients times their learning rates."""
    param = Parameter(torch.ones(8, 130))
    sgd, lars = torch.optim.SGD([param], momentum=0.9), shardopt.LARS([param])
    param.grad = torch.ones(8, 130)
    sgd.step()
    with pytest.raises(ValueError, match="expected step, velocity"):
        lars.load_state_dict(sgd.state_dict())
    with pytest.raises(ValueError, match="expected velocity in units of its own, as lars keeps it"):
        shardopt.checkpoint.import_state(lars, sgd.state_dict())
    assert not lars.state
