"""check_numerics: exactly the weights that updates as large as the learning rate do not move."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
from helpers import step
from weight_formats import ALL, BF16, FP16


def many_weights(dtype: torch.dtype) -> Tensor:
    """Of all magnitudes; powers of two and their neighbours; zero."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.arange(-26, 15).float()[:, None]
    mantissas = torch.cat([torch.tensor([0.0, 2**-10, 2**-7, 0.5, 0.99]), torch.rand(64, generator=generator)])
    positive = torch.cat([torch.exp2(exponents) * (1 + mantissas), torch.zeros(1, mantissas.numel())])
    return torch.cat([positive, -positive]).to(dtype)


def moved(weights: str, lr: float, direction: int) -> Tensor:
    """Where Lion, whose updates are exactly the learning rate, moves weights towards zero (-1) or away from it."""
    dtype, options = ALL[weights]
    param = Parameter(many_weights(dtype))
    optimizer = shardopt.Lion8bit([param], lr=lr, weight_decay=0.0, **options)
    before = optimizer.full_precision_parameters()[param]
    step(optimizer, {"": param}, {"": torch.where(before.signbit(), 1.0, -1.0).to(dtype) * direction})
    return optimizer.full_precision_parameters()[param] != before


@pytest.mark.parametrize("weights", [name for name in ALL if "stochastic" not in name])
@pytest.mark.parametrize("lr", [1.1e-12, 4e-8, 1.4e-6, 1.7e-5, 3e-4, 1e-2, 0.7])
def test_exactly_those_that_do_not_move(weights: str, lr: float) -> None:
    dtype, options = ALL[weights]
    param = Parameter(many_weights(dtype))
    optimizer = shardopt.Lion8bit([param], lr=lr, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        share = shardopt.check_numerics(optimizer).get("parameter 0 of param group 0", 0.0)
    stuck = ~(moved(weights, lr, 1) | moved(weights, lr, -1))
    assert round(share * stuck.numel()) == int(stuck.sum())
    assert len(caught) == (share > 0)
    assert param.grad is None
    assert not optimizer.state


def test_the_warning_says_what_helps() -> None:
    params = [Parameter(torch.ones(4, 64, dtype=BF16) * 1.5), Parameter(torch.full((64,), 1e-3, dtype=BF16))]
    optimizer = shardopt.AdamW8bit(params, lr=1e-3)
    with pytest.warns(
        RuntimeWarning, match=r"too small to move 256 of 320 weights in 1 parameters \(parameter 0 .*100"
    ):
        assert shardopt.check_numerics(optimizer) == {"parameter 0 of param group 0": 1.0}
    with pytest.warns(RuntimeWarning, match="too small to move 320 of 320"):
        assert len(shardopt.check_numerics(optimizer, lr=1e-6)) == 2
    for options in ({"master_weight_bits": 24}, {"stochastic_rounding": True}):
        assert not check_quietly(shardopt.AdamW8bit(params, lr=1e-3, **options))
    assert not check_quietly(shardopt.AdamW8bit(params, lr=1e-2))
    assert not check_quietly(shardopt.SGD8bit(params, lr=1e-9))  # its updates are not known


def check_quietly(optimizer: torch.optim.Optimizer, lr: float | None = None) -> dict[str, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return shardopt.check_numerics(optimizer, lr)


def test_names_and_rates_of_param_groups() -> None:
    rows = [Parameter(torch.ones(2, 64, dtype=FP16) * 1.5) for _ in range(2)]
    groups = [{"params": [("slow", rows[0])], "lr": torch.tensor(1e-5)}, {"params": [("fast", rows[1])], "lr": 1e-2}]
    with pytest.warns(RuntimeWarning, match="slow: 100.0%"):
        assert shardopt.check_numerics(shardopt.Lion8bit(groups)) == {"slow": 1.0}


@pytest.mark.parametrize("lr", [0.0, -1.0, math.nan, math.inf])
def test_rates_that_say_nothing(lr: float) -> None:
    param = Parameter(torch.ones(2, 64, dtype=BF16))
    optimizer = shardopt.AdamW8bit([param])
    with pytest.raises(ValueError, match=rf"lr: got {lr}, expected a finite number above 0; give check_numerics\(lr="):
        shardopt.check_numerics(optimizer, lr=lr)
    optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(ValueError, match=rf"lr: got {lr}, expected a finite number"):
        shardopt.check_numerics(optimizer)
    assert not check_quietly(shardopt.AdamW8bit([param]), lr=1e308)


def test_weights_that_are_not_looked_at() -> None:
    """Frozen ones, and those that are not finite, which no update moves."""
    frozen = Parameter(torch.ones(2, 64, dtype=BF16), requires_grad=False)
    broken = Parameter(torch.tensor([math.inf, -math.inf, math.nan, 1.0, 1e-9], dtype=BF16))
    group = {"params": [frozen], "lr": 0.0}
    assert not check_quietly(shardopt.AdamW8bit([group, {"params": [broken], "lr": 1.0}]))
    with pytest.warns(RuntimeWarning, match="too small to move 1 of 2 weights in 1 parameters"):
        found = shardopt.check_numerics(shardopt.AdamW8bit([frozen, broken], lr=1e-5))
    assert found == {"parameter 1 of param group 0": 0.5}


def test_other_optimizers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"got AdamW, expected an optimizer of shardopt such as shardopt\.AdamW8bit"):
        shardopt.check_numerics(torch.optim.AdamW([Parameter(torch.ones(3))]))


def test_nothing_to_look_at() -> None:
    empty = Parameter(torch.zeros(0, 64, dtype=BF16))
    assert not check_quietly(shardopt.AdamW8bit([empty], lr=1e-12))
    zeros = Parameter(torch.zeros(2, 64))
    assert not check_quietly(shardopt.AdamW8bit([zeros], lr=math.ldexp(1, -100)))
