"""Registry of kinds of sharding, such as DTensor and FSDP1. Integrations add theirs with :func:`register`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.layout.rank_group import RankGroup
from shardopt.layout.shard import Shard, assigned, keeps_float32_state


class Engines(NamedTuple):
    """Functions for engines, such as DeepSpeed's, that own the optimizer and step master weights outside of the model.

    Attributes:
        name: the engine's kind, for error messages.
        has_optimizer: called with engine and optimizer: is this the one that the engine steps, or a wrapper of it?
        open: returns a context that yields the engine's bare model and the optimizer whose param groups have masters.
        copy_masters: copies masters, after they were loaded, to the parameters that the model computes with.
    """

    name: str
    has_optimizer: Callable[[Any, Optimizer], bool]
    open: Callable[[Any], AbstractContextManager[tuple[Module, Optimizer]]]
    copy_masters: Callable[[Any], None]


class Kind:
    """A kind of sharding. Subclasses override what applies to them; the defaults recognize no tensor and no model."""

    def shard_of(self, param: Tensor) -> Shard | None:
        """Which part of a global parameter a tensor of this kind holds; None for a tensor of another kind."""
        return None

    def read_model(self, model: Module) -> None:
        """Assigns shards to a model's parameters if only the model's metadata describe them, as under FSDP1."""

    def copies_in(self, model: Module) -> Mapping[Tensor, RankGroup]:
        """The ranks that hold copies of a parameter, as under DDP, and may divide work on it; by parameter."""
        return {}

    def engines_of(self, model: Module) -> Engines | None:
        """The functions for a model that is an engine of this kind; None for any other model."""
        return None


_kinds: list[Kind] = []
_whole_shard = lru_cache(8192)(Shard)  # the shard of a parameter that this rank holds in full, by its shape


def register(kind: Kind) -> None:
    """Adds a kind of sharding, which the functions below ask from then on."""
    _kinds.append(kind)


def shard_of(param: Tensor) -> Shard:
    """Which part of a global parameter ``param`` holds: as assigned, else as a registered kind finds, else all of it.

    Raises UnknownShardError if it is a part, and no metadata say which.
    """
    shard = assigned(param)
    for kind in _kinds:
        shard = shard or kind.shard_of(param)
    shard = shard or _whole_shard(tuple(param.shape))
    return shard.with_float32_state() if keeps_float32_state(param) else shard


def read_model(model: Module) -> None:
    """Has all registered kinds assign shards to a model's parameters; see :meth:`Kind.read_model`."""
    for kind in _kinds:
        kind.read_model(model)


def copies_in(model: Module) -> dict[Tensor, RankGroup]:
    """The ranks that hold copies of a model's parameters, by parameter, as registered kinds find them."""
    return {param: copies for kind in _kinds for param, copies in kind.copies_in(model).items()}


def engines_of(model: Module) -> Engines | None:
    """The functions for a model that is an engine of a registered kind; None for any other model."""
    return next((engines for kind in _kinds if (engines := kind.engines_of(model)) is not None), None)
