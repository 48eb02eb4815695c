"""The matrices that Muon orthogonalizes: their shapes, the ranks that own them, and their division into waves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt.layout import FlatShard, RankGroup
from shardopt.layout.partition import UNCUT, Part
from shardopt.state.rule import Orthogonalized, Split
from shardopt.state.slice_spec import SliceSpec
from shardopt.step.inputs import StepParameter

BYTES = 2  # per element of a direction: bfloat16
ROW_BYTES = 4  # per row, for its second moment: float32
_ALIGNED = 128  # elements: 256 bytes, by which libraries that multiply matrices may choose their kernels
_SCATTER = 0x9E3779B1  # 2^32 over the golden ratio: its multiples, and every second one of them, spread evenly

#: Waves whose directions are in memory at a time: one arrives, one is computed and one goes back.
LIVE_WAVES = 3


@dataclass(frozen=True)
class Matrix:
    """A matrix that Muon orthogonalizes by itself (a parameter, or a part of one), and the ranks that hold its parts.

    Attributes:
        parameter: the optimizer's parameter.
        slice_index: index of the parameter's slice.
        options: how the matrix is orthogonalized.
        rows: the matrix's rows.
        cols: the matrix's columns.
        global_begin: index of the matrix's first element in the flattened parameter of the model.
        local_begin: index in the local tensor of the matrix's first element on this rank.
        ranks: the ranks that hold parts of the matrix, or share its copies; None for a matrix of this rank alone.
        parts: by rank, the rectangles of the matrix that the rank holds, in the order of their elements in its memory,
            with the parameter's rows counted from the matrix's first.
        sent_rows: by rank, how many rows' second moments are sent with its part: all rows', or none.
        owner: the rank that orthogonalizes the matrix, once :func:`waves_of` has chosen it.
    """

    parameter: StepParameter
    slice_index: int
    options: Orthogonalized
    rows: int
    cols: int
    global_begin: int
    local_begin: int
    ranks: RankGroup | None
    parts: tuple[list[Part], ...]
    sent_rows: tuple[int, ...]
    owner: int = 0

    @property
    def spec(self) -> SliceSpec:
        """The slice of a model parameter that the matrix is in."""
        return self.parameter.slices[self.slice_index]

    @property
    def number(self) -> int:
        """The index, among all of the model's parameters, of the parameter that the matrix is in."""
        return self.parameter.number if self.spec.number is None else self.spec.number

    @property
    def numel(self) -> int:
        """Elements of the whole matrix."""
        return self.rows * self.cols

    @property
    def rank(self) -> int:
        """This rank's index in :attr:`ranks`; 0 if the matrix is of this rank alone."""
        return 0 if self.ranks is None else self.ranks.rank

    @property
    def is_replicated(self) -> bool:
        """Whether each rank holds the whole matrix."""
        return all(of_rank == self.parts[0] for of_rank in self.parts)

    def local_numel(self, rank: int) -> int:
        """How many elements of the matrix a rank holds, given its index in :attr:`ranks`."""
        return sum(math.prod(extents) for _, extents in self.parts[rank])

    def view_of_part(self, whole: Tensor, part: Part) -> Tensor:
        """View of a rectangle, one of :attr:`parts`, in ``whole``, which has the matrix's elements as a 1-D tensor."""
        inside = tuple(slice(start, start + extent) for start, extent in zip(*part, strict=True))
        return whole.view(-1, *self.spec.shard.global_shape[1:])[inside]

    def message_numel(self, rank: int) -> int:
        """Elements in a buffer for a rank's part of the direction and, behind it, second moments of rows; padded."""
        return padded(self.local_numel(rank)) + padded(self.sent_rows[rank] * ROW_BYTES // BYTES)

    def row_moments(self, buffer: Tensor, begin: int, rank: int) -> Tensor:
        """View, in float32, of the second moments of rows in a buffer in which a rank's part begins at ``begin``."""
        begin += padded(self.local_numel(rank))
        return buffer[begin : begin + self.sent_rows[rank] * ROW_BYTES // BYTES].view(torch.float32)

    def stored_row_moments(self, entry: Tensor) -> tuple[slice, Tensor]:
        """The rows of the matrix whose second moments this rank stores, and a view of them in the local state entry."""
        grid, shard = self.spec.row_grid, self.spec.shard
        assert grid is not None
        first_row = self.global_begin // self.cols  # among the rows of all matrices of the parameter
        if isinstance(shard, FlatShard):
            (first, end), per_row, col = shard.block_range(grid), 1, 0
        else:  # the entry's rows have a number each; or one per row of a matrix, in a stack of matrices
            (first, end), (col, _) = shard.scales(grid).indices
            per_row = grid.blocks_per_row
        begin, stop = max(first, first_row // per_row), min(end, (first_row + self.rows) // per_row)
        stored = entry[begin - first : max(stop, begin) - first].view(-1)
        start = begin * per_row + col - first_row
        return slice(start, start + len(stored)), stored

    def workspace(self, device_type: str) -> int:
        """Bytes that the orthogonalization takes on the owner while it runs, on a device of this type."""
        return BYTES * self.numel + self.options.newton_schulz.workspace(self.rows, self.cols, device_type)


def matrices_of(parameter: StepParameter, orthogonalized: Orthogonalized) -> Iterator[Matrix]:
    """Generates the matrices of an optimizer's parameter, in order, even those of which this rank holds no part.

    Raises:
        ValueError: the parameter is no matrix, or ``split`` does not fit its shape.
        RuntimeError: the parameter is sharded in a way that is not known here.
    """
    for index, spec in enumerate(parameter.slices):
        shard, local_begin = spec.shard, spec.offset
        name = parameter.name if spec.name is None else f"{spec.name} in {parameter.name}"
        ranks = shard.make_part_group()
        if 0 in shard.global_shape or (ranks is None and 0 in shard.local_shape):  # empty, or not on this rank's mesh
            continue
        if ranks is not None:
            parameter_parts = shard.parts_by_rank(ranks)
        else:
            ranks = parameter.replica_ranks
            parameter_parts = [UNCUT.parts(shard.global_shape, 0)] * (1 if ranks is None else len(ranks.global_ranks))
        for begin, rows, cols in matrix_shapes(name, shard.global_shape, orthogonalized.split):
            first_row, end_row = begin // shard.row_numel, (begin + rows * cols) // shard.row_numel
            parts = tuple(_within(of_rank, first_row, end_row) for of_rank in parameter_parts)
            # A rank without rows of this matrix has none of its second moments. But a rank that holds nothing of the
            # whole parameter may have them: a column shard without columns stores second moments of its rows.
            stores_rows = [bool(part) or not of_rank for part, of_rank in zip(parts, parameter_parts, strict=True)]
            sends_rows = orthogonalized.row_decay is not None
            sent_rows = tuple(rows if stores and sends_rows else 0 for stores in stores_rows)
            shape = rows, cols, begin, local_begin
            matrix = Matrix(parameter, index, orthogonalized, *shape, ranks, parts, sent_rows)
            yield matrix
            local_begin += matrix.local_numel(matrix.rank)


def _within(parts: Sequence[Part], first: int, end: int) -> list[Part]:
    """Intersects rectangles with the rows ``[first, end)`` of the parameter; the results count rows from ``first``."""
    found = []
    for (low, *starts), (rows, *extents) in parts:
        begin, stop = max(low, first), min(low + rows, end)
        if begin < stop:
            found.append(((begin - first, *starts), (stop - begin, *extents)))
    return found


def matrix_shapes(name: str, shape: tuple[int, ...], split: Split) -> list[tuple[int, int, int]]:
    """First element, rows and columns of each matrix of a parameter. Convolutions are ``(out, everything else)``.

    Raises:
        ValueError: the parameter has too few dimensions, or its rows are not the sum of ``split``.
    """
    if len(shape) < 2:
        raise ValueError(
            f"{name}: got a parameter of shape {shape} in a param group for Muon, expected two dimensions or more; "
            "make the groups with shardopt.muon_groups, or give its group algorithm='adamw'"
        )
    width = math.prod(shape[1:])
    if split is None:
        return [(0, shape[0], width)]
    if split == "each":
        if len(shape) < 3:
            raise ValueError(
                f"{name}: got split='each' for a parameter of shape {shape}, expected three dimensions or more; give "
                "the rows of each matrix"
            )
        return [(index * width, shape[1], width // max(shape[1], 1)) for index in range(shape[0])]
    if sum(split) != shape[0]:
        raise ValueError(f"{name}: got split={split} for a parameter of shape {shape}, expected a sum of {shape[0]}")
    begins = accumulate((0, *split[:-1]))
    return [(begin * width, rows, width) for begin, rows in zip(begins, split, strict=True)]


#: Matrices whose directions are exchanged by the same collectives, sorted by owner, as the directions are in the
#: buffer. All matrices of a wave have the same ranks, and either all or none are replicated.
Wave = Sequence[Matrix]


def waves_of(matrices: Sequence[Matrix], memory: int, device_type: str, *, by_number: bool) -> list[Wave]:
    """Assigns the matrices of a device to owner ranks, balanced by cost, and divides the matrices into waves.

    The result depends on the parameters and their sharding alone, so that it is equal on all ranks.

    Args:
        matrices: in an order that is equal on all ranks.
        memory: bytes that a step may take; a slice that needs more is a wave by itself.
        device_type: type of the device that computes the matrices.
        by_number: whether to spread owners by the parameters' numbers in the model, for steps of a single parameter,
            instead of by index in ``matrices``. Numbers differ on ranks that leave out parameters of other ranks.
    """
    by_ranks: dict[Any, list[Matrix]] = {}
    for matrix in matrices:
        by_ranks.setdefault((matrix.ranks, matrix.is_replicated), []).append(matrix)
    waves: list[Wave] = []
    for of_ranks in by_ranks.values():
        # The matrices are orthogonalized one at a time, beside the buffers of several waves.
        limit = (memory - max(matrix.workspace(device_type) for matrix in of_ranks)) // LIVE_WAVES
        slices: dict[tuple[int, int], list[Matrix]] = {}  # a slice is in one wave, as its blocks are coded together
        for matrix in _assign_owners(of_ranks, by_number):
            slices.setdefault((matrix.parameter.index, matrix.slice_index), []).append(matrix)
        in_waves: list[list[Matrix]] = [[]]
        taken = np.zeros(len(of_ranks[0].parts), np.int64)  # bytes that the last wave takes on each rank
        for of_slice in slices.values():
            more = sum(map(_memory, of_slice))
            if in_waves[-1] and (taken + more).max() > limit:
                in_waves.append([])
                taken = np.zeros_like(taken)
            in_waves[-1] += of_slice
            taken = taken + more
        waves += [sorted(wave, key=lambda matrix: matrix.owner) for wave in in_waves]
    return waves


def _assign_owners(matrices: Sequence[Matrix], by_number: bool) -> Iterator[Matrix]:
    """Assigns each of the matrices of the same ranks to a least loaded rank; yields them, the costliest first."""
    ranks = len(matrices[0].parts)
    loads = [0] * ranks
    flops = [matrix.options.newton_schulz.flops(matrix.rows, matrix.cols) for matrix in matrices]
    for index in sorted(range(len(matrices)), key=lambda index: -flops[index]):
        matrix = matrices[index]
        # Among equally loaded ranks not always rank 0: a step of a single parameter would give all its work to rank 0.
        first = ((matrix.number if by_number else index) * _SCATTER % 2**32) * ranks >> 32
        owner = min(range(ranks), key=lambda rank: (loads[rank], (rank - first) % ranks))
        loads[owner] += flops[index]
        yield replace(matrix, owner=owner)


def _memory(matrix: Matrix) -> npt.NDArray[np.int64]:
    """Bytes that a matrix's directions take on each rank: the rank's part, and on the owner also the whole matrix."""
    taken = np.array([BYTES * matrix.message_numel(rank) for rank in range(len(matrix.parts))])
    if not matrix.is_replicated:
        taken[matrix.owner] += taken.sum()
    return taken


def padded(numel: int) -> int:
    """The number of elements rounded up, so that whatever follows in the buffer is aligned for the kernels."""
    return -(-numel // _ALIGNED) * _ALIGNED
