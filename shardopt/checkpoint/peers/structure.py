"""Checks the structure that every optimizer's state dict has, before each package's own form is checked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeGuard

import torch
from torch import Tensor

from shardopt.checkpoint.wording import few, named, shown

_MAX_NESTING = 16


def check_structure(state_dict: Any, hyper: AbstractSet[str]) -> None:
    """Checks containers and their keys, types of hyper-parameters and step counts, and that tensors have numbers.

    Args:
        state_dict: whatever it is.
        hyper: names of the hyper-parameters that will be looked at.

    Raises:
        ValueError: something is of another type.
    """
    fields = state_dict if isinstance(state_dict, Mapping) else {}
    states, groups = fields.get("state"), fields.get("param_groups")
    if not isinstance(states, Mapping) or not _is_list(groups):
        got = f"a state dict with {few(fields)}" if fields else type(state_dict).__name__
        remedy = "pass what an optimizer's state_dict() or get_optimizer_state_dict() gives, not flattened"
        if "optimizer" in fields:
            remedy = "pass its entry 'optimizer'"
        elif isinstance(state_dict, str | os.PathLike):
            got = "a path"
            remedy = "read it with torch.load, torch.distributed.checkpoint.load or safetensors.torch.load_file first"
        raise ValueError(f"got {got}, expected a state dict with state and param_groups; {remedy}")
    for index, group in enumerate(groups):
        _check_group(group, hyper, f"param group {index}")
    for key, state in states.items():
        _check_state(state, f"state of {named(key)}")


def is_dense(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a tensor with all its elements, real numbers, in memory."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_meta or value.is_complex())


def are_floats(value: object) -> TypeGuard[Tensor]:
    """Whether a value is such a tensor of a float dtype."""
    return is_dense(value) and value.dtype.is_floating_point


def _check_group(group: Any, hyper: AbstractSet[str], what: str) -> None:
    if not isinstance(group, Mapping) or not all(isinstance(key, str) for key in group):
        raise ValueError(f"{what}: got {shown(group)}, expected a dict of options; save the state dict again")
    params = group.get("params")
    if not _is_list(params) or not all(isinstance(key, int | str) for key in params):
        raise ValueError(f"{what}: got params as {shown(params)}, expected numbers or names; save the state dict again")
    for key in hyper & group.keys():
        if not _is_plain(group[key], _MAX_NESTING):
            raise ValueError(f"{what}: got {key} as {shown(group[key])}, expected numbers; save the state dict again")


def _check_state(state: Any, what: str, *, wraps: bool = True) -> None:
    """Checks the state of a parameter, which may wrap some of it in one more dict."""
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise ValueError(f"{what}: got {shown(state)}, expected a dict of entries; save the state dict again")
    for key, value in state.items():
        if wraps and isinstance(value, Mapping):
            _check_state(value, f"{what}: {named(key)}", wraps=False)
        elif isinstance(value, Tensor) and not is_dense(value):
            raise ValueError(
                f"{what}: got {named(key)} of {value.dtype} and {value.layout} on {value.device}, expected a dense "
                "tensor of real numbers in memory; convert or load it first"
            )
    step = state.get("step")
    if not (step is None or isinstance(step, int | float) or (isinstance(step, Tensor) and step.numel() == 1)):
        raise ValueError(f"{what}: got step as {shown(step)}, expected a number; save the state dict again")


def _is_plain(value: object, levels: int) -> bool:
    """Whether a value is a number, text or None, or a list of such."""
    if isinstance(value, list | tuple):
        return levels > 0 and all(_is_plain(item, levels - 1) for item in value)
    one = is_dense(value) and value.numel() == 1
    return one or value is None or isinstance(value, int | float | str)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
