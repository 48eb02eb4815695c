"""Reductions in 8 bits: bits as defined, the same on all ranks and on repeat; bytes; what is not finite arrives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

import reference_messages as reference
from message_problem import DTYPES, assert_same_bits, bytes_sent
from ranks.pool import Pool, RankFailure
from shardopt.comm import ReduceScatter8bit, all_reduce_8bit

#: Elements of a rank's chunk: whole blocks, a short one, one element, more than a task of the kernels.
CHUNKS = (256, 300, 1, 70_001)


def gradient(numel: int, dtype: torch.dtype, rank: int) -> Tensor:
    """A rank's gradient, which all ranks can compute; with NaN and infinity on ranks 0 and 1."""
    generator = torch.Generator().manual_seed(10 * numel + rank)
    found = torch.randn(numel, generator=generator) * torch.exp(2 * torch.randn(numel, generator=generator))
    if numel > 8 and rank < 2:
        found[numel // 2 + rank] = (float("nan"), float("-inf"))[rank]
    return found.to(dtype)


def wanted_chunk(dtype: torch.dtype, chunk: int, rank: int, size: int, factor: float, out: torch.dtype) -> Tensor:
    """A rank's chunk of the sum, by the reference."""
    coded = [reference.encode(gradient(size * chunk, dtype, r), size, chunk) for r in range(size)]
    of_rank = reference.Coded(*(torch.stack([part[i][rank] for part in coded]) for i in range(2)))
    return reference.decode_sum(of_rank, chunk, out, terms=size, factor=factor)


def _reduce_scatter() -> None:
    size, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    comm = ReduceScatter8bit()
    operations = ((ReduceOp.SUM, 1.0), (ReduceOp.AVG, 1 / size), (dist._make_nccl_premul_sum(0.3), 0.3))
    for dtype in DTYPES:
        for chunk in CHUNKS:
            own = gradient(size * chunk, dtype, rank)
            for op, factor in operations:
                for _ in range(2):
                    out = comm.allocate((chunk,), dtype=dtype, device=own.device)
                    sent = bytes_sent(lambda out=out, own=own, op=op: comm(out, own, group, op))
                    if size == 1:
                        assert_same_bits(out, own if factor == 1.0 else own * factor)
                        continue
                    assert_same_bits(out, wanted_chunk(dtype, chunk, rank, size, factor, dtype))
                    if chunk > 1000:
                        bf16 = 2 * chunk * (size - 1)
                        assert 0.5039 < sent / bf16 < 0.5045


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_reduce_scatter(ranks: Pool, world_size: int) -> None:
    ranks.run(world_size, _reduce_scatter)


def _all_reduce() -> list[Tensor]:
    size, rank = dist.get_world_size(), dist.get_rank()
    results = []
    for dtype in DTYPES:
        for numel in (1, 300, 1024, 3 * 128 * 7 + 5):
            chunk = -(-numel // (size * 128)) * 128
            grown = [torch.nn.functional.pad(gradient(numel, dtype, r), (0, size * chunk - numel)) for r in range(size)]
            coded = [reference.encode(g, size, chunk) for g in grown]
            means = []
            for r in range(size):
                of_rank = reference.Coded(*(torch.stack([part[i][r] for part in coded]) for i in range(2)))
                mean = reference.decode_sum(of_rank, chunk, torch.float32, terms=size, factor=1 / size)
                means.append(mean[: max(0, min(chunk, numel - r * chunk))])
            again = [reference.encode(mean, 1, chunk) for mean in means]
            together = reference.Coded(*(torch.cat([part[i] for part in again]) for i in range(2)))
            for _ in range(2):
                buffer = gradient(numel, dtype, rank)
                future = all_reduce_8bit(None, SimpleNamespace(buffer=lambda buffer=buffer: buffer))  # type: ignore[arg-type]
                found = future.wait()
                if size == 1:
                    assert_same_bits(found, gradient(numel, dtype, rank))
                else:
                    assert_same_bits(found, reference.decode_sum(together, numel, dtype))
            results.append(found)
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_reduce(ranks: Pool, world_size: int) -> None:
    first, *others = ranks.run(world_size, _all_reduce)
    for other in others:
        for found, wanted in zip(other, first, strict=True):
            assert_same_bits(found, wanted)


def _refused(what: str) -> None:
    comm, group = ReduceScatter8bit(), dist.group.WORLD
    if what == "operation":
        comm(torch.zeros(8), torch.zeros(16), group, ReduceOp.MAX)
    elif what == "async":
        comm(torch.zeros(8), torch.zeros(16), group, ReduceOp.SUM, async_op=True)
    else:
        comm(torch.zeros(8, dtype=torch.float64), torch.zeros(16, dtype=torch.float64), group, ReduceOp.SUM)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("operation", r"ValueError: got the reduction .*MAX.*, expected SUM, AVG or PREMUL_SUM"),
        ("async", r"ValueError: got async_op=True, expected False"),
        ("dtype", r"TypeError: got a gradient of torch\.float64, expected float32, bfloat16 or float16"),
    ],
)
def test_refused(ranks: Pool, what: str, message: str) -> None:
    with pytest.raises(RankFailure, match=message):
        ranks.run(2, _refused, what)
