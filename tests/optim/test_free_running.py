"""AdamW with 8-bit state, left to itself for 200 steps, stays near float32, at any scale."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

import shardopt
from quality.drift import measure

#: By the stream of gradients, the mean and the worst drift that log8 may have.
LIMITS = {
    "iid": (0.0125, 1.5),
    "iid at 1e-7": (0.0125, 1.5),
    "iid at 1e5": (0.0125, 1.5),
    "log-normal": (0.08, 10),
    "half sparse": (0.05, 5),
    "rare rows": (0.015, 2),
    "one step of 1e4": (0.03, 5),
}


@pytest.mark.parametrize("scenario", LIMITS)
def test_log8_stays_near_float32(scenario: str) -> None:
    (found,) = measure(scenario, ["log8"], rows=64)
    mean, worst = LIMITS[scenario]
    assert 0 < found["mean"][-1] <= mean
    assert found["worst"] <= worst


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
