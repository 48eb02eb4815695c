"""Gradients to code into messages and to add up, and what must come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import reference_messages as reference
from shardopt.kernels import messages
from shardopt.kernels.messages import Part

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Rows of each part, elements of a row, and whether it is coded; and how many chunks there are.
LAYOUTS: tuple[tuple[tuple[Part, ...], int], ...] = (
    ((Part(1, 384, True),), 4),
    ((Part(3, 130, True),), 2),
    ((Part(2, 128, True), Part(1, 5, False), Part(0, 200, True), Part(3, 300, True), Part(7, 33, False)), 3),
    ((Part(1, 37, False),), 1),
    ((Part(1, 1, True), Part(1, 129, True)), 1),
    ((Part(70, 257, True), Part(1, 9000, False), Part(5, 4096, True)), 2),
)
#: The number of the first term, and of the first term of all: sums before it are there, or not.
NUMBERS = ((0, 0), (6, 0), (7, 0), (13, 0), (3, 3), (7, 6))


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


def check(floats: Tensor, parts: Sequence[Part], chunks: int) -> None:
    """Codes a tensor's first elements, and adds up what was coded."""
    layout = messages.Layout(parts)
    whole = floats[: chunks * layout.numel].view(chunks, layout.numel)
    message = messages.encode(whole, layout)
    element = byte = 0
    decoded = []
    for rows, row_numel, is_coded in parts:
        part = whole[:, element : (element := element + rows * row_numel)]
        if is_coded:
            nbytes = messages.row_bytes(row_numel)
            found_rows = message[:, byte : (byte := byte + rows * nbytes)].reshape(chunks * rows, nbytes).clone()
            actual, wanted = reference.split(found_rows, row_numel), reference.encode(part.reshape(-1, row_numel))
            assert torch.equal(actual.codes, wanted.codes)
            assert torch.equal(actual.scales, wanted.scales)
            actual.codes.zero_()
            actual.scales.zero_()
            assert not found_rows.any()  # what fills the rows up
            decoded.append(reference.decode(wanted).view(chunks, -1))
        else:
            raw = message[:, byte : byte + 4 * part.shape[1]].contiguous().view(torch.float32)
            byte += -(-4 * part.shape[1] // 16) * 16
            assert_same_bits(raw, part.float())
            decoded.append(part.float())
    assert byte == layout.bytes
    for first, begin in NUMBERS:
        check_sums(message, layout, torch.cat(decoded, 1), first, begin)


def check_floats(floats: Tensor, terms: int) -> None:
    """Adds up a tensor's elements, which are terms one after another."""
    whole = floats[: len(floats) // terms * terms].view(terms, -1)
    layout = messages.Layout([Part(1, whole.shape[1], False)])
    for first, begin in NUMBERS:
        check_sums(whole, layout, whole.float(), first, begin)


def check_sums(message: Tensor, layout: messages.Layout, terms: Tensor, first: int, begin: int) -> None:
    """Adds up the terms of a message, which are these, from a number on. Every other sum before is zeros."""
    known, sums = {range(first + t, first + t + 1): term for t, term in enumerate(terms)}, []
    for i, numbers in enumerate(reference.ranges(begin, first)):
        known[numbers] = torch.randn(layout.numel) if i % 2 == 0 else torch.zeros(layout.numel)
        sums.append((numbers, known[numbers].clone() if i % 2 == 0 else None))
    after = list(reference.ranges(begin, first + len(terms)))
    wanted = [reference.sum_over(numbers, known) for numbers in after]
    kept = [numbers for numbers, _ in sums if numbers in after]
    taken = [x for numbers, x in sums if numbers not in kept]
    room = [x for x in taken if x is not None]
    out = [room.pop() if room else torch.full((layout.numel,), torch.nan) for _ in after[len(kept) :]]
    for dtype, divisor in zip(DTYPES, (12, 8, 1), strict=True):
        mean = torch.empty(layout.numel, dtype=dtype)
        before = [x for _, x in sums]
        messages.add_up(message, layout, first=first, begin=begin, sums=before, mean=mean, divisor=divisor)
        assert_same_bits(mean, reference.mean(wanted, divisor).to(dtype))
    messages.add_up(message, layout, first=first, begin=begin, sums=taken, out=out)
    for actual, expected in zip(out, wanted[len(kept) :], strict=True):
        assert_same_bits(actual, expected)


def bytes_sent(act: Callable[[], object]) -> int:
    """Runs a function; returns the bytes that its messages take from this rank to others."""
    sent = 0
    original = dist.all_to_all_single
    size = dist.get_world_size()

    def counted(output: Tensor, source: Tensor, **options: Any) -> None:
        nonlocal sent
        sent += source.nbytes // size * (size - 1)
        original(output, source, **options)

    dist.all_to_all_single = counted
    try:
        act()
    finally:
        dist.all_to_all_single = original
    return sent
