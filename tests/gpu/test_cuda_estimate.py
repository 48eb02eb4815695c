"""Estimates for a GPU and for the host equal the memory that a run on a GPU takes of each."""

from __future__ import annotations

import pytest

from cuda_device import needs_gpu
from estimate_problem import run
from ranks.shaped import small_model
from shardopt.estimate import Setup, estimate
from shardopt.state import residency


@pytest.mark.parametrize(
    ("offload", "budget"), [(None, 0), ("state", 0), ("state", "300KiB"), ("step", 0), ("step", "300KiB")]
)
@needs_gpu
@pytest.mark.parametrize("release", [False, True], ids=["kept", "released"])
def test_device_and_host(
    monkeypatch: pytest.MonkeyPatch, release: bool, offload: str | None, budget: int | str
) -> None:
    """Shows that the allocator gives to the byte what the estimate says."""
    monkeypatch.setattr(residency, "CHUNK_BYTES", 1 << 17)
    options = {"master_weight_bits": 24, "offload": offload, "device_state_budget": budget}
    model, setup = small_model(), Setup(release_gradients=release, options=options)
    expected = estimate(model, setup)
    _, actual = run(model, setup, device="cuda")
    if release and offload == "step":  # it depends on how fast the thread is
        assert actual.device.gradients <= expected.device.gradients
        actual.device.gradients = expected.device.gradients
    assert actual.device == expected.device
    assert actual.host == expected.host
