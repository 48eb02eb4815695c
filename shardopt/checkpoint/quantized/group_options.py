"""The options and counters in the param groups of an optimizer, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_DTYPES = {
    str(dtype): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
_NONE = object()


def to_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as JSON, without those that JSON cannot hold. Tensors of one element have their dtypes.

    Raises:
        ValueError: a tensor has several elements, or is complex.
    """
    found = {key: _to_json(key, value) for key, value in options.items()}
    return {key: value for key, value in found.items() if value is not _NONE}


def _to_json(key: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise ValueError(
                f"got {key} of a param group as a tensor of shape {tuple(value.shape)} and {value.dtype}, expected one "
                "real element; save optimizer.state_dict() instead"
            )
        return {"tensor": value.item(), "dtype": str(value.dtype), "shape": list(value.shape)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        items = [_to_json(key, item) for item in value]
        return _NONE if _NONE in items else items
    return _NONE


def from_json(saved: Any, own: Any, key: str) -> Any:
    """The value of an option in a checkpoint.

    Args:
        saved: what :func:`to_json` gave.
        own: the present value; None if there is none.
        key: the option's name.

    Raises:
        ValueError: :func:`to_json` did not give it.
    """
    if isinstance(saved, list):
        owns = own if isinstance(own, list | tuple) and len(own) == len(saved) else [None] * len(saved)
        values = [from_json(item, each, key) for item, each in zip(saved, owns, strict=True)]
        return tuple(values) if isinstance(own, tuple | None) else values
    try:
        if isinstance(saved, dict):
            value = torch.tensor(saved["tensor"], dtype=_DTYPES[saved["dtype"]], device="cpu").reshape(saved["shape"])
            if value.numel() != 1 or (isinstance(own, Tensor) and own.numel() != 1):
                raise ValueError("several elements")
            if isinstance(own, Tensor):  # of the shape that it has: the value will be copied into it
                return _like(own, value)
            return value.item() if key == "lr" else value  # a matter of the run, as torch takes tensors in few loops
        if isinstance(own, Tensor) and own.numel() == 1 and isinstance(saved, int | float):
            return _like(own, torch.tensor(saved, device="cpu"))
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"got {key} as {saved!r:.80}, expected a number; load another checkpoint") from error
    return saved


def _like(own: Tensor, value: Tensor) -> Tensor:
    """A value of one element as a tensor like the present one; ValueError if that can hold whole numbers only."""
    new = value.to(own).reshape(own.shape)
    if not own.is_floating_point() and new.item() != value.item():
        raise ValueError("a fraction")
    return new
