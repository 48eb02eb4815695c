"""A moment as other packages store it: codes, and a scale for each block of the flattened parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from shardopt.checkpoint.peers.structure import are_floats
from shardopt.codec import get_codec
from shardopt.codec.base import are_finite
from shardopt.codec.dynamic8 import dynamic_map
from shardopt.kernels.numeric import from_blocks, to_blocks
from shardopt.layout import BlockGrid


class CodedMoment(NamedTuple):
    """A moment in blocks of consecutive elements of the flattened parameter, which may cross rows.

    Attributes:
        codes: uint8, the parameter's shape.
        scales: float32, ``(blocks,)``.
        block_size: elements per block.
        codec: shardopt's codec with the same codes and scales; None if no codec has them.
        decode: function from blocks of codes ``(blocks, block_size)`` and their scales ``(blocks, 1)`` to float32.
    """

    codes: Tensor
    scales: Tensor
    block_size: int
    codec: str | None
    decode: Callable[[Tensor, Tensor], Tensor]

    def values(self) -> Tensor:
        """The moment in float32, the parameter's shape."""
        (blocks,) = to_blocks(self.codes.reshape(1, -1), self.block_size)
        decoded = self.decode(blocks, self.scales[:, None])
        return from_blocks(decoded[None], self.codes.numel()).reshape(self.codes.shape)

    def is_laid_out_as(self, grid: BlockGrid) -> bool:
        """Whether the blocks are those of a grid: no block crosses a row."""
        aligned = grid.row_numel % grid.block_size == 0 or grid.rows == 1
        return aligned and self.block_size == grid.block_size


def is_map(values: object) -> TypeGuard[Tensor]:
    """Whether a value has a number for each of 256 codes."""
    return are_floats(values) and values.shape == (256,)


def of_map(codes: Tensor, scales: Tensor, values: Tensor, block_size: int, *, signed: bool) -> CodedMoment:
    """A moment whose codes are indices into a map of 256 values, dynamic8's or another."""
    expected = dynamic_map(signed=signed).to(values.device)
    same = values.dtype == expected.dtype and torch.equal(values, expected)

    def decode(blocks: Tensor, scales: Tensor) -> Tensor:
        return values[blocks.int()] * scales

    return CodedMoment(codes, scales, block_size, "dynamic8" if same else None, decode)


def of_companding(codes: Tensor, scales: Tensor, block_size: int, *, signed: bool) -> CodedMoment:
    """A moment in companded8's codes: int8 of the companded value, or uint8 of the root."""
    codec = get_codec("companded8")

    def decode(blocks: Tensor, scales: Tensor) -> Tensor:
        values = codec.decode(blocks, scales, signed=signed)
        return values if signed else values * values

    return CodedMoment(codes.view(torch.uint8), scales.float(), block_size, codec.name, decode)


def check_blocks(codes: Tensor, scales: Tensor, block_size: int, what: str) -> None:
    """Checks that there is one usable scale for each block.

    Raises:
        ValueError: the number of scales is not that of the blocks, or a scale cannot be used.
    """
    blocks = -(-codes.numel() // block_size)
    if scales.shape != (blocks,):
        raise ValueError(
            f"{what}: got scales of shape {tuple(scales.shape)} for {codes.numel()} codes, expected ({blocks},) of "
            f"blocks of {block_size}"
        )
    if not are_finite(scales, signed=False):
        raise ValueError(
            f"{what}: got scales with NaN or Inf, or below zero, expected finite ones >= 0; reset this parameter's "
            "state"
        )
