"""Copies of many tensors at once: every byte, and no byte beside them."""

from __future__ import annotations

import random

import pytest
import torch

from shardopt.kernels.memory import copy_to_host

LENGTHS = [0, 1, 15, 16, 17, 63, 64, 127, 128, 129, 1000, 4097, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 5]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("threads", [1, 7])
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
    torch.set_num_threads(threads)
    copy_to_host(targets, sources)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
    assert all(bool((part == 7).all()) for parts in surroundings for part in parts)
