"""Chunks: the parameters whose state is decoded at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from shardopt.layout import FlatBuffer, Segment, Shard, shard_of

#: Bytes of working memory per element of a parameter: two decoded moments, and three times as much for temporaries of
#: the optimizer (foreach) and of the codec.
BYTES_PER_ELEMENT = 32


class TransferUnit(NamedTuple):
    """A parameter of the model, or this rank's part of it: an optimizer tensor, or a slice of one.

    Attributes:
        group: index of the optimizer tensor's param group.
        position: index of the optimizer tensor in the group.
        param: the optimizer tensor.
        shard: the part of a parameter that the unit holds.
        stands_in: whether the inner optimizer gets a stand-in, the plain local tensor.
        segment: the slice, if the tensor is a flat buffer of several parameters.
    """

    group: int
    position: int
    param: Tensor
    shard: Shard
    stands_in: bool
    segment: Segment | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of state entries with one element per element of the parameter."""
        return tuple(self.param.shape) if self.segment is None else self.shard.local_shape

    @property
    def has_gradient(self) -> bool:
        """Whether a step changes the unit: slices without elements stay out."""
        return self.param.grad is not None and (self.segment is None or math.prod(self.shape) > 0)

    @property
    def local(self) -> Tensor:
        """This rank's elements: a plain tensor, a view."""
        local = self.shard.local(self.param).detach()
        return local if self.segment is None else self.segment.of(local)

    def target(self) -> Tensor:
        """The tensor that the inner optimizer steps. A stand-in shares its memory and gradient with the parameter."""
        if not self.stands_in:
            return self.param
        stand_in = Parameter(self.local, requires_grad=self.param.requires_grad)
        if self.param.grad is not None:
            gradient = self.shard.local_gradient(self.param.grad)
            stand_in.grad = gradient if self.segment is None else self.segment.of(gradient)
        return stand_in

    def state_in(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The unit's entries; the state of a flat buffer has one dict per parameter name."""
        entries = state if self.segment is None else state.get(self.segment.name)
        return dict(entries) if isinstance(entries, Mapping) else {}

    def put_state(self, states: MutableMapping[Any, Any], state: Mapping[str, Any]) -> None:
        """Replaces the unit's entries in a dict of states by the optimizer's tensors."""
        if self.segment is None:
            states[self.param] = dict(state)
        else:
            states.setdefault(self.param, {})[self.segment.name] = dict(state)

    def to_target(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The unit's state in the form that the target needs."""
        if not self.stands_in:
            return dict(state)
        return {key: self.shard.local(x) if hasattr(x, "to_local") else x for key, x in state.items()}

    def from_target(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The target's state in the form that the unit needs."""
        if not self.stands_in:
            return dict(state)
        local = self.shard.local_shape
        return {
            key: self.shard.like_parameter(x) if isinstance(x, Tensor) and x.dim() > 0 and x.shape == local else x
            for key, x in state.items()
        }

    def present_in(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """The unit's entries, from quantized state or from the bare optimizer's (copies, for a slice); None if none."""
        if self.segment is None or not is_bare(state):
            return self.state_in(state) or None
        if not math.prod(self.shape):
            return None
        tensors = {key: x for key, x in state.items() if isinstance(x, Tensor)}
        slices = {key: self.segment.of(x) if x.shape == self.param.shape else x for key, x in tensors.items()}
        return {**state, **{key: x.detach().clone() for key, x in slices.items()}}

    def add_to_bare(self, state: MutableMapping[str, Any], floats: Mapping[str, Any]) -> None:
        """Adds the unit's state in floats to the state of the bare optimizer's tensor; padding becomes zeros.

        Raises:
            RuntimeError: slices differ in an entry of which the tensor has only one, such as ``step``.
        """
        for key, x in floats.items():
            if self.segment is None:
                state[key] = x
            elif isinstance(x, Tensor) and x.dim() and tuple(x.shape) == self.shape:
                whole = state.setdefault(key, x.new_zeros(self.param.shape))
                self.segment.of(whole).copy_(x)
            elif repr(state.setdefault(key, x)) != repr(x):
                raise RuntimeError(
                    f"got {key} of {state[key]} and {x} for parameters in one flat tensor, expected one number; wrap "
                    "the model with use_orig_params=True"
                )


def is_bare(state: Mapping[str, Any]) -> bool:
    """Whether the state of a flat tensor is the bare optimizer's: not one dict for each parameter."""
    return not all(isinstance(value, Mapping) for value in state.values())


def units_of(groups: Sequence[Mapping[str, Any]], *, local: bool) -> list[TransferUnit]:
    """The parameters in param groups, in order: the tensors, and the slices of flat buffers.

    Args:
        groups: the param groups.
        local: whether the inner optimizer is element by element, so that it can step the local tensors of DTensors.

    Raises:
        UnknownShardError: the shard of a tensor is unknown.
    """
    units = []
    for number, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            shard = shard_of(param)
            if isinstance(shard, FlatBuffer):
                units += [TransferUnit(number, position, param, part.shard, True, part) for part in shard.segments]
            else:
                units.append(TransferUnit(number, position, param, shard, local and not shard.plain))
    return units


def chunks_of(units: Sequence[TransferUnit], working_memory: int | None) -> list[list[TransferUnit]]:
    """Parameters in order, as many at a time as ``working_memory`` bytes hold, at least one; None for all of them.

    Global sizes decide, so that ranks that exchange cut blocks have the same chunks.
    """
    if working_memory is None:
        return [list(units)]
    chunks: list[list[TransferUnit]] = []
    left = 0
    for unit in units:
        size = BYTES_PER_ELEMENT * math.prod(unit.shard.global_shape)
        if not chunks or size > left:
            chunks.append([])
            left = working_memory
        chunks[-1].append(unit)
        left -= size
    return chunks
