"""State goes to the torch.optim class of the same name and back, whatever the rule keeps; on the way in it is coded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
from helpers import CODEC_NAMES, everything, through_a_file
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer
from shardopt.state import slice_spec
from shardopt.state.tensor_spec import TensorSpec, tensor_spec_of
from test_state_dict import advance, made, params_of, trained
from weight_formats import BF16

STEPS = 6


def specification(optimizer: ShardedOptimizer, param: Tensor) -> TensorSpec:
    (group,) = optimizer.param_groups
    return tensor_spec_of(param, group, optimizer.rule(group).moments)


MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_moments_are_coded_and_decoded(codec: str) -> None:
    """Moments of torch as they are loaded, and as torch is given them."""
    theirs, again = (torch.optim.AdamW(params_of(), lr=1e-2, weight_decay=0.1) for _ in range(2))
    advance(theirs, range(5))
    ours = made("adamw", codec=codec)
    ours.load_state_dict(through_a_file(theirs.state_dict()))
    for mine, other in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        expected = specification(ours, mine).encode({name: theirs.state[other][name] for name in MOMENTS})
        state = dict(ours.state[mine])
        assert state.pop("step") == 5
        assert_same(dict(sorted(state.items())), dict(sorted(expected.items())))
    advance(ours, range(5, 8))
    before = everything(ours)
    again.load_state_dict(through_a_file(ours.state_dict(dequantize=True)))
    assert_same(everything(ours), before)
    for mine, other in zip(ours.param_groups[0]["params"], again.param_groups[0]["params"], strict=True):
        decoded = specification(ours, mine).decode(ours.state[mine])
        assert_same({name: again.state[other][name] for name in MOMENTS}, decoded)
        assert again.state[other]["step"] == 8
        other.data.copy_(mine.data)
    if codec == "fp32":  # and it is the same optimizer with the same hyper-parameters that goes on
        for each in (ours, again):
            advance(each, range(8, 10))
        for mine, other in zip(ours.param_groups[0]["params"], again.param_groups[0]["params"], strict=True):
            torch.testing.assert_close(mine, other)


def test_master_weights_and_torch() -> None:
    """Low bits are left out; and master weights made from a state of torch's begin as the parameters."""
    ours = trained("adamw", dtype=BF16, master_weight_bits=24)
    dequantized = through_a_file(ours.state_dict(dequantize=True))
    assert all(set(state) == {"step", *MOMENTS} for state in dequantized["state"].values())
    theirs = torch.optim.AdamW(params_of(BF16))
    theirs.load_state_dict(dequantized)
    advance(theirs, range(3, 4), BF16)
    for state_dict in (dequantized, theirs.state_dict()):
        again = made("adamw", BF16, master_weight_bits=24)
        again.load_state_dict(state_dict)
        assert again.param_groups[0]["master_weight_bits"] == 24
        for state, trained_state in zip(again.state.values(), ours.state.values(), strict=True):
            low_bits = state["master_low_bits"]
            assert not low_bits.any()
            assert trained_state["master_low_bits"].any()
            assert (low_bits.dtype, low_bits.shape) == (torch.int8, trained_state["master_low_bits"].shape)
        advance(again, range(3, 5), BF16)


# Rules with entries of their own --------------------------------------------------------------------------------------

RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "amsgrad": ("AdamW", {"amsgrad": True}),
    "adam": ("Adam", {"weight_decay": 0.1}),
    "momentum": ("SGD", {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1}),
    "nadam": ("NAdam", {}),
    "radam": ("RAdam", {}),
    "adamax": ("Adamax", {}),
    "adagrad": ("Adagrad", {"initial_accumulator_value": 0.5}),
    "rmsprop": ("RMSprop", {}),
    "centered rmsprop": ("RMSprop", {"centered": True}),
    "rmsprop with momentum": ("RMSprop", {"centered": True, "momentum": 0.9}),
    **({"muon": ("Muon", {"lr": 0.02})} if hasattr(torch.optim, "Muon") else {}),
}


def normal(seed: int) -> Tensor:
    return torch.randn((64, 96), generator=torch.Generator().manual_seed(seed))


def advanced(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    (param,) = optimizer.param_groups[0]["params"]
    for t in range(STEPS):
        param.grad = normal(t + 1)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("rule", RULES)
def test_from_torch_and_back(rule: str) -> None:
    """With float32 state nothing is lost either way; torch.optim loads what 8-bit state stands for, and goes on."""
    name, hyper = RULES[rule]
    theirs, again = (getattr(torch.optim, name)([Parameter(normal(0))], **hyper) for _ in range(2))
    saved = advanced(theirs).state_dict()
    ours = getattr(shardopt, name)([Parameter(normal(0))], codec="fp32", **hyper)
    ours.load_state_dict(saved)
    given = ours.state_dict(dequantize=True)["state"][0]
    expected = saved["state"][0]
    assert given.keys() - {"step"} == expected.keys() - {"step"}  # torch's SGD counts no steps
    for key, value in expected.items():
        if key == "mu_product":  # torch's has been rounded in every step
            torch.testing.assert_close(given[key], value, rtol=STEPS * 2.0**-24, atol=0.0)
        else:
            assert torch.equal(given[key], value), key
    coded, back = (getattr(shardopt, f"{name}8bit")([Parameter(normal(0))], **hyper) for _ in range(2))
    again.load_state_dict(advanced(coded).state_dict(dequantize=True))
    (state,) = again.state.values()
    assert state["step"] == STEPS
    assert all(value.isfinite().all() for value in state.values())
    back.load_state_dict(advanced(again).state_dict())
    assert back.state_dict()["state"][0].keys() == coded.state_dict()["state"][0].keys()


def initial_sum(value: float, codec: str) -> Tensor:
    param = Parameter(torch.zeros(64, 96, dtype=torch.float32))
    optimizer = shardopt.Adagrad([param], codec=codec, initial_accumulator_value=value)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    return optimizer.state_dict(dequantize=True)["state"][0]["sum"]


def test_an_initial_sum_is_there_before_the_first_step() -> None:
    """Whatever the default dtype is."""
    for codec in CODEC_NAMES:
        assert torch.equal(initial_sum(0.25, codec), torch.full((64, 96), 0.25)), codec
    expected = initial_sum(0.1, "log8")
    slice_spec._initial_block.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(initial_sum(0.1, "log8"), expected)
    finally:
        torch.set_default_dtype(torch.float32)
        slice_spec._initial_block.cache_clear()


@pytest.mark.parametrize("steps", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_slow_average_survives_in_16_bits(steps: int) -> None:
    """The mean is a twentieth of the noise: beside float32, the error is below 3% of the average."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.randn((8, 128), generator=generator).exp()
    mean = 0.05 * scale * torch.randn((8, 128), generator=generator)
    groups = [{"params": [Parameter(torch.zeros(8, 128))], "codec": codec} for codec in ("log8", "fp32")]
    optimizer = shardopt.AdEMAMix(groups, lr=0.0, min_quantized_numel=64)
    for _ in range(steps):
        gradient = mean + scale * torch.randn((8, 128), generator=generator)
        for group in groups:
            group["params"][0].grad = gradient
        optimizer.step()
    coded, exact = (state["exp_avg_slow"] for state in optimizer.state_dict(dequantize=True)["state"].values())
    error = (coded - exact) / scale
    assert error.square().mean().sqrt() <= 0.03 * (exact / scale).square().mean().sqrt()
