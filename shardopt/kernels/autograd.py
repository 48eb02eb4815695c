"""A decorator that turns off autograd and inference mode in functions that create or update state and parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def without_autograd(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function to run under ``torch.no_grad``, and outside of inference mode even if called inside.

    PyTorch refuses to update tensors created in inference mode once that mode is left: optimizer state created by a
    first step there would make later steps fail.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return call(*args, **kwargs)  # again, now outside of inference mode
        with torch.no_grad():
            return function(*args, **kwargs)

    return call
