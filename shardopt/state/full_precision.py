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
    """Joins parameter and low bits to new float32 weights, sharded like the parameter. ``state`` may be empty."""
    local = spec.shard.local(param.detach())
    weights = local.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if spec.weights.low_bits and state:
        _check_has_low_bits(state)
        for slice_, slice_state in zip(spec.slices, spec.split(state), strict=True):
            low_bits = slice_state[LOW_BITS].to(local.device)  # offloaded state is in the host's memory
            slice_.elements(weights).copy_(spec.weights.load(slice_.elements(local), low_bits))
    return spec.shard.like_parameter(weights)


#: The parameter's dtype at the last call of :func:`reset_stale_low_bits`. Keyed by the state's ``step`` tensor: a load
#: replaces it, and so low bits that were loaded together with weights of another dtype do not count as stale.
_LAST_DTYPES: MutableMapping[Tensor, torch.dtype] = WeakTensorKeyDictionary()


def reset_stale_low_bits(spec: TensorSpec, param: Tensor, state: StateDict, device: torch.device) -> None:
    """Removes the low bits from ``state``, with a warning, if the parameter was cast since the last call.

    If the new dtype needs low bits, puts zeros on ``device`` in their place: master weights then equal the parameter.
    """
    step, has_low_bits, needs_low_bits = state.get("step"), LOW_BITS in state, LOW_BITS in spec.entries
    last_dtype = param.dtype
    if isinstance(step, Tensor):
        last_dtype = _LAST_DTYPES.get(step, param.dtype)
        _LAST_DTYPES[step] = param.dtype
    was_cast = last_dtype != param.dtype and (has_low_bits or needs_low_bits)
    are_unneeded = has_low_bits and not needs_low_bits  # as of a parameter that is float32 now
    if was_cast or are_unneeded:
        state.pop(LOW_BITS, None)
        if needs_low_bits:
            state[LOW_BITS] = spec.wrap_local(LOW_BITS, spec.entries[LOW_BITS].allocate(device))
        warn_user(
            f"got weights that were cast to {param.dtype} after steps: low bits in the state are dropped, and master "
            "weights begin equal to the parameters; take full_precision_parameters() before a cast, and load them "
            "after it",
            UserWarning,
        )


def check_float32_weights(weights: Mapping[Tensor, Tensor], params: Collection[Tensor]) -> None:
    """Raises ValueError if weights, by parameter, are missing, unknown or of another shape, dtype or sharding."""
    if weights.keys() != set(params):
        raise ValueError(
            f"got weights of {len(weights)} parameters, {len(weights.keys() & set(params))} of them the optimizer's, "
            f"expected all {len(params)} of these; take the keys from full_precision_parameters()"
        )
    for index, param in enumerate(params):
        given, expected = weights[param], _format_text(param, torch.float32)
        got = _format_text(given, given.dtype) if isinstance(given, Tensor) else type(given).__name__
        if got != expected:
            raise ValueError(f"parameter {index}: got weights {got}, expected {expected}; shard and cast them so")


def store_float32_weights(
    spec: TensorSpec, param: Tensor, state: StateDict, weights: Tensor, device: torch.device
) -> StateDict:
    """Writes float32 weights, sharded like the parameter, into the parameter and the state's low bits.

    Returns:
        The state: ``state``, or a new one on ``device`` if ``state`` is empty and low bits must be stored. A frozen
        parameter gets no state: its weights are rounded to its dtype.
    """
    local, wide = spec.shard.local(param.detach()), spec.shard.local(weights.detach()).to(param.device)
    is_frozen = not (state or param.requires_grad)
    if not spec.weights.low_bits or local.numel() == 0 or is_frozen:
        local.copy_(wide)
        return state
    state = state or spec.new_state(device)
    _check_has_low_bits(state)
    local.copy_(wide)  # for the padding, which is in no slice
    for slice_, slice_state in zip(spec.slices, spec.split(state), strict=True):
        rounded, low_bits = spec.weights.store(slice_.elements(wide))
        assert low_bits is not None
        slice_.elements(local).copy_(rounded)
        slice_state[LOW_BITS].copy_(low_bits)
    return state


def _check_has_low_bits(state: Mapping[str, Any]) -> None:
    """Raises RuntimeError if ``state`` was made without ``master_weight_bits``, and so has no low bits."""
    if LOW_BITS not in state:
        raise RuntimeError(
            f"got state with {', '.join(state)}, expected {LOW_BITS}, too; set master_weight_bits when the optimizer "
            "is made, or load a state that has low bits"
        )


def _format_text(x: Tensor, dtype: torch.dtype) -> str:
    """The shape and sharding of ``x`` with the given dtype, as text to compare and to show in errors."""
    placements = getattr(x, "placements", None)
    sharding = "" if placements is None else f" placed {placements}"
    return f"{tuple(x.shape)} of {dtype}{sharding}"
