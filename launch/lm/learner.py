"""The training loop's interface to a model and its optimizer, independent of the backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lm.model import Transformer
from lm.options import Config
from lm.runtime import Ranks


class Learner(ABC):
    """A model and its optimizer, spread over the ranks. Each backend is a class.

    Attributes:
        needs_group: whether the backend runs over a process group; other backends run in one process.
        releases_gradients: whether the backend can step parameters during the backward pass.
        orders_gradients: whether gradients can be summed in the order of the micro-batches.
        module: the wrapped model, to call for a forward pass.
        optimizer: the optimizer, whose param groups have the learning rates.
    """

    needs_group: ClassVar[bool] = True
    releases_gradients: ClassVar[bool] = False
    orders_gradients: ClassVar[bool] = False

    module: nn.Module
    optimizer: Optimizer

    @abstractmethod
    def __init__(self, model: Transformer, ranks: Ranks, config: Config) -> None:
        """Spreads a model, the bare one on the CPU, over the ranks, and makes the optimizer."""

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
