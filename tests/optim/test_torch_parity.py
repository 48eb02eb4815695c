"""``codec="fp32"`` is torch.optim to rounding, whatever a training loop does with its optimizer.

Every scenario runs three times: with torch in float64, with torch in float32, and with shardopt. shardopt's error may
be twice torch's float32 error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer, lr_scheduler

import plain_optimizers
import shardopt
from plain_optimizers import Plain, PlainProdigy

STEPS = 100


class Pair(NamedTuple):
    """A torch optimizer, the class of shardopt that is to equal it, and their hyper-parameters."""

    theirs: Callable[..., Optimizer]
    ours: type[Optimizer]
    hyper: dict[str, Any]
    mean: float = 0.0  #: of each element's gradients, in units of their deviations


def _pair(theirs: Callable[..., Optimizer], ours: type[Optimizer], **hyper: Any) -> Pair:
    return Pair(theirs, ours, {"lr": 1e-2, **hyper})


def _torch(name: str, **hyper: Any) -> Pair:
    return _pair(getattr(torch.optim, name), getattr(shardopt, name), **hyper)


def _plain(update: str, name: str, **hyper: Any) -> Pair:
    return _pair(partial(Plain, getattr(plain_optimizers, update)), getattr(shardopt, name), **hyper)


SMALL_VARIANCE = {"lr": 1e-4, "alpha": 0.5, "centered": True, "foreach": False}
MIXED = {"lr": 1e-3, "betas": (0.9, 0.99, 0.9999), "alpha": 5.0}
ADAN = {"lr": 1e-3, "betas": (0.98, 0.92, 0.99), "weight_decay": 0.1}
CAUTIOUS = {"cautious": True, "cautious_weight_decay": True}
PAIRS: dict[str, Pair] = {
    "adam": _torch("Adam"),
    "adam-l2": _torch("Adam", weight_decay=0.1, betas=(0.8, 0.99), maximize=True),
    "adamw": _torch("AdamW", weight_decay=0.1),
    "adamw-eps": _torch("AdamW", eps=0.1, maximize=True),
    "sgd": _torch("SGD", weight_decay=0.1),
    "momentum": _torch("SGD", momentum=0.9, maximize=True),
    "dampening": _torch("SGD", momentum=0.9, dampening=0.3, weight_decay=0.1),
    "nesterov": _torch("SGD", momentum=0.9, nesterov=True, weight_decay=0.1),
    "amsgrad": _torch("AdamW", amsgrad=True, betas=(0.9, 0.9)),
    "amsgrad-l2": _torch("Adam", amsgrad=True, weight_decay=0.1),
    "nadam": _torch("NAdam", weight_decay=0.1),
    "nadam-decoupled": _torch("NAdam", weight_decay=0.1, momentum_decay=0.1, decoupled_weight_decay=True),
    "radam": _torch("RAdam", weight_decay=0.1),
    "radam-decoupled": _torch("RAdam", weight_decay=0.1, decoupled_weight_decay=True),
    "radam-short": _torch("RAdam", betas=(0.9, 0.5)),  # never rectified
    "adamax": _torch("Adamax", weight_decay=0.1),
    "adagrad": _torch("Adagrad", lr=1e-1),
    "adagrad-initial": _torch("Adagrad", lr=1e-1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.3),
    "rmsprop": _torch("RMSprop", lr=1e-3, weight_decay=0.1),
    "rmsprop-momentum": _torch("RMSprop", lr=1e-3, momentum=0.9, alpha=0.9),
    "rmsprop-centered": _torch("RMSprop", lr=1e-3, centered=True, eps=1e-3),
    "rmsprop-small-variance": Pair(torch.optim.RMSprop, shardopt.RMSprop, SMALL_VARIANCE, mean=10.0),
    "rmsprop-centered-momentum": _torch("RMSprop", lr=1e-3, centered=True, momentum=0.9, eps=1e-2),
    "lion": _plain("lion", "Lion", lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1),
    "signum": _plain("signum", "Signum", lr=1e-3, momentum=0.9, weight_decay=0.1),
    "ademamix": _plain("ademamix", "AdEMAMix", **MIXED, weight_decay=0.1),
    "ademamix-schedules": _plain("ademamix", "AdEMAMix", **MIXED, alpha_steps=70, beta3_steps=80, weight_decay=0.0),
    "adopt": _plain("adopt", "ADOPT", betas=(0.9, 0.9999), decoupled_weight_decay=True, weight_decay=0.1),
    "adopt-l2": _plain("adopt", "ADOPT", betas=(0.9, 0.99), decoupled_weight_decay=False, weight_decay=0.1),
    "adan": _plain("adan", "Adan", **ADAN, no_prox=False),
    "adan-no-prox": _plain("adan", "Adan", **ADAN, no_prox=True),
    "lamb": _plain("lamb", "LAMB", betas=(0.9, 0.99), weight_decay=0.1),
    "lars": _plain("lars", "LARS", lr=1.0, momentum=0.9, weight_decay=0.1, trust_coefficient=1e-2),
    "stable-adamw": _plain("stable_adamw", "StableAdamW", betas=(0.9, 0.9), weight_decay=0.1),
    "cautious-adamw": _plain("cautious_adamw", "AdamW", betas=(0.9, 0.99), weight_decay=0.1, cautious=True),
    "cautious-decay-adamw": _plain(
        "cautious_adamw", "AdamW", betas=(0.9, 0.99), weight_decay=0.1, cautious_weight_decay=True
    ),
    "cautious-lion": _plain("lion", "Lion", lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, **CAUTIOUS),
    "prodigy": _pair(PlainProdigy, shardopt.Prodigy, lr=1.0, weight_decay=0.1),
    "prodigy-l2": _pair(
        PlainProdigy, shardopt.Prodigy, lr=0.5, weight_decay=0.1, decouple=False, use_bias_correction=True, d_coef=0.5
    ),
    "prodigy-growth": _pair(
        PlainProdigy,
        shardopt.Prodigy,
        lr=0.5,
        betas=(0.8, 0.99),
        beta3=0.9,
        d0=1e-4,
        growth_rate=1.1,
        safeguard_warmup=True,
    ),
}


class Run:
    """One run of a scenario."""

    def __init__(self, optimizer: Callable[..., Optimizer], hyper: dict[str, Any], dtype: torch.dtype) -> None:
        self._class = optimizer
        self._hyper = hyper
        self.dtype = dtype

    def optimizer(self, params: Iterable[Any], **hyper: Any) -> Optimizer:
        return self._class(params, **{**self._hyper, **hyper})

    def param(self, *shape: int, seed: int = 0) -> Parameter:
        return Parameter(normal(shape, seed).to(self.dtype))

    def give_gradients(self, params: Iterable[Tensor], t: int, mean: float = 0.0) -> None:
        """mean: of each element's gradients, in units of their deviation."""
        for index, param in enumerate(params):
            noise, offset = normal(param.shape, 1000 * (t + 1) + index), mean * normal(param.shape, index)
            param.grad = (noise + offset).to(self.dtype)


Scenario = Callable[[Run], list[Tensor]]


def normal(shape: Iterable[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def assert_as_near_as_torch(scenario: Scenario, pair: Pair) -> None:
    """Compares what a scenario returns, in the mean and at worst."""
    exact = scenario(Run(pair.theirs, pair.hyper, torch.float64))
    theirs = scenario(Run(pair.theirs, pair.hyper, torch.float32))
    ours = scenario(Run(pair.ours, {**pair.hyper, "codec": "fp32"}, torch.float32))
    errors = []
    for found in (ours, theirs):
        assert all(x.dtype == torch.float32 and x.shape == e.shape for x, e in zip(found, exact, strict=True))
        differences = [(x.detach().double() - e.detach()).abs().flatten() for x, e in zip(found, exact, strict=True)]
        errors.append(torch.cat(differences))
    assert errors[1].max() < 1e-3, "torch's own float32 run has gone astray: the scenario is no yardstick"
    assert errors[0].mean() <= 2 * errors[1].mean()
    assert errors[0].max() <= 2 * errors[1].max()


@pytest.mark.parametrize("name", PAIRS)
def test_a_hundred_steps(name: str) -> None:
    def scenario(run: Run) -> list[Tensor]:
        params = [run.param(64, 64, seed=1), run.param(257, seed=2)]
        optimizer = run.optimizer(params)
        for t in range(STEPS):
            run.give_gradients(params, t, PAIRS[name].mean)
            optimizer.step()
        return params

    assert_as_near_as_torch(scenario, PAIRS[name])


#: Both cycle ``betas[0]``, too.
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 3e-2, total_steps=40),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-2, 5),
}


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [
        ("adam-l2", "one cycle"),
        ("amsgrad", "cyclic"),
        ("nadam", "one cycle"),
        ("radam", "cyclic"),
        ("adamax", "cyclic"),
    ],
)
def test_decay_rates_change(name: str, scheduler: str) -> None:
    """The run is saved and loaded meanwhile."""

    def scenario(run: Run) -> list[Tensor]:
        params = [run.param(70, 64), run.param(257, seed=2)]
        optimizer = run.optimizer(params)
        schedule = SCHEDULERS[scheduler](optimizer)
        rates = set()
        for t in range(30):
            if t == 11:
                state_dict = optimizer.state_dict()
                optimizer = run.optimizer(params)
                optimizer.load_state_dict(state_dict)
                schedule.optimizer = optimizer
            rates.add(optimizer.param_groups[0]["betas"][0])
            run.give_gradients(params, t)
            optimizer.step()
            schedule.step()
        assert len(rates) > 5
        return params

    assert_as_near_as_torch(scenario, PAIRS[name])


@pytest.mark.parametrize("scheduler", ["one cycle", "cyclic"])
def test_nadam_goes_on_after_torch(scheduler: str) -> None:
    """torch's state has the product of decay rates that changed, and ours gives it back."""

    def scenario(run: Run) -> list[Tensor]:
        params = [run.param(70, 64)]
        optimizer: Optimizer = torch.optim.NAdam(params, lr=1e-2, weight_decay=0.1)
        schedule = SCHEDULERS[scheduler](optimizer)
        for t in range(30):
            if t in (11, 20):
                ours = isinstance(optimizer, shardopt.NAdam)
                state_dict = optimizer.state_dict(dequantize=True) if ours else optimizer.state_dict()
                optimizer = torch.optim.NAdam(params) if ours else run.optimizer(params)
                optimizer.load_state_dict(state_dict)
                schedule.optimizer = optimizer
            run.give_gradients(params, t)
            optimizer.step()
            schedule.step()
        return params

    assert_as_near_as_torch(scenario, PAIRS["nadam"])
