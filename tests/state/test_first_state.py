"""A step that a framework takes to see state appear makes state and is no step: the run has the bits of one without."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer

import shardopt
from helpers import CASES
from ranks.snapshot import assert_same, snapshot
from slow_cases import slow

SMALL = {"min_quantized_numel": 64}
#: Optimizers of torch whose state in codes is dropped again by the first step.
WRAPPED = ("AdamW", "NAdam", "SGD", "Rprop")


def titan(model: nn.Module, optimizer: Optimizer) -> None:
    """torchtitan's ``init_optim_state``."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = torch.tensor(0.0) if isinstance(lr, torch.Tensor) else 0.0
    optimizer.step()
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
    optimizer.zero_grad()


def titan_twice(model: nn.Module, optimizer: Optimizer) -> None:
    titan(model, optimizer)
    titan(model, optimizer)


WAYS: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "torch": get_optimizer_state_dict, "titan": titan, "titan twice": titan_twice,
}  # fmt: skip


def make(rule: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 96), nn.Linear(96, 32, bias=False)).to(dtype)
    if rule.startswith("torch."):
        hyper = {"lr": 1e-2} | ({"momentum": 0.9, "dampening": 0.5} if rule == "torch.SGD" else {})
        inner = getattr(torch.optim, rule.removeprefix("torch."))(model.parameters(), **hyper)
        return model, shardopt.quantize_state(inner, **SMALL, **options)
    return model, CASES[rule].make(model.parameters(), **SMALL, **options)


def advance(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        for number, param in enumerate(model.parameters()):
            seed = torch.Generator().manual_seed(number)
            param.grad = torch.randn(param.shape, generator=seed).to(param.dtype)
        optimizer.step()
        optimizer.zero_grad()


def everything(model: nn.Module, optimizer: Optimizer) -> tuple[Any, ...]:
    groups = [{key: x for key, x in group.items() if key != "params"} for group in optimizer.param_groups]
    return snapshot(dict(model.named_parameters()), optimizer), groups


def assert_alike(one: tuple[nn.Module, Optimizer], other: tuple[nn.Module, Optimizer]) -> None:
    (tensors, groups), (expected, expected_groups) = everything(*one), everything(*other)
    assert_same(tensors, expected)
    assert groups == expected_groups


FIRST_STEPS = [
    *((rule, "torch") for rule in CASES),
    *((f"torch.{name}", way) for name in WRAPPED for way in ("torch", "titan")),
    *product(["adamw", "prodigy", "nadam", "adagrad", "muon_in_waves"], ["titan", "titan twice"]),
]


@pytest.mark.parametrize(("rule", "way"), [*FIRST_STEPS, *slow(product(CASES, WAYS), besides=FIRST_STEPS)])
def test_the_run_is_that_without_it(rule: str, way: str) -> None:
    run, expected = make(rule), make(rule)
    for model, _ in (run, expected):
        model[0].weight.data[0] = -0.0
    weights = {name: param.detach().view(torch.int32).clone() for name, param in run[0].named_parameters()}
    WAYS[way](*run)
    assert_same({name: param.detach().view(torch.int32) for name, param in run[0].named_parameters()}, weights)
    states = [run[1].state[param] for param in run[0].parameters()]
    assert all(states)
    assert all(state.get("step", 0) == 0 for state in states)
    advance(*run)
    advance(*expected)
    assert_alike(run, expected)


@pytest.mark.parametrize("by", ["reset", "load"])
def test_after_the_state_was_forgotten(by: str) -> None:
    expected, run = make("adamw"), make("adamw")
    weights, empty = copy.deepcopy(run[0].state_dict()), copy.deepcopy(run[1].state_dict())
    advance(*run)
    run[0].load_state_dict(weights)
    if by == "reset":
        run[1].reset_state()
    else:
        run[1].load_state_dict(empty)
    get_optimizer_state_dict(*run)
    advance(*run)
    advance(*expected)
    assert_alike(run, expected)


@pytest.mark.parametrize("rule", ["adamw", "torch.AdamW"])
def test_a_checkpoint_loaded_after_it_is_kept(rule: str, tmp_path: Path) -> None:
    expected, run = make(rule), make(rule)
    advance(*expected)
    shardopt.checkpoint.save(tmp_path / "saved", *expected)
    get_optimizer_state_dict(*run)
    shardopt.checkpoint.load(tmp_path / "saved", *run)
    advance(*run)
    advance(*expected)
    assert_alike(run, expected)


@pytest.mark.parametrize("rule", ["adamw", "momentum", "torch.AdamW"])
def test_a_first_step_of_a_warm_up_counts(rule: str) -> None:
    """A rate of zero alone makes no such step, nor do zero gradients, nor zeros later on."""
    for lr, factor in ((0.0, 1.0), (1e-2, 0.0)):
        model, optimizer = make(rule)
        for param in model.parameters():
            param.grad = torch.ones_like(param) * factor
        model[1].weight.grad = torch.zeros_like(model[1].weight)  # as of an adapter whose other half is zero
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        assert all(state.get("step", 1) == 1 for state in optimizer.state.values())
        titan(model, optimizer)
        assert all(state.get("step", 2) == 2 for state in optimizer.state.values())


@pytest.mark.parametrize("released", [False, True])
def test_with_released_gradients(released: bool) -> None:
    """State is made before or after the release."""
    run, expected = make("adamw"), make("adamw")
    if not released:
        get_optimizer_state_dict(*run)
    for model, optimizer in (run, expected):
        shardopt.release_gradients(model, optimizer)
    if released:
        get_optimizer_state_dict(*run)
    for model, optimizer in (run, expected):
        for _ in range(2):
            model(torch.ones(4, 128)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_alike(run, expected)
