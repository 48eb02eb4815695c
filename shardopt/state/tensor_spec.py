"""Which state entries one stepped tensor has, put together from the slices of model parameters in the tensor.

A plain or DTensor parameter, or its single flat shard, is one slice; a flat buffer (a FlatParameter of FSDP1 with
``use_orig_params=False``; ZeRO) has slices of several parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardopt.codec import Moment
from shardopt.kernels.weights import WeightFormat
from shardopt.layout import FlatBuffer, Shard, shard_of
from shardopt.state.loaded_entries import check_entry, check_moment, checked_step
from shardopt.state.slice_spec import LOW_BITS, NON_MOMENTS, ROW_MOMENTS, EntryFormat, SliceSpec, StateDict

#: Entries of torch.optim's state (NAdam's) that a load ignores, as the step count determines them.
_IGNORED = frozenset(["mu_product"])

#: A tensor's entries in a state dict, by name; None for a tensor without state.
LoadedEntries = Mapping[str, Any] | None


@dataclass(frozen=True)
class TensorSpec:
    """Describes the state of one tensor that the optimizer steps.

    The slices' entries of one name are concatenated in one tensor, in the order of the slices; in a flat buffer,
    quantized and unquantized moments have different names (bf16 moments are ``exp_avg_bf16``). Entries are sharded like
    the tensor.
    """

    shard: Shard
    slices: tuple[SliceSpec, ...]

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The rule's moments, the same in all slices."""
        return self.slices[0].moments

    @property
    def weights(self) -> WeightFormat:
        """The format of weights and low bits, the same in all slices."""
        return self.slices[0].weights

    @cached_property
    def entries(self) -> dict[str, EntryFormat]:
        """The formats of all entries in ``optimizer.state``, by name: the slices' entries are concatenated."""
        entries: dict[str, EntryFormat] = {}
        for slice_ in self.slices:
            for key, entry in slice_.entries.items():
                name = slice_.entry_name(key)
                if name in entries and key != "step":
                    rows, *rest = entry.shape
                    entry = entry._replace(shape=(entries[name].shape[0] + rows, *rest))
                entries[name] = entry
        return entries

    @property
    def has_column_cut_blocks(self) -> bool:
        """Whether column shards cut blocks, see :attr:`SliceSpec.has_column_cut_blocks`."""
        return any(slice_.has_column_cut_blocks for slice_ in self.slices)

    def new_state(self, device: torch.device) -> StateDict:
        """Allocates the state before the first step: initial moments, and master weights equal to the parameter."""
        return {key: self.wrap_local(key, entry.allocate(device)) for key, entry in self.entries.items()}

    def wrap_local(self, key: str, local: Tensor) -> Tensor:
        """Wraps this rank's part of entry ``key`` as the optimizer stores it: for a DTensor parameter, as a DTensor."""
        if key == "step":
            return local
        shard, grid = self.slices[0].shard, self.slices[0].grid_of(key)
        return (shard if grid is None else shard.scales(grid)).like_parameter(local)

    def join(self, states: Sequence[Mapping[str, Tensor]]) -> StateDict:
        """Concatenates the slices' entries to entries of the whole tensor: the inverse of :meth:`split`."""
        by_name: dict[str, list[Tensor]] = {}
        for slice_, state in zip(self.slices, states, strict=True):
            for key, value in state.items():
                by_name.setdefault(slice_.entry_name(key), []).append(value)
        return {
            name: self.wrap_local(name, values[0] if name == "step" or len(values) == 1 else torch.cat(values))
            for name, values in by_name.items()
        }

    def split(self, state: Mapping[str, Any]) -> list[StateDict]:
        """Divides a tensor's entries by slice: views of this rank's plain tensors. ``state`` may lack entries."""
        rows_taken: dict[str, int] = {}  # by entry: where the slices so far end in dim 0
        states = []
        for slice_ in self.slices:
            slice_state: StateDict = {}
            for key, entry in slice_.entries.items():
                name = slice_.entry_name(key)
                if name not in state:
                    continue
                slice_state[key] = state[name] if slice_.is_replicated(key) else self.shard.local(state[name])
                if slice_.name is not None and key != "step":
                    first = rows_taken.get(name, 0)
                    rows_taken[name] = first + entry.shape[0]
                    slice_state[key] = slice_state[key][first : rows_taken[name]]
            states.append(slice_state)
        return states

    def split_moments(self, values: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """Divides float moments, sharded like the tensor, by slice: views of this rank's plain tensors, per moment."""
        local = [self.shard.local(values[moment.name]) for moment in self.moments]
        return [[slice_.elements(x) for x in local] for slice_ in self.slices]

    def encode(self, values: Mapping[str, Tensor]) -> StateDict:
        """Quantizes float moments, sharded like the tensor. Blocks must not be cut: ``encode_slices`` handles these."""
        moments = zip(self.slices, self.split_moments(values), strict=True)
        return self.join([slice_.encode(slice_moments) for slice_, slice_moments in moments])

    def decode(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Dequantizes moments to float32, sharded like the tensor, with zeros where a flat buffer is padded."""
        states = zip(self.slices, self.split(state), strict=True)
        if isinstance(self.shard, FlatBuffer):
            values = [torch.zeros(self.shard.local_shape, device=state["step"].device) for _ in self.moments]
            for slice_, slice_state in states:
                for x, moment in zip(values, slice_.decode(slice_state), strict=True):
                    slice_.elements(x).copy_(moment)
        else:
            (values,) = (slice_.decode(slice_state) for slice_, slice_state in states)  # the only slice's
        return {m.name: self.shard.like_parameter(x) for m, x in zip(self.moments, values, strict=True)}

    def reset_rows(self, state: Mapping[str, Any], masks: Sequence[Tensor], weights: Tensor) -> None:
        """Gives rows their initial moments, in place; blocks never cross a row, so that all other rows stay.

        ``masks``: for each slice, a bool per row of the global parameter. Prodigy's exact moment becomes ``weights``.
        """
        exact = {moment.name for moment in self.moments if moment.exact}
        for slice_, rows, of_slice in zip(self.slices, masks, self.split(state), strict=True):
            for key in of_slice.keys() - {"step", LOW_BITS} if rows.any() else ():
                grid, values = slice_.grid_of(key), of_slice[key]
                shard = slice_.shard if grid is None else slice_.shard.scales(grid)
                shape, initial = shard.global_shape, values.new_tensor(slice_.entries[key].fill)
                chosen = shard.part(rows.view(shape[:1] + (1,) * (len(shape) - 1)).expand(shape)).to(values.device)
                if key in exact:
                    initial = slice_.elements(self.shard.local(weights)).to(values).reshape(*chosen.shape, 1)
                if values.numel():
                    values = values.view(*chosen.shape, -1)
                    values.copy_(torch.where(chosen[..., None], initial, values))

    def has_float_moments(self, loaded: Mapping[str, Any]) -> bool:
        """Whether loaded entries have float moments of the tensor's shape, as torch.optim saves, and no codes."""
        floats, own_entries = {moment.name for moment in self.moments}, self.entries.keys() - NON_MOMENTS
        if not floats or not floats <= loaded.keys():
            return False
        if isinstance(self.shard, FlatBuffer) and own_entries == floats:
            # The names are equal: only torch.optim's moments include the buffer's padding.
            return all(getattr(loaded[name], "shape", None) == self.shard.local_shape for name in floats)
        return loaded.keys().isdisjoint(own_entries - floats)

    def check_loaded(self, loaded: Mapping[str, Any], name: str, *, may_lack_low_bits: bool) -> None:
        """Checks names and formats of loaded entries, step count and float moments; not the values of codes and scales.

        :meth:`check_values` checks codes and scales of the state that :meth:`state_from_loaded` makes.

        ``loaded`` are entries as shardopt stores them, or torch.optim's. ``may_lack_low_bits``: whether they may be
        torch.optim's, so that master weights begin equal to the parameter. ``name`` is the parameter's, for errors.

        Raises ValueError if the entries are of another optimizer or another shape, or float moments are not finite.
        """
        self._check_names(loaded, name, may_lack_low_bits=may_lack_low_bits)
        has_float_moments, expected = self.has_float_moments(loaded), self.new_state(torch.device("meta"))
        if has_float_moments:
            floats = self.shard.like_parameter(torch.empty(self.shard.local_shape, device="meta"))
            expected = {key: entry for key, entry in expected.items() if key in NON_MOMENTS}
            expected.update((moment.name, floats) for moment in self.moments)
        for key, entry in expected.items():
            if key == "step" or key not in loaded:
                continue
            check_entry(loaded[key], entry, key, name)
            has_any_dtype = has_float_moments and key not in NON_MOMENTS  # check_moment demands floats
            if loaded[key].dtype != entry.dtype and not has_any_dtype:
                raise ValueError(f"{name}: got {key} of {loaded[key].dtype}, expected {entry.dtype}")
        for slice_moments in self.split_moments(loaded) if has_float_moments else ():
            for moment, x in zip(self.moments, slice_moments, strict=True):
                check_moment(x, moment.name, name, signed=moment.signed)
        checked_step(loaded, name)

    def _check_names(self, loaded: Mapping[str, Any], name: str, *, may_lack_low_bits: bool) -> None:
        """Raises ValueError unless loaded entries are those of this state, by name, or torch.optim's float moments."""
        got, floats = ", ".join(loaded), {moment.name for moment in self.moments}
        if not self.weights.low_bits and LOW_BITS in loaded:
            raise ValueError(
                f"{name}: got state with {got}, expected no {LOW_BITS} for a parameter of {self.weights.dtype}, which "
                "would lose them; load a checkpoint with shardopt.checkpoint.load(convert=True), or the weights that "
                "full_precision_parameters() gave"
            )
        # torch's SGD has no step; no optimizer but shardopt's has low bits and second moments of rows.
        required, optional = set(self.entries), {"step"} | ({LOW_BITS} if may_lack_low_bits else set())
        if self.has_float_moments(loaded):
            required, optional = (required & NON_MOMENTS) | floats, optional | {ROW_MOMENTS}
        known = {"step", *_IGNORED, *self.entries, *floats}
        is_unknown = any(key not in known and isinstance(value, Tensor) for key, value in loaded.items())
        if is_unknown or not required - optional <= loaded.keys():
            raise ValueError(
                f"{name}: got state with {got}, expected {', '.join(self.entries)}; was it saved by another optimizer, "
                "or with other quantization options or master_weight_bits? shardopt.checkpoint.import_state takes the "
                "state of bitsandbytes, torchao and other packages"
            )

    def state_from_loaded(self, loaded: Mapping[str, Any], device: torch.device, name: str) -> StateDict:
        """Makes new state on ``device`` from copies of checked entries, whose float moments were quantized already.

        Low bits and second moments of rows, which torch.optim's state lacks, get their initial values.
        """
        state: StateDict = {}
        for key, entry in self.entries.items():
            if key == "step":
                state[key] = torch.tensor(checked_step(loaded, name), dtype=torch.float32, device=device)
            elif key in loaded:
                state[key] = loaded[key].detach().clone(memory_format=torch.contiguous_format).to(device)
            else:
                state[key] = self.wrap_local(key, entry.allocate(device))
        return state

    def check_values(self, state: Mapping[str, Any], name: str) -> None:
        """Checks the values of a state's step count and moments, of all slices; see :meth:`SliceSpec.check_values`."""
        for slice_, slice_state in zip(self.slices, self.split(state), strict=True):
            slice_.check_values(slice_state, name if slice_.name is None else f"{slice_.name} in {name}")


def tensor_spec_of(param: Tensor, group: Mapping[str, Any], moments: tuple[Moment, ...]) -> TensorSpec:
    """The spec of a parameter's state in a param group, given its rule's moments.

    Raises ValueError if the group's weight format, or ``repay``, does not suit the parameter's dtype.
    """
    shard = shard_of(param)
    if not isinstance(shard, FlatBuffer):
        return TensorSpec(shard, (SliceSpec.of(shard, param.dtype, group, moments),))
    slices = []
    for segment in shard.segments:
        spec = SliceSpec.of(segment.shard, param.dtype, group, moments)
        slices.append(replace(spec, offset=segment.offset, name=segment.name, number=segment.number))
    return TensorSpec(shard, tuple(slices))
