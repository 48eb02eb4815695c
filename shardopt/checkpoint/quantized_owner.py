"""State of quantize_state in portable checkpoints: its entries, described as those of shardopt's own optimizers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.groups import OF_THE_RUN, SavedGroup, options_as_json
from shardopt.checkpoint.index import StoredTensor
from shardopt.checkpoint.items import Chunks, Item
from shardopt.checkpoint.owner import OF_QUANTIZE_STATE, Owner
from shardopt.checkpoint.quantized_values import is_text, option_from_json, packed, tensor_as_json, unpacked
from shardopt.checkpoint.wording import line, named, shown
from shardopt.layout import FlatShard, Shard
from shardopt.state.slice_spec import EntryFormat, SliceSpec
from shardopt.wrapper.chunks import TransferUnit, units_of
from shardopt.wrapper.coding import CODING_ENDS, DTYPE, State, coded_names, coding_keys, placed
from shardopt.wrapper.entries import CODED_DTYPES, Entries
from shardopt.wrapper.loading import UNSIGNED, checked_dtype, codec_name, format_of, on_device
from shardopt.wrapper.optimizer import QuantizedState
from shardopt.wrapper.tested import Kind, is_tested, kind_of


class Kept(NamedTuple):
    """An entry that is not quantized.

    Attributes:
        format: this rank's part.
        is_whole: whether all ranks have the same; else it is sharded as the parameter is.
    """

    format: EntryFormat
    is_whole: bool


@dataclass(frozen=True)
class EntriesState(SliceSpec):
    """State of a slice of a model parameter whose entries are those of some optimizer, not of a rule.

    The moments are the quantized entries, each in units of its own.
    """

    kept: Mapping[str, Kept] = field(default_factory=dict)

    @classmethod
    def with_entries(
        cls,
        entries: Entries,
        options: Mapping[str, Any],
        shard: Shard,
        dtype: torch.dtype,
        quantized: Collection[str],
        kept: Mapping[str, Kept],
    ) -> EntriesState:
        """The state of a slice, with the names of its quantized entries and the other entries."""
        moments = tuple(entries.moment(name) for name in sorted(quantized))
        spec = SliceSpec.of(shard, dtype, options, moments)
        return cls(spec.shard, spec.grid, spec.codec, spec.moments, spec.weights, kept=kept)

    @cached_property
    def entries(self) -> dict[str, EntryFormat]:
        return {**self.moment_entries, **{key: kept.format for key, kept in self.kept.items()}}

    def is_whole(self, key: str) -> bool:
        return key in self.kept and self.kept[key].is_whole

    def check_local(self, state: Mapping[str, Any], name: str) -> None:
        if self.moments:
            self.check_moments(state, name)
        kept = unpacked({key: state[key] for key in self.kept})
        for key in {moment.name + DTYPE for moment in self.moments} & kept.keys():
            checked_dtype(kept[key], key, name)


class QuantizedOwner(Owner):
    """The optimizer of a model's parameters, where it is the result of quantize_state."""

    one_step_count = False
    has_fixed_entries = False

    def __init__(self, groups: list[dict[str, Any]], optimizer: QuantizedState) -> None:
        self.groups = groups
        self.optimizer: QuantizedState = optimizer
        self._entries: Entries = optimizer._entries
        self._found_kept: set[str] = set()
        self._converted: dict[tuple[Tensor, int | None], torch.dtype] = {}

    @property
    def name(self) -> str:
        cls, inner = type(self.optimizer._inner), self.optimizer._inner
        package = f"{cls.__module__.partition('.')[0]}." if is_tested(inner) else ""
        return f"{OF_QUANTIZE_STATE}{package}{cls.__qualname__}"

    def synchronize(self) -> None:
        """Waits for nothing: a step leaves its state complete."""

    def slices(self, param: Tensor, group: int) -> list[tuple[SliceSpec, dict[str, Tensor]]]:
        state = self.optimizer.state.get(param, {})
        units = self._units(param)
        return [self._slice(unit, unit.state_in(state) if _has_elements(unit.shard) else {}) for unit in units]

    def describe(self, group: Mapping[str, Any], names: Sequence[str]) -> SavedGroup:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        try:
            saved = options_as_json(options, tensor_as_json)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        return {"parameters": list(names), "options": {**saved, **format_of(self._entries)}}

    def common_chunks(self) -> dict[str, Chunks]:
        state = {key: value for key, value in self.optimizer.state.items() if isinstance(key, str)}
        try:
            return {key: Chunks.whole(x) for name, value in state.items() for key, x in packed(name, value).items()}
        except ValueError as error:
            raise CheckpointError(f"the optimizer's state: {error}") from error

    def check_saved(self, header: Mapping[str, Any], entries: Mapping[str, Mapping[str, StoredTensor]]) -> None:
        if header.get("optimizer") != self.name:
            raise CheckpointError(
                f"got the state of {named(header.get('optimizer'))}, expected that of {self.name}; load it "
                "into the optimizer that it was saved from"
            )
        self._coded = {name for of_param in entries.values() for name in _coded(of_param)}

    def merged(self, group: Mapping[str, Any], saved: dict[str, Any], index: int) -> dict[str, Any]:
        what = f"param group {index}"
        least = self._entries.options["min_quantized_numel"]
        if saved.get("min_quantized_numel") != least:
            raise CheckpointError(
                f"{what}: got state saved with min_quantized_numel={shown(saved.get('min_quantized_numel'))}, expected "
                f"{least}; pass quantize_state the options of the run that saved it"
            )
        format_keys = format_of(self._entries).keys()
        left = {key: value for key, value in saved.items() if key not in (*OF_THE_RUN, *format_keys, "params")}
        try:
            self._saved_options(saved)
            new = {key: option_from_json(value, group.get(key), key) for key, value in left.items()}
            kept = {key: value for key, value in group.items() if key not in new and not self._is_counter(key, value)}
            self.optimizer._checked_kind([{**kept, **new}])
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(f"{what}: {line(error)}") from error
        return {**kept, **new}

    def forms(
        self,
        item: Item,
        options: Mapping[str, Any],
        saved_options: Mapping[str, Any],
        stored: Mapping[str, StoredTensor],
        dtype: torch.dtype,
    ) -> tuple[SliceSpec | None, SliceSpec]:
        what, shard, entries = named(item.name), item.shard, self._entries
        quantized = _coded(stored)
        kept: dict[str, Kept] = {}
        for key, (entry_dtype, shape, *_) in stored.items():
            if key.removesuffix("_codes") not in quantized and key.removesuffix("_scales") not in quantized:
                is_whole = shape != shard.global_shape or not shape or ":" in key
                kept[key] = Kept(EntryFormat(shape if is_whole else shard.local_shape, entry_dtype, (0,)), is_whole)
        try:
            _check_kept(shard, kept)
        except ValueError as error:
            raise CheckpointError(f"{what}: {error}") from error
        for name in quantized:
            saved, own = name in saved_options[UNSIGNED], not entries.moment(name).signed
            if saved != own:
                signs = ["unsigned" if x else "signed" for x in (saved, own)]
                raise CheckpointError(
                    f"{what}: got {named(name)} saved as {signs[0]}, expected {signs[1]}; pass quantize_state the "
                    "unsigned= of the run that saved it"
                )
        form = EntriesState.with_entries(entries, entries.options, shard, item.local.dtype, quantized, kept)
        if not stored:
            return None, form
        can_be = entries.is_quantized(shard)
        floats = {key for key, x in kept.items() if not x.is_whole and x.format.dtype in (*CODED_DTYPES, dtype)}
        floats = (floats if can_be else set()) - entries.kept_among({*quantized, *kept})
        if (quantized and not can_be) or floats & self._coded:
            got, expected = ("codes", "floats") if quantized else ("floats", "codes")
            raise CheckpointError(
                f"{what}: got {named(min(quantized or floats))} in {got}, expected {expected}, as for the other "
                "parameters; is it the weight of a StableEmbedding in one of the models only?"
            )
        if dtype != item.local.dtype:
            self._converted[item.param, item.segment] = dtype
        self._found_kept |= floats  # as the run that saved them found them to be copies of weights
        saved_form = EntriesState.with_entries(
            entries, self._saved_options(saved_options), shard, dtype, quantized, kept
        )
        return saved_form, form

    def has_state_here(self, item: Item) -> bool:
        return _has_elements(item.shard)

    def placed(self, param: Tensor, options: Mapping[str, Any], states: Sequence[dict[str, Tensor]]) -> Any:
        new: dict[Any, State] = {}
        for index, (unit, state) in enumerate(zip(self._units(param), states, strict=True)):
            before = self._converted.get((param, None if unit.segment is None else index))
            if state:
                unit.put_state(new, self._placed_unit(unit, options, state, before))
        return new[param]

    def put(self, param: Tensor, placed: Any) -> None:
        self.optimizer.state[param] = placed

    def finish(self, common: Mapping[str, Tensor]) -> None:
        self._entries.kept |= self._found_kept
        self.optimizer._expect_first_step()
        self.optimizer._is_elementwise = kind_of(self.optimizer._inner) is Kind.ELEMENTWISE
        for key in [key for key in self.optimizer.state if isinstance(key, str)]:
            del self.optimizer.state[key]
        self.optimizer.state.update(unpacked(common))

    def check_common(self, common: Mapping[str, Tensor]) -> None:
        unpacked(common)

    def _units(self, param: Tensor) -> list[TransferUnit]:
        return units_of([{"params": [param]}], local=self.optimizer._is_elementwise)

    def _is_counter(self, key: str, value: Any) -> bool:
        """Whether a value of a param group was put there by a step."""
        stays = {"params", "param_names", *OF_THE_RUN, *self.optimizer.defaults}
        return key not in stays and isinstance(value, int | float | Tensor)

    def _saved_options(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The options with which the state in a checkpoint was coded.

        Raises:
            ValueError: they are none that it can have been coded with.
        """
        codec, signs = codec_name(saved.get("codec")), saved.get(UNSIGNED)
        if codec is None or not isinstance(signs, list) or not all(isinstance(name, str) for name in signs):
            raise ValueError(
                f"got state saved with codec={shown(saved.get('codec'))} and unsigned={shown(signs)}, expected those "
                "of quantize_state; load another checkpoint"
            )
        return self._entries.with_options({"codec": codec, "block_size": saved.get("block_size")})

    def _slice(self, unit: TransferUnit, state: Mapping[str, Any]) -> tuple[SliceSpec, dict[str, Tensor]]:
        """Form and entries of a tensor's state."""
        quantized, coding = coded_names(state), coding_keys(state)
        entries = {key: unit.shard.local(state[key]) for key in coding if not key.endswith(DTYPE)}
        kept: dict[str, Kept] = {}
        try:
            for name, value in state.items():
                if name in entries:
                    continue
                for key, x in packed(name, value).items():
                    entries[key], is_whole = (x, True) if ":" in key else _local(unit.shard, x)
                    kept[key] = Kept(EntryFormat(tuple(entries[key].shape), x.dtype, (0,)), is_whole)
            _check_kept(unit.shard, kept)
        except ValueError as error:
            raise CheckpointError(f"a parameter of shape {unit.shard.global_shape}: {error}") from error
        options, dtype = self._entries.options, unit.param.dtype
        return EntriesState.with_entries(self._entries, options, unit.shard, dtype, quantized, kept), entries

    def _placed_unit(
        self, unit: TransferUnit, options: Mapping[str, Any], state: Mapping[str, Tensor], before: torch.dtype | None
    ) -> State:
        """The state of a tensor as the optimizer has it.

        ``before`` is the parameter's dtype in the checkpoint if it is converted: entries of that dtype follow.
        """
        quantized = _coded(state)
        spec = EntriesState.with_entries(
            self._entries, self._entries.options, unit.shard, unit.param.dtype, quantized, {}
        )
        codes = {key: state[key].to(unit.param.device) for key in spec.moment_entries}
        kept = unpacked({key: value for key, value in state.items() if key not in codes})
        for key, value in kept.items():
            if isinstance(value, Tensor) and value.dim() and value.dtype == before:
                kept[key] = value.to(unit.param.dtype)
        return {
            **placed(self._entries, unit, spec, codes),
            **{key: on_device(unit, options, key, value) for key, value in kept.items()},
        }


def _has_elements(shard: Shard) -> bool:
    """Whether this rank takes part in steps of a parameter; elsewhere Adagrad has state, too, but does not count."""
    return not isinstance(shard, FlatShard) or shard.numel > 0


def _coded(keys: Collection[str]) -> list[str]:
    return sorted(coded_names(dict.fromkeys(keys)))


def _local(shard: Shard, value: Tensor) -> tuple[Tensor, bool]:
    """This rank's part of an entry, and whether all ranks have the same."""
    is_sharded = hasattr(value, "to_local")
    shape = shard.global_shape if is_sharded else shard.local_shape
    if tuple(value.shape) == shape and value.dim() and is_sharded != shard.plain:
        return shard.local(value), False
    if is_sharded:
        raise ValueError(
            f"got a state entry as DTensor of shape {tuple(value.shape)}, expected the parameter's shape and sharding, "
            f"{shard.global_shape}; save get_optimizer_state_dict() with torch.distributed.checkpoint"
        )
    return value, True


def _check_kept(shard: Shard, kept: Mapping[str, Kept]) -> None:
    """Checks entries that are not quantized.

    Raises:
        ValueError: one is named as codes or scales are, or has another shape than the parameter although this rank has
            a part of the parameter only.
    """
    for key, (form, is_whole) in kept.items():
        if key.endswith(CODING_ENDS):
            raise ValueError(
                f"got a state entry {named(key)} alone, expected codes and scales together; load another "
                "checkpoint, or rename an entry of the optimizer's own"
            )
        if is_whole and form.shape and not is_text(key) and shard.local_shape != shard.global_shape:
            raise ValueError(
                f"got a state entry {named(key)} of shape {shown(form.shape)} for a part of a parameter of shape "
                f"{shard.global_shape}, expected numbers, and tensors of the parameter's shape; use an optimizer that "
                "is element by element"
            )
