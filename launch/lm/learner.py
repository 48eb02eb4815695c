"""The training loop's interface to a model and its optimizer, independent of the backend."""

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
    """A model and its optimizer, spread over the ranks.

    Attributes:
        module: the wrapped model, to call for a forward pass.
    """

    module: nn.Module

    @property
    @abstractmethod
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups of the optimizer."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Any, ...]:
        """The arguments for ``shardopt.checkpoint.save`` and ``load``: model and optimizer, or the engine."""

    @abstractmethod
    def held(self) -> AbstractContextManager[tuple[nn.Module, Optimizer]]:
        """Yields the model and the optimizer, with all parameters and state that this rank holds."""

    def autocast(self) -> AbstractContextManager[None]:
        """A context for forward passes in the compute dtype."""
        return nullcontext()

    @abstractmethod
    def micro_step(self, last: bool) -> AbstractContextManager[None]:
        """A context for one accumulation step's forward and backward pass; :meth:`step` follows the `last` one."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Accumulates the gradients of this rank's part of a step's loss."""

    @abstractmethod
    def step(self) -> tuple[float | None, float]:
        """Clips the gradients, takes the optimizer's step, and frees the gradients.

        Returns:
            The gradients' norm before clipping, or None if no norm was computed; and the optimizer's seconds.
        """


@dataclass(frozen=True)
class Parallel:
    """A model ready to train.

    Attributes:
        module: the wrapped model, whose parameters the optimizer takes.
        no_sync: makes a context in which backward passes accumulate gradients without exchanging them.
        autocast: makes a context for forward passes in the compute dtype.
        clip: (largest norm) -> norm of all gradients before it scaled them down to the largest norm.
    """

    module: nn.Module
    no_sync: Context
    autocast: Context
    clip: Callable[[float], Tensor]


class TorchLearner(Learner):
    """The learner of PyTorch's backends, whose model and optimizer are separate objects."""

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
