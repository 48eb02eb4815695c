"""The numbers of a model's parameters, on which the noise of stochastic rounding depends."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from shardopt.layout.flat import FlatBuffer
from shardopt.layout.names import parameter_names
from shardopt.layout.shard import assigned

_NUMBER = "_shardopt_number"  # an attribute of parameters


def number_parameters(model: Module) -> None:
    """Notes with each parameter its index among all of the bare model's.

    Where the model has flat buffers nothing is noted: these say the numbers of what they are made of.
    """
    params = parameter_names(model).values()
    if not any(isinstance(assigned(param), FlatBuffer) for param in params):
        for number, param in enumerate(params):
            setattr(param, _NUMBER, number)


def number_of(param: Tensor) -> int | None:
    """The index that was noted; None where none was."""
    return getattr(param, _NUMBER, None)
