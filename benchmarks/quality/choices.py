"""The optimizers of the study, each with the float32 run that it is compared with."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import shardopt
from quality.task import BETAS, EPS, TASKS, WEIGHT_DECAY, Task

#: (model, task, learning rate, options of the choice) -> optimizer.
Make = Callable[[nn.Module, Task, float, dict[str, Any]], Optimizer]

LONG = "long"
#: All others.
SHORT_TASKS = tuple(task for task in TASKS if task != LONG)

_ADAM: dict[str, Any] = {"betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}


@dataclass(frozen=True)
class Choice:
    """An optimizer of the study.

    Attributes:
        make: makes it.
        options: what `make` is given, written beside every result.
        baseline: name of the choice whose loss of the same seed is 100%.
        label: the name in tables.
        lr_factor: of the task's learning rate.
        weights: dtype of the model.
        weight_noise: standard deviation of the relative change of the first weights.
        tasks: where it takes part.
        seeds: at most so many runs of it, or None for as many as the task says.
        package: what has to be installed.
        least_numel: parameters below this stay float32 whatever the task says: left out where that would be most.
    """

    make: Make
    options: dict[str, Any] = field(default_factory=dict)
    baseline: str = "fp32"
    label: str = ""
    lr_factor: float = 1.0
    weights: torch.dtype = torch.float32
    weight_noise: float = 0.0
    tasks: tuple[str, ...] = SHORT_TASKS
    seeds: int | None = None
    package: str = "shardopt"
    least_numel: int = 0

    def obstacle(self, task: Task) -> str | None:
        """Why this optimizer cannot take part in a task here, or None."""
        if task.name in TASKS and task.name not in self.tasks:
            return f"takes part in {', '.join(self.tasks)} only"
        if importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        kind = self.options.get("kind")
        if self.package == "shardopt" and kind is not None and not hasattr(shardopt, kind):
            return f"shardopt has no {kind}"
        if task.quantize_from < self.least_numel:
            return f"{self.package} keeps parameters of fewer than {self.least_numel} elements in float32"
        return None


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _torch(model: nn.Module, task: Task, lr: float, options: dict[str, Any]) -> Optimizer:
    return torch.optim.AdamW(_trainable(model), lr=lr, fused=True, **_ADAM)


def _shardopt(model: nn.Module, task: Task, lr: float, options: dict[str, Any]) -> Optimizer:
    """A class of shardopt by the name "kind", with the hyper-parameters that it shares with AdamW."""
    given = dict(options)
    kind = getattr(shardopt, given.pop("kind"))
    if given.pop("by_steps", False):
        given |= {"alpha_steps": task.steps, "beta3_steps": task.steps}
    shared = {"weight_decay": WEIGHT_DECAY, "min_quantized_numel": task.quantize_from}
    if issubclass(kind, shardopt.Muon):
        return kind(shardopt.muon_groups(model, lr=lr, adamw_lr=lr), **shared, **given)
    return kind(_trainable(model), lr=lr, **shared, **given)


def _bitsandbytes(model: nn.Module, task: Task, lr: float, options: dict[str, Any]) -> Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(_trainable(model), lr=lr, min_8bit_size=task.quantize_from, **_ADAM)


def _torchao(model: nn.Module, task: Task, lr: float, options: dict[str, Any]) -> Optimizer:
    """A class of torchao by the name "kind".

    The compiled step runs eagerly: the same formulas, nothing to compile.
    """
    import torchao.optim

    torch.compiler.set_stance("force_eager")
    made: Optimizer = getattr(torchao.optim, options["kind"])(_trainable(model), lr=lr, **_ADAM)
    return made


def _coded(label: str, codec: str, kind: str = "AdamW", baseline: str = "fp32", **options: Any) -> Choice:
    adam: dict[str, Any] = {"betas": BETAS, "eps": EPS} if kind == "AdamW" else {}
    return Choice(_shardopt, {"kind": kind, "codec": codec, **adam, **options}, baseline, label)


def _rule(label: str, kind: str, lr_factor: float = 1.0, **options: Any) -> dict[str, Choice]:
    """A rule with float32 state and with log8; the former is the yardstick."""
    name = kind.lower()
    return {
        f"{name}_fp32": Choice(
            _shardopt, {"kind": kind, "codec": "fp32", **options}, f"{name}_fp32", f"{label}, float32", lr_factor
        ),
        f"{name}8": Choice(_shardopt, {"kind": f"{kind}8bit", **options}, f"{name}_fp32", f"{label}8bit", lr_factor),
    }


def _weights(label: str, **options: Any) -> Choice:
    given = {"kind": "AdamW", "codec": "log8", "betas": BETAS, "eps": EPS, **options}
    return Choice(_shardopt, given, "fp32", label, weights=torch.bfloat16, tasks=("bytes", "tokens", "finetune"))


def _rate(name: str, factor: float) -> dict[str, Choice]:
    """AdamW with float32 state and with log8 at another learning rate, for the long task alone."""
    coded = _coded(f"AdamW, log8, lr * {factor:g}", "log8", baseline=f"fp32_{name}")
    exact = Choice(_torch, {}, f"fp32_{name}", f"AdamW, float32 (torch), lr * {factor:g}")
    return {
        f"{key}_{name}": replace(choice, lr_factor=factor, tasks=(LONG,), seeds=10 if factor < 1 else 5)
        for key, choice in (("fp32", exact), ("log8", coded))
    }


_SHORT_CHOICES: dict[str, Choice] = {
    "fp32": Choice(_torch, label="AdamW, float32 (torch)"),
    "fp32_lr": Choice(_torch, label="control: float32, lr * 1.0001", lr_factor=1.0001),
    "fp32_init": Choice(_torch, label="control: float32, first weights changed by 1%", weight_noise=0.01),
    "log8": _coded("AdamW, log8", "log8"),
    "log8_repaid": _coded("AdamW, log8, repaid", "log8", repay=True),
    "companded8": _coded("AdamW, companded8", "companded8"),
    "dynamic8": _coded("AdamW, dynamic8, blocks of 256", "dynamic8", block_size=256),
    "bf16": _coded("AdamW, bf16", "bf16"),
    "log4": Choice(_shardopt, {"kind": "AdamW4bit", "betas": BETAS, "eps": EPS}, "fp32", "AdamW4bit, log4"),
    "log4_unpaid": Choice(
        _shardopt,
        {"kind": "AdamW4bit", "betas": BETAS, "eps": EPS, "repay": False},
        "fp32",
        "AdamW4bit, log4, not repaid",
    ),
    **_rule("Lion", "Lion", 0.2),
    **_rule("Muon", "Muon", adjust_lr_fn="match_rms_adamw"),
    **_rule("NorMuon", "NorMuon", adjust_lr_fn="match_rms_adamw"),
    **_rule("AdEMAMix", "AdEMAMix", by_steps=True),
    "bnb8": Choice(_bitsandbytes, {"kind": "AdamW8bit"}, "fp32", "bitsandbytes AdamW8bit", package="bitsandbytes"),
    **{
        name: Choice(_torchao, {"kind": kind}, "fp32", f"torchao {kind}", package="torchao", least_numel=4096)
        for name, kind in (("torchao8", "AdamW8bit"), ("torchao4", "AdamW4bit"), ("torchao_fp8", "AdamWFp8"))
    },
    "bf16_master32": _weights("bf16 weights, 32-bit masters", master_weight_bits=32),
    "bf16_master24": _weights("bf16 weights, 24-bit masters", master_weight_bits=24),
    "bf16_stochastic": _weights("bf16 weights, stochastic rounding", stochastic_rounding=True),
    "bf16_nearest": _weights("bf16 weights, nearest"),
}

#: Optimizers that take part in `long`, too.
IN_LONG_RUNS = ("fp32", "fp32_lr", "fp32_init", "log8", "log8_repaid", "companded8", "dynamic8", "bf16", "log4", "bnb8")

CHOICES: dict[str, Choice] = {
    **{
        name: replace(choice, tasks=TASKS) if name in IN_LONG_RUNS else choice
        for name, choice in _SHORT_CHOICES.items()
    },
    **_rate("half", 0.5),
    **_rate("double", 2.0),
}


def in_order(names: Collection[str]) -> list[str]:
    """The names in the order of the tables."""
    return [name for name in CHOICES if name in names]


def choice_of(name: str) -> Choice:
    """The optimizer of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in CHOICES:
        raise ValueError(f"optimizer {name}: expected one of {', '.join(CHOICES)}")
    return CHOICES[name]
