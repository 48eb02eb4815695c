"""A decorator of functions that make or change tensors that are kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def without_autograd(function: Callable[P, R]) -> Callable[P, R]:
    """Calls the function under ``torch.no_grad``, outside of inference mode.

    A tensor that is made in inference mode can never be changed outside of it: state made by a first step there would
    make later steps fail.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return call(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return call
