"""A tensor's part on its way into a checkpoint or out of one.

An :class:`Item` is a parameter or buffer of the bare model with the optimizer's state, under the name that it has
without sharding. An item becomes several :class:`Chunks`, one for each tensor of the checkpoint.
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
    """One global tensor of which this rank can save some rectangles, or none, or loads some.

    The rectangles of all ranks that save must fill the tensor, and must not overlap. One rank writes a rectangle that
    several ranks have.

    Attributes:
        shape: the shape of the global tensor.
        dtype: the dtype of the global tensor and of each rectangle.
        parts: the rectangles by the offsets of their first elements in the global tensor: plain tensors, or views, on
            any device; none is empty.
        placed: the rule by which ranks that save have the rectangles, the same on all ranks that have the tensor; None
            if there is no rule: the ranks then tell each other their rectangles.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: dict[tuple[int, ...], Tensor]
    placed: Placed | None

    @classmethod
    def whole(cls, tensor: Tensor, placed: Placed = WHOLE) -> Chunks:
        """A tensor that this rank holds in full. By default one of the ranks that have it writes it."""
        is_own = tensor.numel() and placed.partition.parts(tensor.shape, placed.offset)
        parts = {(0,) * tensor.dim(): tensor.detach()} if is_own else {}
        return cls(tuple(tensor.shape), tensor.dtype, parts, placed)

    def with_copies(self, rectangles: Iterator[Tensor]) -> Chunks:
        """Chunks with copies of the rectangles, in the same order."""
        return replace(self, parts={offsets: next(rectangles) for offsets in self.parts})


@dataclass
class Item:
    """This rank's part of a parameter or buffer of the bare model, and of the optimizer's state for it.

    A save fills ``spec`` and ``state`` with the present state. A load fills them, ``values`` and ``saved`` with the
    checkpoint's content, which it then converts.

    Attributes:
        name: the fully qualified name in the bare model.
        param: the wrapped model's tensor, which may be a flat buffer of several parameters of the bare model.
        segment: the index in that flat buffer; None for other tensors.
        shard: the position of this rank's part in the parameter.
        local: the elements of this rank's part, a view.
        group: the index of the parameter's param group; None if no optimizer has the parameter.
        spec: the form of the state in the optimizer; None if no optimizer has the parameter.
        state: the state's entries as plain tensors; empty if this rank has or needs none.
        values: on a load, the elements as read, in the checkpoint's dtype; unset before.
        saved: on a load, the form of the state in the checkpoint; None if no state is to be loaded.
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
        """How a load has to encode moments anew, in words; empty if they are as saved."""
        if self.saved is None or self.spec is None or not self.spec.moments:
            return ""
        saved, present = _described(self.saved), _described(self.spec)
        return "" if saved == present else f"{saved} state for {present}"

    @property
    def weight_formats(self) -> tuple[WeightFormat, WeightFormat]:
        """The weights' format in the checkpoint and in the model. Without state, there are no low bits."""
        bits = [0 if spec is None or self.saved is None else spec.weights.low_bits for spec in (self.saved, self.spec)]
        return WeightFormat(self.values.dtype, bits[0]), WeightFormat(self.local.dtype, bits[1])

    @property
    def conversion(self) -> str:
        """The conversions of state and weights, in words; empty if there are none."""
        (old, new), of_state = self.weight_formats, self.state_conversion
        of_weights = f"{old.dtype} weights of {old.low_bits} low bits for {new.dtype} of {new.low_bits}"
        return " and ".join(filter(None, [of_state, "" if old == new else of_weights]))

    def convert_weights(self) -> None:
        """Converts the checkpoint's weights to the format of the parameter and the optimizer."""
        old, new = self.weight_formats
        if old == new:
            return
        values, low_bits = new.store(old.load(self.values, self.state.pop(LOW_BITS, None)))
        if low_bits is not None and self.state:
            self.state[LOW_BITS] = low_bits
        for key, entry in (self.saved.kept or ()) if self.saved is not None and self.state else ():
            is_whole = not entry.shape or entry.shape != self.shard.local_shape
            if not is_whole and entry.dtype == old.dtype:  # the weights' dtype, in quantize_state
                self.state[key] = self.state[key].to(new.dtype)
        self.values = values

    def moments(self) -> list[Tensor] | None:
        """The saved moments, decoded: this rank's part, float32; None if none are read."""
        return self.saved.decode(self.state) if self.saved is not None and self.state else None


def _described(spec: SliceSpec) -> str:
    """The codec and block size of a state, in words."""
    return f"{spec.codec.name} in blocks of {spec.grid.block_size}" if spec.codec.blockwise else spec.codec.name


def chunks_of(shard: Shard, local: Tensor, grid: BlockGrid | None = None, *, to_save: bool = False) -> Chunks:
    """A tensor of the parameter's shape of which this rank holds ``local``, perhaps with trailing dimensions.

    With a grid, the scales of the parameter's blocks. All ranks that hold a cut block load its scales; the rank that
    holds its first element saves them.
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
    """The tensors of a checkpoint that an item becomes, by their names.

    Args:
        item: the parameter or buffer.
        local: its elements on this rank.
        spec: the form of its state, if there is any.
        state: this rank's part of each state entry, plain tensors.
        to_save: leave out what other ranks save, though this rank holds it, too.
    """
    tensors = {model_key(item.name): chunks_of(item.shard, local)}
    if spec is None:
        return tensors
    for key, value in state.items():
        if spec.is_whole(key):
            chunks = Chunks.whole(value, _of_first_element(spec.shard) if to_save else WHOLE)
        else:
            chunks = chunks_of(spec.shard, value, spec.grid_of(key), to_save=to_save)
        tensors[f"optimizer.{item.name}.{key}"] = chunks
    return tensors


def model_key(name: str) -> str:
    """A parameter's or buffer's name in a checkpoint."""
    return f"model.{name}"


def _of_first_element(shard: Shard) -> Placed:
    """Partition of per-parameter entries (``step``). Under flat sharding the rank that holds element 0 stores them.

    A rank that holds no element of the parameter has no state of it.
    """
    placed = shard.partition
    if placed is None or not isinstance(placed.partition, RangePartition):
        return WHOLE
    return placed._replace(partition=placed.partition._replace(dims=0, block=None))


def _rectangles(shape: Sequence[int], start: int, end: int, local: Tensor) -> dict[tuple[int, ...], Tensor]:
    """Views of ``local``, by offset, for the rectangles that make up ``[start, end)`` of a flattened tensor.

    Args:
        shape: the tensor's.
        start: first element.
        end: behind the last element.
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
