"""Weights in the full precision of parameter and low bits together."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shardopt.state.slice_spec import LOW_BITS, StateDict
from shardopt.state.tensor_state import TensorState
from shardopt.state.warn import warn_user


def joined(spec: TensorState, param: Tensor, state: Mapping[str, Any]) -> Tensor:
    """The weights of a parameter as float32, sharded like the parameter.

    Args:
        spec: describes the parameter's state.
        param: the optimizer's parameter.
        state: the parameter's state; empty before the first step.
    """
    local = spec.shard.local(param.detach())
    weights = local.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if spec.weights.low_bits and state:
        if LOW_BITS not in state:
            raise RuntimeError(
                f"got state with {', '.join(state)}, expected {LOW_BITS}, too; set master_weight_bits when the "
                "optimizer is made, or load a state that has low bits"
            )
        for slice_, slice_state in zip(spec.slices, spec.split(state), strict=True):
            # The state may be in the host's memory.
            stored = spec.weights.load(slice_.elements(local), slice_state[LOW_BITS].to(local.device))
            slice_.elements(weights).copy_(stored)
    return spec.shard.like_parameter(weights)


#: The dtype that the weights had when their state was last seen, by the state's step count.
_SEEN: MutableMapping[Tensor, torch.dtype] = WeakTensorKeyDictionary()


def fit_low_bits(spec: TensorState, param: Tensor, state: StateDict, device: torch.device) -> None:
    """Drops low bits that belong to weights of another dtype, with a warning: the model was cast after steps.

    Master weights then begin equal to the parameter.

    Args:
        spec: describes the state of the parameter as it is now.
        param: the optimizer's parameter.
        state: the parameter's state, changed in place.
        device: device for new low bits.
    """
    step, has, wants = state.get("step"), LOW_BITS in state, LOW_BITS in spec.entries
    seen = param.dtype
    if isinstance(step, Tensor):
        seen, _SEEN[step] = _SEEN.get(step, seen), param.dtype
    if (has and not wants) or (seen != param.dtype and (has or wants)):
        state.pop(LOW_BITS, None)
        if wants:
            state[LOW_BITS] = spec.like(LOW_BITS, spec.entries[LOW_BITS].new(device))
        warn_user(
            f"got weights that were cast to {param.dtype} after steps: low bits in the state are dropped, and master "
            "weights begin equal to the parameters; to keep them, save with shardopt.checkpoint before a cast, and "
            "load with convert=True after it",
            UserWarning,
        )
