"""The optimizer of a run, from its options."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import shardopt
from lm.backends import BACKENDS, Groups
from lm.errors import UserError
from shardopt.layout.names import parameter_names

if TYPE_CHECKING:
    from lm.config import Config

# Each update rule with the options that are its own.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], tuple[str, ...]]] = {
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
    "offload",
    "nonfinite",
)

# What lays out the state: a checkpoint loads only where these agree.
STATE_OPTIONS = ("optimizer", "codec", "block_size", "min_quantized_numel", "master_weight_bits")


def build(config: Config, model: nn.Module, matrices: Collection[str]) -> torch.optim.Optimizer:
    """Makes the optimizer over `model`.

    Args:
        config: the options.
        model: as the backend wrapped it.
        matrices: the names, in the bare model, of the parameters that decay. Shards do not all show what they are of.

    Raises:
        UserError: an option that the rule does not have, or a value that it refuses.
    """
    groups: Groups = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in parameter_names(model).items():
        groups[name not in matrices]["params"].append(parameter)
    make = BACKENDS[config.backend].optimizer
    return _build(config, lambda kind, options: make(kind, groups, options, model))


def check(config: Config) -> dict[str, Any]:
    """Raises UserError where `build` would, without a model; returns what `describe` would."""
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    parameter = torch.zeros(2, 2, dtype=dtype, requires_grad=True)
    return describe(config, _build(config, lambda kind, options: kind([parameter], **options)))


def _build(
    config: Config, make: Callable[[type[torch.optim.Optimizer], dict[str, Any]], torch.optim.Optimizer]
) -> torch.optim.Optimizer:
    rule, own_options = OPTIMIZERS[config.optimizer]
    everyones = {name for _, names in OPTIMIZERS.values() for name in names}
    for name in sorted(everyones - set(own_options)):
        if getattr(config, name) is not None:
            raise UserError(f"option {name} does not apply to the optimizer {config.optimizer}")
    options = {name: getattr(config, name) for name in (*own_options, *SHARED_OPTIONS)}
    options = {name: value for name, value in options.items() if value is not None}
    try:
        return make(rule, {"lr": config.lr, **options})
    except ValueError as error:
        raise UserError(f"optimizer {config.optimizer}: {error}") from error


def describe(config: Config, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The values of `STATE_OPTIONS` in force, defaults filled in."""
    group = optimizer.param_groups[0]
    return {
        name: config.optimizer if name == "optimizer" else group.get(name, getattr(config, name))
        for name in STATE_OPTIONS
    }


def state_memory(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of optimizer state allocated on this rank, host and device together, and elements."""
    report = shardopt.memory_report(getattr(optimizer, "optim", optimizer))  # what a ZeroRedundancyOptimizer has here
    kinds = ("state", "scales", "master_weights")
    memory = {kind: getattr(report.host, kind) + getattr(report.device, kind) for kind in kinds}
    return {"numel": report.numel, **memory}
