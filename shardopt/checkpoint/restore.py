"""Loads a portable checkpoint: plans the reads, converts, and changes model and optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.checkpoint.contents import (
    aliases_in,
    buffers_of,
    items_of,
    model_key,
    names_by_group,
    state_key,
)
from shardopt.checkpoint.data_file import check_lengths
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.groups import apply, checked_groups, options_by_name, saved_options
from shardopt.checkpoint.index import Index, StoredTensor, noticing_replacement
from shardopt.checkpoint.items import Chunks, Item, parameter_chunks, state_chunks
from shardopt.checkpoint.owner import Owner
from shardopt.checkpoint.ranks import Ranks
from shardopt.checkpoint.storage import Folder
from shardopt.checkpoint.wording import few, first_of, line, named, shown
from shardopt.kernels.dispatch import DTYPES
from shardopt.state.encoding import Floats, encode_slices, sharing_ranks

_CPU = torch.device("cpu")


class Restoration:
    """A checkpoint on its way into a model and an optimizer.

    Call :meth:`plan`, read :attr:`tensors`, then call :meth:`convert` and :meth:`commit`. Nothing is changed before
    :meth:`commit`.

    Raises:
        CheckpointError: shardopt.checkpoint.save did not write the checkpoint, or the optimizer is not the model's.
        TypeError: the optimizer is neither shardopt's nor of quantize_state.
    """

    def __init__(self, folder: Folder, index: Index, model: Module, optimizer: Optimizer | None) -> None:
        self._folder = folder
        self._path = str(folder)
        self._index = index
        if "extra" not in index.header:
            raise CheckpointError(
                f"{folder}: got a checkpoint that shardopt.checkpoint.save did not write, expected one"
            )
        self._owner = None if optimizer is None else Owner(optimizer)
        self._items = items_of(model, self._owner)
        self._buffers = buffers_of(model)
        #: Tensors of the checkpoint that are to equal a shared parameter: pipeline stages save one by several names.
        self._equal = {
            alias: name
            for alias, name in aliases_in(model, self._items).items()
            if {model_key(alias), model_key(name)} <= index.tensors.keys()
        }
        aliases, names = index.header.get("aliases", {}), {item.name for item in self._items}
        for item in self._items:
            # The checkpoint has a parameter by another name if the saved model shared it.
            saved_as = aliases.get(item.name)
            if model_key(item.name) not in index.tensors and saved_as is not None and saved_as not in names:
                item.name = saved_as

    @property
    def claimed(self) -> bytes:
        """A bit for each model tensor in the checkpoint: whether the model has that tensor on this rank."""
        names = {model_key(name) for name in (*(item.name for item in self._all), *self._equal)}
        return np.packbits(np.array([name in names for name in self._saved_names], dtype=np.bool_)).tobytes()

    def plan(self, claimed: Sequence[bytes], *, convert: bool) -> None:
        """Plans reads and conversions; ``claimed`` has the attribute of this name on each rank.

        Raises:
            CheckpointError: the checkpoint is of another model or optimizer, needs a conversion without `convert`, has
                options that are not allowed, or lacks bytes of tensors in ``extra``.
        """
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
        self._check_lengths(list(extra.values()))
        for item in self._items:
            self._plan_item(item, saved_groups)
        for item in self._buffers:
            item.values = torch.empty(item.local.shape, dtype=item.local.dtype, device="cpu")
        self.converted = {item.name: conversion for item in self._items if (conversion := item.conversion)}
        if self.converted and not convert:
            name, conversion = next(iter(self.converted.items()))
            raise CheckpointError(
                f"{self._path}: got {conversion} for {named(name)} and {len(self.converted) - 1} other parameters, "
                "expected the optimizer's and model's own; make them alike, or convert with load(..., convert=True)"
            )
        by_name = {item.name: item for item in self._items}
        #: The item and the values read of each alias.
        self._aliases = {
            alias: (by_name[name], torch.empty_like(by_name[name].read)) for alias, name in self._equal.items()
        }
        self._extra_tensors = {name.removeprefix("extra."): self._empty(stored) for name, stored in extra.items()}
        self._check_tensors()

    @property
    def extra(self) -> dict[str, Any]:
        """The ``extra`` values that were saved."""
        return {**self._index.header["extra"], **self._extra_tensors}

    @property
    def tensors(self) -> dict[str, Chunks]:
        """The tensors to read into, by the names in the checkpoint."""
        tensors: dict[str, Chunks] = {}
        for item in self._all:
            tensors[model_key(item.name)] = parameter_chunks(item.shard, item.read)
            if item.saved is not None:
                for entry, chunks in state_chunks(item.saved, item.state).items():
                    tensors[state_key(item.name, entry)] = chunks
        for alias, (item, values) in self._aliases.items():
            tensors[model_key(alias)] = parameter_chunks(item.shard, values)
        for name, values in self._extra_tensors.items():
            tensors[f"extra.{name}"] = Chunks.whole(values)
        return tensors

    def convert(self, ranks: Ranks) -> None:
        """Makes the optimizer's new state, in its form and on its devices. All ranks must call this.

        Raises:
            CheckpointError: on any rank, a step could not go on from the state, or the state could not be made.
        """
        shared = ranks.agree(self._shared_moments)
        encoded = ranks.agree(lambda: encode_slices(list(shared.values())))
        ranks.agree(lambda: self._make_states(dict(zip(shared, encoded, strict=True))))

    def commit(self) -> None:
        """Changes model and optimizer: copies into their tensors, and assigns the state that was made."""
        with torch.no_grad():
            for item in self._all:
                item.local.copy_(item.read)
        if self._owner is None:
            return
        groups = self._owner.optimizer.param_groups
        dropped = [g.keys() - new.keys() for g, new in zip(self._owner.groups, self._options, strict=True)]
        for group, new, keys in zip(self._owner.groups, self._options, dropped, strict=True):
            apply(group, new, keys)
        if self._owner.groups is not groups:  # a ZeroRedundancyOptimizer's local optimizer has fewer parameters
            for group, new, keys in zip(groups, self._options, dropped, strict=True):
                apply(group, new, keys)
        for param in self._owned:
            if param in self._states:
                self._owner.internals.put(param, self._states[param])
            else:
                self._owner.optimizer.state.pop(param, None)
        self._owner.internals.forget_tables(anew=True)

    @property
    def _all(self) -> list[Item]:
        """Parameters and buffers."""
        return [*self._items, *self._buffers]

    @property
    def _saved_names(self) -> list[str]:
        return [name for name in self._index.tensors if name.startswith("model.")]

    def _check_model(self, claimed: Sequence[bytes]) -> None:
        """Checks that the checkpoint has all tensors of the model, and only tensors that the model has on some rank."""
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
                f"{self._path}: got a checkpoint of another model: {'; '.join(filter(None, differences))}; expected "
                "the model that was saved: build it with the same sizes and names"
            )

    def _check_lengths(self, tensors: Sequence[StoredTensor]) -> None:
        """Checks that the checkpoint has the bytes of tensors, before memory is allocated for them."""
        if not tensors:
            return
        files = {file for stored in tensors for file in stored.files_of(((0,) * len(stored.shape), stored.shape))}
        lengths = [stored.data for number in files if (stored := self._index.files[number]) is not None]
        if sum(stored.nbytes for stored in tensors) > sum(lengths):
            raise CheckpointError(
                f"{self._path}: got tensors of more bytes than the data files have, expected no more; load another "
                "checkpoint"
            )
        with noticing_replacement(self._folder, self._index):
            check_lengths(self._folder, self._index, sorted(files))

    def _check_tensors(self) -> None:
        """Checks that the checkpoint has each tensor to read, in the dtype and shape of the tensor to read into."""
        for name, target in self.tensors.items():
            stored = self._index.tensors[name]
            if (stored.dtype, stored.shape) != (target.dtype, target.shape):
                raise CheckpointError(
                    f"{self._path}: got {named(name)} of {stored.dtype} and shape {shown(stored.shape)}, expected "
                    f"{target.dtype} and {target.shape}; load another checkpoint"
                )

    def _merged_options(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The options of each param group after the load, and the options that it was saved with."""
        if self._owner is None:
            return [], []
        if self._index.header.get("param_groups") is None:
            raise CheckpointError(
                f"{self._path}: got a checkpoint without an optimizer, expected one; load it without optimizer"
            )
        with self._naming():
            self._owner.check_saved(self._index.header)
        options = options_by_name(checked_groups(self._path, self._index.header["param_groups"]))
        names = names_by_group(self._items, len(self._owner.groups))
        new, saved = [], []
        with self._naming():
            for index, group in enumerate(self._owner.groups):
                saved.append(saved_options(options, names[index], index))
                new.append(self._owner.merged(group, saved[-1], index) if names[index] else dict(group))
        return new, saved

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Names the checkpoint in errors of its content."""
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{self._path}: {error}") from error
        except ValueError as error:
            raise CheckpointError(f"{self._path}: {line(error)}") from error

    def _plan_item(self, item: Item, saved_groups: Sequence[Mapping[str, Any]]) -> None:
        """Gives a parameter memory for what is to be read, and the forms of its state."""
        dtype = self._index.tensors[model_key(item.name)].dtype
        if dtype != item.local.dtype and not {dtype, item.local.dtype} <= DTYPES.keys():
            raise CheckpointError(
                f"{self._path}: got {named(item.name)} of {dtype}, expected {item.local.dtype}; only "
                f"{', '.join(map(str, DTYPES))} can be converted into each other"
            )
        item.values = torch.empty(item.local.shape, dtype=dtype, device="cpu")
        item.state = {}
        if self._owner is None or item.group is None:
            return
        options, saved_options = self._options[item.group], saved_groups[item.group]
        entries = self._entries.get(item.name, {})
        with self._naming():
            item.saved, item.spec = self._owner.forms(item, options, saved_options, entries, dtype)
        if item.saved is None:
            return
        is_here = self._owner.has_state_here(item) and id(item.param) in self._owned_ids
        self._check_lengths([x for key, x in entries.items() if x.shape and item.saved.is_whole(key)])
        if is_here or item.converts_weights:
            with self._in_memory():
                item.state = item.saved.new(_CPU)

    def _empty(self, stored: StoredTensor) -> Tensor:
        with self._in_memory():
            return torch.empty(stored.shape, dtype=stored.dtype, device="cpu")

    @contextmanager
    def _in_memory(self) -> Iterator[None]:
        """Names the checkpoint if memory cannot be allocated for a tensor whose shape it says."""
        try:
            yield
        except RuntimeError as error:
            raise CheckpointError(
                f"{self._path}: got a tensor that does not fit into the host's memory, expected one that does: "
                f"{line(error)}; load another checkpoint"
            ) from error

    def _shared_moments(self) -> dict[int, Floats]:
        """Checks states, converts weights, and decodes moments to re-encode, by the indices of items.

        These are the moments of blocks that several ranks hold, which encode them together.
        """
        self._check_states()
        for item in self._items:
            item.convert_weights()
        return {
            index: Floats(item.spec, item.moments(), item.name)
            for index, item in enumerate(self._items)
            if item.converts_state and item.spec is not None and sharing_ranks(item.spec) is not None
        }

    def _make_states(self, encoded: Mapping[int, dict[str, Tensor] | None]) -> None:
        """Encodes the other moments anew, and makes the optimizer's state on its devices.

        ``encoded`` has the moments that ranks encode together, by the indices of their items.
        """
        for index, item in enumerate(self._items):
            if item.converts_state:
                assert item.spec is not None
                assert item.saved is not None
                state = {key: x for key, x in item.state.items() if key not in item.saved.moment_entries}
                if index in encoded:
                    state |= encoded[index] or {}
                elif (moments := item.moments()) is not None:
                    state |= item.spec.encode(moments)
                item.saved, item.state = item.spec, state
                self._check_values(item)
        self._states: dict[Tensor, Any] = {}
        of: dict[Tensor, list[Item]] = {}
        for item in self._items:
            of.setdefault(item.param, []).append(item)
        for param in self._owned:
            if any(item.state for item in of[param]):
                self._states[param] = self._placed(param, of[param])

    def _placed(self, param: Tensor, items: Sequence[Item]) -> Any:
        """The new state of one of the optimizer's tensors, as its owner keeps it."""
        group = items[0].group
        assert self._owner is not None
        assert group is not None
        return self._owner.internals.placed(param, self._options[group], [item.state for item in items])

    def _check_states(self) -> None:
        """Checks the states that were read, as far as one rank can."""
        for alias, (item, values) in self._aliases.items():
            if not torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (values, item.read))):
                raise CheckpointError(
                    f"{self._path}: got {named(item.name)} and {named(alias)} with different values, expected equal "
                    "ones for a parameter that the model has under both names; load into a model that does not share "
                    "them"
                )
        for item in self._items:
            self._check_values(item)
        if self._owner is not None:
            self._check_steps()

    def _check_values(self, item: Item) -> None:
        if item.saved is None or not item.state:
            return
        with self._naming():
            item.saved.check_local(item.state, item.name)

    def _check_steps(self) -> None:
        """Checks that parameters in one flat buffer, which has a single step count, were stepped equally often."""
        steps: dict[Tensor, set[float]] = {}
        for item in self._items:
            if item.segment is not None and item.state:
                steps.setdefault(item.param, set()).add(float(item.state["step"]))
        for counts in steps.values():
            if len(counts) > 1:
                raise CheckpointError(
                    f"{self._path}: got parameters stepped {shown(sorted(counts))} times for one flat parameter, "
                    "expected one count; wrap the model with use_orig_params=True"
                )
