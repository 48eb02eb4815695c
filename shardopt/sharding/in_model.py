"""Temporarily replaces a model's parameters, by the float32 master weights that an engine's optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor
from torch.nn import Module


@contextmanager
def replaced_parameters(model: Module, tensors: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Context in which the modules of a model hold ``tensors`` in place of the parameters that are their keys."""
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
