"""A task of the study: its model, its data, and the digest that tells one definition from another."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

#: In the order of the tables.
TASKS = ("bytes", "tokens", "finetune", "finetune_lora", "recommender", "long")
SIZES = ("small", "large")

#: Hyper-parameters that all tasks and optimizers share, where a rule has them.
BETAS = (0.9, 0.999)
EPS = 1e-8
WEIGHT_DECAY = 0.01
WARMUP = 0.1
LEAST_LR = 0.1


class Problem(ABC):
    """Model and data of a task. Weights and batches depend on the seed alone, not on the optimizer.

    Attributes:
        fingerprint: digest of the data.
    """

    fingerprint: str

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """A model with float32 weights on the CPU; frozen parameters do not require gradients."""

    @abstractmethod
    def loss(self, model: nn.Module, seed: int, step: int) -> Tensor:
        """Training loss of a step, from 1: float32, ()."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> float:
        """Held-out loss in nats."""


@dataclass(frozen=True)
class Task:
    """A task at one size.

    Attributes:
        name: its name, and that of its file of results.
        settings: all numbers that define model and data.
        steps: optimizer steps of a run.
        lr: AdamW's peak learning rate, tuned with float32 state.
        load: (settings, folder for cached files) -> problem.
        quantize_from: parameters with fewer elements keep float32 state.
        seeds: how many runs of each optimizer the study makes unless told.
        micro_batches: backward passes of a step, of a batch each.
        clip: norm that gradients are clipped to, or None.
        marks: shares of the steps after which a run is looked at: held-out loss and moments.
    """

    name: str
    settings: Mapping[str, Any]
    steps: int
    lr: float
    load: Callable[[Mapping[str, Any], Path], Problem]
    quantize_from: int = 4096
    seeds: int = 20
    micro_batches: int = 1
    clip: float | None = None
    marks: tuple[float, ...] = ()

    @property
    def marked_steps(self) -> tuple[int, ...]:
        """The steps after which a run is looked at."""
        return tuple(round(share * self.steps) for share in self.marks)

    def digest(self, problem: Problem) -> str:
        """Results with one digest can be compared, others cannot: settings, data and the version of torch."""
        parts = {
            "name": self.name,
            "settings": dict(self.settings),
            "steps": self.steps,
            "lr": self.lr,
            "quantize_from": self.quantize_from,
            "shared": [BETAS, EPS, WEIGHT_DECAY, WARMUP, LEAST_LR],
            "data": problem.fingerprint,
            "torch": torch.__version__,
        }
        if self.micro_batches > 1 or self.clip is not None:
            parts["gradients"] = [self.micro_batches, self.clip]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def task_of(name: str, size: str) -> Task:
    """The task of this name, from the module of the same name."""
    found: Task = importlib.import_module(f"quality.tasks.{name}").task(size)
    return found


def lr_factor(step: int, steps: int) -> float:
    """The learning rate of a step, from 1, as a share of the peak: linear warm-up, then a cosine."""
    warmup = round(WARMUP * steps)
    if step <= warmup:
        return step / warmup
    done = (step - warmup) / (steps - warmup)
    return LEAST_LR + (1 - LEAST_LR) * (1 + math.cos(math.pi * done)) / 2


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
