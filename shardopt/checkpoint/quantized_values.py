"""Values of quantize_state in checkpoints: state entries that are no tensors, and options that are.

:func:`packed` encodes numbers, texts, dtypes, None, lists and tuples in state entries as tensors. A tensor keeps its
name. Other values have their kind behind it, as ``step:int``; the items of a list ``q`` are ``q:0``,
``q:1`` and so on, beside ``q:list``, which is their number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from shardopt.checkpoint.index import dtype_named

_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple}
_MAX_DEPTH = 8


def packed(key: str, value: Any) -> dict[str, Tensor]:
    """The tensors that stand for a value, by their names.

    Raises:
        ValueError: there is no way to say the value in tensors, or its name has one of the marks that are used here.
    """
    if not key or set(key) & set(".:"):
        raise ValueError(f"got a state entry {key!r}, expected a name without '.' and ':'")
    return _packed(key, value)


def _packed(key: str, value: Any) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {key: value.detach()}
    if value is None:
        return {f"{key}:none": torch.zeros((), device="cpu")}
    if isinstance(value, torch.dtype):
        return {f"{key}:dtype": torch.zeros((), dtype=value, device="cpu")}
    if type(value) in _NUMBERS and not (isinstance(value, int) and abs(value) >= 2**63):
        return {f"{key}:{type(value).__name__}": torch.tensor(value, dtype=_NUMBERS[type(value)], device="cpu")}
    if isinstance(value, str):
        return {f"{key}:text": torch.tensor(list(value.encode()), dtype=torch.uint8, device="cpu")}
    if type(value) in _SEQUENCES.values() and key.count(":") < _MAX_DEPTH:
        tensors = {f"{key}:{type(value).__name__}": torch.tensor(len(value), device="cpu")}
        for index, item in enumerate(value):
            tensors.update(_packed(f"{key}:{index}", item))
        return tensors
    raise ValueError(
        f"got a state entry {key} of {type(value).__name__}, expected tensors, numbers, texts, None, or lists of "
        "these; save optimizer.state_dict() instead"
    )


def is_text(key: str) -> bool:
    """Whether a tensor of this name stands for a text."""
    return key.endswith(":text")


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The values for which :func:`packed` gave these tensors.

    Raises:
        ValueError: it gave no such tensors.
    """
    values = {name: _value(name, tensors) for name in dict.fromkeys(key.partition(":")[0] for key in tensors)}
    _demand({key for name, value in values.items() for key in _packed(name, value)} == tensors.keys(), tensors)
    return values


def _value(key: str, tensors: Mapping[str, Tensor]) -> Any:
    if key in tensors:
        return tensors[key]
    kinds = [
        kind for kind in ("none", "dtype", "text", "bool", "int", "float", *_SEQUENCES) if f"{key}:{kind}" in tensors
    ]
    _demand(len(kinds) == 1 and key.count(":") < _MAX_DEPTH, tensors)
    (kind,) = kinds
    tensor = tensors[f"{key}:{kind}"]
    if kind == "none":
        return None
    if kind == "dtype":
        return tensor.dtype
    if kind == "text":
        _demand(tensor.dtype == torch.uint8 and tensor.dim() == 1, tensors)
        return bytes(tensor.tolist()).decode(errors="replace")
    _demand(tensor.dim() == 0, tensors)
    number = tensor.item()
    if kind in _SEQUENCES:
        _demand(type(number) is int and 0 <= number < len(tensors), tensors)
        return _SEQUENCES[kind](_value(f"{key}:{index}", tensors) for index in range(int(number)))
    _demand(type(number).__name__ == kind, tensors)
    return number


def _demand(holds: bool, keys: Collection[str]) -> None:
    if not holds:
        raise ValueError(
            f"got state entries {', '.join(sorted(keys))[:160]}, expected those of a checkpoint of quantize_state; "
            "load another checkpoint"
        )


def tensor_as_json(key: str, value: Tensor) -> dict[str, Any]:
    """A tensor in an option of a param group as JSON, with its dtype.

    Raises:
        ValueError: the tensor has several elements, or is complex.
    """
    if value.numel() != 1 or value.is_complex():
        raise ValueError(
            f"got {key} of a param group as a tensor of shape {tuple(value.shape)} and {value.dtype}, expected one "
            "real element; save optimizer.state_dict() instead"
        )
    return {"tensor": value.item(), "dtype": str(value.dtype), "shape": list(value.shape)}


def option_from_json(saved: Any, own: Any, key: str) -> Any:
    """The value of an option in a checkpoint, in the form of the present value ``own`` if there is one.

    Raises:
        ValueError: no save wrote this.
    """
    if isinstance(saved, list):
        owns = own if isinstance(own, list | tuple) and len(own) == len(saved) else [None] * len(saved)
        values = [option_from_json(item, present, key) for item, present in zip(saved, owns, strict=True)]
        return tuple(values) if isinstance(own, tuple | None) else values
    try:
        if isinstance(saved, dict):
            dtype = dtype_named(saved["dtype"].removeprefix("torch."))
            if dtype is None:
                raise ValueError("no dtype")
            value = torch.tensor(saved["tensor"], dtype=dtype, device="cpu").reshape(saved["shape"])
            if value.numel() != 1 or (isinstance(own, Tensor) and own.numel() != 1):
                raise ValueError("several elements")
            if isinstance(own, Tensor):  # of the shape that it has: the value will be copied into it
                return _like(own, value)
            return value.item() if key == "lr" else value  # a matter of the run, as torch takes tensors in few loops
        if isinstance(own, Tensor) and own.numel() == 1 and isinstance(saved, int | float):
            return _like(own, torch.tensor(saved, device="cpu"))
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"got {key} as {saved!r:.80}, expected a number; load another checkpoint") from error
    return saved


def _like(own: Tensor, value: Tensor) -> Tensor:
    """A value of one element as a tensor like the present one; ValueError if that can hold whole numbers only."""
    new = value.to(own).reshape(own.shape)
    if not own.is_floating_point() and new.item() != value.item():
        raise ValueError("a fraction")
    return new
