"""State goes to the torch.optim class of the same name and back, whatever the rule keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
from shardopt.state import slice_spec

STEPS = 6
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "amsgrad": ("AdamW", {"amsgrad": True}),
    "nadam": ("NAdam", {}),
    "radam": ("RAdam", {}),
    "adamax": ("Adamax", {}),
    "adagrad": ("Adagrad", {"initial_accumulator_value": 0.5}),
    "rmsprop": ("RMSprop", {}),
    "centered rmsprop": ("RMSprop", {"centered": True}),
    "rmsprop with momentum": ("RMSprop", {"centered": True, "momentum": 0.9}),
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
    """With float32 state nothing is lost either way."""
    name, hyper = RULES[rule]
    theirs = advanced(getattr(torch.optim, name)([Parameter(normal(0))], **hyper))
    saved = theirs.state_dict()
    ours = getattr(shardopt, name)([Parameter(normal(0))], codec="fp32", **hyper)
    ours.load_state_dict(saved)
    given = ours.state_dict(dequantize=True)["state"][0]
    expected = saved["state"][0]
    assert given.keys() == expected.keys()
    for key, value in expected.items():
        if key == "mu_product":  # torch's has been rounded in every step
            torch.testing.assert_close(given[key], value, rtol=STEPS * 2.0**-24, atol=0.0)
        else:
            assert torch.equal(given[key], value), key


@pytest.mark.parametrize("rule", RULES)
def test_8_bits_to_torch(rule: str) -> None:
    """torch.optim loads what 8-bit state stands for, and goes on."""
    name, hyper = RULES[rule]
    ours = advanced(getattr(shardopt, f"{name}8bit")([Parameter(normal(0))], **hyper))
    theirs = getattr(torch.optim, name)([Parameter(normal(0))], **hyper)
    theirs.load_state_dict(ours.state_dict(dequantize=True))
    (state,) = theirs.state.values()
    assert state["step"] == STEPS
    assert all(value.isfinite().all() for value in state.values())
    advanced(theirs)
    back = getattr(shardopt, f"{name}8bit")([Parameter(normal(0))], **hyper)
    back.load_state_dict(theirs.state_dict())
    assert back.state_dict()["state"][0].keys() == ours.state_dict()["state"][0].keys()


def test_an_initial_sum_is_there_before_the_first_step() -> None:
    for codec in ("log8", "companded8", "dynamic8", "companded16", "bf16", "fp32"):
        param = Parameter(torch.zeros(64, 96))
        optimizer = shardopt.Adagrad([param], codec=codec, initial_accumulator_value=0.25)
        param.grad = torch.zeros_like(param)
        optimizer.step()
        assert torch.equal(optimizer.state_dict(dequantize=True)["state"][0]["sum"], torch.full((64, 96), 0.25)), codec


def test_an_initial_sum_does_not_depend_on_the_default_dtype() -> None:
    sums = []
    for dtype in (torch.bfloat16, torch.float32):
        slice_spec._first_codes.cache_clear()
        torch.set_default_dtype(dtype)
        try:
            param = Parameter(torch.zeros(64, 96, dtype=torch.float32))
            param.grad = torch.zeros_like(param)
            optimizer = shardopt.Adagrad8bit([param], initial_accumulator_value=0.1)
            optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        sums.append(optimizer.state_dict(dequantize=True)["state"][0]["sum"])
    assert torch.equal(sums[0], sums[1])


def test_a_slow_average_survives_in_16_bits() -> None:
    """10,000 steps with a mean of a twentieth of the noise: beside float32, the error is below 3% of the average."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.randn((32, 256), generator=generator).exp()
    mean = 0.05 * scale * torch.randn((32, 256), generator=generator)
    params = [Parameter(torch.zeros(32, 256)) for _ in range(2)]
    optimizers = [
        shardopt.AdEMAMix([param], lr=0.0, codec=codec) for param, codec in zip(params, ("log8", "fp32"), strict=True)
    ]
    for _ in range(10_000):
        gradient = mean + scale * torch.randn((32, 256), generator=generator)
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = gradient
            optimizer.step()
    coded, exact = (optimizer.state_dict(dequantize=True)["state"][0]["exp_avg_slow"] for optimizer in optimizers)
    error = (coded - exact) / scale
    assert error.square().mean().sqrt() <= 0.03 * (exact / scale).square().mean().sqrt()
