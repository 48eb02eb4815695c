"""Kinds of sharding: what each knows of parameters and models. Integrations register theirs with :func:`register`."""

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
    """Functions for models that own their optimizer and keep its parameters elsewhere, as DeepSpeed's do.

    Attributes:
        name: the kind, for error messages.
        has_optimizer: whether an optimizer is the engine's, or wrapped by the engine's.
        opened: a context with the engine's bare model, and the optimizer with the parameters that it steps.
        refresh: makes the parameters that the model computes with from those that the optimizer steps.
    """

    name: str
    has_optimizer: Callable[[Any, Optimizer], bool]
    opened: Callable[[Any], AbstractContextManager[tuple[Module, Optimizer]]]
    refresh: Callable[[Any], None]


class Kind:
    """A kind of sharding. Subclasses define what applies to them."""

    def shard_of(self, param: Tensor) -> Shard | None:
        """The shard that a parameter of this kind is; None for another tensor."""
        return None

    def read_model(self, model: Module) -> None:
        """Assigns shards to a model's parameters that do not say themselves what shard they are."""

    def copies_in(self, model: Module) -> Mapping[Tensor, RankGroup]:
        """The ranks that hold copies of a model's parameters, by parameter, and may share the work on it."""
        return {}

    def engines_of(self, model: Module) -> Engines | None:
        """The functions for a model that is an engine of this kind; None for any other model."""
        return None


_kinds: list[Kind] = []
_whole = lru_cache(8192)(Shard)  # the shard of a parameter that this rank holds in full, by the parameter's shape


def register(kind: Kind) -> None:
    """Adds a kind of sharding."""
    _kinds.append(kind)


def shard_of(param: Tensor) -> Shard:
    """The shard that ``param`` is.

    Raises:
        UnknownShardError: ``param`` is a part of a parameter, and nothing says which part of which.
    """
    shard = assigned(param)
    for kind in _kinds:
        shard = shard or kind.shard_of(param)
    shard = shard or _whole(tuple(param.shape))
    return shard.with_float32_state() if keeps_float32_state(param) else shard


def read_model(model: Module) -> None:
    """Assigns shards to all parameters of a model that a registered kind knows of."""
    for kind in _kinds:
        kind.read_model(model)


def copies_in(model: Module) -> dict[Tensor, RankGroup]:
    """The ranks that hold copies of a model's parameters, by parameter, as registered kinds find them."""
    return {param: copies for kind in _kinds for param, copies in kind.copies_in(model).items()}


def engines_of(model: Module) -> Engines | None:
    """The functions for a model that is an engine of a registered kind; None for any other model."""
    return next((engines for kind in _kinds if (engines := kind.engines_of(model)) is not None), None)
