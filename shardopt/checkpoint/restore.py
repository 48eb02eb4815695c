"""Loads a portable checkpoint: plans the reads, converts, and changes model and optimizer."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.checkpoint.chunks import Chunks
from shardopt.checkpoint.contents import (
    Content,
    contents_of,
    model_key,
    names_by_group,
    owner_for,
    state_key,
)
from shardopt.checkpoint.conversion import Target
from shardopt.checkpoint.data_file import check_lengths
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.folder import Folder
from shardopt.checkpoint.groups import apply, checked_groups, options_by_name, saved_options
from shardopt.checkpoint.index import Index, StoredTensor, noticing_replacement
from shardopt.checkpoint.pieces import Piece, aliases_in, buffers_of, parameter_chunks, state_chunks
from shardopt.checkpoint.ranks import on_every_rank
from shardopt.checkpoint.wording import few, first_of, line, named, shown
from shardopt.kernels.dispatch import DTYPES
from shardopt.layout import FlatShard
from shardopt.state.flat_encoding import encode_flat
from shardopt.state.slice_spec import SliceSpec
from shardopt.wrapper.coding import coded_names

_CPU = torch.device("cpu")


def _empty(stored: StoredTensor) -> Tensor:
    return torch.empty(stored.shape, dtype=stored.dtype, device="cpu")


class Restoration:
    """A checkpoint on its way into a model and an optimizer.

    Call :meth:`plan`, read :attr:`tensors`, then call :meth:`convert` and :meth:`commit`. Nothing is changed before
    :meth:`commit`.

    Args:
        folder: the checkpoint's folder.
        index: the index of the checkpoint.
        model: the model.
        optimizer: the model's optimizer; None to load the model only.

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
        self._owner = None if optimizer is None else owner_for(optimizer)
        contents = contents_of(model, self._owner)
        #: Tensors of the checkpoint that are to equal a shared parameter: pipeline stages save one by several names.
        self._equal = {
            alias: (name, torch.empty(0, device="cpu"))
            for alias, name in aliases_in(model, (content.piece for content in contents)).items()
            if {model_key(alias), model_key(name)} <= index.tensors.keys()
        }
        self._contents = [self._as_saved(content, {each.piece.name for each in contents}) for content in contents]
        self._buffers = [
            (piece, torch.empty(piece.local.shape, dtype=piece.local.dtype, device="cpu"))
            for piece in buffers_of(model)
        ]

    def _as_saved(self, content: Content, names: Container[str]) -> Content:
        """The content by the name under which the checkpoint has it: by another one if the saved model shared it."""
        name = content.piece.name
        saved_as = self._index.header.get("aliases", {}).get(name)
        if model_key(name) in self._index.tensors or saved_as is None or saved_as in names:
            return content
        return content._replace(piece=content.piece._replace(name=saved_as))

    @property
    def claimed(self) -> bytes:
        """A bit for each model tensor in the checkpoint: whether the model has that tensor on this rank."""
        own = {model_key(name) for name in (*(piece.name for piece in self._pieces), *self._equal)}
        return np.packbits(np.array([name in own for name in self._saved_names], dtype=np.bool_)).tobytes()

    def plan(self, claimed: Sequence[bytes], *, convert: bool) -> None:
        """Plans reads and conversions.

        Args:
            claimed: :attr:`claimed` of each rank.
            convert: whether state and weights may be converted.

        Raises:
            CheckpointError: the checkpoint is of another model or optimizer, needs a conversion without `convert`, has
                options that are not allowed, or lacks bytes of tensors in ``extra``.
        """
        self._check_model(claimed)
        contents = self._contents
        self._entries: dict[str, dict[str, StoredTensor]] = {}
        for key, stored in self._index.tensors.items():
            name, dot, entry = key.removeprefix("optimizer.").rpartition(".")
            if key.startswith("optimizer.") and dot:
                self._entries.setdefault(name, {})[entry] = stored
        self._options, saved_groups = self._merged_options(contents)
        self._owned = [p for g in self._owner.optimizer.param_groups for p in g["params"]] if self._owner else []
        self._owned_ids = {id(param) for param in self._owned}
        extra = {name: stored for name, stored in self._index.tensors.items() if name.startswith("extra.")}
        self._check_lengths([*extra.values(), *self._free_entries()])
        self._targets = [self._target(content, saved_groups) for content in contents]
        self.converted = {t.content.piece.name: what for t in self._targets if (what := t.conversion)}
        if self.converted and not convert:
            name, what = next(iter(self.converted.items()))
            raise CheckpointError(
                f"{self._path}: got {what} for {named(name)} and {len(self.converted) - 1} other parameters, expected "
                "the optimizer's and model's own; make them alike, or convert with load(..., convert=True)"
            )
        values_of = {target.content.piece.name: target.values for target in self._targets}
        self._equal = {alias: (name, torch.empty_like(values_of[name])) for alias, (name, _) in self._equal.items()}
        self._extra_tensors = {name.removeprefix("extra."): _empty(stored) for name, stored in extra.items()}
        has_common = self._owner is not None and not self._owner.has_fixed_entries
        common = self._entries.get("", {}) if has_common else {}
        self._common = {entry: _empty(stored) for entry, stored in common.items()}
        self._check_tensors()

    @property
    def extra(self) -> dict[str, Any]:
        """The ``extra`` values that were saved."""
        return {**self._index.header["extra"], **self._extra_tensors}

    @property
    def tensors(self) -> dict[str, Chunks]:
        """The tensors to read into, by the names in the checkpoint."""
        tensors: dict[str, Chunks] = {}
        for target in self._targets:
            piece = target.content.piece
            tensors[model_key(piece.name)] = parameter_chunks(piece.shard, target.values)
            if target.saved is not None:
                for entry, chunks in state_chunks(target.saved, target.state).items():
                    tensors[state_key(piece.name, entry)] = chunks
        for piece, values in self._buffers:
            tensors[model_key(piece.name)] = parameter_chunks(piece.shard, values)
        targets = {target.content.piece.name: target for target in self._targets}
        for alias, (name, values) in self._equal.items():
            tensors[model_key(alias)] = parameter_chunks(targets[name].content.piece.shard, values)
        for name, values in self._extra_tensors.items():
            tensors[f"extra.{name}"] = Chunks.whole(values)
        for entry, values in self._common.items():
            tensors[state_key("", entry)] = Chunks.whole(values)
        return tensors

    def convert(self) -> None:
        """Makes the optimizer's new state, in its form and on its devices. All ranks must call this.

        Raises:
            CheckpointError: on any rank, a step could not go on from the state, or the state could not be made.
        """
        on_every_rank(self._check_states)
        flat = on_every_rank(self._flat_moments)
        specs, values = [spec for spec, _ in flat.values()], [moments for _, moments in flat.values()]
        encoded = on_every_rank(lambda: encode_flat(specs, values))
        on_every_rank(lambda: self._make_states(dict(zip(flat, encoded, strict=True))))

    def commit(self) -> None:
        """Changes model and optimizer: copies into their tensors, and assigns the state that was made."""
        with torch.no_grad():
            for target in self._targets:
                target.content.piece.local.copy_(target.values)
            for piece, values in self._buffers:
                piece.local.copy_(values)
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
                self._owner.put(param, self._states[param])
            else:
                self._owner.optimizer.state.pop(param, None)
        self._owner.finish(self._common)

    @property
    def _pieces(self) -> list[Piece]:
        return [*(content.piece for content in self._contents), *(piece for piece, _ in self._buffers)]

    @property
    def _saved_names(self) -> list[str]:
        return [name for name in self._index.tensors if name.startswith("model.")]

    def _check_model(self, claimed: Sequence[bytes]) -> None:
        """Checks that the checkpoint has all tensors of the model, and only tensors that the model has on some rank."""
        own = {model_key(piece.name): piece.shard.global_shape for piece in self._pieces}
        saved = {name: self._index.tensors[name].shape for name in self._saved_names}
        bits = np.bitwise_or.reduce([np.frombuffer(of_rank, dtype=np.uint8) for of_rank in claimed])
        wanted = np.unpackbits(bits, count=len(saved))
        missing = sorted(own.keys() - saved.keys())
        unexpected = sorted(name for name, is_wanted in zip(saved, wanted, strict=True) if not is_wanted)
        other = sorted(name for name in own.keys() & saved.keys() if own[name] != saved[name])
        if missing or unexpected or other:
            shapes = first_of([f"{named(name)} {shown(saved[name])} and {shown(own[name])}" for name in other])
            differences = [
                f"the checkpoint does not have {few(missing)}" if missing else "",
                f"the model does not have {few(unexpected)}" if unexpected else "",
                f"shapes saved and in the model differ: {shapes}" if other else "",
            ]
            raise CheckpointError(
                f"{self._path}: got a checkpoint of another model: {'; '.join(filter(None, differences))}; expected "
                "the model that was saved: build it with the same sizes and names"
            )

    def _free_entries(self) -> list[StoredTensor]:
        """The state entries whose shapes are not those of a parameter's codes, scales or elements."""
        if self._owner is None or self._owner.has_fixed_entries:
            return []
        shape_of = {piece.name: piece.shard.global_shape for piece in self._pieces}
        found = []
        for name, entries in self._entries.items():
            coded = {each + end for each in coded_names(entries) for end in ("_codes", "_scales")} if name else ()
            shapes = ((), shape_of.get(name))
            found += [stored for key, stored in entries.items() if stored.shape not in shapes and key not in coded]
        return found

    def _check_lengths(self, tensors: Sequence[StoredTensor]) -> None:
        """Checks that the checkpoint has the bytes of tensors, before memory is allocated for them."""
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

    def _merged_options(self, contents: Sequence[Content]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The options of each param group after the load, and the options that it was saved with."""
        if self._owner is None:
            return [], []
        if self._index.header.get("param_groups") is None:
            raise CheckpointError(
                f"{self._path}: got a checkpoint without an optimizer, expected one; load it without optimizer"
            )
        self._owner.check_saved(self._path, self._index.header, self._entries)
        options = options_by_name(checked_groups(self._path, self._index.header["param_groups"]))
        names = names_by_group(contents, len(self._owner.groups))
        new, saved = [], []
        for index, group in enumerate(self._owner.groups):
            try:
                saved.append(saved_options(options, names[index], index))
            except CheckpointError as error:
                raise CheckpointError(f"{self._path}: {error}") from None
            new.append(self._owner.merged(self._path, group, saved[-1], index) if names[index] else dict(group))
        return new, saved

    def _target(self, content: Content, saved_groups: Sequence[Mapping[str, Any]]) -> Target:
        piece = content.piece
        dtype = self._index.tensors[model_key(piece.name)].dtype
        if dtype != piece.local.dtype and not {dtype, piece.local.dtype} <= DTYPES.keys():
            raise CheckpointError(
                f"{self._path}: got {named(piece.name)} of {dtype}, expected {piece.local.dtype}; only "
                f"{', '.join(map(str, DTYPES))} can be converted into each other"
            )
        values = torch.empty(piece.local.shape, dtype=dtype, device="cpu")
        if self._owner is None or content.group is None:
            return Target(content, values, None, None, {})
        options = self._options[content.group]
        entries = self._entries.get(piece.name, {})
        saved, spec = self._owner.forms(self._path, piece, options, saved_groups[content.group], entries, dtype)
        if saved is None:
            return Target(content, values, None, spec, {})
        target = Target(content, values, saved, spec, {})
        is_here = self._owner.has_state_here(piece)
        if (is_here and id(piece.param) in self._owned_ids) or target.converts_weights:
            target = target._replace(state=saved.new(_CPU))
        return target

    def _flat_moments(self) -> dict[int, tuple[SliceSpec, list[Tensor] | None]]:
        """Converts weights; decodes the moments of flat shards that are encoded anew, by their indices in the targets.

        All ranks encode the moments of flat shards together.
        """
        self._targets = [target.with_converted_weights() for target in self._targets]
        return {
            index: (target.spec, target.moments)
            for index, target in enumerate(self._targets)
            if target.converts_state and target.spec is not None and isinstance(target.spec.shard, FlatShard)
        }

    def _make_states(self, encoded: Mapping[int, dict[str, Tensor] | None]) -> None:
        """Encodes the other moments anew, and makes the optimizer's state on its devices.

        Args:
            encoded: the encoded moments of flat shards, by the indices of their parameters in the targets.
        """
        for index, target in enumerate(self._targets):
            if target.converts_state:
                assert target.spec is not None
                assert target.saved is not None
                state = {key: x for key, x in target.state.items() if key not in target.saved.moment_entries}
                if index in encoded:
                    state |= encoded[index] or {}
                elif (moments := target.moments) is not None:
                    state |= target.spec.encode(moments)
                self._targets[index] = target._replace(saved=target.spec, state=state)
                self._check_values(self._targets[index])
        self._states: dict[Tensor, Any] = {}
        of: dict[Tensor, list[Target]] = {}
        for target in self._targets:
            of.setdefault(target.content.piece.param, []).append(target)
        for param in self._owned:
            if any(target.state for target in of[param]):
                self._states[param] = self._placed(param, of[param])

    def _placed(self, param: Tensor, targets: Sequence[Target]) -> Any:
        """The new state of one of the optimizer's tensors, as its owner keeps it."""
        group = targets[0].content.group
        assert self._owner is not None
        assert group is not None
        return self._owner.placed(param, self._options[group], [target.state for target in targets])

    def _check_states(self) -> None:
        """Checks the states that were read, as far as one rank can."""
        values_of = {target.content.piece.name: target.values for target in self._targets}
        for alias, (name, values) in self._equal.items():
            if not torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (values, values_of[name]))):
                raise CheckpointError(
                    f"{self._path}: got {named(name)} and {named(alias)} with different values, expected equal ones "
                    "for a parameter that the model has under both names; load into a model that does not share them"
                )
        for target in self._targets:
            self._check_values(target)
        if self._owner is None:
            return
        if self._owner.one_step_count:
            self._check_steps()
        try:
            self._owner.check_common(self._common)
        except ValueError as error:
            raise CheckpointError(f"{self._path}: {line(error)}") from error

    def _check_values(self, target: Target) -> None:
        if target.saved is None or not target.state:
            return
        try:
            target.saved.check_local(target.state, target.content.piece.name)
        except ValueError as error:
            raise CheckpointError(f"{self._path}: {line(error)}") from error

    def _check_steps(self) -> None:
        """Checks that parameters in one flat buffer, which has a single step count, were stepped equally often."""
        steps: dict[Tensor, set[float]] = {}
        for target in self._targets:
            if target.content.piece.segment is not None and target.state:
                steps.setdefault(target.content.piece.param, set()).add(float(target.state["step"]))
        for counts in steps.values():
            if len(counts) > 1:
                raise CheckpointError(
                    f"{self._path}: got parameters stepped {shown(sorted(counts))} times for one flat parameter, "
                    "expected one count; wrap the model with use_orig_params=True"
                )
