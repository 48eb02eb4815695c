"""Codes, scales and weights after some steps are those of checkpoints of format 2, on every processor.

A change of these digests is a change of what saved codes mean, which needs another ``FORMAT_VERSION`` and a way to read
the old one, or of which codes a step chooses, as when second moments got random codes.
"""

from __future__ import annotations

import hashlib

import pytest
import torch

import shardopt
from shardopt.checkpoint.index import FORMAT_VERSION
from shardopt.codec import CODECS
from shardopt.optim import ShardedOptimizer

#: Of format 2, by codec: of AdamW's state and weights, and of Lion's.
DIGESTS: dict[str, tuple[str, str]] = {
    "log8": ("711fad6f5863a712", "ba45fef9d32eb5b1"),
    "companded8": ("e4683e16f6a71b19", "75d9a784d74e9a97"),
    "dynamic8": ("8293ffdf8c7cec9c", "0003f4c01d548908"),
    "companded16": ("fbad2ee96a94dee0", "38e8ced5eb401a4d"),
    "log4": ("0fe1e485839d808f", ""),
    "bf16": ("ed4808de44b7d075", "426c58a6fd7583be"),
    "fp32": ("e530a075f6d745a1", "214b494be8062456"),
}


def digest(optimizer: ShardedOptimizer) -> str:
    """Of state and weights after three steps on numbers that any machine makes alike, from 1e-12 to 1e4, and zeros."""
    weight = optimizer.param_groups[0]["params"][0]
    for step in range(3):
        numbers = torch.arange(weight.numel(), dtype=torch.int64) * 2654435761 + step * 97
        mantissa = (numbers % 8191 - 4095).float() / 4096
        weight.grad = torch.ldexp(mantissa, (numbers // 8191 % 54 - 40).int()).view_as(weight)
        weight.grad[numbers.view_as(weight) % 11 == 0] = 0
        optimizer.step()
    found = hashlib.sha256(weight.detach().numpy().tobytes())
    for name, entry in sorted(optimizer.state[weight].items()):
        found.update(name.encode() + entry.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


@pytest.mark.parametrize("codec", CODECS)
def test_codes(codec: str) -> None:
    assert FORMAT_VERSION == 2
    found = []
    for kind in (shardopt.AdamW, shardopt.Lion):
        if kind is shardopt.Lion and codec == "log4":
            found.append("")  # log4 is for pairs of moments
            continue
        weight = torch.nn.Parameter(torch.zeros(33, 300))
        found.append(digest(kind([weight], lr=1e-2, codec=codec)))
    assert tuple(found) == DIGESTS[codec]
