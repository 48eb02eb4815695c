"""The shard: which part of a global parameter this rank holds, and how the parameter's state is sharded.

A plain tensor is a shard that holds the whole parameter. Integrations register kinds of sharding with
:mod:`shardopt.layout.kinds`; nothing here knows of torch.distributed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardopt.kernels.memory import readable, unwrapped
from shardopt.layout.block_grid import BlockGrid, Rectangle
from shardopt.layout.partition import (
    UNCUT,
    GridPartition,
    Part,
    Partition,
    Placed,
    Range,
    extents_of,
    flattened,
    least_offset,
    placed_by_number,
)
from shardopt.layout.rank_group import Counted, RankGroup

_S = TypeVar("_S", bound="_OfThisProcess")


class UnknownShardError(RuntimeError):
    """A tensor holds a part of a parameter, and its metadata do not say which part, or have an unknown format."""


class _OfThisProcess:
    """Base of objects with references to process groups or functions: pickled as None, and not copied by deepcopy."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __deepcopy__(self: _S, memo: Any) -> _S:
        return self


class Shard(_OfThisProcess):
    """The part of one parameter on this rank.

    A subclass says how the parameter is cut and among which ranks; shapes, rectangles and scales follow from that. For
    tensors of a subclass, such as DTensor, it defines :meth:`local`, :meth:`local_gradient` and :meth:`like_parameter`.
    Rows and columns are those of the parameter seen as the matrix ``(shape[0], row_numel)``.

    Args:
        global_shape: shape of the whole parameter.
        cut: how the parameter is cut, by the ranks' places among ``ranks``.
        offset: this rank's place among ``ranks``, from 0 on.
        ranks: the ranks that hold the parts, one rank per part; None if this rank holds the whole parameter.
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

    def __init__(
        self,
        global_shape: tuple[int, ...],
        cut: GridPartition = UNCUT,
        offset: int = 0,
        ranks: RankGroup | None = None,
    ) -> None:
        self.global_shape = tuple(global_shape)
        self.cut, self.offset, self.ranks = cut, offset, ranks
        #: How the parameter is cut: ``cut``, or ranges of its elements.
        self.rule: Partition = cut
        #: The indices of each dimension that this rank holds.
        self.indices: tuple[Range, ...] = cut.indices(self.global_shape, offset)
        self.local_shape = extents_of(self.indices)
        #: Whether ranks may hold parts of one row; if a block is cut between them, they exchange its extremes.
        self.cuts_rows = any(each.dim > 0 for each in cut.cuts)
        self._scales: dict[int, Shard] = {}

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
    def columns(self) -> list[Range]:
        """The columns of each row that this rank holds."""
        return flattened(self.global_shape[1:], self.indices[1:])

    @cached_property
    def range_start(self) -> int | None:
        """Index in the flattened parameter of this rank's first element; None if the part is not contiguous."""
        if self.cols != self.row_numel:
            return None
        return self.indices[0][0] * self.row_numel if self.indices else 0

    def rectangles(self, grid: BlockGrid) -> list[Rectangle]:
        """This rank's part as rectangles, which kernels step: one per contiguous range of columns."""
        scales, width, columns = self.scales(grid), self.row_numel, self.columns
        deepest = max((dim for dim, n in enumerate(self.local_shape) if n < self.global_shape[dim]), default=0)
        within = math.prod(self.global_shape[deepest:])
        if deepest > 1 and self.local_shape[1:deepest] == self.global_shape[1:deepest] and not within % grid.block_size:
            width, columns = within, flattened(self.global_shape[deepest:], self.indices[deepest:])
        matrices = self.row_numel // max(width, 1)
        per_row, cols = scales.cols // max(matrices, 1), sum(stop - start for start, stop in columns)
        first_block = scales.columns[0][0] if scales.columns else 0
        begin = self.indices[0][0] * self.row_numel if self.indices else 0
        rectangles, element = [], 0
        for start, stop in columns if self.rows else ():
            block = start // grid.block_size - first_block
            rows, numel = self.rows * matrices, stop - start
            rectangles.append(Rectangle(element, begin + start, rows, numel, cols, width, block, per_row))
            element += numel
        return rectangles

    def scales(self, grid: BlockGrid) -> Shard:
        """The shard of the matrix of scales, one per block. Codecs with several scales per block add a dimension."""
        if grid.block_size not in self._scales:
            self._scales[grid.block_size] = self._matrix_of_blocks(grid)
        return self._scales[grid.block_size]

    def _matrix_of_blocks(self, grid: BlockGrid) -> Shard:
        """Computes :meth:`scales`: cut like the parameter if no block is cut, else along rows only."""
        cut = self.cut if self._is_aligned(grid) else self.cut.along_rows
        return Shard((grid.rows, grid.blocks_per_row), cut, self.offset, self.ranks)

    def _is_aligned(self, grid: BlockGrid) -> bool:
        """Whether no block is cut, and the matrix of scales cut like the parameter gives each rank its own blocks."""
        if not self.cuts_rows:
            return True
        if any(cut.dim > 1 for cut in self.cut.cuts):
            return False
        inner = math.prod(self.global_shape[2:])
        of_columns = [range(0, cut.ways * cut.stride, cut.stride) for cut in self.cut.cuts if cut.dim > 0]
        for offset in map(sum, itertools.product(*of_columns)):  # of ranks that hold parts of the first rows
            ends = [index * inner for index in self.cut.indices(self.global_shape, offset)[1]]
            blocks = self.cut.indices((grid.rows, grid.blocks_per_row), offset)[1]
            if not all(map(grid.is_boundary, ends)) or blocks != tuple(-(-end // grid.block_size) for end in ends):
                return False
        return True

    def block_owners(self, grid: BlockGrid) -> RankGroup | None:
        """The ranks that all-reduce the extremes of cut blocks, and so all have the scales of all blocks of their rows.

        None if no block is cut between ranks.
        """
        return self.row_owners if self.cuts_rows and not self.scales(grid).cuts_rows else None

    def with_float32_state(self: _S) -> _S:
        """Returns the shard of the same elements whose moments stay float32: one cached object per shard."""
        twin: _S | None = self if self.__dict__.get("float32_state") else self.__dict__.get("_float32_twin")
        if twin is None:
            twin = self.__dict__["_float32_twin"] = object.__new__(type(self))
            twin.__dict__.update(self.__dict__, float32_state=True, _float32_twin=None)
        return twin

    @property
    def holders(self) -> RankGroup | None:
        """All ranks that hold a part of the parameter or a copy of a part; None if only this rank is known to."""
        return self.ranks

    @property
    def row_owners(self) -> RankGroup | None:
        """The ranks that hold parts of the same rows, and may share blocks; None if rows are whole.

        Raises:
            UnknownShardError: dimension 0 is cut, too, and the subclass does not say which ranks share rows.
        """
        if self.cuts_rows and any(cut.dim == 0 for cut in self.cut.cuts):
            raise UnknownShardError(
                f"got rows and columns cut by {self.cut.cuts}, expected {type(self).__name__}.row_owners to say which "
                "ranks hold parts of the same rows; define it"
            )
        return self.ranks if self.cuts_rows else None

    def divided_among(self) -> RankGroup | None:
        """The ranks that hold the parameter's parts, one rank per part; None if this rank holds the whole parameter.

        All of these ranks must call this, as it may make a process group.

        Raises:
            UnknownShardError: the shard was made without its ranks.
        """
        if self.ranks is None and math.prod(self.local_shape) != math.prod(self.global_shape):
            raise UnknownShardError(
                f"got a part {self.local_shape} of a parameter of shape {self.global_shape} and a rule for whole "
                f"parameters, expected {type(self).__name__} to say which ranks hold the rest; pass ranks"
            )
        return self.ranks

    def counted(self) -> Counted | None:
        """Which ranks hold copies, so that sums over parameters count each part once; None if each rank has all of it.

        All of these ranks must call this, as it may make a process group.
        """
        ranks = self.divided_among()
        if ranks is None:
            return None
        numbers = frozenset(ranks.numbers)
        return Counted(ranks, numbers, frozenset(), numbers)

    def parts_of(self, ranks: RankGroup) -> list[list[Part]]:
        """For each rank of a group, in its order, the list of rectangles of the parameter that the rank holds."""
        places = {number: place for place, number in enumerate(self._numbers)}
        offsets = [least_offset(self.rule, places[number]) for number in ranks.numbers]
        return [self.rule.parts(self.global_shape, offset) for offset in offsets]

    @property
    def _numbers(self) -> tuple[int, ...]:
        """The global rank numbers, by the offsets that ``cut`` counts."""
        return (0,) if self.ranks is None else self.ranks.numbers

    @cached_property
    def partition(self) -> Placed | None:
        """The rule that says which ranks hold which parts of the parameter, and this rank's offset in it.

        None if the ranks' numbers follow no rule: a checkpoint then lists the parts.
        """
        return placed_by_number(self.rule, self.offset, self._numbers) if self.is_here else None

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a parameter, codes or scales as an ordinary tensor: of a DTensor, its local tensor.

        Raises:
            RuntimeError: a wrapper subclass has no inner tensor with its elements (:func:`written`).
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
        return inside.clone(memory_format=torch.contiguous_format)  # does not keep the memory of the whole


#: Name of the attribute in which parameters keep the shard that they were assigned.
ASSIGNED = "_shardopt_shard"
#: Name of the attribute of parameters whose moments stay float32.
_FLOAT32_STATE = "_shardopt_float32_state"


def assign(param: Tensor, shard: Shard) -> None:
    """Stores a parameter's shard as an attribute of the parameter, where :func:`assigned` finds it."""
    setattr(param, ASSIGNED, shard)


class _Unread(_OfThisProcess):
    """Placeholder for a parameter's shard until :func:`assigned` asks for the shard; see :func:`assign_later`."""

    def __init__(self, read: Callable[[], None]) -> None:
        self.read = read


def assign_later(params: Iterable[Tensor], read: Callable[[], None]) -> None:
    """Defers the assignment of shards until :func:`assigned` asks for one of them; replaces earlier assignments.

    Args:
        params: the parameters.
        read: assigns the parameters' shards, all at once. If ``read`` raises or leaves them unassigned, it is called
            again. ``read`` lives as long as the parameters, so it must not keep their model alive.
    """
    unread = _Unread(read)
    for param in params:
        setattr(param, ASSIGNED, unread)


def assigned(param: Tensor) -> Shard | None:
    """The shard that :func:`assign` stored, or that the function given to :func:`assign_later` assigns now.

    Raises:
        RuntimeError: raised by the function given to :func:`assign_later`.
    """
    shard = getattr(param, ASSIGNED, None)
    if isinstance(shard, _Unread):
        shard.read()
        shard = getattr(param, ASSIGNED, None)
    return shard if isinstance(shard, Shard) else None


def keep_float32_state(param: Tensor) -> None:
    """Marks a parameter whose moments stay float32, whatever the optimizer's options say."""
    setattr(param, _FLOAT32_STATE, True)


def keeps_float32_state(param: Tensor) -> bool:
    """Whether :func:`keep_float32_state` was called for this tensor."""
    return getattr(param, _FLOAT32_STATE, False)
