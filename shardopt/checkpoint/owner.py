"""The optimizer that a checkpoint saves and loads: the forms of its state, and its param groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.groups import merged
from shardopt.checkpoint.index import StoredTensor
from shardopt.checkpoint.items import Item
from shardopt.checkpoint.wording import few, line, named
from shardopt.layout import FlatShard
from shardopt.optim import ShardedOptimizer
from shardopt.report.memory import owner_of
from shardopt.state.options import DEFAULTS, STATE_FORMAT, check_options
from shardopt.state.slice_spec import SliceSpec
from shardopt.wrapper.entries import OF_QUANTIZE_STATE
from shardopt.wrapper.optimizer import QuantizedState


class Owner:
    """Access to an optimizer's state and param groups for checkpoints.

    Args:
        optimizer: one of shardopt's, of quantize_state, or a wrapper of one; see :func:`owner_of`.

    Attributes:
        groups: all param groups, whether this rank has state of their parameters or not.
        optimizer: the optimizer that has this rank's state; with a ZeroRedundancyOptimizer, the optimizer inside.
        name: the optimizer's name in a checkpoint.

    Raises:
        TypeError: the optimizer is none of these.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        inner = owner_of(optimizer)
        if not isinstance(inner, ShardedOptimizer | QuantizedState):
            raise TypeError(
                f"got an optimizer of {type(optimizer).__name__}, expected one of shardopt's, or the result of "
                "quantize_state; save others with torch.distributed.checkpoint"
            )
        self.groups = optimizer.param_groups
        self.optimizer: Any = inner
        self.internals = inner._internals
        self.name = self.internals.name

    @property
    def group_of(self) -> dict[Tensor, int]:
        """The index of each parameter's group."""
        return {param: index for index, group in enumerate(self.groups) for param in group["params"]}

    def slices(self, param: Tensor, group: int) -> list[tuple[SliceSpec, dict[str, Tensor]]]:
        """Form and entries of the state of each slice of one of the optimizer's tensors: plain tensors.

        Raises:
            CheckpointError: a checkpoint cannot hold an entry.
        """
        try:
            spec, held = self.internals.held(param, self.groups[group])
        except ValueError as error:
            raise CheckpointError(f"a parameter of shape {tuple(param.shape)}: {line(error)}") from error
        states = spec.split(held)
        return [(each.spec, state) for each, state in zip(spec.slices, states, strict=True)]

    def check_saved(self, header: Mapping[str, Any]) -> None:
        """Checks which optimizer a checkpoint is of.

        Raises:
            CheckpointError: this optimizer cannot load the state of that one.
        """
        self._saved_by = header.get("optimizer")
        of_quantize_state = [str(name).startswith(OF_QUANTIZE_STATE) for name in (self._saved_by, self.name)]
        if self._saved_by != self.name and any(of_quantize_state):
            raise CheckpointError(
                f"got the state of {named(self._saved_by)}, expected that of {self.name}; load it into that "
                "optimizer, then load its state_dict(dequantize=True) into this one"
            )

    def merged(self, group: Mapping[str, Any], saved: dict[str, Any], index: int) -> dict[str, Any]:
        """The options of a param group after the load, from those of a checkpoint, which may be damaged.

        Raises:
            CheckpointError: an option is not allowed, or a hyper-parameter is out of range.
        """
        try:
            if isinstance(self.optimizer, QuantizedState):
                self.optimizer._internals.saved_options(saved, ())
            else:
                check_options({**DEFAULTS, **{key: saved[key] for key in STATE_FORMAT if key in saved}})
            new = merged(self.optimizer, group, saved)
        except ValueError as error:
            raise CheckpointError(f"param group {index}: {line(error)}") from error
        return {key: x for key, x in new.items() if key in saved or not self.internals.is_counter(key, x)}

    def forms(
        self,
        item: Item,
        options: Mapping[str, Any],
        saved_options: Mapping[str, Any],
        stored: Mapping[str, StoredTensor],
        dtype: torch.dtype,
    ) -> tuple[SliceSpec | None, SliceSpec]:
        """The forms of a parameter's state: in the checkpoint, None if it has none; and in the optimizer.

        Args:
            item: the parameter.
            options: those of its param group after the load.
            saved_options: those in the checkpoint.
            stored: its state entries in the checkpoint.
            dtype: its dtype in the checkpoint.

        Raises:
            CheckpointError: the checkpoint has entries of another optimizer.
        """
        own = self.internals.form(item.shard, item.local.dtype, options, stored)
        if not stored:
            return None, own
        format_keys = {*STATE_FORMAT, *self.internals.format} & saved_options.keys()
        # State has the same entries with repay and without. With it, some dtypes of saved weights would be refused.
        as_saved = {**options, **{key: saved_options[key] for key in format_keys}, "repay": False}
        saved = self.internals.form(item.shard, dtype, as_saved, stored)
        if stored.keys() != saved.entries.keys():
            raise CheckpointError(
                f"got {few(stored)} of {named(item.name)}, saved by {named(self._saved_by)}, expected "
                f"{', '.join(sorted(saved.entries))} of {self.name}; load it into {named(self._saved_by)}, "
                "or the model alone: load(path, model)"
            )
        return saved, own

    def has_state_here(self, item: Item) -> bool:
        """Whether this rank stores state for a parameter that is stateful elsewhere."""
        return item.local.numel() > 0 or item.segment is not None or not isinstance(item.shard, FlatShard)
