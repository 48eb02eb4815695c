"""State packed into float32 tensors of the parameter's shape, the only form that FSDP1's own functions carry.

Bits are moved, never computed with. Decoded moments would not do: the scales of most blocks cannot be told from decoded
numbers, so that encoding them again gives other bits.

An element has 4 bytes in each of the entries ``packed_0``, ``packed_1``, ...: first its own bytes of the entries that
have the parameter's shape (codes, moments that are not quantized, low bits), in the order of :attr:`SliceSpec.entries`,
then some bytes of its block's scales, as many as let the parameter's shortest block carry them all: they begin at the
block's first element and go on at the next ones. Second moments of rows follow likewise, with rows as blocks. The rest
is zeros: FSDP1 demands the same entries of all parameters.

``packed_exact`` is one number that no narrower format has: a cast of the state to one, and back, changes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt.layout import BlockGrid, Exchange, FlatBuffer, FlatShard, Shard
from shardopt.state.agreement import all_or_none, on_any_rank
from shardopt.state.loaded_entries import check_entry
from shardopt.state.slice_spec import SliceSpec, StateDict
from shardopt.state.tensor_state import TensorState

_PREFIX = "packed_"
_EXACT = f"{_PREFIX}exact"
_EXACT_VALUE = 1 + 2.0**-23
_WORD = 4  # bytes


def is_packed(entries: Iterable[str]) -> bool:
    """Whether entries of these names are packed state."""
    return any(name.startswith(_PREFIX) for name in entries)


def words_of(specs: Iterable[TensorState]) -> int:
    """The words per element that the state of each of some tensors fits in, on any number of ranks."""
    return max((_Layout(slice_.spec).words for spec in specs for slice_ in spec.slices), default=0)


def pack(spec: TensorState, state: Mapping[str, Any], words: int) -> StateDict:
    """The state in ``words`` entries of float32, of the local tensor's shape, beside ``step`` and ``packed_exact``."""
    shape = spec.shard.local_shape
    device = next((value.device for key, value in state.items() if key != "step"), state["step"].device)
    packed = torch.zeros((words, math.prod(shape), _WORD), dtype=torch.uint8, device=device)
    for slice_, slice_state in zip(spec.slices, spec.split(state), strict=True):
        layout = _Layout(slice_.spec)
        layout.pack(slice_state, packed[:, slice_.offset : slice_.offset + layout.numel])
    columns = packed.view(torch.float32).view(words, *shape)
    step = state["step"].clone()
    if not words:
        return {"step": step}
    exact = torch.full_like(step, _EXACT_VALUE, dtype=torch.float32)
    return {"step": step, _EXACT: exact, **{f"{_PREFIX}{word}": column for word, column in enumerate(columns)}}


def unpack_loaded(
    specs: Sequence[TensorState],
    loaded: Sequence[Mapping[str, Any] | None],
    names: Sequence[str],
    exchanges: Sequence[Exchange],
) -> list[Mapping[str, Any] | None]:
    """Replaces packed state by the entries that were packed; leaves other state alone.

    All ranks must call this with the same tensors, in the same order, if any of them has flat shards.

    Args:
        specs: describe the state of each tensor.
        loaded: the tensors' entries; None for a tensor without state.
        names: the tensors' names in errors.
        exchanges: the ranks that raise together if one of them cannot unpack its part; see :func:`agreeing`.

    Raises:
        ValueError: packed entries are of other parameters, another optimizer or other options, or are incomplete.
    """
    if not on_any_rank(exchanges, any(entries is not None and is_packed(entries) for entries in loaded)):
        return list(loaded)
    tensors = all_or_none(exchanges, lambda: [_slices(*item) for item in zip(specs, loaded, names, strict=True)])
    slices = [slice_ for of_tensor in tensors for slice_ in of_tensor]
    shared = all_or_none(exchanges, lambda: _cut_scales(slices))
    for exchange, scales in shared.items():
        exchange.all_reduce_sum(scales)
    return all_or_none(exchanges, lambda: _completed(specs, loaded, tensors, shared))


class _Scales(NamedTuple):
    """The scales of this rank's blocks, as far as this rank's elements carry them.

    Attributes:
        bytes: uint8, ``(blocks, bytes of a block's scales)``, with zeros where other ranks have them.
        known: int32, ``(blocks,)``: how many of them are known here.
    """

    bytes: Tensor
    known: Tensor


class _Slice(NamedTuple):
    """A slice on its way out of packed state; ``elements`` and ``scales`` are None without packed state.

    Attributes:
        layout: where the bytes of the slice's state are.
        name: the tensor's name in errors.
        elements: the entries of the parameter's shape.
        scales: the scales, for each of the layout's blocks.
    """

    layout: _Layout
    name: str
    elements: StateDict | None = None
    scales: list[_Scales] | None = None


@dataclass(frozen=True)
class _Layout:
    """Where the bytes of a slice's state, described by ``spec``, are in packed state."""

    spec: SliceSpec

    @cached_property
    def elements(self) -> dict[str, int]:
        """Bytes of an element, by entry."""
        dims = len(self.spec.shard.local_shape)
        widths = {key: math.prod(entry.shape[dims:]) * entry.dtype.itemsize for key, entry in self.spec.entries.items()}
        outside = {key for key in widths if self.spec.is_whole(key) or self.spec.grid_of(key) is not None}
        return {key: width for key, width in widths.items() if key not in outside}

    @cached_property
    def blocks(self) -> list[_Blocks]:
        """The blocks that have scales, and the rows that have second moments."""
        entries: dict[BlockGrid, dict[str, int]] = {}
        for key, entry in self.spec.entries.items():
            grid = self.spec.grid_of(key)
            if grid is not None:
                per_block = entry.shape[len(self.spec.shard.scales(grid).local_shape) :]
                entries.setdefault(grid, {})[key] = _WORD * math.prod(per_block)
        blocks, at = [], sum(self.elements.values())
        for grid, widths in entries.items():
            blocks.append(_Blocks(self.spec, grid, widths, at))
            at += blocks[-1].beside
        return blocks

    @property
    def words(self) -> int:
        """Words per element that hold the slice's state."""
        return -(-(sum(self.elements.values()) + sum(blocks.beside for blocks in self.blocks)) // _WORD)

    @property
    def numel(self) -> int:
        """Elements on this rank."""
        return math.prod(self.spec.shard.local_shape)

    def pack(self, state: Mapping[str, Tensor], packed: Tensor) -> None:
        """Writes the slice's state to bytes: uint8, ``(words, numel, 4)``."""
        at = 0
        for key, width in self.elements.items():
            for column in _as_bytes(state[key], self.numel, width).unbind(1):
                packed[at // _WORD, :, at % _WORD] = column
                at += 1
        for blocks in self.blocks:
            first, end = blocks.local
            scales = torch.cat([_as_bytes(state[key], end - first, w) for key, w in blocks.widths.items()], 1)
            for index, place in enumerate(blocks.places(packed.device)):
                packed[place.word, place.elements, place.byte] = scales[place.inside, index]

    def unpack(self, packed: Tensor) -> tuple[StateDict, list[_Scales]]:
        """Reads the entries of the parameter's shape, and the scales that this rank's elements carry."""
        elements: StateDict = {}
        at = 0
        for key, width in self.elements.items():
            columns = [packed[i // _WORD, :, i % _WORD] for i in range(at, at + width)]
            entry = self.spec.entries[key]
            elements[key] = torch.stack(columns, 1).view(entry.dtype).view(entry.shape)
            at += width
        return elements, [blocks.unpack(packed) for blocks in self.blocks]


@dataclass(frozen=True)
class _Blocks:
    """Where the bytes of the scales of a grid's blocks are in packed state.

    Attributes:
        spec: describes the slice's state.
        grid: the blocks.
        widths: bytes of a block's scales, by entry.
        first: index of the first byte in an element.
    """

    spec: SliceSpec
    grid: BlockGrid
    widths: dict[str, int]
    first: int

    @property
    def beside(self) -> int:
        """Bytes of the scales in an element: as many as suffice for the shortest block."""
        shortest = self.grid.row_numel % self.grid.block_size or self.grid.block_size
        return -(-sum(self.widths.values()) // shortest)

    @property
    def local(self) -> tuple[int, int]:
        """The blocks of which this rank has scales: their numbers in the grid are ``[first, end)``."""
        shard, grid = self.spec.shard, self.grid
        return shard.blocks(grid) if isinstance(shard, FlatShard) else (0, grid.rows * grid.blocks_per_row)

    @property
    def cut(self) -> list[int]:
        """The blocks whose scales are on several ranks, on this rank or not: their numbers in the grid."""
        shard = self.spec.shard
        return shard.cut_blocks(self.grid) if isinstance(shard, FlatShard) and shard.exchange is not None else []

    def unpack(self, packed: Tensor) -> _Scales:
        """Reads the scales that this rank's elements carry."""
        first, end = self.local
        scales = packed.new_zeros((end - first, sum(self.widths.values())))
        known = torch.zeros(end - first, dtype=torch.int32, device=packed.device)
        for index, place in enumerate(self.places(packed.device)):
            scales[place.inside, index] = packed[place.word, place.elements, place.byte]
            known += place.inside
        return _Scales(scales, known)

    def entries(self, scales: Tensor) -> StateDict:
        """The entries of the scales, from the bytes of all scales by block."""
        parts = torch.split(scales, list(self.widths.values()), 1)
        shapes = [self.spec.entries[key].shape for key in self.widths]
        return {
            key: part.contiguous().view(torch.float32).view(shape)
            for key, part, shape in zip(self.widths, parts, shapes, strict=True)
        }

    def places(self, device: torch.device) -> Iterator[_Place]:
        """The place of each byte of a block's scales, in the scales' order."""
        grid, shard = self.grid, self.spec.shard
        blocks = torch.arange(*self.local, device=device)
        start = shard.start if isinstance(shard, FlatShard) else 0
        begins = blocks // grid.blocks_per_row * grid.row_numel + blocks % grid.blocks_per_row * grid.block_size - start
        for index in range(sum(self.widths.values())):
            element, (word, byte) = begins + index // self.beside, divmod(self.first + index % self.beside, _WORD)
            inside = (element >= 0) & (element < math.prod(shard.local_shape))
            yield _Place(word, byte, inside, element[inside])


class _Place(NamedTuple):
    """Where one byte of all blocks' scales is in packed state.

    Attributes:
        word: the entry.
        byte: the byte in the entry's elements.
        inside: bool, ``(blocks,)``: whether a block's byte is on this rank.
        elements: int64: the element with the byte, for each block whose byte is on this rank.
    """

    word: int
    byte: int
    inside: Tensor
    elements: Tensor


def _as_bytes(entry: Tensor, count: int, width: int) -> Tensor:
    return entry.detach().reshape(-1).view(torch.uint8).view(count, width)


def _slices(spec: TensorState, entries: Mapping[str, Any] | None, name: str) -> list[_Slice]:
    """The slices of a tensor, with what this rank's part of its packed state has of theirs.

    Raises:
        ValueError: packed state is of another parameter, another optimizer or other options.
    """
    if entries is None or not is_packed(entries):
        return [_Slice(_Layout(slice_.spec), name) for slice_ in spec.slices]
    if not (isinstance(spec.shard, FlatBuffer | FlatShard) or type(spec.shard) is Shard):
        raise ValueError(
            f"{name}: got state that torch's optim_state_dict of FSDP1 gathered, expected a parameter of FSDP1, not a "
            "DTensor; save with shardopt.checkpoint to load it under another sharding"
        )
    count, least = sum(key.startswith(_PREFIX) and key != _EXACT for key in entries), words_of([spec])
    keys = [f"{_PREFIX}{word}" for word in range(max(count, least))]
    if entries.keys() != {"step", _EXACT, *keys}:
        raise ValueError(
            f"{name}: got state with {', '.join(entries)}, expected step, {_EXACT}, {', '.join(keys)}; was it saved "
            "by another optimizer, or with other quantization options?"
        )
    like = torch.empty(spec.shard.local_shape, device="meta")
    for key in keys:
        check_entry(entries[key], like, key, name)
        if entries[key].dtype != torch.float32:
            raise ValueError(
                f"{name}: got {key} of {entries[key].dtype}, expected torch.float32; load it as it was saved"
            )
    check_entry(entries[_EXACT], torch.empty((), device="meta"), _EXACT, name)
    if float(entries[_EXACT]) != _EXACT_VALUE:
        raise ValueError(
            f"{name}: got {_EXACT} {float(entries[_EXACT])!r}, expected {_EXACT_VALUE!r}: packed state was converted, "
            "as to half precision and back, and its bytes are lost; carry it as it was saved"
        )
    packed = torch.stack([entries[key].detach().reshape(-1, 1).view(torch.uint8) for key in keys])
    slices = []
    for slice_ in spec.slices:
        layout = _Layout(slice_.spec)
        of_slice = packed[:, slice_.offset : slice_.offset + layout.numel]
        slices.append(_Slice(layout, name, *layout.unpack(of_slice)))
    return slices


def _cut_scales(slices: Sequence[_Slice]) -> dict[Exchange, Tensor]:
    """This rank's bytes of the scales of cut blocks, each block's with their number behind them: int32, on the CPU."""
    shared: dict[Exchange, list[Tensor]] = {}
    for layout, _, _, all_scales in slices:
        for index, blocks in enumerate(layout.blocks):
            cut, scales = blocks.cut, None if all_scales is None else all_scales[index]
            if not cut:
                continue
            rows = torch.zeros((len(cut), sum(blocks.widths.values()) + 1), dtype=torch.int32, device="cpu")
            first, end = blocks.local
            for row, number in zip(rows, cut, strict=True):
                if scales is not None and first <= number < end:
                    row[:-1] = scales.bytes[number - first]
                    row[-1] = scales.known[number - first]
            exchange = layout.spec.shard.holders
            assert exchange is not None
            shared.setdefault(exchange, []).append(rows.view(-1))
    return {exchange: torch.cat(rows) for exchange, rows in shared.items()}


def _completed(
    specs: Sequence[TensorState],
    loaded: Sequence[Mapping[str, Any] | None],
    tensors: Sequence[Sequence[_Slice]],
    shared: Mapping[Exchange, Tensor],
) -> list[Mapping[str, Any] | None]:
    """The state of all tensors, after the ranks have put together the scales of cut blocks."""
    ends = dict.fromkeys(shared, 0)
    results: list[Mapping[str, Any] | None] = []
    for spec, entries, slices in zip(specs, loaded, tensors, strict=True):
        states: list[StateDict] = []
        for layout, name, elements, all_scales in slices:
            state = dict(elements or {})
            for index, blocks in enumerate(layout.blocks):
                cut, width = blocks.cut, sum(blocks.widths.values())
                rows = torch.empty((0, width + 1), device="cpu")
                if cut:
                    exchange = layout.spec.shard.holders
                    assert exchange is not None
                    begin, ends[exchange] = ends[exchange], ends[exchange] + len(cut) * (width + 1)
                    rows = shared[exchange][begin : ends[exchange]].view(len(cut), width + 1)
                if all_scales is not None:
                    _complete(blocks, all_scales[index], dict(zip(cut, rows, strict=True)), name)
                    state |= blocks.entries(all_scales[index].bytes)
            if elements is not None:
                states.append(state)
        if entries is None or not states:
            results.append(entries)
        else:
            results.append({"step": entries["step"], **spec.join(states)})
    return results


def _complete(blocks: _Blocks, scales: _Scales, rows: Mapping[int, Tensor], name: str) -> None:
    """Puts the bytes from all ranks in place.

    Raises:
        ValueError: ranks have more or fewer bytes of a block's scales than the scales have.
    """
    first, end = blocks.local
    for number, row in rows.items():
        if first <= number < end:
            if row[-1] != len(row) - 1:
                raise ValueError(
                    f"{name}: got packed state with {int(row[-1])} bytes of the scales of block {number}, expected "
                    f"{len(row) - 1}; load on all ranks what torch's optim_state_dict_to_load gives"
                )
            scales.bytes[number - first] = row[:-1].to(scales.bytes)
