"""Muon on tensors of any memory format and offset, offloaded, and with released gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

import shardopt
from helpers import CASES, at_odd_offset
from muon_problem import OPTIONS, SHAPES, STEPS, advance, assert_equal, gradient, make, params_of
from ranks.layouts import values
from ranks.models import loss_of, make_batch, make_net
from ranks.offload import LateTransfers, late_transfers, offload_from_cpu
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer
from strided_problem import LAYOUTS, set_gradients
from weight_formats import ALL


def _strided(strided: bool, **options: Any) -> ShardedOptimizer:
    dtype = options.pop("dtype", torch.float32)
    found = [(values(shape, i, dtype), layout) for i, (shape, layout) in enumerate(LAYOUTS)]
    params = [Parameter(layout(x) if strided else x) for x, layout in found]
    given = {"min_quantized_numel": 64, "block_size": 32, **options}
    return CASES["muon"].make([{"params": params[:4]}, {"params": params[4:], "weight_decay": 0.0}], **given)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"codec": "fp32"},
        {"memory": 1},
        {"dtype": torch.bfloat16, "master_weight_bits": 24},
        {"dtype": torch.bfloat16, "stochastic_rounding": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("grad_dtype", [None, torch.float32], ids=str)
def test_memory_formats(options: dict[str, Any], grad_dtype: torch.dtype | None) -> None:
    """Channels last, transposed, parts of wider tensors: as contiguous copies."""
    got, expected = (_strided(strided, **options) for strided in (True, False))
    strides = [param.stride() for param in params_of(got)]
    for step in range(4):
        for optimizer in (got, expected):
            set_gradients(optimizer, step, grad_dtype)
            optimizer.step()
        assert_equal(got, expected)
    assert [param.stride() for param in params_of(got)] == strides


def test_what_lies_between_the_elements_stays() -> None:
    wide = torch.full((48, 60), 3.0)
    optimizer = shardopt.Muon8bit([Parameter(wide[:, 7:53])], **OPTIONS)
    advance(optimizer, range(3))
    assert (wide[:, :7] == 3).all()
    assert (wide[:, 53:] == 3).all()
    assert (wide[:, 7:53] != 3).any()


def test_gradients_are_not_changed() -> None:
    optimizer = make()
    advance(optimizer, range(1))
    for index, param in enumerate(params_of(optimizer)):
        assert_same({"grad": param.grad}, {"grad": gradient(tuple(param.shape), 0, index)})


def test_storage_at_odd_offsets() -> None:
    expected = advance(make(), range(STEPS))
    got = shardopt.Muon8bit([Parameter(at_odd_offset(values(shape, i))) for i, shape in enumerate(SHAPES)], **OPTIONS)
    for step in range(STEPS):
        for index, param in enumerate(params_of(got)):
            param.grad = at_odd_offset(gradient(tuple(param.shape), step, index), 5)
        got.step()
    assert_equal(got, expected)


@pytest.mark.parametrize("options", [{}, {"codec": "fp32"}, {"memory": 1}], ids=str)
@pytest.mark.parametrize("format", ["fp32", "bf16 24", "bf16 stochastic"])
def test_offloaded_state(format: str, options: dict[str, Any]) -> None:
    """In chunks that are smaller than a parameter, with copies that come as late as they may."""
    dtype, weights = ALL[format]
    expected = advance(make(dtype, **weights, **options), range(STEPS))
    with offload_from_cpu(4096, late_transfers("state")):
        got = advance(make(dtype, offload="state", **weights, **options), range(STEPS))
        got.synchronize()
        assert_equal(got, expected)
        entries = [value.nbytes for state in got.state.values() for name, value in state.items() if name != "step"]
        # Each entry there and back once, in one of the two passes.
        assert LateTransfers.latest.bytes_in == LateTransfers.latest.bytes_out == STEPS * sum(entries)


@pytest.mark.parametrize("offload", [None, "state"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_released_gradients(dtype: torch.dtype, offload: str | None) -> None:
    with offload_from_cpu(8192):
        models = [make_net(dtype) for _ in range(2)]
        options = {"stochastic_rounding": dtype == torch.bfloat16, "min_quantized_numel": 64}
        released, ordinary = (
            shardopt.Muon8bit(shardopt.muon_groups(model), **options, offload=how)
            for model, how in zip(models, (offload, None), strict=True)
        )
        shardopt.release_gradients(models[0], released)
        for number in range(STEPS):
            for model, optimizer in zip(models, (released, ordinary), strict=True):
                loss_of(model, make_batch(number)).backward()
                if optimizer is released:
                    assert all(param.grad is None for param in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
        released.synchronize()
        assert_equal(released, ordinary)
