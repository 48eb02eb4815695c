"""Loads a checkpoint in steps: validates and reads to host memory, builds the new state, then changes the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.checkpoint.contents import UnwrappedOptimizer, aliases_in, buffers_of, items_of, names_by_group
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.groups import (
    changed_options,
    options_after_load,
    saved_options,
    set_options,
    values_kept_by_steps,
)
from shardopt.checkpoint.index import Index, StoredTensor
from shardopt.checkpoint.items import Chunks, Item, LoadedItem, model_key, tensors_of
from shardopt.checkpoint.reading import read_tensors
from shardopt.checkpoint.storage import Folder
from shardopt.checkpoint.wording import few, first_of, named, one_line, shown
from shardopt.kernels.dispatch import DTYPES
from shardopt.layout import FlatShard
from shardopt.state.encoding import FloatMoments, encode_slices, sharing_ranks
from shardopt.state.options import DEFAULTS, STATE_FORMAT, check_options
from shardopt.wrapper.entries import WRAPPED_PREFIX
from shardopt.wrapper.optimizer import QuantizedState

#: Options of each param group of the optimizer.
_GroupOptions = Sequence[Mapping[str, Any]]


class HostCopy(NamedTuple):
    """This rank's part of a checkpoint as read: in host memory and validated, with weights in the model's formats.

    Attributes:
        items: the parameters, with their state as it was saved.
        buffers: the buffers.
        options: the options of each param group after the load.
        extra: the ``extra`` values of the save.
        hyper_parameters: see :class:`shardopt.checkpoint.Loaded`.
        converted: by name of each parameter whose state or dtype is converted: from what to what, in words.
        shared: items with moments that several ranks must encode together, as they share blocks; and these moments.
    """

    items: list[LoadedItem]
    buffers: list[LoadedItem]
    options: list[dict[str, Any]]
    extra: dict[str, Any]
    hyper_parameters: dict[int, dict[str, tuple[Any, Any]]]
    converted: dict[str, str]
    shared: list[tuple[LoadedItem, FloatMoments]]


class Restoration:
    """The load of a checkpoint into a model and an optimizer, on one rank.

    Call :meth:`read`, :meth:`make_states` and :meth:`commit`. Only :meth:`commit` changes model and optimizer. Raises
    CheckpointError if save() did not write the checkpoint, or the optimizer is not the model's; TypeError if not ours.
    """

    def __init__(self, folder: Folder, index: Index, model: Module, optimizer: Optimizer | None) -> None:
        self._folder, self._index = folder, index
        if "extra" not in index.header:
            raise CheckpointError(
                f"{folder}: got a checkpoint without 'extra' in its header, expected one written by "
                "shardopt.checkpoint.save; pass the path that save() was given"
            )
        self._unwrapped = None if optimizer is None else UnwrappedOptimizer.of(optimizer)
        groups = [] if self._unwrapped is None else self._unwrapped.optimizer.param_groups
        #: The parameters whose state this rank's optimizer keeps, as the keys of a dict.
        self._owned: dict[Tensor, None] = dict.fromkeys(param for group in groups for param in group["params"])
        self._items, self._buffers = items_of(model, self._unwrapped), buffers_of(model)
        self._model_items = [*self._items, *self._buffers]
        #: The state entries in the checkpoint, by the parameter's name and the entry's.
        self._entries: dict[str, dict[str, StoredTensor]] = {}
        for key, stored in index.tensors.items():
            name, dot, entry = key.removeprefix("optimizer.").rpartition(".")
            if key.startswith("optimizer.") and dot:
                self._entries.setdefault(name, {})[entry] = stored
        self._saved_names = [name for name in index.tensors if name.startswith("model.")]
        #: Tied weights that were saved under several names, as by pipeline stages: alias to main name. Must be equal.
        self._saved_twice = {
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
        own = {model_key(name) for name in (*(item.name for item in self._model_items), *self._saved_twice)}
        return np.packbits(np.array([name in own for name in self._saved_names], dtype=np.bool_)).tobytes()

    def read(self, claimed: Sequence[bytes], *, convert: bool, keep: bool) -> HostCopy:
        """Reads this rank's part to host memory, validates it and converts weights; ``claimed`` has all ranks' bitmaps.

        With ``keep`` the optimizer keeps its hyper-parameters. Raises CheckpointError if the checkpoint is damaged, of
        another model or optimizer, needs a conversion without ``convert``, or has options or state out of range.
        """
        with _errors_with_path(self._folder):
            self._check_model(claimed)
            options, saved = self._new_and_saved_options(keep)
            items = [self._allocated(item, options, saved) for item in self._items]
            converted = {each.item.name: words for each in items if (words := each.conversion)}
            if converted and not convert:
                raise CheckpointError(
                    f"{few(converted)}: got {converted[min(converted)]}; use the options that were saved, or convert "
                    "with load(..., convert=True)"
                )
            buffers = [LoadedItem(item, _new_like(item.local)) for item in self._buffers]
            by_name = {each.item.name: each for each in items}
            pairs = [(alias, by_name[name]) for alias, name in self._saved_twice.items()]
            aliases = [(LoadedItem(replace(x.item, name=alias), _new_like(x.values)), x) for alias, x in pairs]
            stored_extra = {key: stored for key, stored in self._index.tensors.items() if key.startswith("extra.")}
            extra = {key: torch.empty(x.shape, dtype=x.dtype, device="cpu") for key, x in stored_extra.items()}
            targets = self._targets([*items, *buffers, *(alias for alias, _ in aliases)], extra)
        read_tensors(self._folder, self._index, targets)
        with _errors_with_path(self._folder):
            _check_aliases(aliases)
            for each in items:
                each.check_state()
            _check_steps(items)
        for each in items:
            each.convert_weights()
        # Moments are decoded here, as no rank waits for another yet: if memory for it lacks, all raise.
        shared = [
            (each, FloatMoments(each.spec, each.decoded_moments(), each.item.name))
            for each in items
            if each.spec is not None and each.state_conversion and sharing_ranks(each.spec) is not None
        ]
        all_extra = {**self._index.header["extra"], **{key.removeprefix("extra."): x for key, x in extra.items()}}
        changes: dict[int, dict[str, tuple[Any, Any]]] = {}
        if self._unwrapped is not None:
            kept = values_kept_by_steps(self._unwrapped.optimizer)
            of_groups = map(partial(changed_options, kept), self._unwrapped.all_groups, saved, options)
            changes = {index: changed for index, changed in enumerate(of_groups) if changed}
        return HostCopy(items, buffers, options, all_extra, changes, converted, shared)

    def make_states(self, host: HostCopy) -> dict[Tensor, Any]:
        """Builds the optimizer's new state, encoded in its codec and on its devices. All ranks must call this.

        Converts the state in ``host.items``, and empties ``host.shared`` to free its memory. Returns the state of each
        parameter or flat buffer that has some, for :meth:`commit`. Raises CheckpointError if it cannot be made.
        """
        groups = dict.fromkeys(sharing_ranks(floats.spec) for _, floats in host.shared)
        encoded = encode_slices([floats for _, floats in host.shared], [ranks for ranks in groups if ranks is not None])
        encoded_of = {id(each): state for (each, _), state in zip(host.shared, encoded, strict=True)}
        host.shared.clear()
        items_by_param: dict[Tensor, list[LoadedItem]] = {}
        for each in host.items:
            if each.state_conversion:
                each.convert_state(encoded_of.get(id(each)))
                with _errors_with_path(self._folder):
                    each.check_state()
            items_by_param.setdefault(each.item.param, []).append(each)
        states: dict[Tensor, Any] = {}
        for param in self._owned:
            if any(each.state for each in items_by_param[param]):
                states[param] = self._state_on_device(param, items_by_param[param], host.options)
        return states

    def _state_on_device(self, param: Tensor, items: Sequence[LoadedItem], options: _GroupOptions) -> Any:
        """Builds the optimizer's state of a parameter or flat buffer, on its device, from the state of its items."""
        group = items[0].item.group
        assert self._unwrapped is not None
        assert group is not None
        return self._unwrapped.internals.state_from_checkpoint(param, options[group], [each.state for each in items])

    def commit(self, host: HostCopy, states: Mapping[Tensor, Any]) -> None:
        """Copies into parameters and buffers, sets the param groups' options, and assigns the new state.

        A parameter of the optimizer without an element of ``states`` loses its state.
        """
        with torch.no_grad():
            for each in (*host.items, *host.buffers):
                each.item.local.copy_(each.values)
        if self._unwrapped is None:
            return
        # A ZeroRedundancyOptimizer's param groups are other dicts than those of its inner optimizer: set both.
        inner_groups = self._unwrapped.optimizer.param_groups
        for group, inner_group, new in zip(self._unwrapped.all_groups, inner_groups, host.options, strict=True):
            dropped = group.keys() - new.keys()
            for target in (group,) if inner_group is group else (group, inner_group):
                set_options(target, new, dropped)
        for param in self._owned:
            if param in states:
                self._unwrapped.internals.install(param, states[param])
            else:
                self._unwrapped.optimizer.state.pop(param, None)
        self._unwrapped.internals.invalidate_steps(discard_gradients=True)

    def _check_model(self, claimed: Sequence[bytes]) -> None:
        """Checks that the checkpoint has all of this rank's tensors, in their shapes, and none that no rank has."""
        own_shapes = {model_key(item.name): item.shard.global_shape for item in self._model_items}
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
                f"got a checkpoint of another model: {'; '.join(filter(None, differences))}; expected "
                "the model that was saved: build it with the same sizes and names"
            )

    def _new_and_saved_options(self, keep: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """For each param group: its options after the load, and the options with which its parameters were saved."""
        if self._unwrapped is None:
            return [], []
        if self._index.header.get("param_groups") is None:
            raise CheckpointError("got a checkpoint without an optimizer, expected one; load it without optimizer")
        saved_by, own = self._index.header.get("optimizer"), self._unwrapped.internals.name
        if saved_by != own and any(str(name).startswith(WRAPPED_PREFIX) for name in (saved_by, own)):
            raise CheckpointError(
                f"got the state of {named(saved_by)}, expected that of {own}; load it into that "
                "optimizer, then load its state_dict(dequantize=True) into this one"
            )
        names = names_by_group(self._items, len(self._unwrapped.all_groups))
        saved = saved_options(self._index.header["param_groups"], names)
        new = []
        for index, group in enumerate(self._unwrapped.all_groups):
            try:
                new.append(self._new_options(group, saved[index], keep) if names[index] else dict(group))
            except ValueError as error:
                raise ValueError(f"param group {index}: {error}") from None
        return new, saved

    def _new_options(self, group: Mapping[str, Any], saved: Mapping[str, Any], keep: bool) -> dict[str, Any]:
        """Validates a param group's saved options, and returns its options after the load."""
        assert self._unwrapped is not None
        optimizer, internals = self._unwrapped.optimizer, self._unwrapped.internals
        if isinstance(optimizer, QuantizedState):
            optimizer._internals.checkpoint_options(saved, ())
        else:
            check_options({**DEFAULTS, **{key: saved[key] for key in STATE_FORMAT if key in saved}})
        new = options_after_load(optimizer, group, saved, keep=keep)
        return {key: x for key, x in new.items() if key in saved or not internals.is_set_by_steps(key, x)}

    def _allocated(self, item: Item, options: _GroupOptions, saved_options: _GroupOptions) -> LoadedItem:
        """Allocates memory to read a parameter and its state into, and determines the formats of both.

        ``options`` and ``saved_options`` are those of all param groups: after the load, and in the checkpoint.
        """
        dtype = self._index.tensors[model_key(item.name)].dtype
        if dtype != item.local.dtype and not {dtype, item.local.dtype} <= DTYPES.keys():
            raise CheckpointError(
                f"got {named(item.name)} of {dtype}, expected {item.local.dtype}; only "
                f"{', '.join(map(str, DTYPES))} can be converted into each other"
            )
        loaded = LoadedItem(item, torch.empty(item.local.shape, dtype=dtype, device="cpu"))
        if self._unwrapped is None or item.group is None:
            return loaded
        entries, internals = self._entries.get(item.name, {}), self._unwrapped.internals
        new, saved = options[item.group], saved_options[item.group]
        loaded.spec = internals.spec_of_entries(item.shard, item.local.dtype, new, entries)
        if not entries:
            return loaded
        saved_format = {key: saved[key] for key in {*STATE_FORMAT, *internals.format} & saved.keys()}
        # Entries do not depend on repay, which would refuse some dtypes of weights here.
        saved_spec = internals.spec_of_entries(item.shard, dtype, {**new, **saved_format, "repay": False}, entries)
        if entries.keys() != saved_spec.entries.keys():
            saved_by = named(self._index.header.get("optimizer"))
            raise CheckpointError(
                f"got {few(entries)} of {named(item.name)}, saved by {saved_by}, expected "
                f"{', '.join(sorted(saved_spec.entries))} of {internals.name}; load it into {saved_by}, or the "
                "model alone: load(path, model)"
            )
        loaded.saved_spec = saved_spec
        is_flat = isinstance(item.shard, FlatShard)  # on ranks without elements, flat shards have no state
        has_state = item.local.numel() > 0 or item.segment is not None or not is_flat
        saved_weights, new_weights = loaded.weight_formats  # to convert weights, the low bits in the state are needed
        if (has_state and item.param in self._owned) or saved_weights != new_weights:
            loaded.state = saved_spec.new_state(torch.device("cpu"))
        return loaded

    def _targets(self, items: Sequence[LoadedItem], extra: Mapping[str, Tensor]) -> dict[str, Chunks]:
        """The memory to read into, by the names in the checkpoint; checks that the saved dtypes and shapes fit."""
        tensors: dict[str, Chunks] = {}
        for each in items:
            tensors |= tensors_of(each.item, each.values, each.saved_spec, each.state)
        tensors |= {key: Chunks.whole(values) for key, values in extra.items()}
        for name, target in tensors.items():
            stored = self._index.tensors[name]
            if (stored.dtype, stored.shape) != (target.dtype, target.shape):
                raise CheckpointError(
                    f"got {named(name)} of {stored.dtype} and shape {shown(stored.shape)}, expected "
                    f"{target.dtype} and {target.shape}; load another checkpoint"
                )
        return tensors


def _check_aliases(aliases: Sequence[tuple[LoadedItem, LoadedItem]]) -> None:
    """Checks that tied weights were saved with bitwise equal values under both names of each pair."""
    for alias, main in aliases:
        if not torch.equal(*(x.values.reshape(-1).view(torch.uint8) for x in (alias, main))):
            raise CheckpointError(
                f"got {named(main.item.name)} and {named(alias.item.name)} with different values, "
                "expected equal ones for a parameter that the model has under both names; load into a model that "
                "does not share them"
            )


def _check_steps(items: Sequence[LoadedItem]) -> None:
    """Checks that parameters of one flat buffer have equal step counts, as the buffer's state has only one."""
    steps: dict[Tensor, set[float]] = {}
    for each in items:
        if each.item.segment is not None and each.state:
            steps.setdefault(each.item.param, set()).add(float(each.state["step"]))
    for counts in steps.values():
        if len(counts) > 1:
            raise CheckpointError(
                f"got parameters stepped {shown(sorted(counts))} times for one flat parameter, "
                "expected one count; wrap the model with use_orig_params=True"
            )


@contextmanager
def _errors_with_path(folder: Folder) -> Iterator[None]:
    """Turns errors in a checkpoint's content, and failed allocations of a size in it, into a CheckpointError."""
    try:
        yield
    except (CheckpointError, ValueError) as error:
        raise CheckpointError(f"{folder}: {error if isinstance(error, CheckpointError) else one_line(error)}") from None
    except RuntimeError as error:
        raise CheckpointError(
            f"{folder}: got a tensor that does not fit into the host's memory, expected one that does: "
            f"{one_line(error)}; load another checkpoint"
        ) from error


def _new_like(tensor: Tensor) -> Tensor:
    """Host memory for a plain tensor of the same shape and dtype."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
