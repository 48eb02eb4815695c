"""The checks that torch runs over its database of optimizers (``OptimizerInfo``, test/test_optim.py), for every rule.

The wheels of torch have the database, which needs another package, but not the checks: they are written here again, by
torch's names, for every run; test_torch_optim_suite.py runs torch's own file where there is one. Not here: sparse,
complex and differentiable optimizers, which shardopt has not; hooks, closures, lr as a tensor, weights_only and
torch.compile, which tests/optim, tests/state and tests/step cover for their code is common to all rules.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer, lr_scheduler, swa_utils

import shardopt
from helpers import CASES, everything
from ranks.snapshot import assert_same

#: Where the hyper-parameters of the cases, in which every term counts, are too large to train with.
USUAL: dict[str, dict[str, Any]] = {"decoupled_prodigy": {"d_coef": 1.0}}
ALL = pytest.mark.parametrize("codec", ["fp32", "log8"])
RULES = pytest.mark.parametrize("rule", CASES)


def problem(rule: str, codec: str, **options: Any) -> tuple[list[Parameter], Optimizer, Callable[[], Tensor]]:
    """A matrix, which is quantized, and a bias; the optimizer; a loss of theirs."""
    generator = torch.Generator().manual_seed(0)
    weight = Parameter(torch.randn(64, 64, generator=generator))
    bias, inputs = Parameter(torch.randn(64, generator=generator)), torch.randn(64, generator=generator)
    optimizer = CASES[rule].make([weight, bias], codec=codec, min_quantized_numel=64, **options)
    return [weight, bias], optimizer, lambda: (weight @ inputs + bias).square().mean()


def run(optimizer: Optimizer, loss_of: Callable[[], Tensor], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@RULES
@ALL
def test_forloop_goes_right_direction(rule: str, codec: str) -> None:
    _, optimizer, loss_of = problem(rule, codec, **USUAL.get(rule, {}))
    losses = run(optimizer, loss_of, 12)
    assert losses[-1] < losses[0]
    _, optimizer, loss_of = problem(rule, codec, maximize=True, weight_decay=0.0, **USUAL.get(rule, {}))
    losses = run(optimizer, loss_of, 12)
    assert losses[-1] > losses[0]


@RULES
@ALL
def test_param_groups(rule: str, codec: str) -> None:
    """A learning rate of 0 holds its group, whatever the other group does."""
    (weight, bias), _, loss_of = problem(rule, codec)
    before = bias.detach().clone()
    groups = [{"params": [weight]}, {"params": [bias], "lr": 0.0}]
    optimizer = CASES[rule].make(groups, codec=codec, min_quantized_numel=64, **USUAL.get(rule, {}))
    losses = run(optimizer, loss_of, 8)
    assert losses[-1] < losses[0]
    assert torch.equal(bias.detach(), before)


@RULES
@ALL
def test_save_load_equality(rule: str, codec: str) -> None:
    """Through a file that unpickles weights only; also into an optimizer with other hyper-parameters."""
    params, optimizer, loss_of = problem(rule, codec)
    run(optimizer, loss_of, 3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others, other, other_loss = problem(rule, codec)
    with torch.no_grad():
        for param, value in zip(others, params, strict=True):
            param.copy_(value)
    for group in other.param_groups:
        group["lr"] = 123.0
    other.load_state_dict(torch.load(file, weights_only=True))
    run(optimizer, loss_of, 3)
    run(other, other_loss, 3)
    assert_same(everything(other), everything(optimizer))


@RULES
@ALL
def test_step_is_noop_when_params_have_no_grad(rule: str, codec: str) -> None:
    params, optimizer, _ = problem(rule, codec)
    before = [param.detach().clone() for param in params]
    optimizer.step()
    assert all(torch.equal(param, value) for param, value in zip(params, before, strict=True))
    assert not optimizer.state


@RULES
@ALL
def test_step_is_noop_for_zero_grads(rule: str, codec: str) -> None:
    params, optimizer, _ = problem(rule, codec, weight_decay=0.0)
    before = [param.detach().clone() for param in params]
    for _ in range(2):
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
    assert all(torch.equal(param, value) for param, value in zip(params, before, strict=True))


@RULES
def test_optimizer_can_be_printed_and_copied(rule: str) -> None:
    _, optimizer, loss_of = problem(rule, "log8")
    run(optimizer, loss_of, 1)
    text = repr(optimizer)
    assert text.startswith(type(optimizer).__name__)
    assert all(f"{name}:" in text for name in optimizer.param_groups[0] if name != "params")
    other = copy.deepcopy(optimizer)

    def public(each: Optimizer) -> set[str]:
        return {name for name in vars(each) if not name.startswith("_")} - {"rule"}  # as helpers.limited has it

    assert public(other) == public(optimizer)
    assert_same(everything(other), everything(optimizer))


@RULES
@ALL
def test_grad_scaler(rule: str, codec: str) -> None:
    """A scale that is a power of two leaves the bits of no scale; a step with an overflow leaves everything."""
    _, optimizer, loss_of = problem(rule, codec)
    _, expected, expected_loss = problem(rule, codec)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        run(expected, expected_loss, 1)
        for overflows in (False, True) if step % 2 else (False,):
            before = everything(optimizer) if overflows else None
            optimizer.zero_grad()
            scaler.scale(loss_of() * (math.inf if overflows else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert_same(everything(optimizer), everything(expected) if before is None else before)
    assert scaler.get_scale() == 256.0


CLASSES = sorted({case.optimizer for case in CASES.values()}, key=lambda each: each.__name__)
ERRORS: dict[str, tuple[Callable[[Parameter, Parameter], Any], type[Exception], str]] = {
    "invalid param type": (lambda p, q: p, TypeError, "should be an iterable of Tensors or dicts"),
    "duplicates in a group": (lambda p, q: [p, p], UserWarning, "duplicate parameters"),
    "duplicates in two groups": (lambda p, q: [{"params": p}, {"params": p}], ValueError, "more than one parameter"),
    "some without names": (lambda p, q: [("weight", p), q], ValueError, "with/without names"),
    "a group without names": (
        lambda p, q: [{"params": [p], "lr": 1e-2}, {"params": [("weight", q)]}],
        ValueError,
        "with/without names",
    ),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("what", ERRORS)
@pytest.mark.parametrize("optimizer", CLASSES)
def test_errors(optimizer: type[Optimizer], what: str) -> None:
    params, kind, message = ERRORS[what]
    with pytest.raises(kind, match=message):
        optimizer(params(Parameter(torch.randn(1, 1)), Parameter(torch.randn(1, 1))), lr=1e-3)


@pytest.mark.parametrize("optimizer", CLASSES)
def test_lr_of_several_elements_is_refused(optimizer: type[Optimizer]) -> None:
    with pytest.raises(ValueError, match="lr"):
        optimizer([Parameter(torch.randn(1, 1))], lr=torch.tensor([0.001, 0.001]))


SCHEDULERS: dict[type, Callable[[Optimizer], Any]] = {
    lr_scheduler.LambdaLR: lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    lr_scheduler.MultiplicativeLR: lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    lr_scheduler.StepLR: lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    lr_scheduler.MultiStepLR: lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.5),
    lr_scheduler.ConstantLR: lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    lr_scheduler.LinearLR: lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5),
    lr_scheduler.ExponentialLR: lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    lr_scheduler.PolynomialLR: lambda o: lr_scheduler.PolynomialLR(o, 10, 2.0),
    lr_scheduler.CosineAnnealingLR: lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    lr_scheduler.CosineAnnealingWarmRestarts: lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    lr_scheduler.CyclicLR: lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, 3),
    lr_scheduler.OneCycleLR: lambda o: lr_scheduler.OneCycleLR(o, 3e-2, total_steps=10),
    lr_scheduler.ReduceLROnPlateau: lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    lr_scheduler.SequentialLR: lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    lr_scheduler.ChainedScheduler: lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    swa_utils.SWALR: lambda o: swa_utils.SWALR(o, 1e-3, 4),
}


def test_all_schedulers_are_here() -> None:
    bases = (lr_scheduler.LRScheduler, lr_scheduler._LRScheduler)
    found = {each for each in vars(lr_scheduler).values() if isinstance(each, type) and issubclass(each, bases)}
    assert found - set(bases) <= set(SCHEDULERS)


def advance(schedule: Any) -> None:
    schedule.step(*([1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))


@ALL
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers(kind: type, codec: str) -> None:
    """Rates and momenta are those of torch's AdamW, and each step takes them; a schedule saved half-way goes on."""
    theirs = torch.optim.AdamW([Parameter(torch.zeros(1))], lr=1e-2)
    schedule = SCHEDULERS[kind](theirs)
    expected = []
    for _ in range(8):
        expected.append((theirs.param_groups[0]["lr"], theirs.param_groups[0]["betas"]))
        theirs.step()
        advance(schedule)
    _, by_hand, hand_loss = problem("adamw", codec, lr=1e-2)
    for lr, betas in expected:
        by_hand.param_groups[0].update(lr=lr, betas=betas)
        run(by_hand, hand_loss, 1)
    _, optimizer, loss_of = problem("adamw", codec, lr=1e-2)
    schedule = SCHEDULERS[kind](optimizer)
    for step in range(8):
        if step == 4:
            saved, saved_group = schedule.state_dict(), dict(optimizer.param_groups[0])
            schedule = SCHEDULERS[kind](optimizer)
            optimizer.param_groups[0].update(saved_group)
            schedule.load_state_dict(saved)
        assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]) == expected[step]
        run(optimizer, loss_of, 1)
        advance(schedule)
    assert_same(everything(optimizer), everything(by_hand))


AVERAGES: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor, int], Tensor]]] = {
    "swa": ({}, lambda mean, value, count: mean + (value - mean) / (count + 1)),
    "ema": (
        {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
        lambda mean, value, count: mean.lerp(value, 1 - 0.9),
    ),
}


@ALL
@pytest.mark.parametrize("kind", AVERAGES)
def test_averaged_models(kind: str, codec: str) -> None:
    """torch's averages of the weights see each step, and an optimizer of the averages' copies is its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    optimizer = shardopt.AdamW(model.parameters(), lr=1e-2, codec=codec, min_quantized_numel=64)
    options, mean_of = AVERAGES[kind]
    averaged = swa_utils.AveragedModel(model, **options)
    inputs = torch.randn(8, 64)
    means: list[Tensor] = []
    for step in range(4):
        run(optimizer, lambda: (model(inputs) - inputs).square().mean(), 1)
        averaged.update_parameters(model)
        values = [param.detach().clone() for param in model.parameters()]
        means = [mean_of(m, v, step) for m, v in zip(means, values, strict=True)] if means else values
    assert_same(
        {str(i): param.detach() for i, param in enumerate(averaged.module.parameters())},
        {str(i): mean for i, mean in enumerate(means)},
    )
    swa_utils.update_bn([inputs], averaged)
    tuned = shardopt.AdamW(averaged.parameters(), lr=1e-2, codec=codec, min_quantized_numel=64)
    before = everything(optimizer)
    losses = run(tuned, lambda: (averaged(inputs) - inputs).square().mean(), 4)
    assert all(later < earlier for earlier, later in pairwise(losses))
    assert_same(everything(optimizer), before)
