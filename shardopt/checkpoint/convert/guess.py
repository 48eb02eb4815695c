"""The class of an optimizer, where a checkpoint does not name it: by options and entries."""

from __future__ import annotations

from typing import Any

import torch

from shardopt import optim
from shardopt.checkpoint.convert.recoding import Entries, forms
from shardopt.checkpoint.convert.stream import Checkpoint
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.wording import few
from shardopt.optim import ShardedOptimizer
from shardopt.state.options import DEFAULTS

#: Before others that would read the same state in the same way.
_FIRST = ("AdamW", "SGD", "Lion")


def class_of_entries(checkpoint: Checkpoint, entries: Entries) -> str:
    """The class whose options a checkpoint's param groups have, and whose state has these entries.

    Classes that would read the state in the same way count as one: the first of them is named.

    Raises:
        CheckpointError: there is none, or there are several that would read it differently.
    """
    keys: set[str] = set().union(*(group["options"].keys() for group in checkpoint.groups)) - DEFAULTS.keys()
    found: dict[str, Any] = {}
    rules = [kind for kind in optim.OPTIMIZERS.values() if kind.default_codec == "fp32"]
    for name in sorted(rules, key=lambda kind: (kind.__name__ not in _FIRST, kind.__name__)):
        if keys - {"initial_lr"} != _own_options(name):
            continue
        trial = Checkpoint(checkpoint.path, name.__name__, checkpoint.groups, tensors=checkpoint.tensors)
        try:
            of_class = forms(trial, checkpoint.groups, list(entries))
        except CheckpointError:
            continue
        if all(form.entries.keys() == entries[key].keys() for key, form in of_class.items()):
            found[name.__name__] = {key: (form.moments, form.codec) for key, form in of_class.items()}
    if not found or any(each != next(iter(found.values())) for each in found.values()):
        raise CheckpointError(
            f"{checkpoint.path}: got the state of {few(found) or 'an unknown optimizer'}, whose class the checkpoint "
            "does not name, expected one that its options and entries tell; name the class with --optimizer"
        )
    return next(iter(found))


def class_defaults(kind: type[ShardedOptimizer]) -> dict[str, Any]:
    """The options of a class, with their defaults."""
    made = kind([torch.empty(1, 1, device="meta")])  # type: ignore[call-arg]  # subclasses have defaults
    return made.defaults


def _own_options(kind: type[ShardedOptimizer]) -> set[str]:
    return set(class_defaults(kind)) - DEFAULTS.keys()
