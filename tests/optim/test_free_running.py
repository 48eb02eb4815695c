"""AdamW with 8-bit state, left to itself for 200 steps, stays near float32; zero gradients move nothing."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

import free_running
import shardopt
from helpers import CODEC_NAMES, RULES

ELEMENTS = 32768


@pytest.mark.parametrize("name", free_running.SCENARIOS)
def test_log8_stays_near_float32(name: str) -> None:
    scenario = free_running.SCENARIOS[name]
    drifts = free_running.measure(scenario, ELEMENTS)
    print(drifts)
    assert drifts["log8"].mean <= scenario.limit.mean
    assert drifts["log8"].worst <= scenario.limit.worst
    assert drifts["fp32"].mean < drifts["log8"].mean / 1000  # the yardstick itself is straight


def test_log8_does_not_see_the_scale() -> None:
    """2^-20 and 2^20 times the gradients (and eps): the same parameters and codes, bit for bit."""
    found = []
    for exponent in (-20, 0, 20):
        generator = torch.Generator().manual_seed(0)
        param = Parameter(torch.zeros(16, 512))
        optimizer = shardopt.AdamW8bit([param], eps=2.0 ** (exponent - 27), weight_decay=0.0)
        for _ in range(20):
            param.grad = torch.randn(param.shape, generator=generator) * 2.0**exponent
            optimizer.step()
        state = optimizer.state[param]
        found.append((param.detach(), state["exp_avg_codes"], state["exp_avg_sq_codes"]))
    for other in (found[0], found[2]):
        assert all(torch.equal(a, b) for a, b in zip(other, found[1], strict=True))


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("rule", ["adam", "adamw", "lion"])
def test_coordinates_without_gradient_do_not_move(rule: str, codec: str) -> None:
    generator = torch.Generator().manual_seed(0)
    param = Parameter(torch.randn(8, 512, generator=generator))
    still = torch.rand(param.shape, generator=generator) < 0.5
    before = param.detach().clone()
    optimizer = RULES[rule].make([param], codec=codec, weight_decay=0.0, min_quantized_numel=0)
    for _ in range(500):
        gradient = torch.randn(param.shape, generator=generator)
        param.grad = torch.where(still, 0.0, gradient)
        optimizer.step()
    assert torch.equal(param.detach()[still], before[still])
    assert (param.detach() != before)[~still].float().mean() > 0.9  # Lion's walk may come back
