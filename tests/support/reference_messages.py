"""Gradients in E4M3 and sums of terms, as docs/gradients.md defines them, written another way than in the package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128


def rounded(rows: Tensor) -> Tensor:
    """Rows of floats as E4M3 codes with scales give them back."""
    count, row_numel = rows.shape
    x = pad(rows.float(), (0, -row_numel % BLOCK)).view(count, -(-row_numel // BLOCK), BLOCK)
    finite = x.isfinite()
    largest = torch.where(finite, x.abs(), 0.0).amax(2, keepdim=True)
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent, mantissa in [.5, 1); 448 = .875 * 2^9
    exponent = (exponent - 9 + (mantissa > 0.875).int()).clamp(-124, 119)
    scale = torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64), exponent)
    codes = (x.double() / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn)  # exact, or far below the least code
    return torch.where(finite, codes.double() * scale, torch.nan).float().flatten(1)[:, :row_numel]


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
