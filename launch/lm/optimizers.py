"""Makes a run's optimizer from the job's options."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import shardopt
from lm.errors import UserError
from lm.options import Config
from shardopt.layout.names import parameter_names
from shardopt.report.memory import owner_of
from shardopt.state.options import DEFAULTS, STATE_FORMAT

Groups = list[dict[str, Any]]
# (class, param groups, options) -> optimizer
Make = Callable[[type[Optimizer], Groups, dict[str, Any]], Optimizer]

# The optimizers, by the values of the option optimizer: update rules with the state's codec.
OPTIMIZERS: Mapping[str, type[Optimizer]] = shardopt.optim.OPTIMIZERS

# Update rules that u-muP's learning rates are for: updates have elements of about lr, weight decay stands apart.
OF_UNIT_SCALING = ("adamw", "stableadamw", "lion")


def rule_of(optimizer: str) -> str:
    """The update rule of an optimizer: "adamw" of "adamw8bit"."""
    return optimizer.removesuffix("8bit").removesuffix("4bit")


def _arguments(kind: type[Optimizer]) -> list[str]:
    """The job's options that an optimizer class takes as arguments of the same names."""
    taken = {*inspect.signature(kind).parameters, *DEFAULTS}
    return [field.name for field in dataclasses.fields(Config) if field.name in taken]


# The job's options that any optimizer class takes.
ARGUMENTS = list(dict.fromkeys(name for kind in OPTIMIZERS.values() for name in _arguments(kind)))


def chosen(config: Config) -> tuple[type[Optimizer], dict[str, Any]]:
    """The optimizer's class and its arguments, without options that are None.

    Raises:
        UserError: an option does not apply to the optimizer.
    """
    kind = OPTIMIZERS[config.optimizer]
    given = {name: value for name in ARGUMENTS if (value := getattr(config, name)) is not None}
    for name in sorted(given.keys() - set(_arguments(kind))):
        raise UserError(f"option {name} does not apply to the optimizer {config.optimizer}")
    return kind, given


def plain(kind: type[Optimizer], groups: Groups, options: dict[str, Any]) -> Optimizer:
    """Makes an optimizer from its param groups and options alone."""
    return kind(groups, **options)  # type: ignore[call-arg]


def build(config: Config, groups: Groups, make: Make = plain) -> Optimizer:
    """Makes the optimizer of some param groups.

    Raises:
        UserError: an option does not apply to the optimizer, or the optimizer refuses its value.
    """
    kind, options = chosen(config)
    try:
        return make(kind, groups, options)
    except ValueError as error:
        raise UserError(f"optimizer {config.optimizer}: {error}") from error


def matrices(model: nn.Module) -> set[str]:
    """The names of the matrices among a bare model's parameters, to which weight decay applies.

    Not all shards have the dimensions of their parameters.
    """
    return {name for name, parameter in model.named_parameters() if parameter.ndim > 1}


def groups(config: Config, module: nn.Module, matrices: Collection[str]) -> Groups:
    """The param groups of a model: parameters with weight decay and without, and for Muon by who steps them.

    In u-muP the learning rates follow from kinds and shapes, and weight decay does not depend on them.
    """
    if config.parametrization == "u-mup":
        return shardopt.param_groups(module, rule="u-mup", lr=config.lr, weight_decay=config.weight_decay)
    names = parameter_names(module)
    if issubclass(OPTIMIZERS[config.optimizer], shardopt.Muon):
        vectors = [name for name in names if name not in matrices]
        return shardopt.muon_groups(module, lr=config.lr, adamw_lr=config.adamw_lr, no_decay=vectors)
    return [
        {"params": [parameter for name, parameter in names.items() if name in matrices]},
        {"params": [parameter for name, parameter in names.items() if name not in matrices], "weight_decay": 0.0},
    ]


def check(config: Config) -> dict[str, Any]:
    """Raises UserError if `build` would, without a model; returns the result of `describe`."""
    parameter = torch.zeros(2, 2, dtype=config.stored, requires_grad=True)
    return describe(config, build(config, [{"params": [parameter]}]))


def describe(config: Config, optimizer: Optimizer) -> dict[str, Any]:
    """The options that lay out the state, as they are in use; a checkpoint loads only into a run that has the same."""
    group = optimizer.param_groups[0]
    layout = {name: group.get(name, getattr(config, name)) for name in STATE_FORMAT}
    return {"optimizer": rule_of(config.optimizer), **layout}


def state_memory(optimizer: Optimizer) -> dict[str, int]:
    """Bytes of weights and optimizer state allocated on this rank, host and device together, and elements."""
    report = shardopt.memory_report(owner_of(optimizer))  # a ZeroRedundancyOptimizer's local optimizer
    kinds = ("parameters", "state", "scales", "master_weights")
    memory = {kind: getattr(report.host, kind) + getattr(report.device, kind) for kind in kinds}
    return {"numel": report.numel, **memory}
