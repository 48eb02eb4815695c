"""Copies of many tensors at once: every byte, and no byte beside them."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from shardopt.kernels.copies import copy_tensors

LENGTHS = [0, 1, 15, 16, 17, 63, 64, 127, 128, 129, 1000, 4097, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 5]


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_bytes_at_any_address(threads: int) -> None:
    chance = random.Random(threads)
    sources, targets, surroundings = [], [], []
    for length in LENGTHS * 3:
        before, after = chance.randrange(70), chance.randrange(70)
        whole = torch.full((before + length + after,), 7, dtype=torch.uint8)
        first = chance.randrange(70)
        sources.append(torch.randint(256, (first + length,), dtype=torch.uint8)[first:])
        targets.append(whole[before : before + length])
        surroundings.append((whole[:before], whole[before + length :]))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        copy_tensors(targets, sources)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
    assert all(bool((part == 7).all()) for parts in surroundings for part in parts)


def _complex() -> Tensor:
    return torch.randn(40, dtype=torch.complex64)


@pytest.mark.parametrize(
    "source",
    [
        torch.randn(30, 20).t(),
        torch.randn(30, 20)[:, 3:],
        _complex().conj(),
        _complex().conj().imag,
        nn.Parameter(torch.randn(30)),
        torch.randn(()),
        torch.zeros(0, 3),
        torch.randn(5, dtype=torch.bfloat16),
        torch.rand(33) < 0.5,
        torch._efficientzerotensor((1000,)),
    ],
    ids=["transposed", "columns", "conjugate", "negative", "parameter", "scalar", "empty", "bf16", "bool", "zeros"],
)
def test_tensors_of_any_form(source: Tensor) -> None:
    target = torch.empty(source.shape, dtype=source.dtype)
    with torch.no_grad():
        copy_tensors([target, other := torch.empty(3)], [source, torch.ones(3)])
    assert torch.equal(target, source)
    assert torch.equal(other, torch.ones(3))


def test_nothing() -> None:
    copy_tensors([], [])
    with pytest.raises(ValueError, match="shorter"):
        copy_tensors([torch.empty(3)], [])
