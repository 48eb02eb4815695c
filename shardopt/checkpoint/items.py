"""Describes one rank's shards of parameters, buffers and optimizer state, as rectangles of global tensors.

An :class:`Item` is a parameter or buffer with its optimizer state, under its name in the unwrapped model; a
:class:`LoadedItem` is what a load reads for it. In the checkpoint, the item is several tensors (the weights, and each
state entry), each described by a :class:`Chunks`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardopt.kernels.weights import WeightFormat
from shardopt.layout import WHOLE, BlockGrid, FlatRange, PlacedPartition, RangePartition, Shard
from shardopt.layout.partition import Part, rectangles_of_range
from shardopt.state.slice_spec import LOW_BITS, SliceSpec


@dataclass
class Chunks:
    """A global tensor of a checkpoint, and the rectangles of it that this rank holds, to be saved or loaded into.

    On a save, the rectangles of all ranks must tile the tensor. Several ranks may hold the same rectangle (replicas);
    one of them writes it.

    Attributes:
        shape: the shape of the global tensor.
        dtype: the dtype of the global tensor and of each rectangle.
        parts: the rectangles by the offsets of their first elements in the global tensor: plain tensors, or views, on
            any device; none is empty.
        placed: the partition of the tensor over ranks, the same on all of them, and this rank's offset in it; None if
            no partition describes the rectangles, which the ranks of a save then all-gather.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: dict[tuple[int, ...], Tensor]
    placed: PlacedPartition | None

    @classmethod
    def whole(cls, tensor: Tensor, placed: PlacedPartition = WHOLE) -> Chunks:
        """Chunks of a tensor that each rank holds in full; ``placed`` says which rank saves it, by default any one."""
        is_here = tensor.numel() and placed.partition.parts(tensor.shape, placed.rank_offset)
        parts = {(0,) * tensor.dim(): tensor.detach()} if is_here else {}
        return cls(tuple(tensor.shape), tensor.dtype, parts, placed)

    @property
    def rectangles(self) -> list[Part]:
        """Offsets and shapes of the rectangles that this rank holds."""
        return [(offsets, tuple(tensor.shape)) for offsets, tensor in self.parts.items()]


@dataclass
class Item:
    """This rank's part of a parameter or buffer of the bare model, and of the optimizer's present state for it.

    Attributes:
        name: the fully qualified name in the bare model.
        param: the tensor in the wrapped model, which may be a flat buffer with several parameters of the bare model.
        segment: the parameter's index among those in the flat buffer; None if ``param`` is no flat buffer.
        shard: which part of the parameter this rank holds.
        local: the elements of this rank's part, a view.
        group: the index of the parameter's param group; None if no optimizer has the parameter.
        spec: the format of the optimizer's state (entries, codec, blocks); None if no optimizer has the parameter.
        state: this rank's part of each state entry, as plain tensors; empty if this rank has no state of the parameter.
    """

    name: str
    param: Tensor
    segment: int | None
    shard: Shard
    local: Tensor
    group: int | None = None
    spec: SliceSpec | None = None
    state: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass
class LoadedItem:
    """This rank's part of a parameter or buffer, and of the optimizer's state for it, in host memory.

    Attributes:
        item: the parameter or buffer of the model, which will get the values.
        values: the elements, in the checkpoint's dtype until :meth:`convert_weights`.
        spec: the format that the optimizer's state will have; None if no optimizer has the parameter.
        saved_spec: the format of ``state``: the checkpoint's until :meth:`convert_state`; None if it has no state.
        state: this rank's part of each state entry, as plain tensors; empty if this rank gets no state.
    """

    item: Item
    values: Tensor
    spec: SliceSpec | None = None
    saved_spec: SliceSpec | None = None
    state: dict[str, Tensor] = field(default_factory=dict)

    @property
    def state_conversion(self) -> str:
        """Words for an error or report: how saved moments are encoded and how the optimizer's; empty if alike."""
        if self.saved_spec is None or self.spec is None or not self.spec.moments:
            return ""
        saved, wanted = _described(self.saved_spec), _described(self.spec)
        return "" if saved == wanted else f"state saved with {saved}, this optimizer has {wanted}"

    @property
    def weight_formats(self) -> tuple[WeightFormat, WeightFormat]:
        """Dtype and master low bits of weights in the checkpoint and the model; no low bits if no state is loaded."""
        saved_bits = new_bits = 0
        if self.saved_spec is not None and self.spec is not None:
            saved_bits, new_bits = self.saved_spec.weights.low_bits, self.spec.weights.low_bits
        return WeightFormat(self.values.dtype, saved_bits), WeightFormat(self.item.local.dtype, new_bits)

    @property
    def conversion(self) -> str:
        """Words for an error or report: how a load converts moments and weights; empty if both stay bit for bit."""
        old, new = self.weight_formats
        saved, wanted = (f"{each.dtype} with {each.low_bits} low bits" for each in (old, new))
        of_weights = f"weights saved in {saved}, this model has {wanted}"
        return " and ".join(filter(None, [self.state_conversion, "" if old == new else of_weights]))

    def decoded_moments(self) -> list[Tensor] | None:
        """Decodes this rank's part of the moments to float32; None if there is no state to load."""
        return self.saved_spec.decode(self.state) if self.saved_spec is not None and self.state else None

    def check_state(self) -> None:
        """Checks that the step count and the moments in ``state`` are in range; raises a ValueError if not."""
        if self.saved_spec is not None and self.state:
            self.saved_spec.check_values(self.state, self.item.name)

    def convert_weights(self) -> None:
        """Converts ``values`` and the master low bits in ``state``, in place, from the checkpoint's to the model's."""
        old, new = self.weight_formats
        if old == new:
            return
        self.values, low_bits = new.store(old.load(self.values, self.state.pop(LOW_BITS, None)))
        if self.saved_spec is None or not self.state:
            return
        if low_bits is not None:
            self.state[LOW_BITS] = low_bits
        for key, entry in self.saved_spec.unquantized or ():
            # quantize_state's entries per element that have the weights' dtype, such as copies of them, follow it.
            is_per_element = bool(entry.shape) and entry.shape == self.item.shard.local_shape
            if is_per_element and entry.dtype == old.dtype:
                self.state[key] = self.state[key].to(new.dtype)

    def convert_state(self, encoded: Mapping[str, Tensor] | None) -> None:
        """Replaces the moments in ``state`` by ``encoded`` ones, or encodes them here: the format becomes ``spec``."""
        assert self.saved_spec is not None
        assert self.spec is not None
        if encoded is None:
            moments = self.decoded_moments()
            encoded = {} if moments is None else self.spec.encode(moments)
        others = {key: x for key, x in self.state.items() if key not in self.saved_spec.moment_entries}
        self.saved_spec, self.state = self.spec, {**others, **encoded}


def _described(spec: SliceSpec) -> str:
    """The codec and block size of a state, for an error or report."""
    return f"{spec.codec.name} in blocks of {spec.grid.block_size}" if spec.codec.blockwise else spec.codec.name


def chunks_of(shard: Shard, local: Tensor, grid: BlockGrid | None = None, *, to_save: bool = False) -> Chunks:
    """Chunks of a tensor that is sharded as the parameter is, and of which ``local`` is this rank's part.

    ``local`` may have trailing dimensions. With a ``grid``, the tensor has one number per block, such as scales: ranks
    that share a block all load its number, and the rank with the block's first element saves it (``to_save``).
    """
    shard = shard if grid is None else shard.scales(grid)
    local = local.detach()
    trailing = local.shape[len(shard.local_shape) :]
    zeros = (0,) * len(trailing)
    if isinstance(shard, FlatRange):
        start = shard.saved_from if to_save else shard.start
        rectangles = list(rectangles_of_range(shard.global_shape, start, shard.end))
        pieces = torch.split(local[start - shard.start :], [math.prod(extents) for _, extents in rectangles])
        parts = {
            (*offsets, *zeros): piece.view((*extents, *trailing))
            for (offsets, extents), piece in zip(rectangles, pieces, strict=True)
        }
    else:
        parts = {(*(start for start, _ in shard.indices), *zeros): local} if local.numel() else {}
    return Chunks((*shard.global_shape, *trailing), local.dtype, parts, shard.placed_partition)


def tensors_of(
    item: Item, local: Tensor, spec: SliceSpec | None, state: Mapping[str, Any], *, to_save: bool = False
) -> dict[str, Chunks]:
    """Describes an item's tensors by their names in the checkpoint: its elements ``local``, and each state entry.

    ``spec`` is the format of its state (None: leave the state out), ``state`` this rank's part of each entry. With
    ``to_save``, leaves out what another rank saves: scales of a block that begins there, a flat parameter's step count.
    """
    tensors = {model_key(item.name): chunks_of(item.shard, local)}
    if spec is None:
        return tensors
    for key, value in state.items():
        if spec.is_replicated(key):
            chunks = Chunks.whole(value, _step_partition(spec.shard) if to_save else WHOLE)
        else:
            chunks = chunks_of(spec.shard, value, spec.grid_of(key), to_save=to_save)
        tensors[f"optimizer.{item.name}.{key}"] = chunks
    return tensors


def model_key(name: str) -> str:
    """The name in a checkpoint of the parameter or buffer with this name in the model."""
    return f"model.{name}"


def _step_partition(shard: Shard) -> PlacedPartition:
    """The partition of ``step`` and other entries that are not sharded, when saved: which rank writes them.

    Under flat sharding the rank with the parameter's first element does, as ranks without elements have no state.
    """
    placed = shard.placed_partition
    if placed is None or not isinstance(placed.partition, RangePartition):
        return WHOLE
    return placed._replace(partition=placed.partition._replace(dims=0, block=None))
