"""Sums over whole parameters: exact, whatever the order, the threads and the instruction set.

Sums of squares are in tests/step/test_gradient_norm.py.
"""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.nn import Parameter

import shardopt
from helpers import with_gradient
from kernel_problem import using
from shardopt import _C
from shardopt.layout import GridPartition, Shard, UnknownShardError, assign
from shardopt.layout.partition import Cut


def value_of(digits: list[int]) -> Fraction:
    total = sum(digit << (32 * i) for i, digit in enumerate(digits))
    return Fraction(total) * Fraction(2) ** _C.sum_lowest_bit


def test_a_shard_that_does_not_know_the_other_parts_is_refused() -> None:
    param = Parameter(torch.ones(8, 130))
    assign(param, Shard((16, 130), GridPartition((Cut(0, 2, 1),))))
    with_gradient(param, torch.ones(8, 130))
    shardopt.AdamW8bit([param]).step()
    before = param.detach().clone()
    with pytest.raises(UnknownShardError, match="Shard to say which ranks hold the rest"):
        shardopt.LAMB8bit([param]).step()
    assert torch.equal(param.detach(), before)


def test_a_shard_that_only_its_attributes_name_is_refused() -> None:
    """A shard with the attributes of torch's CheckpointableTensor is refused; a whole tensor with them is stepped."""
    param = Parameter(torch.ones(8, 130))
    param.grad, param.global_offsets, param.global_shape = torch.ones(8, 130), ((8, 0),), (16, 130)
    optimizer = shardopt.AdamW8bit([param])
    with pytest.raises(
        UnknownShardError, match=r"got a shard of a tensor of shape \(16, 130\), .*CheckpointableTensor"
    ):
        optimizer.step()
    assert (param == 1).all()
    param.global_offsets, param.global_shape = ((0, 0),), (8, 130)
    optimizer.step()
    assert (param < 1).all()


def totals_of(optimizer: shardopt.Prodigy) -> list[tuple[Fraction, int]]:
    """The sums over all parameters in the last step."""
    tables = optimizer._internals.cached_stepper()._tables
    assert tables is not None
    assert tables._sums is not None
    total = tables._sums.total()
    assert total is not None
    return [(value_of(digits), lost) for *digits, lost in total.tolist()]


@pytest.mark.parametrize("target", _C.cpu_targets())
def test_least_and_largest_products(target: str) -> None:
    least, largest = 2.0**-149, 2.0**128 - 2.0**104
    few = [least, -largest, largest, 1.0, -(2.0**-126), 3 * least, math.nan, math.inf, 0.0]
    pairs = [(x, y) for x in few for y in few] * 5
    param = Parameter(torch.zeros(len(pairs)))
    optimizer = shardopt.Prodigy([param], codec="fp32", nonfinite="propagate")
    with using(target, threads=1):
        for gradient, p0 in ((torch.zeros(len(pairs)), 0.0), (torch.tensor([x for x, _ in pairs]), pairs)):
            with_gradient(param, gradient)
            if p0:
                optimizer.state[param]["p0"].copy_(torch.tensor([y for _, y in pairs]))
            optimizer.step()
    finite = [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
    expected = sum((Fraction(x) * Fraction(y) for x, y in finite), Fraction(0))
    nan = sum(math.isnan(x) or math.isnan(y) for x, y in pairs)
    assert totals_of(optimizer)[0] == (expected, nan * 2**32 + len(pairs) - len(finite) - nan)


def digits_of(number: int) -> list[int]:
    """A whole number as the words of a sum: digits of 32 bits, of which the last has the sign."""
    digits = [number >> (32 * i) & 0xFFFFFFFF for i in range(_C.sum_words - 1)]
    digits[-1] = number >> (32 * (_C.sum_words - 2))
    return [*digits, 0]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_is_rounded_once_to_the_nearest_double(sign: int) -> None:
    generator = random.Random(0)
    numbers = [0, 1, 2**53 - 1, 2**53 + 1, 2**53 + 3, 2**54 + 2, 2**54 + 6, 2**64 - 1, 2**64 - 2**10, 2**65 + 2**12 + 1]
    numbers += [generator.getrandbits(generator.randrange(1, 680)) for _ in range(2000)]
    numbers += [(2**53 + odd) << shift for odd in (1, 3) for shift in (10, 11, 12, 31, 32, 33, 500)]
    for number in numbers:
        expected = float(Fraction(sign * number) * Fraction(2) ** _C.sum_lowest_bit)
        assert _C.sum_value(np.array(digits_of(sign * number), np.int64)) == expected, number


def test_digits_with_carries_are_one_sum() -> None:
    generator = random.Random(1)
    for _ in range(500):
        digits = [generator.randrange(-(2**62), 2**62) for _ in range(_C.sum_words - 2)] + [0, 0]
        assert _C.sum_value(np.array(digits, np.int64)) == float(value_of(digits[:-1]))
