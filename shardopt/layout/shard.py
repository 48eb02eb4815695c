"""The shard: which part of a global parameter this rank holds, and how state beside it is made.

A plain tensor is its own and only shard. Integrations register shards of other tensors (DTensors, flat parameters)
with :func:`register`; nothing here knows of torch.distributed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.nn import Module

from shardopt.kernels.memory import readable, written
from shardopt.layout.block_grid import BlockGrid
from shardopt.layout.division import Copies, Counted, Division, Exchange
from shardopt.layout.partition import WHOLE, Placed
from shardopt.layout.ranges import Positions, Ranges, count, flattened
from shardopt.layout.rectangle import Rectangle

_S = TypeVar("_S", bound="Shard")


class UnknownShardError(RuntimeError):
    """A parameter is a part of another, and nothing says which part, or says so in a way that is not known here."""


class LocalBlocks(NamedTuple):
    """The blocks of each row that a shard's scales cover.

    ``exchange`` is set if blocks are cut: every rank that holds a part of the rows then has the scales of all their
    blocks. ``pieces`` is the largest number of ranges of columns in one block that this rank holds.
    """

    first: int
    per_row: int
    exchange: Exchange | None
    pieces: int = 1


class Shard:
    """The part of one parameter on this rank: some indices of each dimension.

    As it stands, this base class is for the whole, unsharded parameter. Rows and columns are those of the parameter
    seen as the matrix ``(shape[0], row_numel)``.
    """

    #: Whether parameter, gradient and state are ordinary tensors with this rank's part and nothing else.
    plain = True

    #: Name of the attribute that refers to an object which decides the shard: cached steps look the shard up again only
    #: when a parameter has another such object. None: cached steps look shards up in each step, unless they are plain.
    layout_attribute: str | None = None

    #: Name of the attribute in which tensors keep their local tensor. With `layout_attribute` alone, tensors are local
    #: tensors themselves, and cached steps call neither `local` nor `local_gradient`.
    local_attribute: str | None = None

    #: Whether ranks may hold parts of one row: they exchange moments where blocks are cut.
    cuts_rows = False

    #: Whether this rank is one of those that the parameter is divided among.
    is_here = True

    #: Whether the moments stay float32, whatever the options say.
    float32_state = False

    def __init__(self, global_shape: tuple[int, ...], local_shape: tuple[int, ...]) -> None:
        self.global_shape = tuple(global_shape)
        self.local_shape = tuple(local_shape)
        self.rows = local_shape[0] if local_shape else 1
        self.cols = math.prod(local_shape[1:])
        #: The indices of each dimension that this rank holds.
        self.indices: tuple[Ranges, ...] = tuple(((0, size),) if size else () for size in self.local_shape)

    @property
    def row_numel(self) -> int:
        """Elements of a whole row."""
        return math.prod(self.global_shape[1:])

    @cached_property
    def columns(self) -> Ranges:
        """The columns of each row that this rank holds."""
        return flattened(self.global_shape[1:], self.indices[1:])

    @cached_property
    def _positions(self) -> tuple[Positions, Positions]:
        """Rows and columns in the parameter, by their positions in the part."""
        return Positions(self.indices[0] if self.indices else ((0, 1),)), Positions(self.columns)

    def index_of(self, element: int) -> int:
        """The index in the flattened parameter of an element of the local tensor."""
        if self.local_shape == self.global_shape:
            return element
        row, col = divmod(element, self.cols)
        rows, cols = self._positions
        return rows[row] * self.row_numel + cols[col]

    @property
    def is_range(self) -> bool:
        """Whether the part's elements follow one another in the flattened parameter."""
        return self.cols == self.row_numel and (not self.indices or len(self.indices[0]) < 2)

    def rectangles(self, grid: BlockGrid) -> list[Rectangle]:
        """The part as matrices whose rows begin where blocks begin."""
        covered, width, columns = self.local_blocks(grid), self.row_numel, self.columns
        deepest = max((dim for dim, n in enumerate(self.local_shape) if n < self.global_shape[dim]), default=0)
        within = math.prod(self.global_shape[deepest:])
        if deepest > 1 and self.local_shape[1:deepest] == self.global_shape[1:deepest] and not within % grid.block_size:
            width, columns = within, flattened(self.global_shape[deepest:], self.indices[deepest:])
        matrices = self.row_numel // max(width, 1)
        per_row, cols = covered.per_row // max(matrices, 1), count(columns)
        rectangles, row = [], 0
        for first, end in self.indices[0] if self.indices else ((0, 1),):
            rows, element = (end - first) * matrices, row * cols
            for start, stop in columns:
                block = row * per_row + start // grid.block_size - covered.first
                rectangles.append(Rectangle(element, rows, start, stop - start, cols, width, block, per_row))
                element += stop - start
            row += rows
        return rectangles

    def scales_shape(self, grid: BlockGrid) -> tuple[int, ...]:
        """The shape of the local scales of codecs with one scale per block."""
        return (self.rows, self.local_blocks(grid).per_row)

    def with_float32_state(self: _S) -> _S:
        """Returns the shard of the same elements whose moments stay float32: one cached object per shard."""
        if self.float32_state:
            return self
        twin: _S | None = self.__dict__.get("_float32_twin")
        if twin is None:
            twin = object.__new__(type(self))
            twin.__dict__.update(self.__dict__, float32_state=True)
            self.__dict__["_float32_twin"] = twin
        return twin

    @property
    def holders(self) -> Exchange | None:
        """All ranks that hold a part of the parameter or a copy of one; None if this rank knows of no other."""
        return None

    @property
    def row_owners(self) -> Exchange | None:
        """The ranks that hold parts of the same rows, and may share blocks; None if rows are whole."""
        return None

    @property
    def parts(self) -> Exchange | None:
        """The ranks that hold the parameter's parts, one copy of each; None if this rank holds the whole parameter.

        Rules with sums over the parameter need the ranks.

        Raises:
            UnknownShardError: this kind of shard does not say which ranks hold the parts.
        """
        if self.local_shape != self.global_shape:
            raise UnknownShardError(
                f"got a part {self.local_shape} of a parameter of shape {self.global_shape} and a rule with sums over "
                f"the parameter, expected {type(self).__name__}.parts to say which ranks hold the others; define it"
            )
        return None

    def counted(self) -> Counted | None:
        """The ranks that hold the parameter, for sums over several parameters; None if each rank has all of it.

        All of these ranks must call this, as it may make a process group.
        """
        ranks = self.parts
        if ranks is None:
            return None
        numbers = frozenset(number for group in ranks.numbers_in_world for number in group)
        return Counted(ranks, numbers, frozenset(), numbers)

    @property
    def division(self) -> Division | None:
        """How the ranks divide the parameter among them; None if this rank holds the whole parameter.

        Rules that treat the parameter as a matrix need the division.

        Raises:
            UnknownShardError: this kind of shard does not say how ranks divide a parameter.
            RuntimeError: some rank's part is neither a matrix nor a range.
        """
        if self.local_shape != self.global_shape:
            raise UnknownShardError(
                f"got a part {self.local_shape} of a parameter of shape {self.global_shape} and a rule for matrices, "
                f"expected {type(self).__name__}.division to say which ranks hold the rest; define it"
            )
        return None

    @property
    def partition(self) -> Placed | None:
        """The rule that says which ranks hold which parts of the parameter, and this rank's offset in it.

        None if no rule is known: a checkpoint then lists the parts.
        """
        return WHOLE if self.local_shape == self.global_shape else None

    def scales_partition(self, grid: BlockGrid) -> Placed | None:
        """The rule for the parameter's scales: each block's scales belong to one of the ranks that hold them."""
        return self.partition

    def local(self, tensor: Tensor) -> Tensor:
        """The ordinary tensor with this rank's part of a parameter, codes or scales.

        Raises:
            RuntimeError: a wrapper subclass has no inner tensor with its elements (:func:`written`).
        """
        return written(tensor)

    def local_gradient(self, gradient: Tensor) -> Tensor:
        """This rank's part of a gradient, laid out like the parameter, with memory of its own.

        All ranks must call this if the gradient is sharded otherwise than the parameter.
        """
        return readable(gradient if self.plain else self.local(gradient))

    def like_parameter(self, local: Tensor) -> Tensor:
        """The global tensor, sharded like the parameter, whose part here is ``local``.

        ``local`` may have dimensions behind the parameter's.
        """
        return local

    def local_blocks(self, grid: BlockGrid) -> LocalBlocks:
        """The blocks that the local scales cover."""
        return LocalBlocks(0, grid.blocks_per_row, None)

    def like_scales(self, local: Tensor, grid: BlockGrid) -> Tensor:
        """The global scales whose part here is ``local``."""
        return local

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of a global value of the parameter's shape."""
        return whole

    def scales_part(self, whole: Tensor, grid: BlockGrid) -> Tensor:
        """This rank's part of the global scales."""
        return whole


Resolver = Callable[[Tensor], Shard | None]
_resolvers: list[Resolver] = []
ModelReader = Callable[[Module], None]
_model_readers: list[ModelReader] = []
CopiesFinder = Callable[[Module], Mapping[Tensor, Copies]]
_copies_finders: list[CopiesFinder] = []
#: Name of the attribute in which parameters keep the shard that they were assigned.
ASSIGNED = "_shardopt_shard"
#: Name of the attribute of parameters whose moments stay float32.
_FLOAT32_STATE = "_shardopt_float32_state"


def register(resolver: Resolver) -> None:
    """Adds a function that recognizes a kind of sharded parameter and returns its shard, or None for another tensor."""
    _resolvers.append(resolver)


def register_model_reader(reader: ModelReader) -> None:
    """Adds a function that assigns shards to a model's parameters that do not say themselves what shard they are."""
    _model_readers.append(reader)


def register_copies_finder(finder: CopiesFinder) -> None:
    """Adds a function that finds the parameters of a model of which other ranks hold copies."""
    _copies_finders.append(finder)


def copies_in(model: Module) -> dict[Tensor, Copies]:
    """The parameters of a model of which other ranks hold copies, as registered functions find them."""
    return {param: copies for find in _copies_finders for param, copies in find(model).items()}


def read_model(model: Module) -> None:
    """Assigns shards to all parameters of a model that a registered reader knows of."""
    for reader in _model_readers:
        reader(model)


def assign(param: Tensor, shard: Shard) -> None:
    """Stores a parameter's shard with the parameter."""
    setattr(param, ASSIGNED, shard)


class _Unread:
    """Placeholder for a parameter's shard until the shard is asked for.

    Pickles as None, because its function belongs to this process.
    """

    def __init__(self, read: Callable[[], None]) -> None:
        self.read = read

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __deepcopy__(self, memo: Any) -> _Unread:
        return self


def assign_later(params: Iterable[Tensor], read: Callable[[], None]) -> None:
    """Has shards assigned to parameters when one of them is asked for; replaces earlier assignments.

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
    if shard is None or isinstance(shard, Shard):
        return shard
    shard.read()
    shard = getattr(param, ASSIGNED, None)
    return shard if isinstance(shard, Shard) else None


def keep_float32_state(param: Tensor) -> None:
    """Says that the moments of a parameter stay float32, whatever the options say."""
    setattr(param, _FLOAT32_STATE, True)


def keeps_float32_state(param: Tensor) -> bool:
    """Whether :func:`keep_float32_state` was called for this tensor."""
    return getattr(param, _FLOAT32_STATE, False)


def shard_of(param: Tensor) -> Shard:
    """The shard that ``param`` is.

    Raises:
        UnknownShardError: ``param`` is a part of a parameter, and nothing says which part of which.
    """
    shard = _shard_of(param)
    return shard.with_float32_state() if keeps_float32_state(param) else shard


def _shard_of(param: Tensor) -> Shard:
    shard = assigned(param)
    if shard is not None:
        return shard
    for resolve in _resolvers:
        shard = resolve(param)
        if shard is not None:
            return shard
    return _whole(tuple(param.shape))


@lru_cache(8192)
def _whole(shape: tuple[int, ...]) -> Shard:
    return Shard(shape, shape)
