"""Engines: models that own their optimizer and keep its parameters elsewhere, as DeepSpeed's do.

Integrations register their engines with :func:`register_engines`, as they register kinds of shards.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch.nn import Module
from torch.optim import Optimizer


class Engines(NamedTuple):
    """Functions for one kind of engine.

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


EnginesFinder = Callable[[Module], Engines | None]
_finders: list[EnginesFinder] = []


def register_engines(finder: EnginesFinder) -> None:
    """Adds a function that recognizes a kind of engine: the functions for it, or None for any other model."""
    _finders.append(finder)


def engines_of(model: Module) -> Engines | None:
    """The functions for a model that is an engine of a registered kind; None for any other model."""
    return next((engines for find in _finders if (engines := find(model)) is not None), None)
