"""AdamW with 8-bit state, left to itself for 200 steps, stays near float32, at any scale."""

from __future__ import annotations

import pytest

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
