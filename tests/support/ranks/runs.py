"""Short runs that come out the same in whatever way parameters are sharded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from helpers import CASES
from ranks.flat import Change, gathered, gathered_tensors, is_flat, pieces
from ranks.models import WAYS, loss_of, make_bare, make_batch, make_net, named_parameters, set_gradients
from ranks.snapshot import Snapshot, in_full, snapshot
from shardopt.optim import ShardedOptimizer

SMALL = {"min_quantized_numel": 64}


def make_optimizer(
    way: str, model: nn.Module, rule: str = "adamw", params: Any = None, **options: Any
) -> ShardedOptimizer:
    """The optimizer for a model sharded in one of the ``WAYS``; under "zero" the one around it."""
    case, options, params = CASES[rule], {**SMALL, **options}, params or model.parameters()
    if way == "zero":
        return ZeroRedundancyOptimizer(params, optimizer_class=case.make, **options)  # type: ignore[arg-type]
    return case.make(params, **options)


def trained(
    way: str, steps: int, rule: str = "adamw", *, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[nn.Module, ShardedOptimizer]:
    """The model sharded in one of the ``WAYS`` and its optimizer, after so many :func:`step_with`."""
    model = WAYS[way](make_net(dtype, seed))
    optimizer = make_optimizer(way, model, rule, **options)
    for step in range(steps):
        step_with(model, optimizer, step)
    return model, optimizer


def single(steps: int, rule: str = "adamw", **options: Any) -> Snapshot:
    """The snapshot of the unsharded run after so many steps; each is taken once per process."""
    return _single(steps, rule, tuple(options.items()))


@lru_cache(maxsize=64)
def _single(steps: int, rule: str, options: tuple[tuple[str, Any], ...]) -> Snapshot:
    return snapshot_of(*trained("single", steps, rule, **dict(options)))


def step_with(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Takes the run's step of this number."""
    set_gradients(model, step)
    optimizer.step()
    optimizer.zero_grad()


def snapshot_of(model: nn.Module, optimizer: torch.optim.Optimizer, on_all: bool = True) -> Snapshot:
    """The run in full, on all ranks or on the first; all ranks must call this."""
    if is_flat(model):
        return gathered(model, optimizer, on_all)
    return snapshot(named_parameters(model), optimizer, on_all)


class Run:
    """A run under a layout, and what features do with it; also the run that it is compared with.

    Attributes:
        way: one of the ``WAYS``.
        is_tested: False for the run to compare with, which leaves out what must not matter.
        path: a folder of all ranks.
        model: sharded that way.
        optimizer: of the model.
        number: of the next step.
        noted: other results, in full.
    """

    model: nn.Module
    optimizer: Any
    number: int

    def __init__(self, way: str, is_tested: bool, path: Path, of: Run | None = None) -> None:
        self.way, self.is_tested, self.path = way, is_tested, path
        self.bare = make_bare(way) if of is None else of.bare
        self.noted: Snapshot = {}
        self._whole_gradients: dict[int, Snapshot] = {} if of is None else of._whole_gradients

    @property
    def is_single(self) -> bool:
        return self.way == "single"

    @property
    def has_own_gradients(self) -> bool:
        """Whether a single run has to be given this one's."""
        return bool(self._whole_gradients)

    @property
    def inner(self) -> ShardedOptimizer:
        """The optimizer inside a ZeroRedundancyOptimizer, or the optimizer."""
        return getattr(self.optimizer, "optim", self.optimizer)

    def begin(self, rule: str = "adamw", *, dtype: torch.dtype | None = None, seed: int = 0, **options: Any) -> None:
        """Makes model and optimizer."""
        self.shard(self.bare(dtype=dtype, seed=seed))
        self.optimizer = make_optimizer(self.way, self.model, rule, **options)

    def shard(self, bare: nn.Module) -> None:
        """Makes this model the run's."""
        self.model, self.number = WAYS[self.way](bare), 0

    def tensors(self) -> dict[str, Tensor]:
        """The optimizer's parameters by the names of the bare model's: under some layouts one stands for several."""
        if is_flat(self.model):
            return {piece.name: piece.tensor for piece in pieces(self.model)}
        return named_parameters(self.model)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.set_gradients()
            self.step()

    def set_gradients(self, change: Change = lambda place, whole: whole) -> None:
        set_gradients(self.model, self.number, change)
        for param in self.model.parameters():
            if not param.requires_grad:
                param.grad = None

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1

    def backward(self, batches: int = 1) -> None:
        """Gradients of own batches, summed before ranks share them out; a single run takes those of all ranks."""
        if self.is_single:
            for name, param in self.model.named_parameters():
                param.grad = self._whole_gradients[self.number][name].clone()
            return
        for batch in range(batches):
            is_last = batch == batches - 1
            if hasattr(self.model, "set_requires_gradient_sync"):
                self.model.set_requires_gradient_sync(is_last)
            with nullcontext() if is_last or not hasattr(self.model, "no_sync") else self.model.no_sync():
                rank = 0 if "tp" in self.way else dist.get_rank()
                loss_of(self.model, make_batch(10 * self.number + batch, rank)).backward()

    def keep_gradients(self) -> None:
        """Lets the single run step with the gradients that all ranks have now."""
        if not self.is_single:
            gradients = {param: param.grad for param in self.model.parameters() if param.grad is not None}
            self._whole_gradients[self.number] = self.in_full(gradients)

    def in_full(self, tensors: Mapping[Tensor, Tensor]) -> Snapshot:
        """Tensors by the parameters that they are like, in full and by name; all ranks must call this."""
        if is_flat(self.model):
            return gathered_tensors(self.model, tensors)
        return {name: in_full(tensors[param].detach()).clone() for name, param in named_parameters(self.model).items()}

    def results(self, on_all: bool = True) -> Snapshot:
        """All that the run ends with, on all ranks or on the first; all ranks must call this."""
        return {**self.noted, **snapshot_of(self.model, self.optimizer, on_all)}
