"""Encodes numbers, texts, dtypes, None, lists and tuples in state entries as tensors.

A tensor keeps its name. Other values have their kind behind it, as ``step:int``; the items of a list ``q`` are ``q:0``,
``q:1`` and so on, beside ``q:list``, which is their number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

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
        found = {f"{key}:{type(value).__name__}": torch.tensor(len(value), device="cpu")}
        for index, item in enumerate(value):
            found.update(_packed(f"{key}:{index}", item))
        return found
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
