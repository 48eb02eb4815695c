"""``clip_grad_norm_``: the norm is the root of an exact sum of squares, rounded once, and clipping is torch's."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
from kernel_problem import using
from message_problem import DTYPES, numbers
from shardopt import _C, clip_grad_norm_
from shardopt.kernels.norms import clip_of, make_norm_call
from shardopt.optim import clip

INF = math.inf


def with_gradients(gradients: Sequence[Tensor]) -> list[Tensor]:
    params: list[Tensor] = []
    for gradient in gradients:
        params.append(Parameter(torch.zeros_like(gradient)))
        params[-1].grad = gradient.clone(memory_format=torch.preserve_format)
    return params


def assert_root(found: float, square: Fraction) -> None:
    """Checks that a float32 is the nearest one to the root of a rational number; ties go to the even one."""
    one = np.float32(found)
    for other in {np.nextafter(one, np.float32(0)), np.nextafter(one, np.float32(INF))} - {one}:
        between = (exactly(one) + exactly(other)) / 2
        beyond = square - between**2 if other > one else between**2 - square
        assert beyond < 0 or (beyond == 0 and int(one.view(np.int32)) % 2 == 0), (found, square)


def exactly(x: np.float32) -> Fraction:
    """A float32 above zero as a fraction; infinity as the number that would follow the largest."""
    return Fraction(float(x)) if np.isfinite(x) else Fraction(2**128)


def square_of(gradients: Sequence[Tensor]) -> Fraction:
    counts: dict[float, int] = {}
    for value in torch.cat([torch.zeros(1), *(g.reshape(-1).float() for g in gradients)]).abs().tolist():
        counts[value] = counts.get(value, 0) + 1
    return sum((count * Fraction(value) ** 2 for value, count in counts.items()), Fraction(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", _C.cpu_targets())
def test_exact(target: str, dtype: torch.dtype) -> None:
    for numel in (1, 37, 2500):
        for name, floats in numbers(dtype, numel, numel):
            gradients = [floats, floats[: numel // 2] * 0.5]
            with using(target, threads=1):
                total, largest = (clip_grad_norm_(with_gradients(gradients), INF, kind) for kind in (2, INF))
            wanted = max((float(g.abs().max()) for g in gradients if g.numel()), key=lambda x: (x != x, x))
            assert float(largest) == wanted or (math.isnan(largest) and math.isnan(wanted)), name
            if math.isfinite(wanted):
                assert_root(float(total), square_of(gradients))
            else:
                assert float(total) == wanted or (math.isnan(total) and math.isnan(wanted)), name


def sum_of(gradient: Tensor) -> Fraction:
    """The sum of squares of a gradient, before its root is taken."""
    words = torch.zeros(_C.sum_words, dtype=torch.int64)
    row = np.zeros(1, _C.kernel_row)
    row["cols"], row["gradient"], row["sums"] = gradient.numel(), gradient.data_ptr(), words.data_ptr()
    row["gradient_dtype"] = DTYPES.index(gradient.dtype)
    make_norm_call(gradient.device, row).run(_C.NormPass.squares, 1)
    total = sum(digit << (32 * i) for i, digit in enumerate(words[:-1].tolist()))
    return Fraction(total) * Fraction(2) ** _C.sum_lowest_bit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", _C.cpu_targets())
def test_terms_that_fill_the_sums(target: str, dtype: torch.dtype) -> None:
    """As many of the largest terms as are added up at once, and small ones at every distance below them."""
    below_two = torch.tensor(2 - torch.finfo(dtype).eps, dtype=dtype)
    with using(target, threads=1):
        for numel in (16, 2048, 4096):
            for distance in range(0, 24 if dtype == torch.float16 else 110, 1 if numel == 2048 else 7):
                gradient = below_two.repeat(numel)
                gradient[1::3] *= 2.0**-distance
                assert sum_of(gradient) == square_of([gradient]), (numel, distance)


def test_root_rounds_once() -> None:
    """Sums a little beside the squares of midpoints between two float32, where a root of a rounded sum goes wrong."""
    least = 2.0**-140
    for bits in (0x3F800000, 0x3FFFFFFF, 0x40490FDB, 0x5F000001, 0x00800001):
        low, high = np.array([bits, bits + 1], np.int32).view(np.float32)
        middle = (Fraction(float(low)) + Fraction(float(high))) / 2
        for beside in (-1, 0, 1):
            words = np.zeros(_C.sum_words, np.int64)
            number = int(middle**2 * 2**-_C.sum_lowest_bit) + beside
            for digit in range(_C.sum_words - 1):
                words[digit] = number >> 32 * digit & 0xFFFFFFFF
            norm, _ = clip_of(torch.from_numpy(words), 1.0, is_magnitude=False)
            assert_root(float(norm), Fraction(number) / 2**-_C.sum_lowest_bit)
    params = with_gradients([torch.tensor([3.0, 4.0]), torch.full((3,), least)])
    assert float(clip_grad_norm_(params, INF)) == 5.0
    huge = [torch.full((70,), 3e38)]
    assert_root(float(clip_grad_norm_(with_gradients(huge), INF)), square_of(huge))


def test_any_number_of_threads_and_pieces() -> None:
    floats = torch.randn(1 << 19) * torch.exp(4 * torch.randn(1 << 19))
    totals = set()
    for threads, pieces in ((1, 1), (2, 3), (3, 999)):
        with using(_C.cpu_targets()[0], threads):
            totals.add(float(clip_grad_norm_(with_gradients(floats.tensor_split(pieces)), INF)))
    assert len(totals) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", _C.cpu_targets())
def test_clipped(target: str, dtype: torch.dtype) -> None:
    """Gradients are multiplied by torch's coefficient of the exact norm; elsewhere in memory nothing changes."""
    for kind in (2, INF):
        for numel in (1, 31, 70_001):
            whole = torch.randn(numel + 5).to(dtype)
            params = with_gradients([torch.randn(3, 5).to(dtype), torch.zeros(numel, dtype=dtype)])
            params[1].grad = whole[3 : numel + 3]
            before = [params[0].grad.clone(), whole.clone()]
            with using(target, threads=2):
                total = clip_grad_norm_(params, 0.5, kind)
            coefficient = torch.clamp(0.5 / (total + 1e-6), max=1.0)
            wanted = [(g.float() * coefficient).to(dtype) for g in before]
            wanted[1][:3], wanted[1][-2:] = before[1][:3], before[1][-2:]
            assert torch.equal(params[0].grad, wanted[0])
            assert torch.equal(whole, wanted[1])


@pytest.mark.parametrize(("value", "kind"), [(INF, 2), (-INF, INF), (math.nan, 2), (math.nan, INF)])
def test_not_finite(value: float, kind: float) -> None:
    gradients = [torch.randn(40), torch.tensor([1.0, value, 2.0])]
    ours, theirs = with_gradients(gradients), with_gradients(gradients)
    with pytest.raises(RuntimeError, match="expected a finite one"):
        clip_grad_norm_(ours, 1.0, kind, error_if_nonfinite=True)
    assert all(torch.equal(p.grad[:1], g[:1]) for p, g in zip(ours, gradients, strict=True))
    actual, wanted = clip_grad_norm_(ours, 1.0, kind), torch.nn.utils.clip_grad_norm_(theirs, 1.0, kind)
    torch.testing.assert_close([actual, *(p.grad for p in ours)], [wanted, *(p.grad for p in theirs)], equal_nan=True)


def test_gradients_that_come_go_and_move() -> None:
    """Cached tables follow the gradients: none, new ones, strided ones, expanded ones, and frozen parameters."""
    params = with_gradients([torch.randn(4, 6), torch.randn(70), torch.randn(2, 3, 4)])
    params[2].requires_grad_(False)
    kinds = [
        [torch.randn(4, 6), None, torch.randn(2, 3, 4)],
        [torch.randn(6, 4).t(), torch.randn(140)[::2], None],
        [None, None, None],
        [torch.randn(4, 6), torch.randn(1).expand(70).clone(), torch.randn(4, 3, 2).permute(2, 1, 0)],
    ]
    for gradients in kinds * 2:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        there = [g.clone() for g in gradients if g is not None]
        total = clip_grad_norm_(params, 0.25)
        assert_root(float(total), square_of(there))
        for param, gradient in zip([p for p in params if p.grad is not None], there, strict=True):
            assert torch.equal(param.grad, gradient * torch.clamp(0.25 / (total + 1e-6), max=1.0))
    assert float(clip_grad_norm_([], 1.0)) == 0.0
    assert clip_grad_norm_(iter(params), 1.0, foreach=True).dtype == torch.float32


def test_versions_and_memory() -> None:
    """Autograd notices a changed gradient; nothing keeps parameters or gradients alive."""
    params = with_gradients([torch.ones(5), torch.ones(3, 5).t()])
    gradient, strided = (param.grad for param in params)
    assert gradient is not None
    assert strided is not None
    version = gradient._version
    clip_grad_norm_(params, 1.0)
    assert gradient._version > version
    gone = [weakref.ref(params[0]), weakref.ref(gradient), weakref.ref(strided), weakref.ref(clip._norms[params[0]])]
    del params, gradient, strided
    assert [reference() for reference in gone] == [None] * 4


def test_refused() -> None:
    params = with_gradients([torch.ones(40, 50), torch.ones(0, 3), torch.ones(40, 50)])
    with pytest.raises(ValueError, match=r"norm_type: got 1.0, expected 2 or inf"):
        clip_grad_norm_(params, 1.0, 1.0)
    with pytest.raises(RuntimeError, match=r"parameter 0 of shape \(5,\): got a gradient of torch.float64"):
        clip_grad_norm_(with_gradients([torch.randn(5, dtype=torch.float64)]), 1.0)
    sparse = Parameter(torch.zeros(5, 5))
    sparse.grad = torch.eye(5).to_sparse()
    with pytest.raises(RuntimeError, match="got a sparse gradient"):
        clip_grad_norm_(sparse, 1.0)
    params[2].grad = params[0].grad  # would be multiplied twice
    with pytest.raises(RuntimeError, match="parameter 2: got the same gradient as parameter 0"):
        clip_grad_norm_(params, 0.1)
    assert torch.equal(params[0].grad, torch.ones(40, 50))  # type: ignore[arg-type]
    assert float(clip_grad_norm_(params, 1e9)) == pytest.approx(math.sqrt(4000))


@pytest.mark.parametrize("in_place", [True, False])
def test_a_parameter_that_is_given_twice_counts_once(in_place: bool) -> None:
    gradients = [torch.arange(33.0 * 65).view(33, 65) for _ in range(2)]
    params, others = with_gradients(gradients), with_gradients(gradients)
    optimizer = None if in_place else shardopt.AdamW8bit(params)
    expected = clip_grad_norm_(others, 0.1)
    assert torch.equal(clip_grad_norm_([*params, params[0]], 0.1, optimizer=optimizer), expected)
    if in_place:
        assert torch.equal(params[0].grad, others[0].grad)  # type: ignore[arg-type]
