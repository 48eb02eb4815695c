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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt.layout import BlockGrid, Exchange, FlatBuffer, FlatShard, Shard, all_or_none, on_any_rank, reduce_together
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
    packed = torch.zeros((math.prod(shape), words * _WORD), dtype=torch.uint8, device=device)
    for slice_, slice_state in zip(spec.slices, spec.split(state), strict=True):
        layout = _Layout(slice_.spec)
        layout.pack(slice_state, packed[slice_.offset : slice_.offset + layout.numel])
    step = state["step"].clone()
    if not words:
        return {"step": step}
    columns = packed.view(-1, words, _WORD).transpose(0, 1).contiguous().view(torch.float32).view(words, *shape)
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
        exchanges: the ranks that raise together if one of them cannot unpack its part; see :func:`loading_groups`.

    Raises:
        ValueError: packed entries are of other parameters, another optimizer or other options, or are incomplete.
    """
    if not on_any_rank(exchanges, any(entries is not None and is_packed(entries) for entries in loaded), rounds=2):
        return list(loaded)
    tensors = all_or_none(exchanges, lambda: [_read(*item) for item in zip(specs, loaded, names, strict=True)])
    shared: dict[Exchange, list[Tensor]] = {}
    for slice_ in (slice_ for slices in tensors for slice_ in slices):
        for scales in slice_.scales:
            if (exchange := slice_.spec.shard.holders) is not None and len(scales.cut):
                shared.setdefault(exchange, []).append(scales.cut)
    for exchange, of_blocks in shared.items():
        reduce_together(exchange.all_reduce_sum, of_blocks)
    items = list(zip(specs, loaded, tensors, names, strict=True))
    return all_or_none(exchanges, lambda: [_completed(*item) for item in items])


@dataclass(frozen=True)
class _Layout:
    """Where the bytes of a slice's state, described by ``spec``, are in packed state: uint8, ``(numel, 4 * words)``."""

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
        """Writes the slice's state to its bytes."""
        at = 0
        for key, width in self.elements.items():
            packed[:, at : at + width] = _as_bytes(state[key], self.numel, width)
            at += width
        for blocks in self.blocks:
            elements, inside = blocks.places(packed.device)
            scales = torch.cat([_as_bytes(state[key], len(inside), w) for key, w in blocks.widths.items()], 1)
            scales = torch.nn.functional.pad(scales, (0, inside.shape[1] * blocks.beside - scales.shape[1]))
            packed[elements, blocks.bytes] = scales.view(*inside.shape, blocks.beside)[inside]

    def unpack(self, packed: Tensor) -> StateDict:
        """Reads the entries of the parameter's shape."""
        state: StateDict = {}
        at = 0
        for key, width in self.elements.items():
            entry = self.spec.entries[key]
            state[key] = packed[:, at : at + width].contiguous().view(entry.dtype).view(entry.shape)
            at += width
        return state


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

    @property
    def bytes(self) -> slice:
        """The bytes of an element that are of its block's scales."""
        return slice(self.first, self.first + self.beside)

    def places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The elements here that carry scales, and per block whether each of the elements that do is here."""
        grid, shard = self.grid, self.spec.shard
        numbers, start = torch.arange(*self.local, device=device), getattr(shard, "start", 0)
        begins = numbers // grid.blocks_per_row * grid.row_numel + numbers % grid.blocks_per_row * grid.block_size
        count = -(-sum(self.widths.values()) // self.beside)
        elements = begins[:, None] + torch.arange(count, device=device) - start
        inside = (elements >= 0) & (elements < math.prod(shard.local_shape))
        return elements[inside], inside

    def unpack(self, packed: Tensor | None) -> _Scales:
        """Reads the scales that this rank's elements carry, if there are any."""
        width, (first, end) = sum(self.widths.values()), self.local
        cut = torch.zeros((len(self.cut), width + 1), dtype=torch.int32, device="cpu")
        if packed is None:
            return _Scales(self, None, cut)
        elements, inside = self.places(packed.device)
        carried = packed.new_zeros((*inside.shape, self.beside))
        carried[inside] = packed[elements, self.bytes]
        scales = carried.flatten(1)[:, :width].contiguous()
        known = inside[..., None].expand_as(carried).flatten(1)[:, :width].sum(1)
        for row, number in zip(cut, self.cut, strict=True):
            if first <= number < end:
                row[:-1], row[-1] = scales[number - first], known[number - first]
        return _Scales(self, scales, cut)


class _Scales(NamedTuple):
    """The bytes of the scales of this rank's blocks, with zeros where other ranks have them.

    Attributes:
        blocks: the blocks.
        scales: uint8, ``(blocks, bytes of a block's scales)``; None without packed state.
        cut: the same of all cut blocks, and how many of the bytes are known: int32, on the CPU.
    """

    blocks: _Blocks
    scales: Tensor | None
    cut: Tensor

    def entries(self, name: str) -> StateDict:
        """The entries of the scales, after the ranks have put together the bytes of cut blocks.

        Raises:
            ValueError: ranks have more or fewer bytes of a block's scales than the scales have.
        """
        assert self.scales is not None
        first, end = self.blocks.local
        for row, number in zip(self.cut, self.blocks.cut, strict=True):
            if first <= number < end:
                if row[-1] != len(row) - 1:
                    raise ValueError(
                        f"{name}: got packed state with {int(row[-1])} bytes of the scales of block {number}, expected "
                        f"{len(row) - 1}; load on all ranks what torch's optim_state_dict_to_load gives"
                    )
                self.scales[number - first] = row[:-1].to(self.scales)
        widths, spec = self.blocks.widths, self.blocks.spec
        parts = zip(widths, torch.split(self.scales, list(widths.values()), 1), strict=True)
        return {key: part.contiguous().view(torch.float32).view(spec.entries[key].shape) for key, part in parts}


class _Slice(NamedTuple):
    """A slice on its way out of packed state: its entries of the parameter's shape, if any, and its scales."""

    spec: SliceSpec
    elements: StateDict | None
    scales: list[_Scales]


def _as_bytes(entry: Tensor, count: int, width: int) -> Tensor:
    return entry.detach().reshape(-1).view(torch.uint8).view(count, width)


def _read(spec: TensorState, entries: Mapping[str, Any] | None, name: str) -> list[_Slice]:
    """The slices of a tensor, with what this rank's part of its packed state has of theirs.

    Raises:
        ValueError: packed state is of another parameter, another optimizer or other options.
    """
    if entries is None or not is_packed(entries):
        layouts = [_Layout(slice_.spec) for slice_ in spec.slices]
        return [_Slice(layout.spec, None, [blocks.unpack(None) for blocks in layout.blocks]) for layout in layouts]
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
    packed = torch.cat([entries[key].detach().reshape(-1, 1).view(torch.uint8) for key in keys], 1)
    slices = []
    for slice_ in spec.slices:
        layout = _Layout(slice_.spec)
        part = packed[slice_.offset : slice_.offset + layout.numel]
        slices.append(_Slice(slice_.spec, layout.unpack(part), [blocks.unpack(part) for blocks in layout.blocks]))
    return slices


def _completed(
    spec: TensorState, entries: Mapping[str, Any] | None, slices: Sequence[_Slice], name: str
) -> Mapping[str, Any] | None:
    """The state of a tensor, after the ranks have put together the scales of cut blocks."""
    states = []
    for _, elements, of_blocks in slices:
        if elements is not None:
            states.append(dict(elements))
            for scales in of_blocks:
                states[-1].update(scales.entries(name))
    return entries if entries is None or not states else {"step": entries["step"], **spec.join(states)}
