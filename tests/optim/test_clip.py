"""``clip_grad_norm_(optimizer=...)``: the next step multiplies the gradients as it reads them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
from helpers import Named, with_gradient
from kernel_problem import gradients, make, start, using
from ranks.snapshot import assert_same, snapshot
from shardopt import _C, clip_grad_norm_
from shardopt.optim import ShardedOptimizer

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


def test_refused() -> None:
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
    with pytest.raises(RuntimeError, match="got one whose gradients are released"):
        clip_grad_norm_(layer.parameters(), 1.0, optimizer=optimizer)


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
