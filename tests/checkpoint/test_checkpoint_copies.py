"""Digests of tensors that several ranks hold: every difference between ranks changes them."""

from __future__ import annotations

import itertools

import pytest
import torch

from checkpoint_folder import values_of
from shardopt.checkpoint import copies
from shardopt.checkpoint.copies import digest

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.uint8]


def flipped(tensor: torch.Tensor, *places: tuple[int, int]) -> torch.Tensor:
    """The tensor with a bit flipped in some elements."""
    data = tensor.clone()
    bytes_of = data.view(torch.uint8).view(len(tensor), -1)
    for element, bit in places:
        bytes_of[element, bit // 8] ^= 1 << bit % 8
    return data


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_flipped_bit_and_each_pair_of_them_changes_it(dtype: torch.dtype) -> None:
    tensor = values_of((21,), dtype)
    elements, bits = range(len(tensor)), range(8 * dtype.itemsize)
    found = [digest(tensor)]
    found += [digest(flipped(tensor, place)) for place in itertools.product(elements, bits)]
    found += [
        digest(flipped(tensor, (a, bit), (b, bit))) for a, b in itertools.combinations(elements, 2) for bit in bits
    ]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_signs_change_it(dtype: torch.dtype) -> None:
    """Of columns, of rows, of everything, in tensors of several sums."""
    tensor = torch.ones(3 * copies._WORDS * 8 // dtype.itemsize // 64, 64, dtype=dtype)
    found = {digest(tensor), digest(-tensor)}
    for step in (2, 3, 4, 8):
        for dim in (0, 1):
            index = [slice(None)] * 2
            index[dim] = slice(step - 1, None, step)
            other = tensor.clone()
            other[tuple(index)] *= -1
            found.add(digest(other))
    assert len(found) == 10


def test_exchanged_parts_change_it() -> None:
    tensor = torch.arange(3 * copies._WORDS)
    words, in_cache = copies._WORDS, copies._WORDS_IN_CACHE
    found = [digest(tensor), digest(tensor.roll(1)), digest(tensor.roll(words)), digest(tensor.roll(in_cache))]
    found += [digest(tensor[:-1]), digest(tensor.float())]
    assert len(set(found)) == len(found)


def test_it_is_of_the_bytes_wherever_they_lie() -> None:
    for length in (0, 1, 7, 8, 9, 1000, 8 * copies._WORDS_IN_CACHE + 11):
        data = values_of((length + 3,), torch.uint8)
        assert digest(data[3:]) == digest(data[3:].clone())
        assert digest(data[::2]) == digest(data[::2].clone())
