"""The optimizer that a checkpoint saves and loads: the forms of its state, and its param groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.groups import SavedGroup, describe, merged_from
from shardopt.checkpoint.index import StoredTensor
from shardopt.checkpoint.items import Chunks, Item
from shardopt.checkpoint.wording import few, named
from shardopt.layout import FlatShard
from shardopt.optim import ShardedOptimizer
from shardopt.state.options import STATE_FORMAT
from shardopt.state.slice_spec import SliceSpec
from shardopt.state.tensor_state import TensorState

_CPU = torch.device("cpu")

#: Prefix of the optimizer's name in checkpoints of quantize_state.
OF_QUANTIZE_STATE = "quantize_state of "


class Owner:
    """Access to an optimizer's state and param groups for checkpoints. This class is for shardopt's own optimizers.

    Args:
        groups: all param groups, whether this rank has state of their parameters or not.
        optimizer: the optimizer that has this rank's state; with a ZeroRedundancyOptimizer, the optimizer inside.
    """

    #: Whether the parameters in a flat buffer have a single step count.
    one_step_count = True

    #: Whether all entries of the state are known before a checkpoint is read.
    has_fixed_entries = True

    def __init__(self, groups: list[dict[str, Any]], optimizer: ShardedOptimizer) -> None:
        self.groups = groups
        self.optimizer: Any = optimizer

    @property
    def name(self) -> str:
        """The optimizer's name in a checkpoint."""
        return type(self.optimizer).__name__

    @property
    def group_of(self) -> dict[Tensor, int]:
        """The index of each parameter's group."""
        return {param: index for index, group in enumerate(self.groups) for param in group["params"]}

    def synchronize(self) -> None:
        """Waits until the state is complete."""
        self.optimizer.synchronize()

    def slices(self, param: Tensor, group: int) -> list[tuple[SliceSpec, dict[str, Tensor]]]:
        """Form and entries of the state of each slice of one of the optimizer's tensors: plain tensors.

        Raises:
            CheckpointError: a checkpoint cannot hold an entry.
        """
        spec = self.optimizer._internals.state_of(param, self.groups[group])
        states = spec.split(self.optimizer.state.get(param, {}))
        return [(each.spec, state) for each, state in zip(spec.slices, states, strict=True)]

    def describe(self, group: Mapping[str, Any], names: Sequence[str]) -> SavedGroup:
        """A param group as JSON; see :func:`shardopt.checkpoint.groups.describe`."""
        return describe(group, names)

    def common_chunks(self) -> dict[str, Chunks]:
        """State that belongs to no parameter, by entry."""
        return {}

    def check_saved(self, header: Mapping[str, Any], entries: Mapping[str, Mapping[str, StoredTensor]]) -> None:
        """Checks which optimizer a checkpoint is of.

        The key "" of ``entries`` has state that belongs to no parameter.

        Raises:
            CheckpointError: this optimizer cannot load the state of that one.
        """
        self._saved_by = header.get("optimizer")
        if is_of_quantize_state(self._saved_by):
            raise CheckpointError(
                f"got the state of {named(self._saved_by)}, expected that of {self.name}; load it into that "
                "optimizer, then load its state_dict(dequantize=True) into this one"
            )

    def merged(self, group: Mapping[str, Any], saved: dict[str, Any], index: int) -> dict[str, Any]:
        """The options of a param group after the load; see :func:`shardopt.checkpoint.groups.merged`.

        Raises:
            CheckpointError: an option is not allowed, or a hyper-parameter is out of range.
        """
        return merged_from(self.optimizer, group, saved, index)

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
        moments = self.optimizer.rule(options).moments
        own = SliceSpec.of(item.shard, item.local.dtype, options, moments)
        if not stored:
            return None, own
        as_saved = {key: saved_options.get(key, options[key]) for key in STATE_FORMAT}
        # State has the same entries with repay and without. With it, some dtypes of saved weights would be refused.
        saved = SliceSpec.of(item.shard, dtype, {**options, **as_saved, "repay": False}, moments)
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

    def placed(
        self, param: Tensor, options: Mapping[str, Any], states: Sequence[dict[str, Tensor]]
    ) -> tuple[TensorState, dict[str, Any]]:
        """The new state of one of the optimizer's tensors, on its devices, with its form.

        Args:
            param: the tensor.
            options: those of its param group after the load.
            states: the entries of each slice, as they were read; none for a slice that was saved without state.
        """
        internals = self.optimizer._internals
        spec, where = internals.state_of(param, options), internals.residency.of(param)
        of_slices = [state or each.spec.new(_CPU) for state, each in zip(states, spec.slices, strict=True)]
        return spec, spec.join(
            [{k: x.to(where.steps if k == "step" else where.state) for k, x in state.items()} for state in of_slices]
        )

    def put(self, param: Tensor, placed: Any) -> None:
        """Gives one of the optimizer's tensors its new state, which :meth:`placed` has made."""
        spec, state = placed
        self.optimizer.state[param] = state
        self.optimizer._internals.residency.put(param, spec, state)

    def check_common(self, common: Mapping[str, Tensor]) -> None:
        """Checks the state that belongs to no parameter, before :meth:`finish` gets it.

        Raises:
            ValueError: no checkpoint has such state.
        """

    def finish(self, common: Mapping[str, Tensor]) -> None:
        """Ends a load, given the state that belongs to no parameter as :meth:`common_chunks` had it."""
        self.optimizer._internals.forget_tables(anew=True)


def is_of_quantize_state(name: object) -> bool:
    """Whether a checkpoint's optimizer of this name is the result of quantize_state."""
    return isinstance(name, str) and name.startswith(OF_QUANTIZE_STATE)
