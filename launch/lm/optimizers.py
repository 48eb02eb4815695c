"""The optimizer of a run, from its options."""

from __future__ import annotations

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

Groups = list[dict[str, Any]]
# (class, param groups, options, the wrapped model) -> optimizer
Make = Callable[[type[Optimizer], Groups, dict[str, Any], nn.Module], Optimizer]

# Each update rule with the options that are its own.
OPTIMIZERS: dict[str, tuple[type[Optimizer], tuple[str, ...]]] = {
    "adamw": (shardopt.AdamW, ("betas", "eps")),
    "adam": (shardopt.Adam, ("betas", "eps")),
    "sgd": (shardopt.SGD, ("momentum", "dampening", "nesterov")),
    "lion": (shardopt.Lion, ("betas",)),
}

# The options that every rule has.
SHARED_OPTIONS = (
    "weight_decay",
    "codec",
    "block_size",
    "min_quantized_numel",
    "master_weight_bits",
    "stochastic_rounding",
    "stochastic_rounding_seed",
    "offload",
    "device_state_budget",
    "pin_memory",
    "nonfinite",
)

# What lays out the state: a checkpoint loads only where these agree.
STATE_OPTIONS = ("optimizer", "codec", "block_size", "min_quantized_numel", "master_weight_bits")


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
    rule, own_options = OPTIMIZERS[config.optimizer]
    everyones = {name for _, names in OPTIMIZERS.values() for name in names}
    for name in sorted(everyones - set(own_options)):
        if getattr(config, name) is not None:
            raise UserError(f"option {name} does not apply to the optimizer {config.optimizer}")
    options = {name: getattr(config, name) for name in (*own_options, *SHARED_OPTIONS)}
    return rule, {"lr": config.lr, **{name: value for name, value in options.items() if value is not None}}


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
