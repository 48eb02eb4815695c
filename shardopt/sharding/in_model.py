"""Replaces a model's parameters for a while by other tensors: the float32 ones that an engine's optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor
from torch.nn import Module


@contextmanager
def replaced_parameters(model: Module, tensors: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Inside, parameters, each maybe in several modules, are replaced by the tensors; others stay.

    Args:
        model: the model.
        tensors: the replacements, by parameter.
    """
    places = [
        (module._parameters, name, param)
        for module in model.modules()
        for name, param in module._parameters.items()
        if param is not None and param in tensors
    ]
    try:
        for parameters, name, param in places:
            parameters[name] = tensors[param]  # type: ignore[assignment]
        yield
    finally:
        for parameters, name, param in places:
            parameters[name] = param
