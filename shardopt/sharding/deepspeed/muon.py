"""Muon in DeepSpeed's config: its param groups, and ``use_muon``, with which DeepSpeed marks Muon's parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from glob import escape
from itertools import compress
from typing import Any

from torch.nn import Module

from shardopt.layout.names import parameter_names
from shardopt.optim.muon_groups import muon_groups

_MARK = "use_muon"  # attribute by which DeepSpeed tells Muon's parameters from others


def muon_param_groups(model: Module, given: list[Any], params: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Divides a model's parameters into Muon's and the others, unless the user has made param groups.

    If all parameters have DeepSpeed's mark ``use_muon``, parameters with ``use_muon=False`` are not Muon's.

    Args:
        model: the model.
        given: parameters or param groups.
        params: the config's ``optimizer.params``, which may have arguments of :func:`shardopt.muon_groups`, too.

    Returns:
        Param groups, and the optimizer's other arguments.
    """
    arguments = [name for name in inspect.signature(muon_groups).parameters if name not in ("model", "lr")]
    group_options = {name: params[name] for name in arguments if name in params}
    others = {name: value for name, value in params.items() if name not in group_options}
    if any(isinstance(item, Mapping) for item in given):
        return given, dict(params)
    chosen = {id(param) for param in given}
    if all(hasattr(param, _MARK) for param in given):
        named = parameter_names(model).items()
        unmarked = [escape(name) for name, param in named if not getattr(param, _MARK, False)]
        group_options["exclude"] = [*group_options.get("exclude", ()), *unmarked]
    groups = muon_groups(model, **({"lr": params["lr"]} if "lr" in params else {}), **group_options)
    for group in groups:
        kept = [id(param) in chosen for param in group["params"]]
        for key in ("params", "param_names"):
            group[key] = list(compress(group[key], kept))
    return [group for group in groups if group["params"]], others


def clear_muon_marks(model: Module) -> None:
    """Sets DeepSpeed's ``use_muon`` marks to False: ZeRO would itself orthogonalize marked parameters' gradients."""
    for param in model.parameters():
        if getattr(param, _MARK, False):
            setattr(param, _MARK, False)
