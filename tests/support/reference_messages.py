"""Messages in PyTorch (csrc/comm/message.h): the definition that the kernels must equal bit for bit."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
ALIGNMENT = 16
NAN = 0x7F


class Coded(NamedTuple):
    """A message without the bytes that fill its chunks up.

    Attributes:
        codes: uint8, (chunks, elements per chunk); 0 beyond the tensor's end.
        scales: uint8, (chunks, blocks per chunk).
    """

    codes: Tensor
    scales: Tensor


def split(message: Tensor, chunk_numel: int) -> Coded:
    """A message's codes and scales."""
    codes_bytes, blocks = -(-chunk_numel // ALIGNMENT) * ALIGNMENT, -(-chunk_numel // BLOCK)
    return Coded(message[:, :chunk_numel], message[:, codes_bytes : codes_bytes + blocks])


def encode(floats: Tensor, chunks: int, chunk_numel: int) -> Coded:
    """Codes a tensor, chunk by chunk."""
    blocks = -(-chunk_numel // BLOCK)
    x = pad(floats.float(), (0, chunks * chunk_numel - floats.numel())).view(chunks, chunk_numel)
    x = pad(x, (0, blocks * BLOCK - chunk_numel)).view(chunks, blocks, BLOCK)
    finite = x.isfinite()
    largest = torch.where(finite, x.abs(), 0.0).amax(2, keepdim=True)
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent, mantissa in [.5, 1); 448 = .875 * 2^9
    scale = torch.where(largest > 0, exponent - 9 + (mantissa > 0.875).int(), -124).clamp(-124, 119)
    y = torch.ldexp(x.double(), -scale).clamp(-448, 448).float()  # exact, or far below the smallest code
    codes = y.to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(finite, codes, NAN).view(chunks, -1)[:, :chunk_numel]
    return Coded(codes, (scale + 127).to(torch.uint8).squeeze(2))


def decode_sum(coded: Coded, numel: int, dtype: torch.dtype, *, terms: int = 1, factor: float = 1.0) -> Tensor:
    """Sums of so many successive chunks in float32, in their order, times a factor; rounded to the dtype."""
    codes, scales = coded
    scale = torch.ldexp(torch.ones(scales.shape), scales.int() - 127).repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
    values = (codes.contiguous().view(torch.float8_e4m3fn).float() * scale).view(-1, terms, codes.shape[1])
    total = values[:, 0]
    for term in range(1, terms):
        total = total + values[:, term]
    return (total * torch.tensor(factor, dtype=torch.float32)).reshape(-1)[:numel].to(dtype)
