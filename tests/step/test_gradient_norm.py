"""``clip_grad_norm_``: the norm is the root of an exact sum of squares, rounded once, and clipping is torch's.

With ``optimizer=`` the next step clips.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
from helpers import Named, with_gradient
from kernel_problem import gradients, make, start, using
from message_problem import DTYPES, numbers
from ranks.snapshot import assert_same, snapshot
from shardopt import _C, clip_grad_norm_
from shardopt.kernels.norms import norm_and_coefficient
from shardopt.optim import ShardedOptimizer, clip

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
    for numel in (1, 37, 1100, 2100):  # more than are added up at once
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
            norm, _ = norm_and_coefficient(torch.from_numpy(words), 1.0, is_magnitude=False)
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
    for of_step in kinds * 2:
        for param, gradient in zip(params, of_step, strict=True):
            param.grad = gradient
        there = [g.clone() for g in of_step if g is not None]
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
    with pytest.raises(TypeError, match=r"got the module Linear, expected parameters; pass model.parameters\(\)"):
        clip_grad_norm_(torch.nn.Linear(2, 2), 1.0)
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


# Clipping by the next step, which multiplies the gradients as it reads them -------------------------------------------


SHAPES = ((1,), (33,), (4, 129), (7, 33), (2, 8, 65))


def clipped_step(params: Named, optimizer: ShardedOptimizer, gradient: Named, *, late: bool) -> None:
    """A step with clipped gradients. late: clipped by the step, which leaves them as they are."""
    for name, param in params.items():
        with_gradient(param, gradient[name].clone())
    clip_grad_norm_(params.values(), 0.5, optimizer=optimizer if late else None)
    optimizer.step()
    for name, param in params.items():
        assert not late or torch.equal(param.grad.view(torch.int32), gradient[name].view(torch.int32))


def compare(rule: str, codec: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Compares steps of gradients that were clipped in place with those that clip. The third step's are NaN."""
    found = []
    for late in (False, True):
        params, optimizer = make(rule, codec, start(dtype, SHAPES), **options)
        for t in (1, 2, 3, 4):
            clipped_step(params, optimizer, gradients(t, torch.float32, SHAPES, scale=1e-2 * t), late=late)
        found.append(snapshot(params, optimizer))
    assert_same(found[1], found[0])


@pytest.mark.parametrize(
    ("rule", "codec", "options"),
    [
        ("adamw", "log8", {}),
        ("lion", "dynamic8", {}),
        ("radam", "fp32", {"maximize": True}),
        ("lamb", "log8", {}),
        ("prodigy", "bf16", {}),
        ("normuon", "log8", {}),
        ("adamw", "log8", {"offload": "state"}),
        ("adamw", "log8", {"offload": "step"}),
        ("adamw", "log8", {"dtype": torch.bfloat16, "master_weight_bits": 24}),
        ("adamw", "log8", {"nonfinite": "propagate"}),
    ],
    ids=str,
)
def test_equals_clipping_in_place(rule: str, codec: str, options: dict[str, Any]) -> None:
    with using(_C.cpu_targets()[0], threads=2):
        compare(rule, codec, **options)


def one(value: float = 3.0, **options: Any) -> tuple[Parameter, ShardedOptimizer]:
    param = Parameter(torch.zeros(2, 3))
    param.grad = torch.full((2, 3), value)
    return param, shardopt.SGD8bit([param], lr=1.0, **options)


def test_only_the_next_step() -> None:
    """A step, also one that is left out, and ``zero_grad`` forget the coefficient."""
    param, optimizer = one()

    def step(wanted: float | Tensor, closure: Callable[[], float] | None = None) -> None:
        before = param.detach().clone()
        optimizer.step(closure)
        assert torch.equal(param.detach(), before - wanted)

    def clip() -> Tensor:
        return clip_grad_norm_(param, 1.0, optimizer=optimizer)

    clipped = 3.0 * torch.clamp(1.0 / (clip() + 1e-6), max=1.0)
    step(clipped)
    step(3.0)
    clip()
    optimizer.zero_grad()
    param.grad = torch.full((2, 3), 3.0)
    step(3.0)
    clip()
    optimizer.found_inf = torch.tensor(1.0)
    step(0.0)
    optimizer.found_inf = None
    step(3.0)
    step(clipped, lambda: float(clip()))  # as Lightning clips


def test_several_optimizers_and_bfloat16() -> None:
    """One norm of all; gradients in bfloat16 are clipped in float32, as if they had been given so."""
    found = []
    for late in (False, True):
        params = [Parameter(torch.ones(4, 33, dtype=torch.bfloat16)), Parameter(torch.ones(7))]
        optimizers = [shardopt.AdamW8bit(params[:1], master_weight_bits=24), shardopt.SGD8bit(params[1:], lr=1.0)]
        generator = torch.Generator().manual_seed(0)
        for param in params:
            gradient = torch.randn(param.shape, generator=generator).to(param.dtype)
            with_gradient(param, gradient if late else gradient.float())
        clip_grad_norm_(params, 0.5, optimizer=optimizers if late else None)
        for optimizer in optimizers:
            optimizer.step()
        found.append(snapshot(dict(zip("ab", params, strict=True)), optimizers[0]))
    assert_same(found[1], found[0])


def test_grad_scaler() -> None:
    """After ``unscale_``; without, the norm would be that of scaled gradients, which is refused by name."""
    found = {}
    for way in ("in place", "by the step", "scaled"):
        param, optimizer = one()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        param.grad = None
        scaler.scale((param * 5.0).sum()).backward()
        if way != "scaled":
            scaler.unscale_(optimizer)
        clip_grad_norm_(param, 1.0, optimizer=None if way == "in place" else optimizer)
        if way == "scaled":
            with pytest.raises(RuntimeError, match=r"call scaler.unscale_\(optimizer\) before clip_grad_norm_"):
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        found[way] = param.detach().clone()
    assert torch.equal(found["by the step"], found["in place"])
    assert not found["scaled"].any()


def test_clipping_of_a_step_is_refused() -> None:
    param, optimizer = one()
    other, of_other = one()
    frozen = Parameter(torch.zeros(3), requires_grad=False)
    clip_grad_norm_([param, frozen], 1.0, optimizer=optimizer)
    with pytest.raises(ValueError, match="got 1 parameters with a gradient that it does not have, and 0 of its own"):
        clip_grad_norm_([param, other], 1.0, optimizer=optimizer)
    with pytest.raises(ValueError, match="got 0 parameters with a gradient that it does not have, and 1 of its own"):
        clip_grad_norm_([param], 1.0, optimizer=[optimizer, of_other])
    for others in (torch.optim.AdamW([param]), shardopt.quantize_state(torch.optim.AdamW([param]))):
        with pytest.raises(TypeError, match=f"got {type(others).__name__}, expected an optimizer of shardopt"):
            clip_grad_norm_(param, 1.0, optimizer=others)
    layer = torch.nn.Linear(3, 2)
    optimizer = shardopt.SGD8bit(layer.parameters(), lr=1.0)
    shardopt.release_gradients(layer, optimizer)
    for given in (optimizer, None):
        with pytest.raises(RuntimeError, match="got parameters whose gradients are released"):
            clip_grad_norm_(layer.parameters(), 1.0, optimizer=given)


#: Changes of the gradients of a model between clipping and the step, and whether the step warns of them.
LEFT_OUT: dict[str, tuple[Callable[[torch.nn.Module], object], bool]] = {
    "model.zero_grad": (lambda model: model.zero_grad(), False),
    "zero_grad in place": (lambda model: model.zero_grad(set_to_none=False), True),
    "one replaced": (lambda model: setattr(model.bias, "grad", model.bias.grad.clone()), True),
    "one changed": (lambda model: model.weight.grad.add_(1), True),
    "backward again": (lambda model: model(torch.ones(2, 33)).sum().backward(), True),
}


@pytest.mark.parametrize("how", LEFT_OUT)
def test_a_coefficient_is_forgotten_with_its_gradients(how: str) -> None:
    act, warns = LEFT_OUT[how]
    models = [torch.nn.Linear(33, 65) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for clips, model in enumerate(models):
        optimizer = shardopt.SGD8bit(model.parameters(), lr=1.0, min_quantized_numel=64)
        model(torch.ones(2, 33)).sum().backward()
        if clips:
            clip_grad_norm_(model.parameters(), 1e-3, optimizer=optimizer)
        act(model)
        if "zero" in how:
            model(torch.ones(2, 33)).sum().backward()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            optimizer.step()
        assert len(seen) == (clips and warns)
        assert all("gradients were changed or replaced between" in str(warning.message) for warning in seen)
    assert_same(models[0].state_dict(), models[1].state_dict())


def test_gradients_that_are_left_are_clipped() -> None:
    """Others that come are not, also where most parameters have none."""
    params = [Parameter(torch.zeros(4), requires_grad=index % 2 == 1) for index in range(64)]
    optimizer = shardopt.SGD8bit(params, lr=1.0)
    for index in (1, 3):
        params[index].grad = torch.full((4,), 100.0)
    total = clip_grad_norm_(params, 1.0, optimizer=optimizer)
    params[1].grad = None
    optimizer.step()
    torch.testing.assert_close(params[3].detach(), torch.full((4,), -100.0 / (float(total) + 1e-6)))
    params[1].grad, params[3].grad = torch.full((4,), 100.0), None
    clip_grad_norm_(params, 1.0, optimizer=optimizer)
    params[1].grad, params[5].grad = None, torch.ones(4)
    optimizer.step()
    assert torch.equal(params[5], -torch.ones(4))


def test_a_step_that_raises_may_be_tried_again() -> None:
    """With the same gradients; others that come are not clipped."""
    param, optimizer = one(nonfinite="raise")
    total = clip_grad_norm_(param, 1.0, optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()
    assert torch.equal(param.detach(), (-3.0 / (total + 1e-6)).expand(2, 3))
    param.grad[0, 0] = torch.inf
    clip_grad_norm_(param, 1.0, optimizer=optimizer)
    with pytest.raises(FloatingPointError):
        optimizer.step()
    before, param.grad = param.detach().clone(), torch.ones(2, 3)
    optimizer.step()
    assert torch.equal(param.detach(), before - 1)
