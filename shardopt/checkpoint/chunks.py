"""Rectangles of a global tensor as a value of a state dict of torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Chunk(NamedTuple):
    """A rectangle of a global tensor that this rank holds.

    ``tensor`` is a plain tensor, or a view of one, on any device. Its first element is the one at ``offsets`` of the
    global tensor. Loading writes into it.
    """

    offsets: tuple[int, ...]
    tensor: Tensor


class Chunks(Tensor):
    """One global tensor of which this rank holds some rectangles, or none.

    Implements DCP's protocol for sharded values. The class is a tensor only because DCP's planners look up the shards
    of nothing else: a value has the global shape and the dtype, but no data, and no operation works on it.

    One rank writes a rectangle that several ranks have in ``written``. All written rectangles together must fill the
    tensor, and they must not overlap.

    Args:
        shape: the shape of the global tensor.
        dtype: the dtype of the global tensor and of each chunk.
        held: the chunks that this rank holds, each at other offsets; loading writes into them.
        written: the chunks that this rank saves; by default all that the rank holds.

    Raises:
        ValueError: a chunk does not lie within the tensor, has another dtype, or begins where another one does.
    """

    _held: dict[tuple[int, ...], Tensor]
    _written: dict[tuple[int, ...], Tensor]
    _planned: dict[tuple[int, ...], Tensor]

    @staticmethod
    def __new__(
        cls: type[Chunks],
        shape: Sequence[int],
        dtype: torch.dtype,
        held: Sequence[Chunk],
        written: Sequence[Chunk] | None = None,
    ) -> Chunks:
        shape = torch.Size(shape)
        cpu = torch.device("cpu")  # not the meta device: DCP replaces tensors there before it loads
        chunks: Chunks = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=cpu)  # type: ignore[attr-defined]
        chunks._held = _by_offsets(shape, dtype, held)
        chunks._written = chunks._held if written is None else _by_offsets(shape, dtype, written)
        chunks._planned = {}
        return chunks

    @classmethod
    def whole(cls, tensor: Tensor) -> Chunks:
        """A tensor that this rank holds in full."""
        return cls(tensor.shape, tensor.dtype, [Chunk((0,) * tensor.dim(), tensor.detach())])

    @property
    def written(self) -> Mapping[tuple[int, ...], Tensor]:
        """The rectangles that this rank saves, by the offsets of their first elements in the global tensor."""
        return self._written

    def copied(self, copy: Callable[[Tensor], Tensor]) -> Chunks:
        """Chunks that hold copies of the rectangles this rank saves, and nothing else.

        Args:
            copy: gives the copy of a rectangle.
        """
        copies = [Chunk(offsets, copy(tensor)) for offsets, tensor in self._written.items()]
        return Chunks(self.shape, self.dtype, copies)

    # DCP's protocol. DCP asks for a chunk by offsets alone, at which both a written chunk and a larger held chunk may
    # begin. The lookup is therefore in the chunks of the last plan, written or held.

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        self._planned = self._written
        if self.numel() == 0:  # all ranks write an empty chunk, so that the checkpoint has the tensor
            nowhere = (0,) * self.dim()
            self._planned = {nowhere: torch.empty(self.shape, dtype=self.dtype)}
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), tensor.shape),
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.shape,
                ),
            )
            for offsets, tensor in self._planned.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        self._planned = self._held
        return [ChunkStorageMetadata(torch.Size(offsets), tensor.shape) for offsets, tensor in self._held.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._planned[tuple(index.offset)]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Chunks(shape={tuple(self.shape)}, dtype={self.dtype}, {len(self._held)} held)"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TypeError(f"got Chunks in {func}, expected a tensor with data; use the chunks' own tensors")


def _by_offsets(shape: torch.Size, dtype: torch.dtype, chunks: Sequence[Chunk]) -> dict[tuple[int, ...], Tensor]:
    """The chunks that have elements, as plain tensors by their offsets."""
    found: dict[tuple[int, ...], Tensor] = {}
    for offsets, tensor in chunks:
        within = len(offsets) == tensor.dim() == len(shape) and all(
            0 <= offset <= offset + extent <= whole
            for offset, extent, whole in zip(offsets, tensor.shape, shape, strict=True)
        )
        if not within or tensor.dtype != dtype:
            raise ValueError(
                f"got a chunk of {tensor.dtype} and shape {tuple(tensor.shape)} at {tuple(offsets)}, expected one of "
                f"{dtype} within shape {tuple(shape)}"
            )
        if math.prod(tensor.shape) == 0:
            continue
        if tuple(offsets) in found:
            raise ValueError(f"got two chunks at {tuple(offsets)}, expected each at other offsets; make them one")
        found[tuple(offsets)] = tensor.detach()
    return found
