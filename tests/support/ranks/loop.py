"""The usual training loop with gradients that are released or held, beside the same loop without a release."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import ExponentialLR

import shardopt
from helpers import Snapshot, everything
from ranks.offload import offload_from_cpu, slow_steps
from ranks.snapshot import assert_same

STEPS = 3
#: Options of a loop that steps within the backward pass: in this thread, or in another one.
RELEASED: dict[str, Any] = {"overlap": False, "offload": None}
OFFLOADED: dict[str, Any] = {"overlap": False}


class Layers(nn.Module):
    """An embedding that is the head as well, and layers."""

    def __init__(self, early: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embed.weight
        self.early = early  # reads a layer without calling it

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x = x + (layer[1].bias if self.early and index == 2 else layer(x))
        return self.head(x)

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)


def batch(step: int) -> Tensor:
    return torch.randint(50, (4, 7), generator=torch.Generator().manual_seed(step))


def mean_square(model: Any, number: int) -> Tensor:
    """The loss of a numbered batch."""
    loss: Tensor = model(batch(number)).float().square().mean()
    return loss


class Loop:
    """A usual loop whose gradients are ``held``, with ``offload="step"``, or one that offloads and releases nothing.

    ``loss`` is of the model and the number of a backward pass, ten times the step's number or more. Of the passes of a
    step (``micro_batches``) as many as ``brought`` bring a gradient. With ``sums`` the loop without release adds up the
    gradients of the passes by hand.
    """

    def __init__(
        self,
        held: bool,
        *,
        loss: Callable[[Any, int], Tensor] = mean_square,
        micro_batches: int = 1,
        brought: int | None = None,
        sums: bool = False,
        dtype: torch.dtype = torch.float32,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale: float | None = None,
        kind: str = "AdamW8bit",
        model: nn.Module | None = None,
        overlap: bool = True,
        offload: str | None = "step",
        **options: Any,
    ) -> None:
        self.model = Layers() if model is None else model
        if dtype != torch.float32:
            self.model.to(dtype)
        self.loss_of, self.sums = loss, sums and not held
        self.micro_batches, self.max_norm, self.norm_type = micro_batches, max_norm, norm_type
        defaults = {"lr": 1e-2, "min_quantized_numel": 64, "offload": offload if held else None}
        self.optimizer = getattr(shardopt, kind)(self.model.parameters(), **{**defaults, **options})
        self.schedule = ExponentialLR(self.optimizer, 0.7)
        self.scaler = GradScaler("cpu", init_scale=scale, growth_interval=2) if scale is not None else None
        self.norms: list[Tensor] = []
        self.held = held
        if held:
            waiting = {"overlap_forward": overlap, "waiting_gradients": 3}
            self.release = shardopt.release_gradients(
                self.model, self.optimizer, micro_batches=brought or micro_batches, **waiting
            )

    def loss(self, number: int) -> Tensor:
        loss = self.loss_of(self.model, number) / self.micro_batches
        return loss if self.scaler is None else self.scaler.scale(loss)

    def backward(self, step: int) -> None:
        added: dict[Tensor, Tensor] = {}
        for micro in range(self.micro_batches):
            self.loss(10 * step + micro).backward()
            for param in self.model.parameters() if self.sums else ():
                if param.grad is not None:
                    added[param] = added[param] + param.grad if param in added else param.grad.clone()
                    param.grad = None
        for param, gradient in added.items():
            param.grad = gradient

    def step(self, step: int) -> None:
        self.backward(step)
        if self.scaler is not None and self.max_norm is not None:
            self.scaler.unscale_(self.optimizer)
        if self.max_norm is not None:
            self.clip()
        self.update()
        self.schedule.step()

    def run(self, steps: int = STEPS) -> None:
        for step in range(steps):
            self.step(step)

    def update(self) -> None:
        """The optimizer's step, by the scaler if there is one, and its zero_grad()."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()

    def clip(self) -> None:
        norm = shardopt.clip_grad_norm_(
            self.model.parameters(), self.max_norm or 1e-3, self.norm_type, optimizer=self.optimizer
        )
        self.norms.append(norm)

    def evaluate(self) -> None:
        with torch.no_grad():
            self.norms.append(self.model(batch(99)))

    def result(self) -> Snapshot:
        self.optimizer.synchronize()
        scale = {} if self.scaler is None else {"scale": torch.tensor(self.scaler.get_scale())}
        norms = {f"norm {i}": norm for i, norm in enumerate(self.norms)}
        return {**everything(self.optimizer), **norms, **scale}


Drive = Callable[[Loop], object]


def compare(
    drive: Drive = Loop.run, make: Callable[[], nn.Module] = Layers, *, chunk: int = 1 << 14, **options: Any
) -> None:
    """Drives a loop whose gradients are held and one whose are not, and demands that they end with the same bits.

    ``chunk`` bytes are copied at a time.
    """
    results = []
    for held in (True, False):
        with offload_from_cpu(chunk), slow_steps(0.002):
            loop = Loop(held, model=make(), **copy.deepcopy(options))
            drive(loop)
            results.append(loop.result())
    assert_same(*results)
