"""Optimizers to be quantized by quantize_state, one that nobody tested, and a small network that they train."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

from shardopt import quantize_state
from shardopt.wrapper import QuantizedState

Make = Callable[[list[Parameter]], Optimizer]

#: Two quantized parameters, one with rows that end within a block, and small ones.
SHAPES = ((64, 128), (40, 130), (64,), (3, 5))


def of(module: str, name: str, **options: Any) -> Make:
    """Makes an optimizer of another package, which is imported when it is needed."""
    return lambda params: getattr(import_module(module), name)(params, **options)


def _matrices(module: str, name: str, **options: Any) -> Make:
    """Makes an optimizer over the matrices only."""
    return lambda params: of(module, name, **options)([p for p in params if p.dim() == 2])


def _by_dim(module: str, name: str, **options: Any) -> Make:
    """Makes an optimizer with two kinds of param groups."""
    return lambda params: getattr(import_module(module), name)(
        [{"params": [p for p in params if (p.dim() == 2) is muon], "use_muon": muon} for muon in (True, False)],
        **options,
    )


TORCH, TIMM, POPT, FREE = "torch.optim", "timm.optim", "pytorch_optimizer", "schedulefree"


def _usual(module: str, names: str, lr: float = 1e-3) -> dict[str, Make]:
    """Makes each of some optimizers with no other option than a learning rate."""
    package = "torch" if module == TORCH else module.partition(".")[0]
    return {f"{package} {name}": of(module, name, lr=lr) for name in names.split()}


#: Learning rates are such that an MLP learns.
ELEMENTWISE: dict[str, Make] = {
    **_usual(TORCH, "SGD ASGD", lr=0.1),
    **_usual(TORCH, "Adam NAdam RAdam Adamax RMSprop Rprop"),
    **_usual(TORCH, "Adadelta", lr=1.0),
    "torch SGD momentum": of(TORCH, "SGD", lr=0.1, momentum=0.9, nesterov=True),
    "torch AdamW foreach": of(TORCH, "AdamW", lr=1e-3, foreach=True),
    "torch AdamW fused": of(TORCH, "AdamW", lr=1e-3, fused=True),
    "torch AdamW amsgrad": of(TORCH, "AdamW", lr=1e-3, amsgrad=True),
    "torch Adagrad": of(TORCH, "Adagrad", lr=1e-2, lr_decay=1e-3),
    "torch RMSprop centered momentum": of(TORCH, "RMSprop", lr=1e-3, centered=True, momentum=0.9),
    **_usual(TIMM, "AdaBelief Adopt LaProp NAdamW RMSpropTF"),
    **_usual(TIMM, "Lion", lr=1e-4),
    **_usual(POPT, "ADOPT AdEMAMix Yogi ScheduleFreeAdamW ScheduleFreeRAdam"),
    **_usual(POPT, "Lion Tiger", lr=1e-4),
    **_usual(POPT, "ScheduleFreeSGD", lr=0.1),
    "schedulefree AdamW": of(FREE, "AdamWScheduleFree", lr=1e-3),
    "schedulefree RAdam": of(FREE, "RAdamScheduleFree", lr=1e-3),
    "schedulefree SGD": of(FREE, "SGDScheduleFree", lr=0.1),
}
BY_PARAMETER: dict[str, Make] = {
    **_usual(TORCH, "Adafactor", lr=1e-2),
    "torch Muon": _matrices(TORCH, "Muon", lr=1e-2),
    **_usual(TIMM, "Adan Mars"),
    "timm Lamb": of(TIMM, "Lamb", lr=1e-3, max_grad_norm=None),
    "timm Lars": of(TIMM, "Lars", lr=0.1, momentum=0.9),
    **_usual(POPT, "AdaFactor AdamP StableAdamW Adan Amos APOLLO CAME FAdam Fira GaLore GrokFastAdamW Lamb MARS SOAP"),
    **_usual(POPT, "SM3", lr=0.1),
    "pytorch_optimizer Muon": _by_dim(POPT, "Muon", lr=1e-2),
    "pytorch_optimizer Ranger21": of(POPT, "Ranger21", lr=1e-3, num_iterations=300),
}
#: Refused: they look at all parameters together.
TOGETHER: dict[str, Make] = {
    **_usual(POPT, "Prodigy DAdaptAdam", lr=1.0),
    **_usual(POPT, "SPAM"),
    **_usual("prodigyopt", "Prodigy", lr=1.0),
}
SEPARABLE = {**ELEMENTWISE, **BY_PARAMETER}


def parameters(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    """Makes parameters with the same values at every call."""
    generator = torch.Generator().manual_seed(0)
    return [Parameter((0.1 * torch.randn(shape, generator=generator)).to(dtype)) for shape in SHAPES]


def set_gradients(params: list[Parameter], step: int) -> None:
    """Sets gradients that depend on the step alone; in step 2, the first parameter has none."""
    generator = torch.Generator().manual_seed(1 + step)
    for index, param in enumerate(params):
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        if step == 2 and index == 0:
            param.grad = None


class Custom(Optimizer):
    """An optimizer that nobody has tested, with an entry of each kind."""

    def __init__(self, params: Iterable[Parameter], lr: float = 0.1, square: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "square": square})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["start"] = param.detach().clone()
                    state["squares"] = torch.zeros_like(param, dtype=torch.float32)
                    state["moment"] = torch.zeros_like(param)
                    state["count"] = 0
                    state["rows"] = torch.zeros(len(param))
                state["count"] += 1
                state["squares"] += group["square"] * param.grad.float() ** 2
                state["moment"].lerp_(param.grad, 0.1)
                with torch.no_grad():
                    param.sub_(group["lr"] * state["moment"] / (1 + state["squares"].sqrt().to(param.dtype)))


def quietly(optimizer: Optimizer, **options: Any) -> QuantizedState:
    """Quantizes without the warning of an untested optimizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return quantize_state(optimizer, **options)


def trained(optimizer: Optimizer, params: list[Parameter], steps: range = range(4)) -> Any:
    """Takes steps with gradients that depend on the step alone."""
    for step in steps:
        set_gradients(params, step)
        optimizer.step()
    return optimizer


AdamW = ELEMENTWISE["torch AdamW foreach"]


def trained_adamw(**options: Any) -> tuple[list[Parameter], QuantizedState]:
    """Makes parameters and AdamW with quantized state, which has taken four steps."""
    params = parameters()
    return params, trained(quantize_state(AdamW(params), **options), params)


def bits(params: list[Parameter], optimizer: Optimizer) -> list[Tensor]:
    """The parameters and all tensors of the state."""
    state = optimizer.state_dict()["state"]
    entries = [x for index in sorted(state) for _, x in sorted(state[index].items()) if isinstance(x, Tensor)]
    return [*(p.detach() for p in params), *entries]


def same(x: list[Tensor], y: list[Tensor]) -> bool:
    """Whether tensors have the same dtypes and values."""
    return len(x) == len(y) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(x, y, strict=True))


def train_mode(optimizer: Any) -> None:
    """Tells schedule-free optimizers that training begins."""
    if hasattr(optimizer, "train"):
        optimizer.train()


def network() -> nn.Sequential:
    """The MLP of the tables: 64-128-128-64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))


class Counting(Optimizer):
    """An untested optimizer, element by element, with counters of each kind and a copy of the weights."""

    def __init__(self, params: Iterable[Parameter], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["weight_sum"] = group.get("weight_sum", 0.0) + group["lr"] / 3
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["count"], state["rate"], state["z"] = 0, 1.0, param.detach().clone()
                    state["average"], state["flag"] = torch.zeros_like(param), True
                    state["tensor"] = torch.tensor(2, dtype=torch.int16)
                state["count"] += 1
                state["rate"] /= 3
                state["average"].lerp_(param.grad, 0.1)
                state["z"].sub_(state["average"], alpha=group["lr"] / group["weight_sum"] * state["rate"])
                param.lerp_(state["z"], 1 / group["k"])
