"""Reads and writes float32 weights that are stored as a 16-bit parameter and, in its state, the missing low bits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shardopt.state.slice_spec import LOW_BITS, StateDict
from shardopt.state.tensor_spec import TensorSpec
from shardopt.state.warn import warn_user


def float32_weights(spec: TensorSpec, param: Tensor, state: Mapping[str, Any]) -> Tensor:
    """Joins parameter and low bits to float32 weights, sharded like the parameter. ``state`` may still be empty."""
    local = spec.shard.local(param.detach())
    weights = local.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if spec.weights.low_bits and state:
        _check_state(state)
        for slice_, slice_state in zip(spec.slices, spec.split(state), strict=True):
            # The state may be in the host's memory.
            stored = spec.weights.load(slice_.elements(local), slice_state[LOW_BITS].to(local.device))
            slice_.elements(weights).copy_(stored)
    return spec.shard.like_parameter(weights)


#: The parameter's dtype at the last call of :func:`reset_stale_low_bits`, by the tensor with the state's step count.
_SEEN: MutableMapping[Tensor, torch.dtype] = WeakTensorKeyDictionary()


def reset_stale_low_bits(spec: TensorSpec, param: Tensor, state: StateDict, device: torch.device) -> None:
    """Drops or resets low bits, with a warning, if the parameter was cast to another dtype after a step.

    Master weights then equal the parameter again. Changes ``state`` in place; new low bits are on ``device``.
    """
    step, has, wants = state.get("step"), LOW_BITS in state, LOW_BITS in spec.entries
    seen = param.dtype
    if isinstance(step, Tensor):
        seen, _SEEN[step] = _SEEN.get(step, seen), param.dtype
    if (has and not wants) or (seen != param.dtype and (has or wants)):
        state.pop(LOW_BITS, None)
        if wants:
            state[LOW_BITS] = spec.wrap_local(LOW_BITS, spec.entries[LOW_BITS].allocate(device))
        warn_user(
            f"got weights that were cast to {param.dtype} after steps: low bits in the state are dropped, and master "
            "weights begin equal to the parameters; take full_precision_parameters() before a cast, and load them "
            "after it",
            UserWarning,
        )


def check_float32_weights(weights: Mapping[Tensor, Tensor], params: Collection[Tensor]) -> None:
    """Checks that weights, by parameter, can be loaded into all parameters of an optimizer.

    Raises:
        ValueError: weights are missing, unknown or of another shape, dtype or sharding.
    """
    if weights.keys() != set(params):
        raise ValueError(
            f"got weights of {len(weights)} parameters, {len(weights.keys() & set(params))} of them the optimizer's, "
            f"expected all {len(params)} of these; take the keys from full_precision_parameters()"
        )
    for place, param in enumerate(params):
        given, expected = weights[param], _described(param, torch.float32)
        got = _described(given, given.dtype) if isinstance(given, Tensor) else type(given).__name__
        if got != expected:
            raise ValueError(f"parameter {place}: got weights {got}, expected {expected}; shard and cast them so")


def store_float32_weights(
    spec: TensorSpec, param: Tensor, state: StateDict, weights: Tensor, device: torch.device
) -> StateDict:
    """Writes float32 weights, sharded like the parameter, to the parameter and the low bits; returns the state.

    If low bits must be kept and ``state`` is empty, makes a new state on ``device``; but a frozen parameter gets none,
    and the weights are rounded to its dtype.
    """
    local, wide = spec.shard.local(param.detach()), spec.shard.local(weights.detach()).to(param.device)
    if not spec.weights.low_bits or local.numel() == 0 or not (state or param.requires_grad):
        local.copy_(wide)
        return state
    state = state or spec.new_state(device)
    _check_state(state)
    local.copy_(wide)  # includes padding, which is in no slice
    for slice_, slice_state in zip(spec.slices, spec.split(state), strict=True):
        rounded, low_bits = spec.weights.store(slice_.elements(wide))
        assert low_bits is not None
        slice_.elements(local).copy_(rounded)
        slice_state[LOW_BITS].copy_(low_bits)
    return state


def _check_state(state: Mapping[str, Any]) -> None:
    if LOW_BITS not in state:
        raise RuntimeError(
            f"got state with {', '.join(state)}, expected {LOW_BITS}, too; set master_weight_bits when the optimizer "
            "is made, or load a state that has low bits"
        )


def _described(x: Tensor, dtype: torch.dtype) -> str:
    placements = getattr(x, "placements", None)
    sharding = "" if placements is None else f" placed {placements}"
    return f"{tuple(x.shape)} of {dtype}{sharding}"
