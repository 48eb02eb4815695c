"""The numbers of a model's parameters, on which the noise of stochastic rounding depends."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from torch import Tensor
from torch.nn import Module

from shardopt.layout.flat import FlatBuffer
from shardopt.layout.names import parameter_names
from shardopt.layout.shard import assigned

_STORED, _USED = "_shardopt_stored_number", "_shardopt_number"  # attributes of parameters


def number_parameters(model: Module) -> None:
    """Stores with each parameter its index among all of the bare model's; a flat buffer's segments have theirs already.

    Steps use the indices after :func:`use_numbers` only: a table of param groups that one rank prints must not change
    the noise of an optimizer there.

    Args:
        model: the model, which :func:`shardopt.layout.read_model` must have read.
    """
    params = parameter_names(model).values()
    flat = [buffer for param in params if isinstance(buffer := assigned(param), FlatBuffer)]
    taken = {segment.number for buffer in flat for segment in buffer.segments}
    free = (number for number in count() if number not in taken)
    for param in params:
        if not isinstance(assigned(param), FlatBuffer):
            setattr(param, _STORED, next(free))


def use_numbers(params: Iterable[Tensor]) -> None:
    """Has steps of these parameters use the indices that were stored last, if any."""
    for param in params:
        if hasattr(param, _STORED):
            setattr(param, _USED, getattr(param, _STORED))


def give_numbers(params: Iterable[Tensor], numbers: Iterable[int | None]) -> None:
    """Has steps of these parameters use these indices: copies take those of the optimizer they were copied from."""
    for param, number in zip(params, numbers, strict=True):
        if number is not None:
            setattr(param, _USED, number)


def number_of(param: Tensor) -> int | None:
    """The index that steps use; None if none is in use."""
    return getattr(param, _USED, None)
