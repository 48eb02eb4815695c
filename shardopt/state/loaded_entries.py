"""Checks of state entries that users or checkpoints supply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from shardopt.codec.base import are_finite

#: The largest accepted step count, as the kernels compute powers with 64-bit integer exponents.
_MAX_STEP = 2**62


def check_keys(state: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises RuntimeError if ``state`` has a key that is a tensor but in none of the param groups."""
    known = {id(param) for group in groups for param in group["params"]}
    foreign = next((key for key in state if isinstance(key, Tensor) and id(key) not in known), None)
    if foreign is not None:
        raise RuntimeError(
            f"got state of a tensor of shape {tuple(foreign.shape)} that is in no param group, expected state of the "
            "optimizer's parameters; delete it from optimizer.state, or put the parameter back into its param group"
        )


def check_entry(value: object, expected: Tensor, key: str, name: str) -> None:
    """Raises ValueError unless entry ``key`` is a dense tensor with the type, shape and sharding of ``expected``."""
    is_alike = (
        isinstance(value, Tensor)
        and type(value) is type(expected)
        and value.shape == expected.shape
        and getattr(value, "placements", None) == getattr(expected, "placements", None)
    )
    if not is_alike:
        got = f"{type(value).__name__} {tuple(getattr(value, 'shape', ()))}"
        raise ValueError(
            f"{name}: got {key} as {got}, expected {type(expected).__name__} {tuple(expected.shape)}; load "
            "DTensors with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, flat shards on the same "
            "ranks and with the same options, or either with shardopt.checkpoint"
        )
    assert isinstance(value, Tensor)
    if value.layout != torch.strided:
        raise ValueError(f"{name}: got {key} of layout {value.layout}, expected a dense tensor; call to_dense() on it")
    if value.is_meta:
        raise ValueError(f"{name}: got {key} on the meta device, expected a tensor with values; load them first")


def check_moment(value: Tensor, key: str, name: str, *, signed: bool) -> None:
    """Raises ValueError if a loaded moment (this rank's part) is not of floats, or has NaN, Inf or a wrong sign."""
    if not value.dtype.is_floating_point:
        raise ValueError(f"{name}: got {key} of {value.dtype}, expected floats; was it saved by another optimizer?")
    if not are_finite(value, signed=signed):
        raise invalid_values_error(key, name, signed=signed)


def invalid_values_error(what: str, name: str, *, signed: bool) -> ValueError:
    """The error for NaN, Inf or wrongly negative values in state: one of them would spoil its whole block's codes."""
    got, expected = ("NaN or Inf", "") if signed else ("NaN, Inf or numbers below zero", " >= 0")
    return ValueError(
        f"{name}: got {what} that stands for {got}, expected finite numbers{expected}; either the run had diverged "
        "when it was saved, or the state is damaged: load an earlier one, or leave this parameter's state out"
    )


def checked_step(loaded: Mapping[str, Any], name: str) -> float:
    """Returns the loaded step count, checked to be a whole number >= 0.

    Without an entry ``step``, as in the state of torch's SGD, 1: the parameter counts as stepped before, so that
    dampening applies to its next gradient.
    """
    step = loaded.get("step", 1.0)
    if isinstance(step, Tensor) and step.numel() == 1 and step.layout == torch.strided and not step.is_meta:
        step = step.item()
    count = float(step) if isinstance(step, Real) and 0 <= step <= _MAX_STEP else -1.0  # type: ignore[operator]
    if count < 0 or not count.is_integer():
        raise ValueError(
            f"{name}: got step as {step!r}, expected a whole number >= 0, or a tensor of one; load an undamaged state"
        )
    return count
