"""The optimizer of a run, from its options."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import shardopt
from lm.errors import UserError
from lm.options import Config
from shardopt.layout.names import parameter_names
from shardopt.optim.memory import owner_of
from shardopt.optim.options import DEFAULTS, STATE_FORMAT

Groups = list[dict[str, Any]]
# (class, param groups, options, the wrapped model) -> optimizer
Make = Callable[[type[Optimizer], Groups, dict[str, Any], nn.Module], Optimizer]

# The update rules.
OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adamw": shardopt.AdamW,
    "adam": shardopt.Adam,
    "sgd": shardopt.SGD,
    "lion": shardopt.Lion,
}

# A checkpoint loads only where these options, which lay out the state, agree.
STATE_OPTIONS = ("optimizer", *STATE_FORMAT)


def arguments(kind: type[Optimizer]) -> list[str]:
    """The job's options that an optimizer's class takes, under the same names."""
    taken = {*inspect.signature(kind).parameters, *DEFAULTS}
    return [field.name for field in dataclasses.fields(Config) if field.name in taken]


def all_arguments() -> list[str]:
    """The job's options that some optimizer's class takes."""
    return list(dict.fromkeys(name for kind in OPTIMIZERS.values() for name in arguments(kind)))


def plain(kind: type[Optimizer], groups: Groups, options: dict[str, Any], module: nn.Module) -> Optimizer:
    """Makes an optimizer that needs to know no more than its parameters."""
    return kind(groups, **options)  # type: ignore[call-arg]


def build(config: Config, module: nn.Module, matrices: Collection[str], make: Make) -> Optimizer:
    """Makes the optimizer over a model.

    Args:
        config: the options.
        module: the model as the backend wrapped it.
        matrices: what :func:`matrices` said of the bare model. Shards do not all show what they are of.
        make: makes it.

    Raises:
        UserError: an option that the rule does not have, or a value that it refuses.
    """
    kind, options = chosen(config)
    return _explained(config, lambda: make(kind, groups(module, matrices), options, module))


def matrices(model: nn.Module) -> set[str]:
    """The names of the parameters that decay."""
    return {name for name, parameter in model.named_parameters() if parameter.ndim > 1}


def groups(module: nn.Module, matrices: Collection[str]) -> Groups:
    """The param groups of a model: what decays, and what does not."""
    found: Groups = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in parameter_names(module).items():
        found[name not in matrices]["params"].append(parameter)
    return found


def check(config: Config) -> dict[str, Any]:
    """Raises UserError where `build` would, without a model; returns what `describe` would."""
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    parameter = torch.zeros(2, 2, dtype=dtype, requires_grad=True)
    kind, options = chosen(config)
    optimizer = _explained(config, lambda: plain(kind, [{"params": [parameter]}], options, nn.Module()))
    return describe(config, optimizer.param_groups)


def chosen(config: Config) -> tuple[type[Optimizer], dict[str, Any]]:
    """The optimizer's class and its options, those that were left to it aside.

    Raises:
        UserError: an option that the rule does not have.
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
    """The values of `STATE_OPTIONS` in force, defaults filled in."""
    group = param_groups[0]
    return {
        name: config.optimizer if name == "optimizer" else group.get(name, getattr(config, name))
        for name in STATE_OPTIONS
    }


def state_memory(optimizer: Optimizer) -> dict[str, int]:
    """Bytes of weights and optimizer state allocated on this rank, host and device together, and elements."""
    report = shardopt.memory_report(owner_of(optimizer))  # what a ZeroRedundancyOptimizer has here
    kinds = ("parameters", "state", "scales", "master_weights")
    memory = {kind: getattr(report.host, kind) + getattr(report.device, kind) for kind in kinds}
    return {"numel": report.numel, **memory}
