"""Weights with all the bits that parameter and state have of them: read, and loaded again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
from helpers import everything, step
from kernel_problem import gradients, make, start
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.kernels.weights import join_weight, split_weight
from shardopt.optim import ShardedOptimizer
from weight_formats import ALL, BF16, FP32, LOW, int_bits, integers, master_weights


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
def test_read_and_loaded(weights: str, steps: int) -> None:
    """Copies of all bits, from which everything comes back; other weights are rounded as the step would."""
    dtype, options = ALL[weights]
    bits = options.get("master_weight_bits")
    optimizer, low_bits = trained(weights, steps), LOW.get(bits)
    saved, before = optimizer.full_precision_parameters(), everything(optimizer)
    with_bits = steps and bits is not None
    assert_same(named(saved), named({p: master_weights(optimizer, p) if with_bits else p.float() for p in saved}))
    assert not with_bits or any((x != p.detach().float()).any() for p, x in saved.items())
    new = {p: values(tuple(p.shape), 50 + place) for place, p in enumerate(saved)}
    optimizer.load_full_precision_parameters(new)
    wanted = {}
    for param, x in new.items():
        high, low = split_weight(x, low_bits, dtype) if low_bits else (x.to(dtype), None)
        assert torch.equal(int_bits(param.detach()), int_bits(high))
        if low is not None and param.numel():
            stored = optimizer.state[param]["master_low_bits"]
            assert torch.equal(integers(stored, bits).int(), low)
            assert int(optimizer.state[param]["step"]) == steps
        else:
            assert steps or not optimizer.state[param]
        wanted[param] = high.float() if low is None else join_weight(high, low, low_bits)
    assert_same(named(optimizer.full_precision_parameters()), named(wanted))
    optimizer.load_full_precision_parameters(saved)
    after = everything(optimizer)
    assert_same({name: after[name] for name in before}, before)


WRONG: list[tuple[Callable[[dict[Tensor, Tensor]], Any], type[Exception], str]] = [
    (
        lambda weights: dict(list(weights.items())[1:]),
        ValueError,
        "got weights of 1 parameters, 1 of them the optimizer's, expected all 2",
    ),
    (
        lambda weights: {param: x[..., :2] for param, x in weights.items()},
        ValueError,
        r"parameter 0: got weights \(4, 2\) of torch.float32, expected \(4, 64\) of torch.float32",
    ),
    (lambda weights: dict.fromkeys(weights, 1.0), ValueError, r"parameter 0: got weights float, expected \(4, 64\) of"),
]


def test_wrong_weights_change_nothing() -> None:
    initial = {"matrix": values((4, 64), 1, BF16), "bias": values((64,), 2, BF16)}
    params, optimizer = make("adamw", "log8", initial, master_weight_bits=24)
    step(optimizer, params, {name: torch.ones_like(x) for name, x in initial.items()})
    before = everything(optimizer)
    for change, error, message in WRONG:
        with pytest.raises(error, match=message):
            optimizer.load_full_precision_parameters(change(optimizer.full_precision_parameters()))
        assert_same(everything(optimizer), before)


def test_frozen_parameters_get_no_state() -> None:
    """Frozen parameters are rounded; one that was stepped before it was frozen keeps its low bits."""
    params = [Parameter(values((4, 64), place, BF16)) for place in range(2)]
    optimizer = shardopt.AdamW8bit(params, master_weight_bits=24, min_quantized_numel=64)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    for param in params:
        param.requires_grad_(False)
    new = {param: values((4, 64), 50 + place) for place, param in enumerate(params)}
    optimizer.load_full_precision_parameters(new)
    assert not optimizer.state.get(params[1])
    found = optimizer.full_precision_parameters()
    assert_same(
        {"stepped": found[params[0]], "frozen": found[params[1]]},
        {
            "stepped": join_weight(*split_weight(new[params[0]], 8, BF16), 8),
            "frozen": new[params[1]].bfloat16().float(),
        },
    )


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
