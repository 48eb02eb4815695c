"""How a micro-batch's gradient travels: as float32, bfloat16, or E4M3 with a scale per 128 elements of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from shardopt.kernels.messages import BLOCK, chunk_bytes, decode_sum, encode

WireFormat = Literal["fp32", "bf16", "e4m3"]
WIRES: tuple[str, ...] = get_args(WireFormat)


class Rows(NamedTuple):
    """A parameter's part of a chunk: whole rows, of which each owner has so many, the last owners padding.

    Attributes:
        rows: how many.
        row_numel: elements of a row.
    """

    rows: int
    row_numel: int


class Wire:
    """The bytes of chunks, one for or from each rank, which hold rows of several parameters one after another.

    Rounding depends on an element's row alone, thus not on the number of ranks. Rows shorter than 128 elements travel
    in float32 where others are coded.

    Args:
        wire: the format.
        parts: the parameters' rows in a chunk.
    """

    def __init__(self, wire: WireFormat, parts: Sequence[Rows]) -> None:
        self._wire = wire
        self.numel = sum(part.rows * part.row_numel for part in parts)  # of a chunk
        self._parts: list[tuple[slice, slice, int | None]] = []  # elements, bytes, and a coded row's elements
        element = self._bytes = 0
        for rows, row_numel in parts:
            numel, is_coded = rows * row_numel, row_numel >= BLOCK
            size = rows * chunk_bytes(row_numel) if is_coded else -(-4 * numel // 16) * 16
            places = slice(element, element + numel), slice(self._bytes, self._bytes + size)
            self._parts.append((*places, row_numel if is_coded else None))
            element, self._bytes = element + numel, self._bytes + size

    def encode(self, chunks: Tensor) -> Tensor:
        """A message of the chunks of floats, (ranks, elements): (ranks, what a chunk takes)."""
        if self._wire != "e4m3":
            return chunks.bfloat16() if self._wire == "bf16" else chunks
        message = torch.empty(len(chunks), self._bytes, dtype=torch.uint8, device=chunks.device)
        for chunk, coded in zip(chunks, message, strict=True):
            for elements, places, row_numel in self._parts:
                if row_numel is None:
                    _floats(coded[places], elements).copy_(chunk[elements])
                elif elements.start < elements.stop:
                    rows = (elements.stop - elements.start) // row_numel
                    encode(chunk[elements], rows, row_numel, out=coded[places].view(rows, -1))
        return message

    def decode(self, chunk: Tensor) -> Tensor:
        """The floats of one of a message's chunks: float32, (elements,)."""
        if self._wire != "e4m3":
            return chunk.float()
        floats = torch.empty(self.numel, dtype=torch.float32, device=chunk.device)
        for elements, places, row_numel in self._parts:
            if row_numel is None:
                floats[elements].copy_(_floats(chunk[places], elements))
            elif elements.start < elements.stop:
                rows = (elements.stop - elements.start) // row_numel
                decode_sum(chunk[places].view(rows, -1), floats[elements], row_numel)
        return floats


def _floats(places: Tensor, elements: slice) -> Tensor:
    """The float32 numbers that bytes of a message are."""
    return places.view(torch.float32)[: elements.stop - elements.start]
