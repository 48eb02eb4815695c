"""Loads a checkpoint in steps: validates and reads to host memory, builds the new state, then changes the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.checkpoint.contents import Owner, aliases_in, buffers_of, items_of, names_by_group
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.groups import apply, merged, saved_options
from shardopt.checkpoint.index import Index, StoredTensor
from shardopt.checkpoint.items import Chunks, Item, chunks_of, model_key, tensors_of
from shardopt.checkpoint.reading import read_tensors
from shardopt.checkpoint.storage import Folder
from shardopt.checkpoint.wording import few, first_of, line, named, shown
from shardopt.kernels.dispatch import DTYPES
from shardopt.layout import FlatShard
from shardopt.state.encoding import FloatMoments, encode_slices, sharing_ranks
from shardopt.state.options import DEFAULTS, STATE_FORMAT, check_options
from shardopt.wrapper.entries import WRAPPED_PREFIX
from shardopt.wrapper.optimizer import QuantizedState

_CPU = torch.device("cpu")


class Restoration:
    """The load of a checkpoint into a model and an optimizer, on one rank.

    Call :meth:`read`, :meth:`make_states` and :meth:`commit`. Only :meth:`commit` changes model and optimizer.

    Raises:
        CheckpointError: shardopt.checkpoint.save did not write the checkpoint, or the optimizer is not the model's.
        TypeError: the optimizer is neither shardopt's nor of quantize_state.
    """

    def __init__(self, folder: Folder, index: Index, model: Module, optimizer: Optimizer | None) -> None:
        self._folder, self._index = folder, index
        if "extra" not in index.header:
            raise CheckpointError(
                f"{folder}: got a checkpoint without 'extra' in its header, expected one written by "
                "shardopt.checkpoint.save; pass the path that save() was given"
            )
        self._owner = None if optimizer is None else Owner.of(optimizer)
        self._items = items_of(model, self._owner)
        self._all = [*self._items, *buffers_of(model)]
        self._saved_names = [name for name in index.tensors if name.startswith("model.")]
        #: Tied weights that were saved under several names, as by pipeline stages: alias to main name. Must be equal.
        self._equal = {
            alias: name
            for alias, name in aliases_in(model, self._items).items()
            if {model_key(alias), model_key(name)} <= index.tensors.keys()
        }
        aliases, names = index.header.get("aliases", {}), {item.name for item in self._items}
        for item in self._items:
            # Tied weights of the saved model may be in the checkpoint under another of their names.
            saved_as = aliases.get(item.name)
            if model_key(item.name) not in index.tensors and saved_as is not None and saved_as not in names:
                item.name = saved_as

    @property
    def claimed(self) -> bytes:
        """A bitmap, to be all-gathered, of the checkpoint's model tensors that the model has on this rank."""
        names = {model_key(name) for name in (*(item.name for item in self._all), *self._equal)}
        return np.packbits(np.array([name in names for name in self._saved_names], dtype=np.bool_)).tobytes()

    def read(self, claimed: Sequence[bytes], *, convert: bool) -> None:
        """Reads this rank's part to host memory, validates it and converts weights; ``claimed`` has all ranks' bitmaps.

        Raises:
            CheckpointError: the checkpoint is damaged, is of another model or optimizer, needs a conversion without
                `convert`, or has options or state that are out of range.
        """
        self._plan(claimed, convert=convert)
        read_tensors(self._folder, self._index, self._tensors())
        self._check_aliases()
        for item in self._items:
            self._check_values(item)
        self._check_steps()
        for item in self._items:
            item.convert_weights()
        #: Moments that ranks encode together, as they share blocks. Decoded here, where no rank waits for another.
        self._shared = [
            (item, FloatMoments(item.spec, item.moments(), item.name))
            for item in self._items
            if item.spec is not None and item.state_conversion and sharing_ranks(item.spec) is not None
        ]

    def _plan(self, claimed: Sequence[bytes], *, convert: bool) -> None:
        """Validates the index against the model, allocates the memory to read into, and plans conversions."""
        self._check_model(claimed)
        self._entries: dict[str, dict[str, StoredTensor]] = {}
        for key, stored in self._index.tensors.items():
            name, dot, entry = key.removeprefix("optimizer.").rpartition(".")
            if key.startswith("optimizer.") and dot:
                self._entries.setdefault(name, {})[entry] = stored
        self._options, saved_groups = self._merged_options()
        self._owned = [p for g in self._owner.optimizer.param_groups for p in g["params"]] if self._owner else []
        self._owned_ids = {id(param) for param in self._owned}
        extra = {name: stored for name, stored in self._index.tensors.items() if name.startswith("extra.")}
        for item in self._items:
            self._plan_item(item, saved_groups)
        for item in self._all[len(self._items) :]:
            item.values = torch.empty(item.local.shape, dtype=item.local.dtype, device="cpu")
        self.converted = {item.name: conversion for item in self._items if (conversion := item.conversion)}
        if self.converted and not convert:
            name, conversion = next(iter(self.converted.items()))
            raise CheckpointError(
                f"{self._folder}: got {conversion} for {named(name)} and {len(self.converted) - 1} other parameters, "
                "expected the optimizer's and model's own; make them alike, or convert with load(..., convert=True)"
            )
        by_name = {item.name: item for item in self._items}
        #: For each name in ``_equal``: the item with the main name, and memory to read the alias into.
        self._aliases = {
            alias: (by_name[name], torch.empty_like(by_name[name].values)) for alias, name in self._equal.items()
        }
        with self._in_memory():
            self._extra_tensors = {
                name.removeprefix("extra."): torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
                for name, stored in extra.items()
            }

    @property
    def extra(self) -> dict[str, Any]:
        """The ``extra`` values that were saved, with their tensors; complete after :meth:`read`."""
        return {**self._index.header["extra"], **self._extra_tensors}

    def _tensors(self) -> dict[str, Chunks]:
        """The memory to read into, by the names in the checkpoint; checks that the saved dtypes and shapes fit."""
        tensors: dict[str, Chunks] = {}
        for item in self._all:
            tensors |= tensors_of(item, item.values, item.saved, item.state)
        for alias, (item, values) in self._aliases.items():
            tensors[model_key(alias)] = chunks_of(item.shard, values)
        for name, values in self._extra_tensors.items():
            tensors[f"extra.{name}"] = Chunks.whole(values)
        for name, target in tensors.items():
            stored = self._index.tensors[name]
            if (stored.dtype, stored.shape) != (target.dtype, target.shape):
                raise CheckpointError(
                    f"{self._folder}: got {named(name)} of {stored.dtype} and shape {shown(stored.shape)}, expected "
                    f"{target.dtype} and {target.shape}; load another checkpoint"
                )
        return tensors

    def make_states(self) -> None:
        """Builds the optimizer's new state, encoded in its codec and on its devices. All ranks must call this.

        Raises:
            CheckpointError: the state could not be made.
        """
        shared, self._shared = self._shared, []
        sharing = dict.fromkeys(sharing_ranks(floats.spec) for _, floats in shared)
        rank_groups = [ranks for ranks in sharing if ranks is not None]
        encoded = encode_slices([floats for _, floats in shared], rank_groups)
        encoded_by_item = {id(item): state for (item, _), state in zip(shared, encoded, strict=True)}
        del shared
        for item in self._items:
            if item.spec is None or item.saved is None or not item.state_conversion:
                continue
            state = {key: x for key, x in item.state.items() if key not in item.saved.moment_entries}
            if id(item) in encoded_by_item:
                state |= encoded_by_item[id(item)] or {}
            elif (moments := item.moments()) is not None:
                state |= item.spec.encode(moments)
            item.saved, item.state = item.spec, state
            self._check_values(item)
        self._states: dict[Tensor, Any] = {}
        items_by_param: dict[Tensor, list[Item]] = {}
        for item in self._items:
            items_by_param.setdefault(item.param, []).append(item)
        for param in self._owned:
            if any(item.state for item in items_by_param[param]):
                self._states[param] = self._placed(param, items_by_param[param])

    def _placed(self, param: Tensor, items: Sequence[Item]) -> Any:
        """Builds the optimizer's state of a parameter or flat buffer, on its device, from the state of its items."""
        assert self._owner is not None
        assert items[0].group is not None
        return self._owner.internals.state_from_checkpoint(
            param, self._options[items[0].group], [item.state for item in items]
        )

    def commit(self) -> None:
        """Copies into parameters and buffers, sets the param groups' options, and assigns the state that was built."""
        with torch.no_grad():
            for item in self._all:
                item.local.copy_(item.values)
        if self._owner is None:
            return
        # A ZeroRedundancyOptimizer's param groups are other dicts than those of its inner optimizer: set both.
        for group, inside, new in zip(
            self._owner.groups, self._owner.optimizer.param_groups, self._options, strict=True
        ):
            dropped = group.keys() - new.keys()
            for each in (group,) if inside is group else (group, inside):
                apply(each, new, dropped)
        for param in self._owned:
            if param in self._states:
                self._owner.internals.install(param, self._states[param])
            else:
                self._owner.optimizer.state.pop(param, None)
        self._owner.internals.forget_tables(anew=True)

    def _check_model(self, claimed: Sequence[bytes]) -> None:
        """Checks that the checkpoint has all of this rank's tensors, in their shapes, and none that no rank has."""
        own_shapes = {model_key(item.name): item.shard.global_shape for item in self._all}
        saved = {name: self._index.tensors[name].shape for name in self._saved_names}
        bits = np.bitwise_or.reduce([np.frombuffer(of_rank, dtype=np.uint8) for of_rank in claimed])
        wanted = np.unpackbits(bits, count=len(saved))
        missing = sorted(own_shapes.keys() - saved.keys())
        unexpected = sorted(name for name, is_wanted in zip(saved, wanted, strict=True) if not is_wanted)
        other = sorted(name for name in own_shapes.keys() & saved.keys() if own_shapes[name] != saved[name])
        if missing or unexpected or other:
            shapes = first_of([f"{named(name)} {shown(saved[name])} and {shown(own_shapes[name])}" for name in other])
            differences = [
                f"the checkpoint does not have {few(missing)}" if missing else "",
                f"the model does not have {few(unexpected)}" if unexpected else "",
                f"shapes saved and in the model differ: {shapes}" if other else "",
            ]
            raise CheckpointError(
                f"{self._folder}: got a checkpoint of another model: {'; '.join(filter(None, differences))}; expected "
                "the model that was saved: build it with the same sizes and names"
            )

    def _merged_options(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """For each param group: its options after the load, and the options with which its parameters were saved."""
        if self._owner is None:
            return [], []
        if self._index.header.get("param_groups") is None:
            raise CheckpointError(
                f"{self._folder}: got a checkpoint without an optimizer, expected one; load it without optimizer"
            )
        saved_by, own = self._index.header.get("optimizer"), self._owner.internals.name
        if saved_by != own and any(str(name).startswith(WRAPPED_PREFIX) for name in (saved_by, own)):
            raise CheckpointError(
                f"{self._folder}: got the state of {named(saved_by)}, expected that of {own}; load it into that "
                "optimizer, then load its state_dict(dequantize=True) into this one"
            )
        names = names_by_group(self._items, len(self._owner.groups))
        with self._naming():
            saved = saved_options(self._index.header["param_groups"], names)
        new = []
        for index, group in enumerate(self._owner.groups):
            with self._naming(f"param group {index}: "):
                new.append(self._merged(group, saved[index]) if names[index] else dict(group))
        return new, saved

    def _merged(self, group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        """Validates a param group's saved options, and returns its options after the load."""
        assert self._owner is not None
        optimizer, internals = self._owner.optimizer, self._owner.internals
        if isinstance(optimizer, QuantizedState):
            optimizer._internals.checkpoint_options(saved, ())
        else:
            check_options({**DEFAULTS, **{key: saved[key] for key in STATE_FORMAT if key in saved}})
        new = merged(optimizer, group, saved)
        return {key: x for key, x in new.items() if key in saved or not internals.is_counter(key, x)}

    @contextmanager
    def _naming(self, what: str = "") -> Iterator[None]:
        """Turns errors in the checkpoint's content into a CheckpointError that begins with its path, then ``what``."""
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{self._folder}: {what}{error}") from error
        except ValueError as error:
            raise CheckpointError(f"{self._folder}: {what}{line(error)}") from error

    def _plan_item(self, item: Item, saved_groups: Sequence[Mapping[str, Any]]) -> None:
        """Allocates memory to read a parameter and its state into, and sets its formats ``spec`` and ``saved``."""
        dtype = self._index.tensors[model_key(item.name)].dtype
        if dtype != item.local.dtype and not {dtype, item.local.dtype} <= DTYPES.keys():
            raise CheckpointError(
                f"{self._folder}: got {named(item.name)} of {dtype}, expected {item.local.dtype}; only "
                f"{', '.join(map(str, DTYPES))} can be converted into each other"
            )
        item.values = torch.empty(item.local.shape, dtype=dtype, device="cpu")
        item.state = {}
        if self._owner is None or item.group is None:
            return
        stored, internals = self._entries.get(item.name, {}), self._owner.internals
        options, saved_options = self._options[item.group], saved_groups[item.group]
        with self._naming():
            item.spec = internals.spec_of_entries(item.shard, item.local.dtype, options, stored)
            if not stored:
                return
            of_state = {key: saved_options[key] for key in {*STATE_FORMAT, *internals.format} & saved_options.keys()}
            # Entries do not depend on repay, which would refuse some dtypes of weights here.
            saved = internals.spec_of_entries(item.shard, dtype, {**options, **of_state, "repay": False}, stored)
            if stored.keys() != saved.entries.keys():
                saved_by = named(self._index.header.get("optimizer"))
                raise CheckpointError(
                    f"got {few(stored)} of {named(item.name)}, saved by {saved_by}, expected "
                    f"{', '.join(sorted(saved.entries))} of {internals.name}; load it into {saved_by}, or the model "
                    "alone: load(path, model)"
                )
        item.saved = saved
        is_flat = isinstance(item.shard, FlatShard)  # on ranks without elements, flat shards have no state
        has_state = item.local.numel() > 0 or item.segment is not None or not is_flat
        old, new = item.weight_formats
        if (has_state and id(item.param) in self._owned_ids) or old != new:
            with self._in_memory():
                item.state = saved.new_state(_CPU)

    @contextmanager
    def _in_memory(self) -> Iterator[None]:
        """Turns a failed allocation, in a size that the checkpoint says, into a CheckpointError with its path."""
        try:
            yield
        except RuntimeError as error:
            raise CheckpointError(
                f"{self._folder}: got a tensor that does not fit into the host's memory, expected one that does: "
                f"{line(error)}; load another checkpoint"
            ) from error

    def _check_aliases(self) -> None:
        """Checks that tied weights were saved with bitwise equal values under all of their names."""
        for alias, (item, values) in self._aliases.items():
            if not torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (values, item.values))):
                raise CheckpointError(
                    f"{self._folder}: got {named(item.name)} and {named(alias)} with different values, expected equal "
                    "ones for a parameter that the model has under both names; load into a model that does not share "
                    "them"
                )

    def _check_values(self, item: Item) -> None:
        if item.saved is None or not item.state:
            return
        with self._naming():
            item.saved.check_values(item.state, item.name)

    def _check_steps(self) -> None:
        """Checks that parameters of one flat buffer have equal step counts, as the buffer's state has only one."""
        steps: dict[Tensor, set[float]] = {}
        for item in self._items:
            if item.segment is not None and item.state:
                steps.setdefault(item.param, set()).add(float(item.state["step"]))
        for counts in steps.values():
            if len(counts) > 1:
                raise CheckpointError(
                    f"{self._folder}: got parameters stepped {shown(sorted(counts))} times for one flat parameter, "
                    "expected one count; wrap the model with use_orig_params=True"
                )
