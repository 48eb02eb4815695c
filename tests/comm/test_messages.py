"""The kernels of messages equal the reference in PyTorch bit for bit, on every instruction set and in CUDA's source."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

import cuda_emulated
import reference_messages as reference
from kernel_problem import using
from shardopt import _C
from shardopt.kernels import messages

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Elements of the tensor, chunks, elements per chunk: whole blocks; short ones; chunks that end within the tensor's
#: last one, or begin beyond its end.
SHAPES = (
    (128 * 12, 4, 384),
    (1000, 2, 500),
    (1001, 3, 384),
    (37, 4, 16),
    (5, 4, 128),
    (1, 1, 1),
    (129, 1, 129),
    (2 * 9000, 2, 9000),
)


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


def check(floats: Tensor, chunks: int, chunk_numel: int) -> None:
    message = messages.encode(floats, chunks, chunk_numel)
    wanted = reference.encode(floats, chunks, chunk_numel)
    found = reference.split(message, chunk_numel)
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.scales, wanted.scales)
    used = torch.ones_like(message, dtype=torch.bool)
    for part in reference.split(used, chunk_numel):
        part.zero_()
    assert not message[used].any()  # what fills the chunks up
    out = torch.empty_like(floats)
    messages.decode_sum(message, out, chunk_numel)
    assert_same_bits(out, reference.decode_sum(wanted, floats.numel(), floats.dtype))
    out = torch.empty(chunk_numel, dtype=floats.dtype)
    for factor in (1.0, 1 / 3):
        messages.decode_sum(message, out, chunk_numel, terms=chunks, factor=factor)
        expected = reference.decode_sum(wanted, chunk_numel, floats.dtype, terms=chunks, factor=factor)
        assert_same_bits(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", _C.cpu_targets())
def test_cpu(target: str, dtype: torch.dtype) -> None:
    with using(target, threads=1):
        for numel, chunks, chunk_numel in SHAPES:
            for _, floats in numbers(dtype, numel, numel):
                check(floats, chunks, chunk_numel)


def test_any_number_of_threads() -> None:
    floats = torch.randn(4 * 70_000)
    messages_of, sums = [], []
    for threads in (1, 2, 5):
        with using(_C.cpu_targets()[0], threads):
            messages_of.append(messages.encode(floats, 4, 70_000))
            sums.append(torch.empty(70_000))
            messages.decode_sum(messages_of[-1], sums[-1], 70_000, terms=4)
    for message, total in zip(messages_of, sums, strict=True):
        assert torch.equal(message, messages_of[0])
        assert torch.equal(total, sums[0])


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_tensors_at_any_address(offset: int) -> None:
    for dtype in DTYPES:
        floats = torch.randn(offset + 700).to(dtype)[offset:]
        check(floats, 2, 350)


def every_bfloat16() -> Tensor:
    return torch.arange(2**16, dtype=torch.int32).short().view(torch.bfloat16)


def test_every_bfloat16_beside_every_largest() -> None:
    """All bfloat16 numbers in turn, below block maxima of every exponent: nothing finite becomes NaN or grows."""
    every = every_bfloat16()
    blocks = every.view(-1, 128)
    for exponent in range(-130, 128, 7):
        largest = torch.tensor(1.9375 * 2.0**exponent).bfloat16()
        beside = torch.where(blocks.abs() <= largest, blocks, 0.0)
        beside[:, 0] = largest
        check(beside.reshape(-1), 4, 2**14)


def test_errors_of_half_a_unit() -> None:
    """A code is within 2^-4 of a number above the scale's smallest normal, and the largest numbers do not overflow."""
    floats = torch.randn(1 << 16) * torch.exp(2 * torch.randn(1 << 16))
    out = torch.empty_like(floats)
    messages.decode_sum(messages.encode(floats, 1, floats.numel()), out, floats.numel())
    largest = floats.view(-1, 128).abs().amax(1, keepdim=True).expand(-1, 128).reshape(-1)
    normal = floats.abs() >= largest * 2.0**-13
    assert normal.sum() > 50_000
    assert ((out - floats).abs()[normal] <= 2.0**-4 * floats.abs()[normal]).all()
    assert ((out - floats).abs()[~normal] <= 2.0**-17 * largest[~normal]).all()


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**20, -1.0])
def test_powers_of_two_change_no_code(scale: float) -> None:
    floats = torch.randn(1000)
    codes, scales = reference.split(messages.encode(floats, 1, 1000), 1000)
    scaled_codes, scaled_scales = reference.split(messages.encode(floats * scale, 1, 1000), 1000)
    assert torch.equal(scaled_codes, codes ^ (0x80 if scale < 0 else 0))
    assert torch.equal(scaled_scales.int() - scales.int(), torch.full_like(scales, 0).int() + scale_exponent(scale))


def scale_exponent(scale: float) -> int:
    return int(torch.frexp(torch.tensor(abs(scale))).exponent) - 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_harms_no_neighbour(bad: float) -> None:
    floats = torch.randn(384)
    wanted, found = torch.empty(384), torch.empty(384)
    messages.decode_sum(messages.encode(floats.index_fill(0, torch.tensor([200]), 0.0), 1, 384), wanted, 384)
    messages.decode_sum(messages.encode(floats.index_fill(0, torch.tensor([200]), bad), 1, 384), found, 384)
    assert found[200].isnan()
    found[200] = 0.0
    assert torch.equal(found, wanted)


def test_refused() -> None:
    with pytest.raises(TypeError, match=r"got a gradient of torch.float64, expected float32, bfloat16 or float16"):
        messages.encode(torch.zeros(8, dtype=torch.float64), 1, 8)
    with pytest.raises(ValueError, match=r"got a gradient with strides \(2,\), expected a contiguous one"):
        messages.encode(torch.zeros(16)[::2], 1, 8)
    with pytest.raises(RuntimeError, match=r"got a gradient on meta, expected one on cpu"):
        messages.encode(torch.zeros(8, device="meta"), 1, 8)
    with pytest.raises(ValueError, match=r"got 9 elements in 1 chunks of 8"):
        messages.encode(torch.zeros(9), 1, 8)
    with pytest.raises(ValueError, match=r"got a message of shape \(2, 32\), expected a multiple of 2 chunks of 272"):
        messages.decode_sum(messages.encode(torch.zeros(16), 2, 8), torch.zeros(256), 256, terms=2)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return cuda_emulated.build(tmp_path_factory.mktemp("cuda_emulated"))


@pytest.mark.slow
def test_cuda_source(emulated: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a CPU can tell; tests/gpu compares on a device."""
    for name in ("encode_message", "decode_message"):
        run = getattr(emulated, f"{name}_cuda")
        monkeypatch.setattr(_C, name, lambda *args, run=run: run(*args[:-2], 0, 0))
    for dtype in DTYPES:
        for numel, chunks, chunk_numel in SHAPES[:-1]:
            for _, floats in numbers(dtype, numel, numel):
                check(floats, chunks, chunk_numel)
        check(torch.randn(1001).to(dtype)[1:], 2, 500)
