"""Lightning: FSDP1 with the portable checkpoint, which loads under any sharding and has the size of 8-bit state.

``ddp``, ``ModelParallelStrategy`` (FSDP2) and DeepSpeed need no part of shardopt's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch.optim import Optimizer

from shardopt import checkpoint

_FOLDER = "shardopt"  # folder of the model and the optimizer in Lightning's checkpoint, which is a folder, too
_OTHERS = "lightning.pt"  # file of everything else in Lightning's checkpoint


class PortableFSDPStrategy(FSDPStrategy):  # type: ignore[misc]
    """``FSDPStrategy`` whose checkpoints are folders with one of :mod:`shardopt.checkpoint`, for any number of ranks.

    Usage: ``Trainer(strategy=PortableFSDPStrategy(...))`` with the arguments of ``FSDPStrategy``, and one optimizer.
    """

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty: :meth:`save_checkpoint` saves the model."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Empty: :meth:`save_checkpoint` saves the optimizer."""
        return {}

    def save_checkpoint(
        self, checkpoint_: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Saves the model and the optimizer, and the rest of the training's state beside them. All ranks call this.

        Raises:
            TypeError: ``storage_options`` is not None.
            ValueError: the strategy has more than one optimizer.
            CheckpointError: see :func:`shardopt.checkpoint.save`.
        """
        if storage_options is not None:
            raise TypeError(f"got storage_options={storage_options!r}, expected None; the checkpoint is a local folder")
        path = Path(self.broadcast(filepath))
        path.mkdir(parents=True, exist_ok=True)
        optimizer = self._only_optimizer() if "optimizer_states" in checkpoint_ else None  # save_weights_only
        checkpoint.save(path / _FOLDER, self.model, optimizer)
        if self.global_rank == 0:
            torch.save(checkpoint_, path / _OTHERS)
        self.barrier()

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads the model and the optimizer, and returns the rest. All ranks call this.

        Raises:
            ValueError: the strategy has more than one optimizer.
            CheckpointError: see :func:`shardopt.checkpoint.load`.
        """
        path = Path(self.broadcast(checkpoint_path))
        checkpoint.load(path / _FOLDER, self.model, self._only_optimizer())
        others: dict[str, Any] = torch.load(path / _OTHERS, map_location="cpu", weights_only=weights_only)
        return others

    def _only_optimizer(self) -> Optimizer | None:
        """The optimizer; None without one, as in validation."""
        if len(self.optimizers) > 1:
            raise ValueError(f"got {len(self.optimizers)} optimizers, expected one; give it several param groups")
        return self.optimizers[0] if self.optimizers else None
