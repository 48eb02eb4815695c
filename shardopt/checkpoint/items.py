"""Describes one rank's shards of parameters, buffers and optimizer state, as rectangles of global tensors.

An :class:`Item` is a parameter or buffer with its optimizer state, under its name in the unwrapped model. In the
checkpoint, the item is several tensors (the weights, and each state entry), each described by a :class:`Chunks`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardopt.kernels.weights import WeightFormat
from shardopt.layout import WHOLE, BlockGrid, FlatShard, Placed, RangePartition, Shard
from shardopt.layout.partition import rectangles_of_range
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
    placed: Placed | None

    @classmethod
    def whole(cls, tensor: Tensor, placed: Placed = WHOLE) -> Chunks:
        """Chunks of a tensor that each rank holds in full; ``placed`` says which rank saves it, by default any one."""
        is_own = tensor.numel() and placed.partition.parts(tensor.shape, placed.offset)
        parts = {(0,) * tensor.dim(): tensor.detach()} if is_own else {}
        return cls(tuple(tensor.shape), tensor.dtype, parts, placed)

    def with_copies(self, rectangles: Iterator[Tensor]) -> Chunks:
        """Replaces the tensor of each rectangle, in order, by the next one from ``rectangles``, a copy of it."""
        return replace(self, parts={offsets: next(rectangles) for offsets in self.parts})


@dataclass
class Item:
    """This rank's part of a parameter or buffer of the bare model, and of the optimizer's state for it.

    On a save, ``state`` is the optimizer's present state. A load reads the checkpoint into ``values`` and ``state``,
    which has the format ``saved``, and then converts them to the dtype of ``local`` and to the format ``spec``.

    Attributes:
        name: the fully qualified name in the bare model.
        param: the tensor in the wrapped model, which may be a flat buffer with several parameters of the bare model.
        segment: the parameter's index among those in the flat buffer; None if ``param`` is no flat buffer.
        shard: which part of the parameter this rank holds.
        local: the elements of this rank's part, a view.
        group: the index of the parameter's param group; None if no optimizer has the parameter.
        spec: the format of the optimizer's state (entries, codec, blocks); None if no optimizer has the parameter.
        state: this rank's part of each state entry, as plain tensors; empty if this rank has no state of the parameter.
        values: on a load, the elements as read, in the checkpoint's dtype; unset before.
        saved: on a load, the format of the state in the checkpoint; None if no state is to be loaded.
    """

    name: str
    param: Tensor
    segment: int | None
    shard: Shard
    local: Tensor
    group: int | None = None
    spec: SliceSpec | None = None
    state: dict[str, Tensor] = field(default_factory=dict)
    values: Tensor = field(init=False)
    saved: SliceSpec | None = None

    @property
    def state_conversion(self) -> str:
        """Words for an error or report: codecs between which a load converts moments; empty if it does not."""
        if self.saved is None or self.spec is None or not self.spec.moments:
            return ""
        saved, present = _described(self.saved), _described(self.spec)
        return "" if saved == present else f"{saved} state for {present}"

    @property
    def weight_formats(self) -> tuple[WeightFormat, WeightFormat]:
        """Dtype and master low bits of weights in the checkpoint and the model; no low bits if no state is loaded."""
        bits = [0 if spec is None or self.saved is None else spec.weights.low_bits for spec in (self.saved, self.spec)]
        return WeightFormat(self.values.dtype, bits[0]), WeightFormat(self.local.dtype, bits[1])

    @property
    def conversion(self) -> str:
        """Words for an error or report: how a load converts moments and weights; empty if both stay bit for bit."""
        (old, new), of_state = self.weight_formats, self.state_conversion
        of_weights = f"{old.dtype} weights of {old.low_bits} low bits for {new.dtype} of {new.low_bits}"
        return " and ".join(filter(None, [of_state, "" if old == new else of_weights]))

    def convert_weights(self) -> None:
        """Converts ``values`` and the master low bits in ``state`` from the checkpoint's dtypes to the model's."""
        old, new = self.weight_formats
        if old == new:
            return
        values, low_bits = new.store(old.load(self.values, self.state.pop(LOW_BITS, None)))
        if low_bits is not None and self.state:
            self.state[LOW_BITS] = low_bits
        for key, entry in (self.saved.unquantized or ()) if self.saved is not None and self.state else ():
            is_whole = not entry.shape or entry.shape != self.shard.local_shape
            if not is_whole and entry.dtype == old.dtype:  # the weights' dtype, in quantize_state
                self.state[key] = self.state[key].to(new.dtype)
        self.values = values

    def moments(self) -> list[Tensor] | None:
        """Decodes this rank's part of the moments that were read to float32; None if there is no state to load."""
        return self.saved.decode(self.state) if self.saved is not None and self.state else None


def _described(spec: SliceSpec) -> str:
    """The codec and block size of a state, for an error or report."""
    return f"{spec.codec.name} in blocks of {spec.grid.block_size}" if spec.codec.blockwise else spec.codec.name


def chunks_of(shard: Shard, local: Tensor, grid: BlockGrid | None = None, *, to_save: bool = False) -> Chunks:
    """Chunks of a tensor that is sharded as the parameter is, and of which ``local`` is this rank's part.

    ``local`` may have trailing dimensions. With a ``grid``, the tensor has one number per block, such as scales: ranks
    that share a block all load its number, and the rank with the block's first element saves it (``to_save``).
    """
    of = shard if grid is None else shard.scales(grid)
    local = local.detach()
    shape = (*of.global_shape, *local.shape[len(of.local_shape) :])
    if not isinstance(of, FlatShard):
        behind = (0,) * (local.dim() - len(of.indices))
        parts = {(*(start for start, _ in of.indices), *behind): local} if local.numel() else {}
        return Chunks(shape, local.dtype, parts, of.partition)
    start = of.saved_from if to_save else of.start
    return Chunks(
        shape, local.dtype, _rectangles(of.global_shape, start, of.end, local[start - of.start :]), of.partition
    )


def tensors_of(
    item: Item, local: Tensor, spec: SliceSpec | None, state: Mapping[str, Any], *, to_save: bool = False
) -> dict[str, Chunks]:
    """Describes an item's tensors by their names in the checkpoint: its elements ``local``, and each state entry.

    Args:
        item: the parameter or buffer.
        local: this rank's elements of the parameter or buffer.
        spec: the format of its state; None to leave the state out.
        state: this rank's part of each state entry, plain tensors.
        to_save: leave out what another rank saves: scales of a block that begins there, a flat parameter's step count.
    """
    tensors = {model_key(item.name): chunks_of(item.shard, local)}
    if spec is None:
        return tensors
    for key, value in state.items():
        if spec.is_replicated(key):
            chunks = Chunks.whole(value, _of_first_element(spec.shard) if to_save else WHOLE)
        else:
            chunks = chunks_of(spec.shard, value, spec.grid_of(key), to_save=to_save)
        tensors[f"optimizer.{item.name}.{key}"] = chunks
    return tensors


def model_key(name: str) -> str:
    """The name in a checkpoint of the parameter or buffer with this name in the model."""
    return f"model.{name}"


def _of_first_element(shard: Shard) -> Placed:
    """The partition of ``step`` and other entries that are not sharded, when saved: which rank writes them.

    Under flat sharding the rank with the parameter's first element does, as ranks without elements have no state.
    """
    placed = shard.partition
    if placed is None or not isinstance(placed.partition, RangePartition):
        return WHOLE
    return placed._replace(partition=placed.partition._replace(dims=0, block=None))


def _rectangles(shape: Sequence[int], start: int, end: int, local: Tensor) -> dict[tuple[int, ...], Tensor]:
    """Views of ``local``, by offset, for the rectangles that make up ``[start, end)`` of a flattened tensor.

    Args:
        shape: the tensor's shape.
        start: index of the first element.
        end: index behind the last element.
        local: the range's elements, shape ``(end - start, *trailing)``; the views keep the trailing dimensions.
    """
    behind = tuple(local.shape[1:])
    found: dict[tuple[int, ...], Tensor] = {}
    at = 0
    for offsets, extents in rectangles_of_range(tuple(shape), start, end):
        numel = math.prod(extents)
        found[(*offsets, *(0,) * len(behind))] = local[at : at + numel].view(*extents, *behind)
        at += numel
    return found
