"""A model and its optimizer, spread over the ranks: what the training loop works with, whatever the backend."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm import runtime

Context = Callable[[], AbstractContextManager[None]]


class Learner(ABC):
    """A model and its optimizer.

    Attributes:
        module: what to call.
    """

    module: nn.Module

    @property
    @abstractmethod
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Any, ...]:
        """What ``shardopt.checkpoint.save`` and ``load`` take."""

    @abstractmethod
    def held(self) -> AbstractContextManager[tuple[nn.Module, Optimizer]]:
        """The model and the optimizer, with all that they hold on this rank."""

    def autocast(self) -> AbstractContextManager[None]:
        """Inside it forward computes in the compute dtype."""
        return nullcontext()

    @abstractmethod
    def micro_step(self, last: bool) -> AbstractContextManager[None]:
        """Holds one accumulation step's forward and backward pass; after the `last` one comes :meth:`step`."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of this rank's part of a step's loss."""

    @abstractmethod
    def step(self) -> tuple[float | None, float]:
        """Clips the gradients, steps and drops them.

        Returns:
            The gradients' norm, where it was taken, and the seconds that the optimizer took.
        """


@dataclass(frozen=True)
class Parallel:
    """A model ready to train.

    Attributes:
        module: what to call, and whose parameters the optimizer takes.
        no_sync: inside it backward gathers gradients without exchanging them.
        autocast: inside it forward computes in the compute dtype.
        clip: scales the gradients down to a total norm at most as large as it is given, and returns what it was.
    """

    module: nn.Module
    no_sync: Context
    autocast: Context
    clip: Callable[[float], Tensor]


class TorchLearner(Learner):
    """That of PyTorch's backends: model and optimizer are two things."""

    def __init__(self, parallel: Parallel, optimizer: Optimizer, device: torch.device, clip: float) -> None:
        self.module = parallel.module
        self._parallel = parallel
        self._optimizer = optimizer
        self._device = device
        self._clip = clip

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.module, self._optimizer

    @contextmanager
    def held(self) -> Iterator[tuple[nn.Module, Optimizer]]:
        yield self.module, self._optimizer

    def autocast(self) -> AbstractContextManager[None]:
        return self._parallel.autocast()

    def micro_step(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._parallel.no_sync()

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> tuple[float | None, float]:
        norm = self._parallel.clip(self._clip).item() if self._clip else None
        runtime.synchronize(self._device)
        began = time.perf_counter()
        self._optimizer.step()
        runtime.synchronize(self._device)
        seconds = time.perf_counter() - began
        self._optimizer.zero_grad(set_to_none=True)
        return norm, seconds
