"""Wire formats and the counter of sums, against the reference in tests/support and the definition in docs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import reference_messages as reference
from message_problem import DTYPES, assert_same_bits, numbers
from shardopt.comm.counter import Counter
from shardopt.comm.wire import Wire, WireFormat

#: Rows and elements of a row of each part, and the number of chunks.
LAYOUTS: tuple[tuple[tuple[tuple[int, int], ...], int], ...] = (
    (((1, 384),), 4),
    (((3, 130),), 2),
    (((2, 128), (1, 5), (0, 200), (3, 300), (7, 33), (4, 0)), 3),
    (((1, 37),), 1),
    (((70, 257), (300, 30), (5, 4096)), 2),
)
#: The number of the first term, and of the first term of all: sums before it are there, or not.
NUMBERS = ((0, 0), (6, 0), (7, 0), (13, 0), (3, 3), (7, 6))


def round_trip(floats: Tensor) -> Tensor:
    """A row of floats as it arrives in E4M3."""
    wire = Wire("e4m3", [(1, floats.numel())])
    return wire.decode(wire.encode(floats[None])[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_e4m3(dtype: torch.dtype) -> None:
    for parts, chunks in LAYOUTS:
        wire = Wire("e4m3", parts)
        for _, floats in numbers(dtype, chunks * wire.numel, chunks):
            whole = floats.view(chunks, wire.numel)
            for chunk, term in zip(whole, wire.encode(whole), strict=True):
                pieces = zip(chunk.split([rows * n for rows, n in parts]), parts, strict=True)
                wanted = [(reference.rounded if n >= 128 else Tensor.float)(x.view(rows, n)) for x, (rows, n) in pieces]
                assert_same_bits(wire.decode(term), torch.cat([x.flatten() for x in wanted]))


def test_every_bfloat16_next_to_every_largest() -> None:
    """All bfloat16 numbers in turn, below block maxima of every exponent: nothing finite becomes NaN or grows."""
    blocks = torch.arange(2**16, dtype=torch.int32).short().view(torch.bfloat16).view(-1, 128)
    for exponent in range(-130, 128, 7):
        largest = torch.tensor(1.9375 * 2.0**exponent).bfloat16()
        rows = torch.where(blocks.abs() <= largest, blocks, 0.0)
        rows[:, 0] = largest
        found = round_trip(rows.flatten()).view_as(rows)
        assert_same_bits(found, reference.rounded(rows))
        assert (found.abs() <= 1.0625 * largest.float()).all()


def test_errors_of_half_a_unit() -> None:
    """A code is within 2^-4 of a number above the scale's smallest normal, and the largest numbers do not overflow."""
    floats = torch.randn(1 << 16) * torch.exp(2 * torch.randn(1 << 16))
    out = round_trip(floats)
    largest = floats.view(-1, 128).abs().amax(1, keepdim=True).expand(-1, 128).reshape(-1)
    normal = floats.abs() >= largest * 2.0**-13
    assert normal.sum() > 50_000
    assert ((out - floats).abs()[normal] <= 2.0**-4 * floats.abs()[normal]).all()
    assert ((out - floats).abs()[~normal] <= 2.0**-17 * largest[~normal]).all()


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**20, -1.0])
def test_powers_of_two_change_no_code(scale: float) -> None:
    floats = torch.randn(1000)
    assert torch.equal(round_trip(floats * scale), round_trip(floats) * scale)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_harms_no_neighbour(bad: float) -> None:
    floats = torch.randn(384)
    wanted, actual = (round_trip(floats.index_fill(0, torch.tensor([200]), x)) for x in (0.0, bad))
    assert actual[200].isnan()
    actual[200] = 0.0
    assert torch.equal(actual, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_floats(wire: WireFormat, dtype: torch.dtype) -> None:
    form = Wire(wire, [(3, 100)])
    for _, floats in numbers(dtype, 600, 0):
        message = form.encode(floats.view(2, 300))
        assert_same_bits(message, floats.view(2, 300) if wire == "fp32" else floats.view(2, 300).bfloat16())
        assert form.decode(message[1]).data_ptr() == message[1].data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums(dtype: torch.dtype) -> None:
    """Every other sum before the terms is zeros."""
    for first, begin in NUMBERS:
        for count in (1, 2, 3, 7, 12):
            for _, floats in numbers(dtype, count * 70, count):
                _check_sums(floats.view(count, 70), first, begin)


def _check_sums(terms: Tensor, first: int, begin: int) -> None:
    known, counter = {range(first + t, first + t + 1): term.float() for t, term in enumerate(terms)}, Counter(first)
    for i, run in enumerate(reference.ranges(begin, first)):
        known[run] = torch.randn(70) if i % 2 == 0 else torch.zeros(70)
        counter.sums.append(((len(run) - 1).bit_length(), known[run].clone() if i % 2 == 0 else None))
    given = terms.clone()
    counter.push(given)
    given.fill_(7.0)  # whose memory is not kept
    after = list(reference.ranges(begin, first + len(terms)))
    wanted = [reference.sum_over(run, known) for run in after]
    for (level, actual), expected, run in zip(counter.sums, wanted, after, strict=True):
        assert len(run) == 1 << level
        assert_same_bits(torch.zeros(70) if actual is None else actual + 0.0, expected + 0.0)
    for dtype, divisor, size in zip(DTYPES, (12, 8, 1), (70, 70, 64), strict=True):
        mean, copied = torch.empty(size, dtype=dtype), Counter()
        copied.join([(counter, slice(0, 70))])
        copied.finish(mean, divisor)
        assert_same_bits(mean, reference.mean(wanted, divisor).to(dtype)[:size])


def test_sums_of_zeros() -> None:
    counter, mean = Counter(), torch.ones(3)
    counter.push([None] * 5)
    assert counter.tensors == []
    counter.finish(mean, 5)
    assert not mean.any()


def test_another_dtype_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got a gradient of torch.float64, expected float32, bfloat16 or float16"):
        Wire("fp32", [(1, 8)]).encode(torch.zeros(1, 8, dtype=torch.float64))
