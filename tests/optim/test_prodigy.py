"""Prodigy's estimate: where it stands, when it stays, and that it is one for all parameters."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.nn import Parameter

import shardopt
from helpers import everything, through_a_file
from ranks.snapshot import assert_same

SHAPES = ((70, 96), (33,), (3, 257))


def params_of(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def set_gradients(params: list[Parameter], step: int) -> None:
    """Noisy gradients of (p - 0.3)^2 / 2."""
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        noise = 0.1 * torch.randn(param.shape, generator=generator)
        param.grad = (param.detach().float() - 0.3 + noise).to(param.dtype)


def steps(optimizer: torch.optim.Optimizer, count: int, first: int = 0) -> list[float]:
    """The estimate after each step."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found = []
    for step in range(first, first + count):
        set_gradients(params, step)
        optimizer.step()
        (d,) = {group["d"] for group in optimizer.param_groups}
        found.append(d)
    return found


def prodigy(params: Any, **options: Any) -> shardopt.Prodigy:
    return shardopt.Prodigy8bit(params, **{"min_quantized_numel": 64, **options})


def test_groups_share_the_estimate_as_one_group_would_have_it() -> None:
    """The first estimate may stand in the groups; ``d`` and ``d_max`` begin with the group's ``d0``."""
    together, apart = params_of(), params_of()
    options = {"d0": 1e-3, "growth_rate": 1.1, "weight_decay": 0.1}
    one = prodigy(together, **options)
    several = prodigy([{"params": apart[:1], **options}, {"params": apart[1:], **options}])
    assert [(group["d"], group["d_max"]) for group in several.param_groups] == [(1e-3, 1e-3)] * 2
    assert steps(one, 10) == steps(several, 10)
    assert_same(everything(several), everything(one))
    for optimizer in (one, several):
        optimizer.param_groups[0]["betas"] = np.array(optimizer.param_groups[0]["betas"])
        optimizer.add_param_group({"params": [Parameter(torch.ones(3, 7))], **options})
        optimizer.param_groups[0]["d"] *= 1.5  # by hand, in the first group alone
    assert steps(one, 3, first=10) == steps(several, 3, first=10)
    with patch.object(type(several), "check_group") as check:  # a step checks the first group, which others follow
        steps(several, 1, first=13)
    assert {id(call.args[0]) for call in check.call_args_list} == {id(several.param_groups[0])}
    resumed = prodigy([{"params": params_of(), "d0": 1e-3, "d": 0.5, "d_max": 0.6}])
    assert (resumed.param_groups[0]["d"], resumed.param_groups[0]["d_max"]) == (0.5, 0.6)


def test_a_group_whose_learning_rate_is_zero_stays_and_takes_no_part() -> None:
    params, alone = params_of(), params_of()[:2]
    optimizer = prodigy([{"params": params[:2]}, {"params": params[2:], "lr": 0.0, "weight_decay": 0.1}])
    reference = prodigy(alone)
    before = params[2].detach().clone()
    assert steps(optimizer, 5) == steps(reference, 5)
    assert torch.equal(params[2].detach(), before)
    state = optimizer.state[params[2]]
    assert not any(state[f"{name}_codes"].any() for name in ("exp_avg", "exp_avg_sq", "s"))
    optimizer.param_groups[1]["lr"] = 1.0
    steps(optimizer, 1, first=5)
    assert not torch.equal(params[2].detach(), before)
    assert torch.equal(optimizer.state[params[2]]["p0"], before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.5}, r"lr: got 0.5 and 1.0 in different param groups, expected the same or 0"),
        ({"d0": 1e-5}, r"d0: got 1e-06 and 1e-05 in different param groups"),
        ({"betas": (0.9, 0.99)}, r"beta3: got 0.999\d+ and 0.99\d+ in different param groups"),
        ({"growth_rate": 1.5}, r"growth_rate: got inf and 1.5 in different param groups"),
    ],
)
def test_groups_that_disagree_are_refused(options: dict[str, Any], message: str) -> None:
    params = params_of()
    optimizer = prodigy([{"params": params[:2]}, {"params": params[2:], **options}])
    set_gradients(params, 0)
    before = [param.detach().clone() for param in params]
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert all(torch.equal(param, old) for param, old in zip(params, before, strict=True))
    assert all(state["step"] == 0 for state in optimizer.state.values())


@pytest.mark.parametrize("name", ["d", "d_max", "d_numerator", "k"])
def test_a_damaged_estimate_is_refused(name: str) -> None:
    optimizer = prodigy(params_of())
    steps(optimizer, 3)
    state_dict = optimizer.state_dict()
    state_dict["param_groups"][0][name] = math.nan
    with pytest.raises(ValueError, match=rf"param group 0: {name}: got nan, expected a"):
        optimizer.load_state_dict(state_dict)


@pytest.mark.parametrize(("step", "bad"), [(0, math.inf), (3, math.nan)])
def test_skipped_elements_take_no_part_in_the_sums(step: int, bad: float) -> None:
    """As if their parameter were without a gradient; and their first weights are known all the same."""
    params, others = params_of(), params_of()
    optimizer, reference = prodigy(params), prodigy(others)
    assert steps(optimizer, step) == steps(reference, step)
    set_gradients(params, step)
    set_gradients(others, step)
    params[1].grad.fill_(bad)
    others[1].grad = None
    optimizer.step()
    reference.step()
    assert optimizer.param_groups[0]["d"] == reference.param_groups[0]["d"]
    with pytest.warns(RuntimeWarning, match="skipped 33 gradient"):
        steps(optimizer, 2, first=step + 1)
    assert torch.equal(optimizer.state[params[1]]["p0"], params_of()[1].detach())
    assert math.isfinite(optimizer.param_groups[0]["d"])


@pytest.mark.parametrize("codec", ["log8", "fp32"])
def test_a_dequantized_state_dict(codec: str) -> None:
    """Has the estimate and the first weights; with float32 state the run goes on with the same bits."""
    optimizer = prodigy(params_of(), codec=codec, growth_rate=2.0)
    steps(optimizer, 5)
    params = [Parameter(param.detach().clone()) for param in optimizer.param_groups[0]["params"]]
    loaded = prodigy(params, codec=codec)
    loaded.load_state_dict(through_a_file(optimizer.state_dict(dequantize=True)))
    assert all(torch.equal(loaded.state[p]["p0"], old.detach()) for p, old in zip(params, params_of(), strict=True))
    assert loaded.param_groups[0]["d"] == optimizer.param_groups[0]["d"]
    if codec == "fp32":
        assert steps(loaded, 3, first=5) == steps(optimizer, 3, first=5)
        assert_same(everything(loaded), everything(optimizer))


@pytest.mark.parametrize("bits", [None, 24])
def test_the_first_weights_are_exact_with_bits_that_were_loaded(bits: int | None) -> None:
    params = params_of(torch.bfloat16)
    optimizer = prodigy(params, master_weight_bits=bits)
    optimizer.load_full_precision_parameters({p: wide.detach() for p, wide in zip(params, params_of(), strict=True)})
    first = optimizer.full_precision_parameters()
    steps(optimizer, 3)
    for param in params:
        assert torch.equal(optimizer.state[param]["p0"], first[param])


def test_a_closure_is_evaluated_before_the_sums() -> None:
    params, others = params_of(), params_of()
    optimizer, reference = prodigy(params), prodigy(others)
    for step in range(5):
        assert optimizer.step(lambda t=step: set_gradients(params, t) or 7.0) == 7.0
        set_gradients(others, step)
        reference.step()
    assert optimizer.param_groups[0]["d"] > 1e-6
    assert_same(everything(optimizer), everything(reference))
