"""Gradients of all kinds of numbers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def numbers(dtype: torch.dtype, numel: int, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Kinds of gradients by name."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(numel, generator=generator)
    wide = normal * torch.exp(8 * torch.randn(numel, generator=generator))
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=generator).int()
    yield "normal", normal.to(dtype)
    yield "wide", wide.to(dtype)
    yield "any bits", bits.view(torch.float32) if dtype == torch.float32 else bits.short().view(dtype)
    yield "zeros", torch.zeros(numel, dtype=dtype)
    yield "opposite zeros", -torch.zeros(numel, dtype=dtype)
    yield "subnormal", (normal * torch.finfo(dtype).smallest_normal * 0.01).to(dtype)
    below_two = torch.tensor(2 - torch.finfo(dtype).eps, dtype=dtype).repeat(numel)
    below_two[1::3] *= 2.0 ** -(torch.arange(numel)[1::3] % 20)
    yield "all bits of the mantissa", below_two
    yield "huge", (normal.clamp(-3, 3) * (torch.finfo(dtype).max / 3)).to(dtype)
    ties = torch.arange(numel) % 2048 * 2.0**-10  # halfway between subnormal codes, and between normal ones
    ties = torch.where(torch.arange(numel) % 128 == 0, 448.0, ties).to(dtype)
    yield "ties", ties
    yield "just above", torch.nextafter(ties, torch.full_like(ties, 1e3))
    yield "just below", torch.nextafter(ties, torch.full_like(ties, -1e3))


def assert_same_bits(found: Tensor, wanted: Tensor) -> None:
    """NaN equals NaN: payloads are the processor's."""
    assert torch.equal(found.isnan(), wanted.isnan())
    integers = torch.int32 if found.dtype == torch.float32 else torch.int16
    assert torch.equal(found.view(integers)[~found.isnan()], wanted.view(integers)[~wanted.isnan()])
