"""Encodes gradients for messages between ranks: float32, bfloat16, or E4M3 with a scale per 128 elements of a row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

WireFormat = Literal["fp32", "bf16", "e4m3"]
WIRES: tuple[str, ...] = get_args(WireFormat)

BLOCK = 128  # elements that share a scale


class Wire:
    """Encodes and decodes chunks of gradients. A chunk has the rows that one rank owns of several parameters, in turn.

    An element's rounding depends on its row alone, so it is the same on any number of ranks. With ``"e4m3"``, rows
    shorter than 128 elements are sent in float32.

    Args:
        shapes: the shapes of the parameters. A scalar is one row.
        ranks: the number of chunks into which the rows of each parameter are divided.

    Attributes:
        numel: the number of elements in a chunk.
        slices: for each parameter, its slice of a chunk.
    """

    def __init__(self, wire: WireFormat, shapes: Iterable[Sequence[int]], ranks: int = 1) -> None:
        self._wire = wire
        matrices = [(shape[0], math.prod(shape[1:])) if shape else (1, 1) for shape in shapes]
        self._parts = [(-(-rows // ranks), row_numel) for rows, row_numel in matrices]  # of a chunk, by parameter
        offsets = [0, *accumulate(rows * row_numel for rows, row_numel in self._parts)]
        self.numel = offsets[-1]
        self.slices = [slice(begin, end) for begin, end in pairwise(offsets)]
        self._bytes = [  # of each parameter's part of a message with "e4m3": floats, or codes and a scale per block
            4 * rows * row_numel if row_numel < BLOCK else rows * (row_numel + -(-row_numel // BLOCK))
            for rows, row_numel in self._parts
        ]

    def encode(self, chunks: Tensor) -> Tensor:
        """Encodes chunks, (ranks, elements), as one message per rank; with ``"fp32"`` returns ``chunks`` itself."""
        if chunks.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(
                f"got a gradient of {chunks.dtype}, expected float32, bfloat16 or float16; set "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )
        if self._wire != "e4m3":
            return chunks.bfloat16() if self._wire == "bf16" else chunks
        parts = zip([chunks[:, columns].float() for columns in self.slices], self._parts, strict=True)
        return torch.cat([_encode_e4m3(x.reshape(len(chunks), *shape)) for x, shape in parts], 1)

    def decode(self, term: Tensor) -> Tensor:
        """Decodes the message of one chunk to a 1-D tensor of floats."""
        if self._wire != "e4m3":
            return term
        parts = zip(term.split_with_sizes(self._bytes), self._parts, strict=True)
        return torch.cat([_decode_e4m3(part, *shape) for part, shape in parts])


def _encode_e4m3(x: Tensor) -> Tensor:
    """Encodes float32 of shape (ranks, rows, elements) as bytes, (ranks, bytes): E4M3 codes, then a scale per block."""
    row_numel = x.shape[2]
    if row_numel < BLOCK:
        return x.flatten(1).view(torch.uint8)
    x = _blocks(x)
    magnitude = torch.maximum(x, -x)
    is_finite = magnitude < torch.inf
    largest = magnitude.where(is_finite, 0.0).amax(-1, keepdim=True)
    # The scale is 2^e, with the smallest e in [-124, 119] for which largest <= 448 * 2^e. A byte, e + 127, is sent.
    # 448, E4M3's largest number, is 1.75 * 2^8: adding 0x1FFFFF carries a mantissa above 1.75 into the exponent field.
    scale = (((largest.view(torch.int32) + 0x1FFFFF) >> 23) - 8).clamp(3, 246)
    y = (x * _power_of_two(254 - scale)).clamp_(-448.0, 448.0).where(is_finite, torch.nan)
    codes = y.to(torch.float8_e4m3fn).view(torch.uint8).flatten(2)[..., :row_numel]
    return torch.cat([codes.flatten(1), scale.to(torch.uint8).flatten(1)], 1)


def _decode_e4m3(message: Tensor, rows: int, row_numel: int) -> Tensor:
    """Inverse of :func:`_encode_e4m3`, for the message of one rank and parameter; 1-D."""
    if row_numel < BLOCK:
        return message.clone().view(torch.float32)  # the clone's address is a multiple of 4
    codes, scales = message.split_with_sizes([rows * row_numel, rows * -(-row_numel // BLOCK)])
    x = _blocks(codes.view(torch.float8_e4m3fn).float().view(rows, row_numel))
    return (x * _power_of_two(scales.int()).view(*x.shape[:2], 1)).flatten(1)[:, :row_numel].flatten()


def _blocks(x: Tensor) -> Tensor:
    """Splits each row into blocks of 128 elements, the last of which is padded with zeros."""
    return pad(x, (0, -x.shape[-1] % BLOCK)).view(*x.shape[:-1], -(-x.shape[-1] // BLOCK), BLOCK)


def _power_of_two(biased_exponent: Tensor) -> Tensor:
    """The float32 with this exponent field and mantissa 0: an exact power of two, as torch.exp2 does not promise."""
    return (biased_exponent << 23).view(torch.float32)
