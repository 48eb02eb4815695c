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
from lm.precision import PRECISIONS
from shardopt.layout.names import parameter_names
from shardopt.report.memory import owner_of
from shardopt.state.options import DEFAULTS, STATE_FORMAT

Groups = list[dict[str, Any]]
# (class, param groups, options, the wrapped model) -> optimizer
Make = Callable[[type[Optimizer], Groups, dict[str, Any], nn.Module], Optimizer]

# The optimizers, by the values of the option optimizer: update rules with the state's codec.
OPTIMIZERS: Mapping[str, type[Optimizer]] = shardopt.optim.OPTIMIZERS

# Update rules that u-muP's learning rates are for: updates have elements of about lr, weight decay stands apart.
OF_UNIT_SCALING = ("adamw", "stableadamw", "lion")

# Options that lay out the state; a checkpoint loads only into a run that agrees on them.
STATE_OPTIONS = ("optimizer", *STATE_FORMAT)


def rule_of(optimizer: str) -> str:
    """The update rule of an optimizer: "adamw" of "adamw8bit"."""
    return optimizer.removesuffix("8bit").removesuffix("4bit")


def arguments(kind: type[Optimizer]) -> list[str]:
    """The job's options that an optimizer class takes as arguments of the same names."""
    taken = {*inspect.signature(kind).parameters, *DEFAULTS}
    return [field.name for field in dataclasses.fields(Config) if field.name in taken]


def all_arguments() -> list[str]:
    """The job's options that any optimizer class takes."""
    return list(dict.fromkeys(name for kind in OPTIMIZERS.values() for name in arguments(kind)))


def plain(kind: type[Optimizer], groups: Groups, options: dict[str, Any], module: nn.Module) -> Optimizer:
    """Makes an optimizer from its param groups and options alone."""
    return kind(groups, **options)  # type: ignore[call-arg]


def build(config: Config, module: nn.Module, matrices: Collection[str], make: Make) -> Optimizer:
    """Makes the optimizer over a model.

    Args:
        config: the options.
        module: the model as the backend wrapped it.
        matrices: :func:`matrices` of the bare model, because not all shards have the dimensions of their parameters.
        make: makes the optimizer.

    Raises:
        UserError: an option does not apply to the optimizer, or the optimizer refuses its value.
    """
    kind, options = chosen(config)
    return _explained(config, lambda: make(kind, groups(config, module, matrices), options, module))


def matrices(model: nn.Module) -> set[str]:
    """The names of the matrices among the parameters, to which weight decay applies."""
    return {name for name, parameter in model.named_parameters() if parameter.ndim > 1}


def groups(config: Config, module: nn.Module, matrices: Collection[str]) -> Groups:
    """The param groups of a model: parameters with weight decay and without, and for muon by who steps them.

    In u-muP the learning rates follow from kinds and shapes, and weight decay does not depend on them.
    """
    if config.parametrization == "u-mup":
        return shardopt.param_groups(module, rule="u-mup", lr=config.lr, weight_decay=config.weight_decay)
    if rule_of(config.optimizer) == "muon":
        vectors = [name for name in parameter_names(module) if name not in matrices]
        return shardopt.muon_groups(module, lr=config.lr, adamw_lr=config.adamw_lr, no_decay=vectors)
    found: Groups = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in parameter_names(module).items():
        found[name not in matrices]["params"].append(parameter)
    return found


def check(config: Config) -> dict[str, Any]:
    """Raises UserError if `build` would, without a model; returns the result of `describe`."""
    parameter = torch.zeros(2, 2, dtype=PRECISIONS[config.precision].stored, requires_grad=True)
    kind, options = chosen(config)
    optimizer = _explained(config, lambda: plain(kind, [{"params": [parameter]}], options, nn.Module()))
    return describe(config, optimizer.param_groups)


def chosen(config: Config) -> tuple[type[Optimizer], dict[str, Any]]:
    """The optimizer's class and its arguments, without options that are None.

    Raises:
        UserError: an option does not apply to the optimizer.
    """
    kind = OPTIMIZERS[config.optimizer]
    given = {name: value for name in all_arguments() if (value := getattr(config, name)) is not None}
    for name in sorted(given.keys() - set(arguments(kind))):
        raise UserError(f"option {name} does not apply to the optimizer {config.optimizer}")
    return kind, given


def _explained(config: Config, make: Callable[[], Optimizer]) -> Optimizer:
    try:
        return make()
    except ValueError as error:
        raise UserError(f"optimizer {config.optimizer}: {error}") from error


def describe(config: Config, param_groups: Groups) -> dict[str, Any]:
    """The values of `STATE_OPTIONS` in use, with defaults filled in."""
    group = param_groups[0]
    return {
        name: rule_of(config.optimizer) if name == "optimizer" else group.get(name, getattr(config, name))
        for name in STATE_OPTIONS
    }


def state_memory(optimizer: Optimizer) -> dict[str, int]:
    """Bytes of weights and optimizer state allocated on this rank, host and device together, and elements."""
    report = shardopt.memory_report(owner_of(optimizer))  # a ZeroRedundancyOptimizer's local optimizer
    kinds = ("parameters", "state", "scales", "master_weights")
    memory = {kind: getattr(report.host, kind) + getattr(report.device, kind) for kind in kinds}
    return {"numel": report.numel, **memory}
