"""Messages and sums in PyTorch (csrc/comm/message.h): the definition that the kernels must equal bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
ALIGNMENT = 16
NAN = 0x7F


class Coded(NamedTuple):
    """Coded rows without the bytes that fill them up.

    Attributes:
        codes: uint8, (rows, elements per row).
        scales: uint8, (rows, blocks per row).
    """

    codes: Tensor
    scales: Tensor


def split(rows: Tensor, row_numel: int) -> Coded:
    """Codes and scales of the bytes of rows, (rows, bytes)."""
    codes_bytes, blocks = -(-row_numel // ALIGNMENT) * ALIGNMENT, -(-row_numel // BLOCK)
    return Coded(rows[:, :row_numel], rows[:, codes_bytes : codes_bytes + blocks])


def encode(floats: Tensor) -> Coded:
    """Codes rows of floats."""
    rows, row_numel = floats.shape
    blocks = -(-row_numel // BLOCK)
    x = pad(floats.float(), (0, blocks * BLOCK - row_numel)).view(rows, blocks, BLOCK)
    finite = x.isfinite()
    largest = torch.where(finite, x.abs(), 0.0).amax(2, keepdim=True)
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent, mantissa in [.5, 1); 448 = .875 * 2^9
    scale = torch.where(largest > 0, exponent - 9 + (mantissa > 0.875).int(), -124).clamp(-124, 119)
    y = torch.ldexp(x.double(), -scale).clamp(-448, 448).float()  # exact, or far below the smallest code
    codes = y.to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(finite, codes, NAN).view(rows, blocks * BLOCK)[:, :row_numel]
    return Coded(codes, (scale + 127).to(torch.uint8).squeeze(2))


def decode(coded: Coded) -> Tensor:
    """The rows' float32 numbers."""
    codes, scales = coded
    scale = torch.ldexp(torch.ones(scales.shape), scales.int() - 127).repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
    return codes.contiguous().view(torch.float8_e4m3fn).float() * scale


def ranges(begin: int, end: int) -> Iterator[range]:
    """The numbers from begin on, in runs of 2^k that begin at a multiple of 2^k, as few as there can be."""
    while begin < end:
        size = 1 << (end - begin).bit_length() - 1
        while begin % size:
            size //= 2
        yield range(begin, begin := begin + size)


def sum_over(numbers: range, known: Mapping[range, Tensor]) -> Tensor:
    """The sum of numbered terms: of what is known, and of the sums of the halves."""
    if numbers in known:
        return known[numbers]
    middle = (numbers.start + numbers.stop) // 2
    return sum_over(range(numbers.start, middle), known) + sum_over(range(middle, numbers.stop), known)


def mean(sums: list[Tensor], divisor: int) -> Tensor:
    """The sum from the latest to the oldest, over a divisor; no zero is negative."""
    total = sums[-1]
    for earlier in reversed(sums[:-1]):
        total = earlier + total
    return total / divisor + 0.0
