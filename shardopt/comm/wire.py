"""How a micro-batch's gradient travels: as float32, bfloat16, or E4M3 with a scale per 128 elements of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor

from shardopt.kernels.messages import BLOCK, Layout, Part, encode

WireFormat = Literal["fp32", "bf16", "e4m3"]
WIRES: tuple[str, ...] = get_args(WireFormat)


class Wire:
    """The messages of chunks, one for or from each rank, which hold rows of several parameters one after another.

    Rounding depends on an element's row alone, thus not on the number of ranks. Rows shorter than 128 elements travel
    in float32 where others are coded.

    Args:
        wire: the format.
        parts: (rows, elements of a row) of each parameter in a chunk.

    Attributes:
        numel: elements of a chunk.
        layout: of a message's chunks.
    """

    def __init__(self, wire: WireFormat, parts: Sequence[tuple[int, int]]) -> None:
        self._wire = wire
        self.numel = sum(rows * row_numel for rows, row_numel in parts)
        coded = [Part(rows, row_numel, row_numel >= BLOCK) for rows, row_numel in parts]
        self.layout = Layout(coded if wire == "e4m3" else [Part(1, self.numel, False)])

    def encode(self, chunks: Tensor) -> Tensor:
        """The message of chunks of floats, (ranks, elements); for ``"fp32"`` they themselves."""
        if self._wire == "e4m3":
            return encode(chunks, self.layout)
        return chunks.bfloat16() if self._wire == "bf16" else chunks
