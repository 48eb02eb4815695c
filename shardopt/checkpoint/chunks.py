"""Rectangles of a global tensor that this rank holds: what a checkpoint saves, and loads into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardopt.layout.partition import WHOLE, Placed


class Chunk(NamedTuple):
    """A rectangle of a global tensor that this rank holds.

    ``tensor`` is a plain tensor, or a view of one, on any device. Its first element is the one at ``offsets`` of the
    global tensor. Loading writes into it.
    """

    offsets: tuple[int, ...]
    tensor: Tensor


class Chunks:
    """One global tensor of which this rank holds some rectangles, or none.

    One rank writes a rectangle that several ranks have in ``written``. All written rectangles together must fill the
    tensor, and they must not overlap.

    Args:
        shape: the shape of the global tensor.
        dtype: the dtype of the global tensor and of each chunk.
        held: the chunks that this rank holds, each at other offsets; loading writes into them.
        written: the chunks that this rank can save; by default all that the rank holds.
        placed: the rule by which ranks hold the written rectangles, the same on all ranks that have the tensor; None
            if there is no rule: the ranks then tell each other their rectangles.
        is_assumed: whether this rank, which holds no part, only assumes that other ranks have the tensor.

    Raises:
        ValueError: a chunk does not lie within the tensor, has another dtype, or begins where another one does.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        held: Sequence[Chunk],
        written: Sequence[Chunk] | None = None,
        placed: Placed | None = None,
        *,
        is_assumed: bool = False,
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        #: The rectangles to load into, by the offsets of their first elements in the global tensor.
        self.held: Mapping[tuple[int, ...], Tensor] = _by_offsets(self.shape, dtype, held)
        #: The rectangles that this rank can save, likewise.
        self.written = self.held if written is None else _by_offsets(self.shape, dtype, written)
        self.placed = placed
        self.is_assumed = is_assumed

    @classmethod
    def whole(cls, tensor: Tensor, placed: Placed = WHOLE) -> Chunks:
        """A tensor that this rank holds in full.

        Args:
            tensor: the tensor.
            placed: which rank writes it; by default one of those that have it.
        """
        chunk = Chunk((0,) * tensor.dim(), tensor.detach())
        is_own = bool(placed.partition.parts(tensor.shape, placed.offset))
        return cls(tensor.shape, tensor.dtype, [chunk], [chunk] if is_own else [], placed)

    def with_copies(self, rectangles: Iterator[Tensor]) -> Chunks:
        """Chunks that hold copies of the rectangles this rank can save, and nothing else.

        Args:
            rectangles: the copies, in the order of ``written``; takes as many as there are.
        """
        copies = Chunks(self.shape, self.dtype, [], placed=self.placed, is_assumed=self.is_assumed)
        copies.held = copies.written = {offsets: next(rectangles) for offsets in self.written}
        return copies

    def __repr__(self) -> str:
        return f"Chunks(shape={self.shape}, dtype={self.dtype}, {len(self.held)} held)"


def _by_offsets(shape: tuple[int, ...], dtype: torch.dtype, chunks: Sequence[Chunk]) -> dict[tuple[int, ...], Tensor]:
    """The chunks that have elements, as plain tensors by their offsets."""
    found: dict[tuple[int, ...], Tensor] = {}
    for offsets, tensor in chunks:
        extents = tuple(tensor.shape)
        within = len(offsets) == len(extents) == len(shape) and all(
            0 <= offset <= offset + extent <= whole
            for offset, extent, whole in zip(offsets, extents, shape, strict=True)
        )
        if not within or tensor.dtype != dtype:
            raise ValueError(
                f"got a chunk of {tensor.dtype} and shape {extents} at {tuple(offsets)}, expected one of {dtype} "
                f"within shape {shape}"
            )
        if 0 in extents:
            continue
        if tuple(offsets) in found:
            raise ValueError(f"got two chunks at {tuple(offsets)}, expected each at other offsets; make them one")
        found[tuple(offsets)] = tensor.detach()
    return found
