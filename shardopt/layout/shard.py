"""The shard: which part of a global parameter this rank holds, and how the parameter's state is sharded.

A plain tensor is a shard that holds the whole parameter. Integrations register kinds of sharding with
:mod:`shardopt.layout.kinds`; nothing here knows of torch.distributed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from shardopt.kernels.memory import readable, unwrapped
from shardopt.layout.block_grid import BlockGrid, Rectangle
from shardopt.layout.partition import (
    UNCUT,
    GridPartition,
    Part,
    Partition,
    PlacedPartition,
    Range,
    contiguous_ranges,
    extents_of,
    least_offset,
    partition_by_global_rank,
)
from shardopt.layout.rank_group import HoldersForSums, RankGroup

_S = TypeVar("_S", bound="Shard")


class UnknownShardError(RuntimeError):
    """A tensor holds a part of a parameter, and its metadata do not say which part, or have an unknown format."""


class _ProcessLocal:
    """Base of objects with references to process groups or functions: pickled as None, and not copied by deepcopy."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class Shard(_ProcessLocal):
    """The part of one parameter on this rank.

    A subclass says how the parameter is cut and among which ranks; shapes, rectangles and scales follow from that. For
    tensors of a subclass, such as DTensor, it defines :meth:`local`, :meth:`local_gradient` and :meth:`like_parameter`.
    Rows and columns are those of the parameter seen as the matrix ``(shape[0], row_numel)``.

    Args:
        global_shape: shape of the whole parameter.
        partition: how the parameter is cut, by the ranks' indices in ``ranks``. A flat shard has a RangePartition.
        rank_offset: this rank's index in ``ranks``.
        ranks: the ranks that hold the parts, one rank per part; None if this rank holds all, or a subclass finds ranks.

    Attributes:
        indices: the indices of each dimension that this rank holds.
        cuts_rows: whether ranks may hold parts of one row; if a block is cut between them, they exchange its extremes.
    """

    #: Whether parameter, gradient and state are ordinary tensors with this rank's part and nothing else.
    plain = True

    #: Name of a parameter's attribute whose object determines the shard: cached steps look the shard up again only when
    #: the attribute refers to another object. None: cached steps look the shard up in each step, unless it is plain.
    layout_attribute: str | None = None

    #: Name of the attribute in which tensors keep their local tensor. With `layout_attribute` alone, tensors are local
    #: tensors themselves, and cached steps call neither `local` nor `local_gradient`.
    local_attribute: str | None = None

    #: Whether this rank is one of the ranks that the parameter is divided among: a DTensor's mesh may lack some ranks.
    is_here = True

    #: Whether the moments stay float32, whatever the options say.
    float32_state = False
    _float32_twin: Shard | None = None

    def __init__(
        self,
        global_shape: tuple[int, ...],
        partition: GridPartition = UNCUT,
        rank_offset: int = 0,
        ranks: RankGroup | None = None,
    ) -> None:
        self.global_shape, self.rank_offset, self.ranks = tuple(global_shape), rank_offset, ranks
        self.partition: Partition = partition
        self.indices: tuple[Range, ...] = partition.indices(self.global_shape, rank_offset)
        self.local_shape = extents_of(self.indices)
        self._cut_dims = {cut.dim for cut in partition.cuts}
        self.cuts_rows = any(dim > 0 for dim in self._cut_dims)
        self._scales: dict[int, Shard] = {}  # by block size

    @property
    def rows(self) -> int:
        """Rows of which this rank holds elements."""
        return self.local_shape[0] if self.local_shape else 1

    @property
    def cols(self) -> int:
        """Elements of a row on this rank."""
        return math.prod(self.local_shape[1:])

    @property
    def row_numel(self) -> int:
        """Elements of a whole row."""
        return math.prod(self.global_shape[1:])

    @cached_property
    def first_element(self) -> int | None:
        """Index in the flattened parameter of this rank's first element; None if columns are cut."""
        if self.cols != self.row_numel:
            return None
        return self.indices[0][0] * self.row_numel if self.indices else 0

    def rectangles(self, grid: BlockGrid) -> list[Rectangle]:
        """This rank's part as rectangles, which kernels step: one per contiguous range of columns."""
        if 0 in self.local_shape:
            return []
        scales, row_dims = self.scales(grid), self._row_dims(grid)
        rows, local_cols = math.prod(self.local_shape[:row_dims]), math.prod(self.local_shape[row_dims:])
        row_numel = math.prod(self.global_shape[row_dims:])
        row_blocks = scales.cols // math.prod(self.local_shape[1:row_dims])  # scales from row to row
        first_element = self.indices[0][0] * self.row_numel if self.indices else 0
        first_block = scales.indices[1][0]  # the column, in the matrix of scales, where this rank's scales begin
        rectangles, start = [], 0
        for col, stop in contiguous_ranges(self.global_shape[row_dims:], self.indices[row_dims:]):
            element, cols, block = first_element + col, stop - col, col // grid.block_size - first_block
            rectangles.append(Rectangle(start, element, rows, cols, local_cols, row_numel, block, row_blocks))
            start += cols
        return rectangles

    def _row_dims(self, grid: BlockGrid) -> int:
        """How many leading dimensions count the rows of :meth:`rectangles`: 1, or more if this gives fewer rectangles.

        Of a parameter of shape (8, 4, 256) cut along dim 2, a row of 4 * 256 elements has 4 ranges of columns on this
        rank, and 8 * 4 rows of 256 elements have one each. Blocks must not change: such rows consist of whole blocks.
        """
        cut_dims = [dim for dim, extent in enumerate(self.local_shape) if extent < self.global_shape[dim]]
        last = max(cut_dims, default=0)
        are_whole_blocks = math.prod(self.global_shape[last:]) % grid.block_size == 0
        is_cut_between = not set(cut_dims) <= {0, last}  # the rows would then not have one distance in the parameter
        return last if last > 1 and not is_cut_between and are_whole_blocks else 1

    def scales(self, grid: BlockGrid) -> Shard:
        """The shard of the matrix of scales, one per block. Codecs with several scales per block add a dimension."""
        if grid.block_size not in self._scales:
            self._scales[grid.block_size] = self._make_scales(grid)
        return self._scales[grid.block_size]

    def _make_scales(self, grid: BlockGrid) -> Shard:
        partition = cast(GridPartition, self.partition)  # other shards override this
        return Shard((grid.rows, grid.blocks_per_row), partition.of_scales(grid), self.rank_offset, self.ranks)

    def block_owners(self, grid: BlockGrid) -> RankGroup | None:
        """The ranks that all-reduce the extremes of cut blocks, and so all have the scales of all blocks of their rows.

        None if each rank has the scales of its columns alone, and for flat shards, which have ``cut_blocks`` instead.
        """
        # Column shards that cut blocks store scales of whole rows (GridPartition.of_scales); flat shards do not.
        has_scales_of_whole_rows = not self.scales(grid).cuts_rows
        return self.row_owners if self.cuts_rows and has_scales_of_whole_rows else None

    def with_float32_state(self: _S) -> _S:
        """Returns the shard of the same elements whose moments stay float32: one cached object per shard."""
        if self.float32_state:
            return self
        if self._float32_twin is None:
            self._float32_twin = object.__new__(type(self))  # not by copy.copy, as shards are copied as None
            self._float32_twin.__dict__.update(self.__dict__, float32_state=True)
        return cast(_S, self._float32_twin)

    @property
    def holders(self) -> RankGroup | None:
        """All ranks that hold a part of the parameter or a copy of a part; None if no rank but this one is known."""
        return self.ranks

    @property
    def row_owners(self) -> RankGroup | None:
        """The ranks that hold parts of the same rows, and may share blocks; None if rows are whole.

        Raises UnknownShardError if dimension 0 is cut, too, and the subclass does not say which ranks share rows.
        """
        if self.cuts_rows and 0 in self._cut_dims:
            raise UnknownShardError(
                f"got rows and columns cut by {self.partition}, expected {type(self).__name__}.row_owners to say which "
                "ranks hold parts of the same rows; define it"
            )
        return self.ranks if self.cuts_rows else None

    def make_part_group(self) -> RankGroup | None:
        """The ranks that hold the parameter's parts, one rank per part; None if this rank holds the whole parameter.

        Collective: all of these ranks must call this, as it may make a process group. Raises UnknownShardError without
        ranks.
        """
        if self.ranks is None and math.prod(self.local_shape) != math.prod(self.global_shape):
            raise UnknownShardError(
                f"got a part {self.local_shape} of a parameter of shape {self.global_shape} and a rule for whole "
                f"parameters, expected {type(self).__name__} to say which ranks hold the rest; pass ranks"
            )
        return self.ranks

    def holders_for_sums(self) -> HoldersForSums | None:
        """Which ranks hold copies, so that sums over parameters count each part once; None if each rank has all of it.

        Collective: all of these ranks must call this, as it may make a process group.
        """
        ranks = self.make_part_group()
        if ranks is None:
            return None
        global_ranks = frozenset(ranks.global_ranks)
        return HoldersForSums(ranks, global_ranks, frozenset(), global_ranks)

    def parts_by_rank(self, ranks: RankGroup) -> list[list[Part]]:
        """For each rank of a group, in its order, the rectangles of the parameter that it holds, copies or not."""
        index_of = {global_rank: index for index, global_rank in enumerate(self._global_ranks)}
        offsets = [least_offset(self.partition, index_of[rank]) for rank in ranks.global_ranks]
        return [self.partition.parts(self.global_shape, offset) for offset in offsets]

    @property
    def _global_ranks(self) -> tuple[int, ...]:
        """Global rank numbers: the rank at offset ``i`` of ``partition`` is item ``i``."""
        return (0,) if self.ranks is None else self.ranks.global_ranks

    @cached_property
    def placed_partition(self) -> PlacedPartition | None:
        """The partition by global rank numbers, as a checkpoint stores it, and this rank's offset in it.

        None if the global ranks are not evenly spaced (a checkpoint then lists the parts) or do not include this rank.
        """
        if not self.is_here:
            return None
        return partition_by_global_rank(self.partition, self.rank_offset, self._global_ranks)

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a parameter, codes or scales as an ordinary tensor: of a DTensor, its local tensor.

        Raises RuntimeError if a wrapper subclass has no inner tensor with its elements.
        """
        return unwrapped(tensor)

    def local_gradient(self, gradient: Tensor) -> Tensor:
        """This rank's part of a gradient, laid out like the parameter, with memory of its own.

        If the gradient is sharded otherwise than the parameter, collectives redistribute it: all ranks must call this.
        """
        return readable(gradient if self.plain else self.local(gradient))

    def like_parameter(self, local: Tensor) -> Tensor:
        """Wraps this rank's part ``local`` as a global tensor that is sharded like the parameter, such as a DTensor.

        ``local`` may have more trailing dimensions than the parameter.
        """
        return local

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of a global tensor of the parameter's shape, which may have further trailing dimensions."""
        inside = whole[tuple(slice(start, end) for start, end in self.indices)]
        if inside.shape == whole.shape:
            return whole
        return inside.clone(memory_format=torch.contiguous_format)  # a view would keep all of ``whole`` allocated


#: Name of the attribute in which parameters keep the shard that they were assigned.
ASSIGNED = "_shardopt_shard"
#: Name of the attribute of parameters whose moments stay float32.
_FLOAT32_STATE = "_shardopt_float32_state"


def assign(param: Tensor, shard: Shard) -> None:
    """Stores a parameter's shard as an attribute of the parameter, where :func:`assigned` finds it."""
    setattr(param, ASSIGNED, shard)


class _PendingShard(_ProcessLocal):
    """Placeholder for a parameter's shard until :func:`assigned` asks for the shard; see :func:`assign_later`."""

    def __init__(self, read: Callable[[], None]) -> None:
        self.read = read


def assign_later(params: Iterable[Tensor], read: Callable[[], None]) -> None:
    """Defers the assignment of shards until :func:`assigned` asks for one of them; replaces earlier assignments.

    ``read`` assigns the shards of all ``params`` at once. If it raises or leaves them unassigned, the next call of
    :func:`assigned` calls it again. The parameters keep ``read`` alive, so it must not keep their model alive.
    """
    pending = _PendingShard(read)
    for param in params:
        setattr(param, ASSIGNED, pending)


def assigned(param: Tensor) -> Shard | None:
    """The shard that :func:`assign` stored, or that the function given to :func:`assign_later` assigns now."""
    shard = getattr(param, ASSIGNED, None)
    if isinstance(shard, _PendingShard):
        shard.read()
        shard = getattr(param, ASSIGNED, None)
    return shard if isinstance(shard, Shard) else None


def keep_float32_state(param: Tensor) -> None:
    """Marks a parameter whose moments stay float32, whatever the optimizer's options say."""
    setattr(param, _FLOAT32_STATE, True)


def keeps_float32_state(param: Tensor) -> bool:
    """Whether :func:`keep_float32_state` was called for this tensor."""
    return getattr(param, _FLOAT32_STATE, False)
