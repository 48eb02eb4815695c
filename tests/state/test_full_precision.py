"""Weights with all the bits that parameter and state have of them."""

from __future__ import annotations

import pytest
from torch import Tensor

from helpers import everything, step
from kernel_problem import gradients, make, start
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer
from weight_formats import ALL, FP32, master_weights


def trained(weights: str, steps: int = 2, codec: str = "log8") -> ShardedOptimizer:
    dtype, options = ALL[weights]
    params, optimizer = make("adamw", codec, start(dtype), **options)
    for t in range(1, steps + 1):
        step(optimizer, params, gradients(t, dtype))
    return optimizer


def named(weights: dict[Tensor, Tensor]) -> dict[str, Tensor]:
    return {str(place): x for place, x in enumerate(weights.values())}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("weights", ALL)
def test_read(weights: str, steps: int) -> None:
    """Copies of all bits."""
    bits = ALL[weights][1].get("master_weight_bits")
    optimizer = trained(weights, steps)
    saved = optimizer.full_precision_parameters()
    with_bits = steps and bits is not None
    assert_same(named(saved), named({p: master_weights(optimizer, p) if with_bits else p.float() for p in saved}))
    assert not with_bits or any((x != p.detach().float()).any() for p, x in saved.items())


def test_low_bits_are_not_dropped_in_float32() -> None:
    optimizer = trained("bf16 24")
    params, other = make("adamw", "log8", start(FP32), master_weight_bits=24)
    before = everything(other)
    with pytest.raises(ValueError, match=r"expected no master_low_bits for .* torch.float32.*load\(convert=True\)"):
        other.load_state_dict(optimizer.state_dict())
    assert_same(everything(other), before)
    other.load_state_dict(optimizer.state_dict(dequantize=True))
    assert all("master_low_bits" not in other.state[param] for param in params.values())


def test_state_without_low_bits_is_told() -> None:
    optimizer = trained("bf16")
    optimizer.param_groups[0]["master_weight_bits"] = 24
    with pytest.raises(RuntimeError, match=r"got state with step.*, expected master_low_bits, too"):
        optimizer.full_precision_parameters()
