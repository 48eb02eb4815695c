"""A rank's parts of a model's parameters, by the names in the bare model, independent of the sharding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module

from shardopt.checkpoint.chunks import Chunk, Chunks
from shardopt.checkpoint.errors import CheckpointError
from shardopt.kernels.memory import check_storage
from shardopt.layout import (
    WHOLE,
    BlockGrid,
    FlatBuffer,
    FlatShard,
    Placed,
    RangePartition,
    Ranges,
    Shard,
    assigned,
    boxes,
    shard_of,
)
from shardopt.layout.names import all_parameter_names, buffer_names, parameter_names
from shardopt.layout.partition import rectangles_of_range
from shardopt.state.slice_spec import SliceSpec


class Piece(NamedTuple):
    """This rank's part of one parameter of the bare model.

    Attributes:
        name: the fully qualified name in the bare model.
        param: the wrapped model's parameter, which may be a flat buffer of several parameters of the bare model.
        segment: the index in that flat buffer; None for other parameters.
        shard: the position of this rank's part in the parameter.
        local: the elements of this rank's part, a view.
    """

    name: str
    param: Tensor
    segment: int | None
    shard: Shard
    local: Tensor


def pieces_of(model: Module, masters: Sequence[Tensor] = ()) -> Iterator[Piece]:
    """The parameters of a model.

    Args:
        model: the model, which :func:`shardopt.layout.read_model` must have read.
        masters: flat buffers of masters, which take the place of the model's own parameters (DeepSpeed's).

    Raises:
        CheckpointError: a parameter is gathered in full at the moment, for a forward or backward pass; or it
            has no memory.
    """
    named = parameter_names(model)
    for param in masters:
        buffer = shard_of(param)
        assert isinstance(buffer, FlatBuffer)
        for segment in buffer.segments:
            named.pop(segment.name, None)
    named.update((f"master {index}", param) for index, param in enumerate(masters))
    for name, param in named.items():
        shard = shard_of(param)
        local = _local(name, "parameter", shard, param)
        if local.shape != shard.local_shape:
            raise CheckpointError(
                f"got {name} as a tensor of shape {tuple(local.shape)}, expected this rank's part, "
                f"{shard.local_shape}; save and load between steps, not between forward and backward"
            )
        if isinstance(shard, FlatBuffer):
            for index, segment in enumerate(shard.segments):
                yield Piece(segment.name, param, index, segment.shard, segment.of(local))
        else:
            yield Piece(name, param, None, shard, local)


def aliases_in(model: Module, pieces: Iterable[Piece]) -> dict[str, str]:
    """The names of shared parameters under which they are not saved, each with the name under which they are."""
    names = all_parameter_names(model)
    found: dict[str, str] = {}
    for piece in pieces:
        shard = assigned(piece.param)
        others = shard.aliases.get(piece.name, ()) if isinstance(shard, FlatBuffer) else names.get(piece.param, ())
        found.update((name, piece.name) for name in others if name != piece.name)
    return found


def buffers_of(model: Module) -> Iterator[Piece]:
    """The buffers that belong to a model's state dict.

    Raises:
        CheckpointError: a buffer has no memory.
    """
    for name, buffer in buffer_names(model).items():
        shard = shard_of(buffer)
        yield Piece(name, buffer, None, shard, _local(name, "buffer", shard, buffer))


def _local(name: str, what: str, shard: Shard, tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, to be read or written."""
    try:
        local = shard.local(tensor).detach()
    except RuntimeError as error:
        raise CheckpointError(f"{name}: {error}") from error
    check_storage(name, what, local, CheckpointError)
    return local


def parameter_chunks(shard: Shard, local: Tensor) -> Chunks:
    """A tensor of the parameter's shape, perhaps with trailing dimensions, of which this rank holds ``local``."""
    behind = tuple(local.shape[len(shard.local_shape) :])
    shape = (*shard.global_shape, *behind)
    if isinstance(shard, FlatShard):
        held = _rectangles(shard.global_shape, shard.start, shard.end, local)
    else:
        held = _boxes(shard.indices, local)
    return Chunks(shape, local.dtype, held, placed=shard.partition)


def scales_chunks(shard: Shard, grid: BlockGrid, local: Tensor) -> Chunks:
    """The scales of a parameter's blocks, of which this rank holds ``local``.

    The rank that holds a cut block's first element saves the block's scales.
    """
    leading = shard.scales_shape(grid)
    behind = tuple(local.shape[len(leading) :])
    shape = (grid.rows, grid.blocks_per_row, *behind)
    if isinstance(shard, FlatShard):
        first, end = shard.blocks(grid)
        written = max(min(shard.first_written_block(grid), end), first)
        own = _rectangles(shape[:2], written, end, local[written - first :])
        return Chunks(shape, local.dtype, _rectangles(shape[:2], first, end, local), own, shard.scales_partition(grid))
    covered = shard.local_blocks(grid)
    blocks = ((covered.first, covered.first + covered.per_row),)
    held = _boxes((shard.indices[0], blocks), local)
    return Chunks(shape, local.dtype, held, placed=shard.scales_partition(grid))


def state_chunks(spec: SliceSpec, state: Mapping[str, Any]) -> dict[str, Chunks]:
    """The state of a parameter, by the names of its entries.

    Args:
        spec: the form of the state.
        state: this rank's part, plain tensors by entry.
    """
    entries: dict[str, Chunks] = {}
    for key, value in state.items():
        if spec.is_whole(key):
            entries[key] = Chunks.whole(value, _of_first_element(spec.shard))
        elif spec.is_scales(key):
            entries[key] = scales_chunks(spec.shard, spec.grid, value)
        else:
            entries[key] = parameter_chunks(spec.shard, value)
    return entries


def _of_first_element(shard: Shard) -> Placed:
    """Where state that belongs to a parameter as a whole is: among flat shards, with the parameter's first element.

    A rank without any element of the parameter has no state of it.
    """
    placed = shard.partition
    if placed is None or not isinstance(placed.partition, RangePartition):
        return WHOLE
    return placed._replace(partition=placed.partition._replace(dims=0, block=None))


def _boxes(indices: Sequence[Ranges], local: Tensor) -> list[Chunk]:
    """The rectangles of a tensor of which this rank holds some indices of each dimension.

    Args:
        indices: of the leading dimensions.
        local: the elements at these indices, with any trailing dimensions behind.
    """
    zeros = (0,) * (local.dim() - len(indices))
    if all(len(ranges) == 1 for ranges in indices):  # by far the most: all of the elements
        return [Chunk((*(start for ((start, _),) in indices), *zeros), local)]
    return [Chunk((*offsets, *zeros), local[elements]) for offsets, elements in boxes(indices)]


def _rectangles(shape: Sequence[int], start: int, end: int, local: Tensor) -> list[Chunk]:
    """The rectangles that make up the range ``[start, end)`` of a flattened tensor of this shape.

    Args:
        shape: the shape of the global tensor, without the trailing dimensions of ``local``.
        start: the index of the first element.
        end: the index after the last element.
        local: the elements along dimension 0, with any trailing dimensions behind.
    """
    behind = tuple(local.shape[1:])
    zeros = (0,) * len(behind)
    chunks = []
    at = 0
    for offsets, extents in rectangles_of_range(tuple(shape), start, end):
        numel = math.prod(extents)
        chunks.append(Chunk((*offsets, *zeros), local[at : at + numel].view(*extents, *behind)))
        at += numel
    return chunks
