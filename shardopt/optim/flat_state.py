"""State under flat shards: of a buffer that holds parts of several parameters, and of blocks that ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardopt.codec import Moment
from shardopt.kernels.weights import WeightFormat
from shardopt.layout import Exchange, FlatBuffer, FlatShard, assigned, shard_of
from shardopt.optim.loaded_entries import check_dense, check_moment, checked_step, copy_to, step_on
from shardopt.optim.state import LOW_BITS, ParameterState, Part, StateDict

T = TypeVar("T")

#: In the param groups of a state dict: what elements of flat shards it is the state of; see :func:`held_elements`.
HELD = "held_elements"


@dataclass(frozen=True)
class BufferState:
    """The state of a flat buffer (a FlatParameter of FSDP1 with ``use_orig_params=False``; ZeRO).

    Each segment has the state that its parameter has anywhere. Entries of the same name stand one after another in one
    tensor, in the order of the segments; what is quantized and what is not have different names (bf16 moments are
    ``exp_avg_bf16`` here).
    """

    shard: FlatBuffer
    specs: tuple[ParameterState, ...]  # of the segments
    moments: tuple[Moment, ...]
    weights: WeightFormat

    @classmethod
    def of(
        cls, shard: FlatBuffer, dtype: torch.dtype, group: Mapping[str, Any], moments: tuple[Moment, ...]
    ) -> BufferState:
        """The state of a buffer in a param group; see :meth:`ParameterState.of`."""
        specs = tuple(ParameterState.of_shard(s.shard, dtype, group, moments) for s in shard.segments)
        return cls(shard, specs, moments, WeightFormat.of(dtype, group))

    @property
    def state_names(self) -> frozenset[str]:
        """The entries that its state has."""
        return frozenset(["step"]).union(*({_name_here(spec, key) for key in spec.state_names} for spec in self.specs))

    def new(self, device: torch.device) -> StateDict:
        """Fresh state; see :meth:`ParameterState.new`."""
        return self.join([spec.new(device) for spec in self.specs])

    def like(self, key: str, local: Tensor) -> Tensor:
        """See :meth:`ParameterState.like`: a buffer's entries are this rank's."""
        return local

    def join(self, states: Sequence[StateDict]) -> StateDict:
        """The state of the buffer for those of its segments."""
        found: dict[str, list[Tensor]] = {}
        for spec, state in zip(self.specs, states, strict=True):
            for key, value in state.items():
                found.setdefault(_name_here(spec, key), []).append(value)
        return {key: values[0] if key == "step" else torch.cat(values) for key, values in found.items()}

    def split(self, state: Mapping[str, Any]) -> list[StateDict]:
        """The states of the segments: views."""
        at: dict[str, int] = {}
        found = []
        for spec in self.specs:
            part: StateDict = {"step": state["step"]}
            for key, like in spec.new(torch.device("meta")).items():
                here = _name_here(spec, key)
                if key != "step" and here in state:
                    begin = at.get(here, 0)
                    at[here] = begin + like.shape[0]
                    part[key] = state[here][begin : at[here]]
            found.append(part)
        return found

    def parts(self, param: Tensor, state: StateDict) -> Iterator[Part]:
        """The buffer's segments, given its local tensor."""
        for segment, spec, own in zip(self.shard.segments, self.specs, self.split(state), strict=True):
            yield Part(spec, segment.offset, segment.of(param), own, segment.place)

    def decode(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """The moments as float32, laid out like the buffer, with zeros for padding."""
        device = state["step"].device
        found = {m.name: torch.zeros(self.shard.local_shape, device=device) for m in self.moments}
        for segment, spec, own in zip(self.shard.segments, self.specs, self.split(state), strict=True):
            for name, value in spec.decode(own).items():
                segment.of(found[name]).copy_(value)
        return found

    def check_loaded(self, loaded: Mapping[str, Any], name: str, *, of_torch: bool) -> None:
        """Checks entries to be adopted; see :meth:`ParameterState.check_loaded`. Float moments are coded already."""
        checked_step(loaded, name)
        for key, like in self.new(torch.device("meta")).items():
            value = loaded.get(key)
            if key == "step" or (key == LOW_BITS and value is None and of_torch):
                continue
            if not isinstance(value, Tensor) or (value.shape, value.dtype) != (like.shape, like.dtype):
                got = f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else repr(value)
                raise ValueError(
                    f"{name}: got {key} as {got}, expected {tuple(like.shape)} of {like.dtype}; a state dict of flat "
                    "shards loads on the same ranks and options only; use shardopt.checkpoint for others"
                )
            check_dense(value, key, name)

    def adopt(self, loaded: Mapping[str, Any], device: torch.device, name: str) -> StateDict:
        """The state for entries that :meth:`check_loaded` let pass. Low bits that it has not got are zero."""
        state = {**self.new(device), "step": step_on(device, checked_step(loaded, name))}
        return state | {key: copy_to(loaded[key], device) for key in state if key != "step" and key in loaded}

    def check_local(self, state: Mapping[str, Tensor], name: str) -> None:
        """Checks what the state stands for; see :meth:`ParameterState.check_local`."""
        for segment, spec, own in zip(self.shard.segments, self.specs, self.split(state), strict=True):
            spec.check_local(own, f"{segment.name} in {name}")


def _name_here(spec: ParameterState, key: str) -> str:
    """What an entry of a segment's state is called in the buffer's: one name has one dtype."""
    is_moment = any(key == moment.name for moment in spec.moments)
    return f"{key}_{spec.codec.name}" if is_moment and spec.codec.code_dtype != torch.float32 else key


AnyState = ParameterState | BufferState


def state_of(param: Tensor, group: Mapping[str, Any], moments: tuple[Moment, ...]) -> AnyState:
    """The state that one of the optimizer's parameters has in a param group; see :meth:`ParameterState.of`."""
    shard = shard_of(param)
    if isinstance(shard, FlatBuffer):
        return BufferState.of(shard, param.dtype, group, moments)
    return ParameterState.of_shard(shard, param.dtype, group, moments)


def flat_parts(spec: AnyState) -> Sequence[ParameterState]:
    """The flat shards that a parameter is made of: several, one, or none."""
    if isinstance(spec, BufferState):
        return spec.specs
    return [spec] if isinstance(spec.shard, FlatShard) else []


def held_elements(params: Sequence[Tensor]) -> list[list[list[int]]] | None:
    """Which elements of the model's parameters this rank holds in flat shards: per tensor ``[start, end]`` of each.

    None where no shard is flat.
    """
    found = []
    for param in params:
        shard = assigned(param)
        segments = [s.shard for s in shard.segments] if isinstance(shard, FlatBuffer) else [shard]
        found.append([[s.start, s.end] for s in segments if isinstance(s, FlatShard)])
    return found if any(found) else None


def shared_blocks(spec: ParameterState) -> list[int]:
    """The blocks on whose scales several ranks have to agree: numbers in the grid, the same on all ranks."""
    shard = spec.shard
    if not isinstance(shard, FlatShard) or shard.exchange is None:
        return []
    return shard.cut_blocks(spec.grid) if spec.codec.blockwise and spec.exact_cut_blocks else []


def encode_flat(
    specs: Sequence[ParameterState], values: Sequence[Sequence[Tensor] | None], exchanges: Sequence[Exchange] = ()
) -> list[StateDict | None]:
    """The state entries for float moments under flat shards; cut blocks are put together from their owners' parts.

    All ranks must call this with the same parameters in the same order.

    Args:
        specs: the parameters' states.
        values: per parameter, this rank's part of each moment; None where there is none to encode.
        exchanges: the ranks that raise together where one of them cannot encode its part, as for lack of memory.
    """
    shared = all_or_none(exchanges, lambda: _fragments(specs, values))
    for exchange, (_, flat) in shared.items():
        exchange.all_reduce_sum(flat)
    return all_or_none(exchanges, lambda: _encode_completed(specs, values, shared))


def _fragments(
    specs: Sequence[ParameterState], values: Sequence[Sequence[Tensor] | None]
) -> dict[Exchange, tuple[list[tuple[int, Tensor]], Tensor]]:
    """This rank's parts of cut blocks: their parameters with tensors to be filled, and all parts in one on the CPU."""
    shared: dict[Exchange, list[tuple[int, Tensor]]] = {}
    for index, (spec, own) in enumerate(zip(specs, values, strict=True)):
        numbers = shared_blocks(spec)
        if numbers:
            assert isinstance(spec.shard, FlatShard)
            assert spec.shard.exchange is not None
            device = own[0].device if own else torch.device("cpu")
            blocks = torch.zeros((len(numbers), len(spec.moments), spec.grid.block_size), device=device)
            for k, x in enumerate(own or ()):
                _copy_fragments(spec, x, numbers, blocks[:, k])
            shared.setdefault(spec.shard.exchange, []).append((index, blocks))
    return {
        exchange: (found, torch.cat([blocks.reshape(-1).cpu() for _, blocks in found]))
        for exchange, found in shared.items()
    }


def _encode_completed(
    specs: Sequence[ParameterState],
    values: Sequence[Sequence[Tensor] | None],
    shared: Mapping[Exchange, tuple[list[tuple[int, Tensor]], Tensor]],
) -> list[StateDict | None]:
    complete: dict[int, dict[int, Tensor]] = {}
    for found, flat in shared.values():
        for (index, blocks), summed in zip(found, torch.split(flat, [b.numel() for _, b in found]), strict=True):
            numbers = shared_blocks(specs[index])
            complete[index] = dict(zip(numbers, summed.view_as(blocks).to(blocks.device), strict=True))
    return [
        None if own is None else spec.encode_local(own, complete.get(index))  # type: ignore[arg-type]
        for index, (spec, own) in enumerate(zip(specs, values, strict=True))
    ]


def encode_flat_moments(
    specs: Sequence[AnyState], loaded: Sequence[Mapping[str, Any] | None], exchanges: Sequence[Exchange]
) -> list[Mapping[str, Any] | None]:
    """Replaces float moments (torch.optim's state) under flat shards by codes and scales; leaves the rest as it is.

    All ranks must call this with the same parameters, in the same order, if any of them has flat shards.

    Args:
        specs: what the state of each parameter looks like.
        loaded: its entries as loaded; None for a parameter without state.
        exchanges: the ranks that raise together where one of them cannot; see :func:`agreeing`.
    """
    parts: list[ParameterState] = []
    values: list[Sequence[Tensor] | None] = []
    for spec, own in zip(specs, loaded, strict=True):
        segments = spec.shard.segments if isinstance(spec, BufferState) else [None]
        moments = _float_moments(spec, own)
        for part, segment in zip(flat_parts(spec), segments, strict=False):
            parts.append(part)
            values.append([x if segment is None else segment.of(x) for x in moments] if moments else None)
    if not parts or not on_any_rank(exchanges, any(own is not None for own in values)):
        return list(loaded)
    encoded = iter(encode_flat(parts, values, exchanges))
    found: list[Mapping[str, Any] | None] = []
    for spec, own in zip(specs, loaded, strict=True):
        states = [next(encoded) for _ in flat_parts(spec)]
        coded = [state for state in states if state is not None]
        if not coded or own is None:
            found.append(own)
            continue
        entries = spec.join(coded) if isinstance(spec, BufferState) else coded[0]
        moments_of = {moment.name for moment in spec.moments}
        found.append({**{k: v for k, v in own.items() if k not in moments_of}, **entries})
    return found


def _float_moments(spec: AnyState, loaded: Mapping[str, Any] | None) -> list[Tensor] | None:
    """The moments of torch.optim's state of a tensor with flat shards; None if it is something else."""
    if loaded is None or not flat_parts(spec) or not spec.moments:
        return None
    own = [loaded.get(moment.name) for moment in spec.moments]
    found = [x for x in own if isinstance(x, Tensor) and x.shape == spec.shard.local_shape]
    # A buffer's own float32 moments have its shape only where there is nothing else in it: then both are the same.
    native = isinstance(spec, ParameterState) and spec.state_names <= loaded.keys()
    return found if len(found) == len(own) and not native else None


def check_flat_moments(spec: AnyState, loaded: Mapping[str, Any] | None, name: str) -> None:
    """Checks the moments of a parameter that :func:`encode_flat_moments` is to encode.

    Raises:
        ValueError: one is sparse, of no float dtype, or not finite, or below zero though it is not signed.
    """
    for moment, x in zip(spec.moments, _float_moments(spec, loaded) or (), strict=False):
        check_dense(x, moment.name, name)
        for part in [s.of(x) for s in spec.shard.segments] if isinstance(spec, BufferState) else [x]:
            check_moment(part, moment.name, name, signed=moment.signed)


def agreeing(params: Iterable[Tensor]) -> list[Exchange]:
    """The ranks that exchange moments with this one when state is loaded, and so raise together if one of them must.

    Those are the ranks that share parameters with this one in flat shards or in column shards, whatever their state.

    Raises:
        UnknownShardError: nothing says what shard a parameter is.
    """
    shards = [shard_of(param) for param in params]
    found = [shard.holders for shard in shards if shard.cuts_rows]
    return list(dict.fromkeys(holders for holders in found if holders is not None))


def all_or_none(exchanges: Sequence[Exchange], work: Callable[[], T]) -> T:
    """Calls a function without collectives, and raises on all of some ranks if it raised on any of them.

    Args:
        exchanges: the ranks; see :func:`agreeing`.
        work: the function.

    Raises:
        ValueError: it raised on another rank. On this one, what it raised is raised.
    """
    error: Exception | None = None
    try:
        result = work()
    except Exception as raised:  # whatever it is, the other ranks must not wait for this one
        error = raised
    if on_any_rank(exchanges, error is not None):
        raise error or ValueError(
            "got state that another rank refused, expected none of it to be at fault; that rank's error says what is "
            "wrong, and nothing was changed"
        )
    return result


def on_any_rank(exchanges: Sequence[Exchange], here: bool) -> bool:
    """Whether something is so on any of some ranks. All of them must call this.

    Args:
        exchanges: the ranks; see :func:`agreeing`.
        here: whether it is so on this one.
    """
    found = here
    for exchange in exchanges:
        flag = torch.tensor([here], dtype=torch.int32)
        exchange.all_reduce_max(flag)
        found |= bool(flag.item())
    return found


def _copy_fragments(spec: ParameterState, x: Tensor, numbers: Sequence[int], blocks: Tensor) -> None:
    """Puts what this rank holds of the blocks ``numbers`` into ``blocks``, shape ``(len(numbers), block_size)``."""
    shard, grid = spec.shard, spec.grid
    assert isinstance(shard, FlatShard)
    for row, number in zip(blocks, numbers, strict=True):
        first = grid.first_element(number)
        end = min(first + grid.block_size, (first // grid.row_numel + 1) * grid.row_numel)
        begin, stop = max(first, shard.start), min(end, shard.end)
        if begin < stop:
            row[begin - first : stop - first] = x[begin - shard.start : stop - shard.start]
