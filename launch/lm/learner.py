"""A model and its optimizer, as the training loop sees them, independent of the backend."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardopt
from lm import optimizers, runtime
from lm.model import Transformer
from lm.options import Config
from lm.runtime import Ranks


class Learner:
    """A model and its optimizer. This class has both in one process; other backends are its subclasses.

    Args:
        model: the bare model, on the CPU.
        ranks: this rank.
        config: the options.

    Attributes:
        needs_group: whether the backend runs over a process group; other backends run in one process.
        releases_gradients: whether the backend can step parameters during the backward pass.
        orders_gradients: whether gradients can be summed in the order of the micro-batches.
        autocasts: whether forward passes need autocast to compute in bfloat16; other backends convert parameters.
        module: the wrapped model, to call for a forward pass.
        optimizer: the optimizer, whose param groups have the learning rates.
    """

    needs_group: ClassVar[bool] = False
    releases_gradients: ClassVar[bool] = True
    orders_gradients: ClassVar[bool] = True
    autocasts: ClassVar[bool] = True

    module: nn.Module
    optimizer: Optimizer

    def __init__(self, model: Transformer, ranks: Ranks, config: Config) -> None:
        self._config = config
        self._device = ranks.device
        matrices = optimizers.matrices(model)
        self.module = self.wrap(model.to(ranks.device), ranks)
        if config.ordered:
            shardopt.comm.ordered_gradients(
                self.module,
                micro_batches=config.micro_batches,
                wire=config.wire,  # type: ignore[arg-type]
            )
        groups = optimizers.groups(config, self.module, matrices)
        self.optimizer = optimizers.build(config, groups, self.make_optimizer)
        if config.release_gradients:
            shardopt.release_gradients(
                self.module,
                self.optimizer,  # type: ignore[arg-type]
                overlap_forward=config.overlap_forward,
                waiting_gradients=config.waiting_gradients,
                micro_batches=config.accumulate,
            )

    def wrap(self, model: Transformer, ranks: Ranks) -> nn.Module:
        """Wraps the model, which is on the rank's device."""
        return model

    def make_optimizer(self, kind: type[Optimizer], groups: optimizers.Groups, options: dict[str, Any]) -> Optimizer:
        """Makes the optimizer of the wrapped model's parameters."""
        return optimizers.plain(kind, groups, options)

    def held(self) -> AbstractContextManager[tuple[nn.Module, Optimizer]]:
        """Yields the model and the optimizer, with all parameters and state that this rank holds."""
        return nullcontext((self.module, self.optimizer))

    def autocast(self) -> AbstractContextManager[None]:
        """A context for forward passes in the compute dtype."""
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._config.mixed and self.autocasts)

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backward passes accumulate gradients without exchanging them."""
        return getattr(self.module, "no_sync", nullcontext)()  # DDP's and FSDP1's modules have it

    def micro_step(self, last: bool) -> AbstractContextManager[None]:
        """A context for one accumulation step's forward and backward pass; :meth:`step` follows the `last` one."""
        return nullcontext() if last or self._config.ordered else self.no_sync()

    def backward(self, loss: Tensor) -> None:
        """Accumulates the gradients of this rank's part of a step's loss."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> tuple[float | None, float]:
        """Clips the gradients, takes the optimizer's step, and frees the gradients.

        Returns:
            The gradients' norm before clipping, or None if no norm was computed; and the optimizer's seconds.
        """
        limit = self._config.clip
        # Held gradients are in the host's memory: the optimizer multiplies them as it reads them.
        holder: Any = self.optimizer if self._config.overlap_forward else None
        norm = shardopt.clip_grad_norm_(self.module.parameters(), limit, optimizer=holder).item() if limit else None
        seconds = runtime.timed(self._device, self.optimizer.step)
        self.optimizer.zero_grad()
        return norm, seconds
