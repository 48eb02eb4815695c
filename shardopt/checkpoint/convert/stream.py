"""A checkpoint that is read and written in pieces: ranges of elements of one tensor, or of one parameter's state.

Memory then does not depend on the size of a checkpoint, or of a tensor in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from shardopt.checkpoint.contents import model_key, state_key
from shardopt.checkpoint.data_file import rectangle
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.groups import SavedGroup
from shardopt.checkpoint.owner import is_of_quantize_state
from shardopt.checkpoint.reading import common_part, inside
from shardopt.checkpoint.wording import named
from shardopt.kernels.memory import memoryview_of
from shardopt.layout import FlatShard
from shardopt.layout.partition import Part, rectangles_of_range
from shardopt.state.options import MAX_BLOCK_SIZE
from shardopt.state.slice_spec import SliceSpec, StateDict

#: Elements of a piece. Converting takes at most about 60 bytes for each: see docs/checkpoints.md.
PIECE_NUMEL = 1 << 22


class LazyTensor(NamedTuple):
    """A tensor that is read when it is needed.

    Attributes:
        dtype: the dtype.
        shape: the shape.
        read: gives the elements ``[first, end)`` of the flattened tensor: 1-D, on the CPU.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def whole(self) -> Tensor:
        """All elements, in the tensor's shape: for small tensors."""
        return self.read(0, self.numel).view(self.shape)


class State(NamedTuple):
    """The optimizer's state of one parameter, which is read when it is needed.

    Attributes:
        form: the form of the whole parameter's state.
        step: the step count: float32, a scalar.
        read: gives the other entries for the elements ``[first, end)`` of the flattened parameter, as
            :func:`part_of_form` of them describes. ``first`` is where a block begins.
        coded: the same state in codes that decoding and encoding would change, for a target of their form.
        stored: the source's form in words, where it is none of shardopt's.
    """

    form: SliceSpec
    step: Tensor
    read: Callable[[int, int], StateDict]
    coded: State | None = None
    stored: str | None = None


class Piece(NamedTuple):
    """A range of elements of a tensor.

    Attributes:
        key: the tensor's name, as a portable checkpoint has it.
        first: the index of the first element in the flattened tensor.
        data: the elements, 1-D.
    """

    key: str
    first: int
    data: Tensor


class Described(NamedTuple):
    """A tensor's dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class Checkpoint:
    """A checkpoint on its way from one format to another.

    Attributes:
        path: where it is, for errors.
        optimizer: the name of the optimizer's class; None without an optimizer.
        groups: the param groups, with options that describe the state; empty without an optimizer.
        extra: further values that JSON can hold.
        aliases: other names of shared parameters, each with the name in ``tensors``; of portable checkpoints only.
        tensors: parameters and buffers, ``model.<name>``, further tensors, ``extra.<key>``, and state that no class
            describes (quantize_state's), by the names in a portable checkpoint.
        states: the state of parameters, by the parameters' names.
        left_out: what the target cannot hold, in words.
    """

    path: str
    optimizer: str | None = None
    groups: list[SavedGroup] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def described(self) -> dict[str, Described]:
        """Dtypes and shapes of all tensors by name, in the order of :meth:`pieces`."""
        tensors = {key: Described(tensor.dtype, tensor.shape) for key, tensor in self.tensors.items()}
        for name, state in self.states.items():
            for entry, form in state.form.entries.items():
                tensors[state_key(name, entry)] = Described(form.dtype, form.shape)
        return tensors

    def pieces(self, numel: int) -> Iterator[Piece]:
        """All elements of all tensors: those of one tensor ascending, those of a parameter's state by turns.

        Args:
            numel: elements of a piece, at most.
        """
        for key, tensor in self.tensors.items():
            yield from pieces_of_tensor(key, tensor, numel)
        for name, state in self.states.items():
            yield from pieces_of_state(name, state, numel)

    def parameter(self, name: str) -> LazyTensor:
        """A parameter by its name in the model.

        Raises:
            CheckpointError: there is none.
        """
        tensor = self.tensors.get(model_key(name))
        if tensor is None:
            raise CheckpointError(
                f"{self.path}: got state of {named(name)} and no such parameter, expected both; save both"
            )
        return tensor


def pieces_of_tensor(key: str, tensor: LazyTensor, numel: int) -> Iterator[Piece]:
    """The pieces of one tensor."""
    for first, end in ranges(tensor.shape, numel):
        yield Piece(key, first, tensor.read(first, end))


def pieces_of_state(name: str, state: State, numel: int) -> Iterator[Piece]:
    """The pieces of one parameter's state: for one range of its elements after another, those of all entries."""
    yield Piece(state_key(name, "step"), 0, state.step.reshape(1))
    ends: dict[str, int] = {}
    for first, end in ranges(state.form.shard.global_shape, numel):
        for entry, data in state.read(first, end).items():
            begin, stop = range_of_entry(state.form, entry, first, end)
            given = max(ends.get(entry, 0) - begin, 0)  # the second moment of a matrix's row that two ranges share
            ends[entry] = stop
            yield Piece(state_key(name, entry), begin + given, data.reshape(-1)[given:])


def places_of(tensors: Mapping[str, Described]) -> dict[str, int]:
    """Positions in a file, bytes. Tensors with larger elements come first, so that each begins aligned."""
    places, end = {}, 0
    for key, described in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        places[key] = end
        end += described.nbytes
    return places


def write_pieces(
    checkpoint: Checkpoint,
    file: BinaryIO,
    places: Mapping[str, int],
    numel: int,
    progress: Callable[[int], object],
    begin: int = 0,
) -> None:
    """Writes tensors into a file, piece by piece.

    Args:
        checkpoint: the checkpoint.
        file: the file.
        places: the tensors' positions, bytes; tensors without one are left out.
        numel: elements of a piece.
        progress: called with the bytes of each piece.
        begin: the position that places are counted from.

    Raises:
        CheckpointError: the checkpoint could not be read.
        OSError: the system fails to write.
    """
    for key, first, data in checkpoint.pieces(numel):
        if key in places:
            file.seek(begin + places[key] + first * data.itemsize)
            file.write(memoryview_of(data))
        progress(data.nbytes)


def ranges(shape: Sequence[int], most: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
    """Ranges ``[first, end)`` that make up a flattened tensor, or a range of it: whole rows, or parts of one row.

    Parts of a row begin at multiples of the largest block size, so that no range cuts a block.

    Args:
        shape: the tensor's.
        most: elements of a range, at most; at least one largest block.
        start: where the first range begins: at a row, or where a part of a row may begin.
        stop: where the last one ends, likewise.
    """
    numel, row = math.prod(shape), math.prod(shape[1:])
    stop = numel if stop is None else stop
    aligned = max(most // MAX_BLOCK_SIZE, 1) * MAX_BLOCK_SIZE
    while start < stop:
        if row <= most and start % row == 0:
            end = start + most // row * row
        else:
            end = min(start + aligned, (start // row + 1) * row)
        yield start, min(end, stop)
        start = end


def part_of_form(form: SliceSpec, first: int, end: int) -> SliceSpec:
    """The form of the state of a range of a parameter's elements."""
    return replace(form, shard=FlatShard(form.shard.global_shape, first, end))


def range_of_entry(form: SliceSpec, entry: str, first: int, end: int) -> tuple[int, int]:
    """Where a flattened state entry has what belongs to a range of the parameter's elements.

    Args:
        form: the form of the whole parameter's state.
        entry: the entry's name.
        first: where the range begins: at a block.
        end: where the range ends.
    """
    shape, grid = form.entries[entry].shape, form.grid_of(entry)
    if grid is not None:
        width = math.prod(shape[2:])
        return grid.block_of(first) * width, (grid.block_of(end - 1) + 1) * width
    width = math.prod(shape[len(form.shard.global_shape) :])
    return first * width, end * width


def state_of_tensors(form: SliceSpec, step: Tensor, tensors: dict[str, LazyTensor]) -> State:
    """The state whose entries are these tensors, one of the form's shape and dtype for each entry but the step."""

    def read(first: int, end: int) -> StateDict:
        part = part_of_form(form, first, end)
        return {
            entry: tensor.read(*range_of_entry(form, entry, first, end)).view(part.entries[entry].shape)
            for entry, tensor in tensors.items()
        }

    return State(form, step, read)


def elements(tensor: Tensor, first: int, end: int) -> Tensor:
    """A range of a flattened tensor, 1-D; copies no more than the range."""
    if tensor.is_contiguous():
        return tensor.reshape(-1)[first:end]
    parts = rectangles_of_range(tuple(tensor.shape), first, end)
    pieces = [tensor[tuple(slice(a, a + n) for a, n in zip(*part, strict=True))].reshape(-1) for part in parts]
    return torch.cat(pieces) if pieces else tensor.new_empty(0)


def lazy(tensor: Tensor) -> LazyTensor:
    """A tensor in memory, or mapped into it, as one that is read when it is needed."""
    return LazyTensor(tensor.dtype, tuple(tensor.shape), lambda first, end: elements(tensor, first, end))


def rebuilt(
    dtype: torch.dtype, shape: tuple[int, ...], chunks: Sequence[tuple[Part, Callable[[int, int], Tensor]]]
) -> LazyTensor:
    """A tensor of rectangles.

    Args:
        dtype: the dtype.
        shape: the shape.
        chunks: rectangles that fill the tensor, each with what reads a range of its flattened elements.
    """

    def read(first: int, end: int) -> Tensor:
        whole = torch.empty(end - first, dtype=dtype, device="cpu")
        at = 0
        for offsets, extents in rectangles_of_range(shape, first, end):
            into = whole[at : at + math.prod(extents)].view(extents)
            at += into.numel()
            for part, read_chunk in chunks:
                common = common_part((offsets, extents), part)
                if common is not None:
                    # A single index of the leading dimensions, and all of the trailing ones: a range of the chunk.
                    begin = _index(inside(common, part[0]), part[1])
                    values = read_chunk(begin, begin + math.prod(common[1])).view(common[1])
                    into[rectangle(inside(common, offsets), common[1])] = values
        return whole

    return LazyTensor(dtype, shape, read)


def _index(corner: Sequence[int], shape: Sequence[int]) -> int:
    index = 0
    for at, extent in zip(corner, shape, strict=True):
        index = index * extent + at
    return index


def refuse_quantize_state(checkpoint: Checkpoint, remedy: str) -> None:
    """Raises for state of quantize_state, which a format has no place for.

    Args:
        checkpoint: the checkpoint.
        remedy: for the error.

    Raises:
        CheckpointError: the checkpoint has such state.
    """
    if is_of_quantize_state(checkpoint.optimizer):
        raise CheckpointError(
            f"{checkpoint.path}: got a checkpoint of {checkpoint.optimizer}, expected one of an optimizer of shardopt; "
            f"{remedy}"
        )
