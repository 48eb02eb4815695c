"""Packs state into float32 tensors of the parameter's shape, as torch's optim_state_dict for FSDP1 takes no other.

Bytes are moved unchanged. Decoded moments could not replace them: most blocks' scales cannot be recovered from decoded
numbers, so that quantizing them again would give other codes.

An element has 4 bytes in each of the entries ``packed_0``, ``packed_1``, ...: first its bytes in the entries that
have the parameter's shape (codes, moments that are not quantized, low bits), in the order of :attr:`SliceSpec.entries`,
then a part of the bytes of its block's scales, which are spread over the block's elements from the first on, with as
many bytes in each as the parameter's shortest block needs. Second moments of rows follow likewise, with rows as blocks.
The rest is zeros: FSDP1 demands the same entries of all parameters.

``packed_exact`` is a float32 number that 16-bit formats cannot hold: if it has changed, the state was cast in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt.layout import (
    BlockGrid,
    FlatBuffer,
    FlatShard,
    RankGroup,
    Shard,
    all_or_none,
    all_reduce_any,
    reduce_together,
)
from shardopt.state.encoding import cut_blocks, held_of
from shardopt.state.loaded_entries import check_entry
from shardopt.state.slice_spec import SliceSpec, StateDict
from shardopt.state.tensor_spec import TensorSpec

_PREFIX = "packed_"
_EXACT = f"{_PREFIX}exact"
_EXACT_VALUE = 1 + 2.0**-23
_WORD = 4  # bytes


def is_packed(entries: Iterable[str]) -> bool:
    """Whether entries of these names are packed state."""
    return any(name.startswith(_PREFIX) for name in entries)


def words_of(specs: Iterable[TensorSpec]) -> int:
    """How many ``packed_N`` entries, of 4 bytes per element, the largest state of ``specs`` needs, however sharded."""
    sizes = (sum(field.beside for field in _fields(slice_)) for spec in specs for slice_ in spec.slices)
    return max((-(-size // _WORD) for size in sizes), default=0)


def pack(spec: TensorSpec, state: Mapping[str, Any], words: int) -> StateDict:
    """Packs a state into ``words`` float32 entries of the local tensor's shape; adds ``step`` and ``packed_exact``."""
    shape = spec.shard.local_shape
    device = next((value.device for key, value in state.items() if key != "step"), state["step"].device)
    packed = torch.zeros((math.prod(shape), words * _WORD), dtype=torch.uint8, device=device)
    for slice_, slice_state in zip(spec.slices, spec.split(state), strict=True):
        for field in _fields(slice_):
            field.pack(slice_state, slice_.elements(packed))
    step = state["step"].clone()
    if not words:
        return {"step": step}
    columns = packed.view(-1, words, _WORD).transpose(0, 1).contiguous().view(torch.float32).view(words, *shape)
    exact = torch.full_like(step, _EXACT_VALUE, dtype=torch.float32)
    return {"step": step, _EXACT: exact, **{f"{_PREFIX}{word}": column for word, column in enumerate(columns)}}


def unpack_loaded(
    specs: Sequence[TensorSpec],
    loaded: Sequence[Mapping[str, Any] | None],
    names: Sequence[str],
    rank_groups: Sequence[RankGroup],
) -> list[Mapping[str, Any] | None]:
    """Unpacks packed state; ranks all-reduce the scales of blocks that are cut. Leaves other state unchanged.

    All ranks must call this with the same tensors, in the same order, if any of them has flat shards. The ranks of a
    group raise together. A tensor without state has None for its entries.

    Raises:
        ValueError: packed entries are of other parameters, another optimizer or other options, or are incomplete.
    """
    if not all_reduce_any(rank_groups, any(entries is not None and is_packed(entries) for entries in loaded)):
        return list(loaded)
    tensors = all_or_none(rank_groups, lambda: [_read(*item) for item in zip(specs, loaded, names, strict=True)])
    shared: dict[RankGroup, list[Tensor]] = {}
    for unpacked in (unpacked for slices in tensors for fields in slices for unpacked in fields):
        if (ranks := unpacked.field.spec.shard.holders) is not None and len(unpacked.cut):
            shared.setdefault(ranks, []).append(unpacked.cut)
    for ranks, of_blocks in shared.items():
        reduce_together(ranks.all_reduce_sum, of_blocks)
    items = list(zip(specs, loaded, tensors, names, strict=True))
    return all_or_none(rank_groups, lambda: [_completed(*item) for item in items])


class _Field(NamedTuple):
    """The byte range, in each packed element, of all entries of the parameter's shape, or of all of one block grid.

    Attributes:
        spec: describes the slice's state.
        grid: the blocks; None for entries of the parameter's shape.
        widths: by entry, its bytes per element, or per block if there is a grid.
        first: offset of the byte range in an element.
        beside: its length. A block's bytes are spread over its elements, so that the shortest block has room for them.
    """

    spec: SliceSpec
    grid: BlockGrid | None
    widths: dict[str, int]
    first: int
    beside: int

    def of(self, packed: Tensor) -> Tensor:
        """A view of this byte range of all the slice's elements."""
        return packed[:, self.first : self.first + self.beside]

    def carriers(self, grid: BlockGrid, device: torch.device) -> tuple[Tensor, Tensor]:
        """Local indices of elements that hold scales' bytes; a mask ``(blocks, elements)``, True if on this rank."""
        shard, start = self.spec.shard, getattr(self.spec.shard, "start", 0)
        ends = shard.block_range(grid) if isinstance(shard, FlatShard) else (0, grid.rows * grid.blocks_per_row)
        numbers = torch.arange(*ends, device=device)  # of this rank's blocks, which begin at these elements:
        begins = numbers // grid.blocks_per_row * grid.row_numel + numbers % grid.blocks_per_row * grid.block_size
        count = -(-sum(self.widths.values()) // self.beside)  # elements that hold one block's bytes
        elements = begins[:, None] + torch.arange(count, device=device) - start
        inside = (elements >= 0) & (elements < math.prod(shard.local_shape))
        return elements[inside], inside

    def pack(self, state: Mapping[str, Tensor], packed: Tensor) -> None:
        """Writes the entries' bytes to the slice's elements: uint8, ``(numel, 4 * words)``."""
        of_entries = [state[key].detach().reshape(-1).view(torch.uint8).view(-1, w) for key, w in self.widths.items()]
        carried = torch.cat(of_entries, 1)
        if self.grid is None:
            self.of(packed).copy_(carried)
            return
        elements, inside = self.carriers(self.grid, packed.device)
        carried = torch.nn.functional.pad(carried, (0, inside.shape[1] * self.beside - carried.shape[1]))
        self.of(packed)[elements] = carried.view(*inside.shape, self.beside)[inside]

    def unpack(self, packed: Tensor | None) -> _Unpacked:
        """Reads this byte range from this rank's elements; ``packed`` is None if this rank loads no packed state."""
        width, numbers = sum(self.widths.values()), [] if self.grid is None else cut_blocks(self.spec.shard, self.grid)
        cut = torch.zeros((len(numbers), width + 1), dtype=torch.int32, device="cpu")
        if packed is None:
            return _Unpacked(self, None, cut)
        if self.grid is None:
            return _Unpacked(self, self.of(packed), cut)
        elements, inside = self.carriers(self.grid, packed.device)
        carried = packed.new_zeros((*inside.shape, self.beside))
        carried[inside] = self.of(packed)[elements]
        found = carried.flatten(1)[:, :width].contiguous()
        known = inside.repeat_interleave(self.beside, 1)[:, :width].sum(1, keepdim=True)
        sent, local = held_of(numbers, self.spec.shard, self.grid)
        cut[sent] = torch.cat([found, known], 1)[local].int().cpu()
        return _Unpacked(self, found, cut)


class _Unpacked(NamedTuple):
    """The bytes of one field that were read from packed state; those of cut blocks are still to be all-reduced.

    Attributes:
        field: the byte range and its entries.
        found: uint8, ``(elements or blocks of this rank, bytes)``, zeros where other ranks have them; None without
            packed state.
        cut: int32 ``(all cut blocks, bytes + 1)`` on the CPU, to be summed over ranks; last, how many bytes are known.
    """

    field: _Field
    found: Tensor | None
    cut: Tensor

    def entries(self, name: str) -> StateDict:
        """Converts the bytes to state entries, after ``cut`` was all-reduced.

        Raises:
            ValueError: ranks have more or fewer bytes of a block's scales than the scales have.
        """
        (spec, grid, widths, *_), found, cut = self
        assert found is not None
        if len(cut) and grid is not None:
            sent, local = held_of(cut_blocks(spec.shard, grid), spec.shard, grid)
            *_, known = cut[sent].unbind(1)
            if (known != sum(widths.values())).any():
                raise ValueError(
                    f"{name}: got packed state with {known.tolist()} bytes of the scales of blocks, expected "
                    f"{sum(widths.values())} of each; load on all ranks what torch's optim_state_dict_to_load gives"
                )
            found[local] = cut[sent, :-1].to(found)
        parts = torch.split(found, list(widths.values()), 1)
        formats = [spec.entries[key] for key in widths]
        return {
            key: part.clone(memory_format=torch.contiguous_format).view(dtype).view(shape)
            for key, part, (shape, dtype, _) in zip(widths, parts, formats, strict=True)
        }


def _fields(spec: SliceSpec) -> list[_Field]:
    """The byte ranges of a packed element: of entries of the parameter's shape, then of each block grid's."""
    widths: dict[BlockGrid | None, dict[str, int]] = {None: {}}
    for key, entry in spec.entries.items():
        if not spec.is_whole(key):
            grid = spec.grid_of(key)
            counted = spec.shard if grid is None else spec.shard.scales(grid)
            per_item = math.prod(entry.shape[len(counted.local_shape) :])
            widths.setdefault(grid, {})[key] = per_item * entry.dtype.itemsize
    fields: list[_Field] = []
    at = 0
    for grid, of_grid in widths.items():
        # The last block of each row may be shorter than the others.
        shortest = 1 if grid is None else grid.row_numel % grid.block_size or grid.block_size
        if of_grid:
            fields.append(_Field(spec, grid, of_grid, at, -(-sum(of_grid.values()) // shortest)))
            at += fields[-1].beside
    return fields


def _read(spec: TensorSpec, entries: Mapping[str, Any] | None, name: str) -> list[list[_Unpacked]]:
    """Reads the byte ranges of each slice from a tensor's loaded entries, if they are packed state.

    Raises:
        ValueError: packed state is of another parameter, another optimizer or other options.
    """
    packed = _packed_bytes(spec, entries, name) if entries is not None and is_packed(entries) else None
    return [
        [field.unpack(None if packed is None else slice_.elements(packed)) for field in _fields(slice_)]
        for slice_ in spec.slices
    ]


def _packed_bytes(spec: TensorSpec, entries: Mapping[str, Any], name: str) -> Tensor:
    """Checks packed state, and returns its bytes as uint8, ``(numel, 4 * words)``.

    Raises:
        ValueError: packed state is of another parameter, another optimizer or other options.
    """
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
    check_entry(entries[_EXACT], torch.empty((), device="meta"), _EXACT, name)
    dtypes, exact = {entries[key].dtype for key in keys}, float(entries[_EXACT])
    if dtypes != {torch.float32} or exact != _EXACT_VALUE:
        raise ValueError(
            f"{name}: got packed state of {', '.join(map(str, dtypes))} with {_EXACT} {exact!r}, expected "
            f"torch.float32 with {_EXACT_VALUE!r}: it was converted, as to half precision and back, and its bytes are "
            "lost; carry it as it was saved"
        )
    return torch.cat([entries[key].detach().reshape(-1, 1).view(torch.uint8) for key in keys], 1)


def _completed(
    spec: TensorSpec, entries: Mapping[str, Any] | None, slices: Sequence[Sequence[_Unpacked]], name: str
) -> Mapping[str, Any] | None:
    """Returns a tensor's unpacked state, once the bytes of cut blocks were all-reduced; other state unchanged."""
    if entries is None or not is_packed(entries):
        return entries
    states = [{k: x for unpacked in fields for k, x in unpacked.entries(name).items()} for fields in slices]
    return {"step": entries["step"], **spec.join(states)}
