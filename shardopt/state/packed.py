"""Packs state into float32 tensors of the parameter's shape, as torch's optim_state_dict for FSDP1 takes no other.

Bytes are moved unchanged. Decoded moments could not replace them: most blocks' scales cannot be recovered from decoded
numbers, so that quantizing them again would give other codes.

An element has 4 bytes in each of the entries ``packed_0``, ``packed_1``, ... In this order they contain:

1. its bytes of entries of the parameter's shape (codes, plain moments, low bits), in :attr:`SliceSpec.entries`' order;
2. a part of the bytes of its block's scales, which are spread over the block's elements from the first element on, with
   as many bytes in each as the parameter's shortest block needs;
3. a part of its row's second moment, if there is one: rows count as blocks;
4. zeros: FSDP1 demands the same entries of all parameters.

``packed_exact`` is a float32 number that 16-bit formats cannot hold: if it has changed, the state was cast in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt.layout import BlockGrid, FlatBuffer, FlatShard, RankGroup, Shard
from shardopt.layout.rank_group import all_or_none, all_reduce_any, reduce_together
from shardopt.state.encoding import SharedBlocks, shared_blocks
from shardopt.state.loaded_entries import check_entry
from shardopt.state.slice_spec import SliceSpec, StateDict
from shardopt.state.tensor_spec import LoadedEntries, TensorSpec

_PREFIX = "packed_"
_EXACT = f"{_PREFIX}exact"
_EXACT_VALUE = 1 + 2.0**-23
_WORD = 4  # bytes


def is_packed(entries: Iterable[str]) -> bool:
    """Whether entries of these names are packed state."""
    return any(name.startswith(_PREFIX) for name in entries)


def words_per_element(specs: Iterable[TensorSpec]) -> int:
    """How many ``packed_N`` entries, of 4 bytes per element, the largest of the states needs, the same on all ranks."""
    sizes = (sum(field.nbytes for field in _fields(slice_)) for spec in specs for slice_ in spec.slices)
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
    specs: Sequence[TensorSpec], loaded: Sequence[LoadedEntries], names: Sequence[str], rank_groups: Sequence[RankGroup]
) -> list[LoadedEntries]:
    """Returns tensors' loaded entries, in order: unpacked where they are packed state, otherwise unchanged.

    Collective: each rank has some bytes of the scales of cut blocks, which are all-reduced. All ranks must call this
    with the same tensors, in the same order, if any of them has flat shards. The ranks of a group raise together, a
    ValueError if packed entries are of other parameters, another optimizer or other options, or are incomplete.
    """
    if not all_reduce_any(rank_groups, any(entries is not None and is_packed(entries) for entries in loaded)):
        return list(loaded)
    items = list(zip(specs, loaded, names, strict=True))
    tensors = all_or_none(rank_groups, lambda: [_unpack_local(*item) for item in items])
    messages: dict[RankGroup, list[Tensor]] = {}
    for unpacked in (unpacked for slices in tensors for fields in slices for unpacked in fields):
        ranks = unpacked.field.spec.shard.holders
        if ranks is not None and len(unpacked.cut_blocks):
            messages.setdefault(ranks, []).append(unpacked.cut_blocks)
    for ranks, message in messages.items():
        reduce_together(ranks.all_reduce_sum, message)
    unpacked_items = list(zip(items, tensors, strict=True))
    return all_or_none(rank_groups, lambda: [_joined_state(*item, slices) for item, slices in unpacked_items])


class _Field(NamedTuple):
    """A byte range in each packed element, for all entries of the parameter's shape, or all of one block grid.

    ``entry_bytes``: by entry, its bytes per element or, with a ``grid``, per block. ``offset`` and ``nbytes`` are the
    range in an element. A block's bytes are spread over its elements.
    """

    spec: SliceSpec
    grid: BlockGrid | None
    entry_bytes: dict[str, int]
    offset: int
    nbytes: int

    @property
    def item_bytes(self) -> int:
        """The bytes of all entries per element, or per block if there is a grid."""
        return sum(self.entry_bytes.values())

    def view(self, packed: Tensor) -> Tensor:
        """A view of this byte range in ``packed``, the bytes of the slice's elements: ``(numel, nbytes)``."""
        return packed[:, self.offset : self.offset + self.nbytes]

    def block_elements(self, grid: BlockGrid, device: torch.device) -> tuple[Tensor, Tensor]:
        """Finds the elements that carry the bytes of this rank's blocks: the first ones of each block.

        Returns local indices of the elements that are on this rank, and a mask ``(blocks, elements per block)`` that is
        True for these: other ranks have the rest of a cut block.
        """
        shard, start = self.spec.shard, getattr(self.spec.shard, "start", 0)
        first, end = shard.block_range(grid) if isinstance(shard, FlatShard) else (0, grid.rows * grid.blocks_per_row)
        numbers = torch.arange(first, end, device=device)
        rows, columns = numbers // grid.blocks_per_row, numbers % grid.blocks_per_row
        first_elements = rows * grid.row_numel + columns * grid.block_size
        per_block = -(-self.item_bytes // self.nbytes)
        elements = first_elements[:, None] + torch.arange(per_block, device=device) - start
        is_local = (elements >= 0) & (elements < math.prod(shard.local_shape))
        return elements[is_local], is_local

    def pack(self, state: Mapping[str, Tensor], packed: Tensor) -> None:
        """Writes the entries' bytes into ``packed``, which has the slice's elements: uint8, ``(numel, 4 * words)``."""
        flat = {key: state[key].detach().reshape(-1).view(torch.uint8) for key in self.entry_bytes}
        items = torch.cat([flat[key].view(-1, nbytes) for key, nbytes in self.entry_bytes.items()], 1)
        if self.grid is None:
            self.view(packed).copy_(items)
            return
        elements, is_local = self.block_elements(self.grid, packed.device)
        padded = torch.nn.functional.pad(items, (0, is_local.shape[1] * self.nbytes - self.item_bytes))
        self.view(packed)[elements] = padded.view(*is_local.shape, self.nbytes)[is_local]

    def unpack(self, packed: Tensor | None) -> _Unpacked:
        """Reads this byte range from this rank's elements; ``packed`` is None if this rank loads no packed state."""
        shared, is_flat = SharedBlocks(0, [], []), isinstance(self.spec.shard, FlatShard)
        if self.grid is not None and is_flat:  # only flat shards cut blocks here: _packed_bytes refuses DTensors
            shared = shared_blocks(self.spec.shard, self.grid)
        cut_blocks = torch.zeros((shared.block_count, self.item_bytes + 1), dtype=torch.int32, device="cpu")
        if packed is None or self.grid is None:
            return _Unpacked(self, None if packed is None else self.view(packed), shared, cut_blocks)
        elements, is_local = self.block_elements(self.grid, packed.device)
        carried = packed.new_zeros((*is_local.shape, self.nbytes))
        carried[is_local] = self.view(packed)[elements]
        items = carried.flatten(1)[:, : self.item_bytes].contiguous()
        known = is_local.repeat_interleave(self.nbytes, 1)[:, : self.item_bytes].sum(1, keepdim=True)
        cut_blocks[shared.in_message] = torch.cat([items, known], 1)[shared.in_scales].int().cpu()
        return _Unpacked(self, items, shared, cut_blocks)


class _Unpacked(NamedTuple):
    """The bytes of one field that were read from packed state; those of cut blocks are still to be all-reduced.

    ``items``: uint8 ``(elements or blocks of this rank, bytes)``, zeros where other ranks have the bytes; None without
    packed state. ``cut_blocks``: int32 ``(all cut blocks, bytes + 1)``; the last counts bytes that are known.
    """

    field: _Field
    items: Tensor | None
    shared: SharedBlocks
    cut_blocks: Tensor

    def entries(self, name: str) -> StateDict:
        """Converts the bytes to state entries, once ``cut_blocks`` was all-reduced. Completes ``items`` in place.

        Raises ValueError if all ranks together have more or fewer bytes of a block's scales than the scales have.
        """
        field, items, shared, cut_blocks = self
        assert items is not None
        if len(cut_blocks):
            *_, known = cut_blocks[shared.in_message].unbind(1)
            if (known != field.item_bytes).any():
                raise ValueError(
                    f"{name}: got packed state with {known.tolist()} bytes of the scales of blocks, expected "
                    f"{field.item_bytes} of each; load on all ranks what torch's optim_state_dict_to_load gives"
                )
            items[shared.in_scales] = cut_blocks[shared.in_message, :-1].to(items)
        parts = torch.split(items, list(field.entry_bytes.values()), 1)
        formats = [field.spec.entries[key] for key in field.entry_bytes]
        return {
            key: part.clone(memory_format=torch.contiguous_format).view(dtype).view(shape)
            for key, part, (shape, dtype, _) in zip(field.entry_bytes, parts, formats, strict=True)
        }


def _fields(spec: SliceSpec) -> list[_Field]:
    """The byte ranges of a packed element: of entries of the parameter's shape, then of each block grid's."""
    entry_bytes: dict[BlockGrid | None, dict[str, int]] = {None: {}}
    for key, entry in spec.entries.items():
        if not spec.is_replicated(key):
            grid = spec.grid_of(key)
            items = spec.shard if grid is None else spec.shard.scales(grid)
            per_item = math.prod(entry.shape[len(items.local_shape) :])
            entry_bytes.setdefault(grid, {})[key] = per_item * entry.dtype.itemsize
    fields: list[_Field] = []
    offset = 0
    for grid, of_grid in entry_bytes.items():
        shortest_block = 1  # elements
        if grid is not None:  # the last block of each row may be shorter than the others
            shortest_block = grid.row_numel % grid.block_size or grid.block_size
        nbytes = -(-sum(of_grid.values()) // shortest_block)
        if of_grid:
            fields.append(_Field(spec, grid, of_grid, offset, nbytes))
            offset += nbytes
    return fields


def _unpack_local(spec: TensorSpec, entries: LoadedEntries, name: str) -> list[list[_Unpacked]]:
    """Reads each slice's fields from a tensor's loaded entries; without their bytes if the state is not packed."""
    packed = _packed_bytes(spec, entries, name) if entries is not None and is_packed(entries) else None
    return [
        [field.unpack(None if packed is None else slice_.elements(packed)) for field in _fields(slice_)]
        for slice_ in spec.slices
    ]


def _packed_bytes(spec: TensorSpec, entries: Mapping[str, Any], name: str) -> Tensor:
    """Returns the bytes of packed state as uint8, ``(numel, 4 * words)``.

    Raises ValueError if the state is of another parameter, another optimizer or other options.
    """
    if not (isinstance(spec.shard, FlatBuffer | FlatShard) or type(spec.shard) is Shard):
        raise ValueError(
            f"{name}: got state that torch's optim_state_dict of FSDP1 gathered, expected a parameter of FSDP1, not a "
            "DTensor; save with shardopt.checkpoint to load it under another sharding"
        )
    # There may be more words than this state needs: as many as the largest parameter's state.
    count = sum(key.startswith(_PREFIX) and key != _EXACT for key in entries)
    keys = [f"{_PREFIX}{word}" for word in range(max(count, words_per_element([spec])))]
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


def _joined_state(
    spec: TensorSpec, entries: LoadedEntries, name: str, slices: Sequence[Sequence[_Unpacked]]
) -> LoadedEntries:
    """Returns a tensor's unpacked state from its slices' fields, all-reduced by now; state not packed as it is."""
    if entries is None or not is_packed(entries):
        return entries
    states = [{k: x for unpacked in fields for k, x in unpacked.entries(name).items()} for fields in slices]
    return {"step": entries["step"], **spec.join(states)}
