"""Chunks: the parameters whose state is decoded at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from shardopt.layout import FlatBuffer, Shard, shard_of

#: Bytes of working memory per element of a parameter: two decoded moments, and three times as much for temporaries of
#: the optimizer (foreach) and of the codec.
BYTES_PER_ELEMENT = 32


class Unit(NamedTuple):
    """A tensor of the optimizer, and how the inner optimizer is to see it.

    Attributes:
        group: index of its param group.
        position: its index there.
        param: the tensor.
        shard: the part of a parameter that the tensor is.
        stands_in: whether the inner optimizer is given the plain local tensor instead.
    """

    group: int
    position: int
    param: Tensor
    shard: Shard
    stands_in: bool

    def target(self) -> Tensor:
        """The tensor that the inner optimizer steps. A stand-in shares its memory and gradient with the parameter."""
        if not self.stands_in:
            return self.param
        stand_in = Parameter(self.shard.local(self.param.detach()), requires_grad=self.param.requires_grad)
        if self.param.grad is not None:
            stand_in.grad = self.shard.local_gradient(self.param.grad)
        return stand_in

    def own_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The unit's part of the tensor's state."""
        return dict(state)

    def tensor_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The unit's part of the tensor's state, with the names that it has there."""
        return dict(state)

    def to_target(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of the tensor as that of the target."""
        if not self.stands_in:
            return dict(state)
        return {key: self.shard.local(x) if hasattr(x, "to_local") else x for key, x in state.items()}

    def from_target(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of the target as that of the tensor."""
        if not self.stands_in:
            return dict(state)
        local = self.shard.local_shape
        return {
            key: self.shard.like_parameter(x) if isinstance(x, Tensor) and x.dim() > 0 and x.shape == local else x
            for key, x in state.items()
        }


def units_of(groups: Sequence[Mapping[str, Any]], *, local: bool) -> list[Unit]:
    """The tensors of param groups, in order.

    Args:
        groups: the param groups.
        local: whether the inner optimizer is element by element, so that it can be given the local tensors of DTensors.

    Raises:
        UnknownShardError: nothing says what part of a parameter a tensor is.
        RuntimeError: a tensor is made of several parameters.
    """
    units = []
    for number, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            shard = shard_of(param)
            if isinstance(shard, FlatBuffer):
                raise RuntimeError(
                    f"got a flat buffer of {len(shard.segments)} parameters for quantize_state, expected parameters; "
                    "wrap the model with FSDP(use_orig_params=True) or fully_shard, or use one of shardopt's optimizers"
                )
            units.append(Unit(number, position, param, shard, local and not shard.plain))
    return units


def chunks_of(units: Sequence[Unit], working_memory: int | None) -> list[list[Unit]]:
    """Tensors in order, as many at a time as ``working_memory`` bytes hold, at least one; None for all of them.

    Global sizes decide, so that ranks that exchange cut blocks have the same chunks.
    """
    if working_memory is None:
        return [list(units)]
    chunks: list[list[Unit]] = []
    left = 0
    for unit in units:
        size = BYTES_PER_ELEMENT * math.prod(unit.shard.global_shape)
        if not chunks or size > left:
            chunks.append([])
            left = working_memory
        chunks[-1].append(unit)
        left -= size
    return chunks
