"""Estimates of memory against runs on a GPU."""

from __future__ import annotations

from dataclasses import asdict

import pytest

import shardopt
from cuda_device import needs_gpu
from estimate_problem import TOKENS, Layers, assert_near, estimated_model
from shardopt.estimate import Setup, estimate


@pytest.mark.parametrize("offload", [None, "state", "step"])
@needs_gpu
def test_device_and_host(offload: str | None) -> None:
    """Shows that a run takes the memory that was estimated, on the device and on the host."""
    setup = Setup(options={"master_weight_bits": 24, "offload": offload})
    net = Layers().to("cuda").bfloat16()
    optimizer = shardopt.AdamW8bit(net.parameters(), **setup.options)
    net(TOKENS.to("cuda")).backward()
    optimizer.step()
    optimizer.synchronize()
    actual, expected = shardopt.memory_report(optimizer), estimate(estimated_model(), setup)
    assert_near(asdict(actual.device), asdict(expected.device))
    assert_near(asdict(actual.host), asdict(expected.host))
