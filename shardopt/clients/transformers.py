"""Callbacks for Hugging Face's Trainer: checkpoints that load on any number of ranks, and reproducible clipping.

Trainer's own optimizer files work, too, on one process and under DistributedDataParallel, FSDP1, FSDP2 and DeepSpeed;
but FSDP1's are four times as large, and DeepSpeed's load only on the same number of ranks. Importing this module
replaces ``transformers.trainer.deepspeed_load_checkpoint``.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers.trainer as _trainer
from accelerate.state import AcceleratorState
from accelerate.utils import save_fsdp_model
from torch.nn import Module
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainingArguments

from shardopt import checkpoint, clip_grad_norm_
from shardopt.optim import ShardedOptimizer

#: Folder of the portable checkpoint in Trainer's folders ``checkpoint-<step>``.
FOLDER = "shardopt"


class PortableCheckpoint(TrainerCallback):  # type: ignore[misc]
    """Saves and loads by :mod:`shardopt.checkpoint`, in place of Trainer's optimizer file, on any number of ranks.

    For one process, DistributedDataParallel, FSDP1, FSDP2 and DeepSpeed, with ``save_only_model=True``, so that Trainer
    does not write its own optimizer file. In addition to the model and the optimizer this saves the state of the
    learning rate schedule and of the loss scaler, and each rank's random numbers. Usage:
    ``Trainer(..., callbacks=[PortableCheckpoint()])``, then ``trainer.train(resume_from_checkpoint=...)`` as usual.
    Trainer restores random numbers if the number of ranks is unchanged. DeepSpeed's loss scale is not saved.

    Args:
        resume_from: the checkpoint folder given to ``trainer.train(resume_from_checkpoint=...)``, which Trainer does
            not tell its callbacks. Default: ``checkpoint-<step>`` in the output folder. Not needed with DeepSpeed.
    """

    def __init__(self, resume_from: str | os.PathLike[str] | None = None) -> None:
        self._resume_from = resume_from

    def on_init_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Raises ValueError if ``save_only_model`` is False, so that Trainer would write an optimizer file, too."""
        if not args.save_only_model:
            raise ValueError(
                "got save_only_model=False with PortableCheckpoint, which saves the optimizer, expected "
                "TrainingArguments(save_only_model=True)"
            )

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Saves model, optimizer, schedule, loss scaler and random states, when Trainer saves. All ranks call this.

        Raises:
            CheckpointError: see :func:`shardopt.checkpoint.save`.
        """
        folder, model, lr_scheduler = _checkpoint_folder(args, state), kwargs["model"], kwargs["lr_scheduler"]
        stateful = _schedule_and_scaler(kwargs["optimizer"], lr_scheduler)
        extra: dict[str, Any] = {name: _saved_state(value) for name, value in stateful.items()}
        checkpoint.save(folder / FOLDER, model, kwargs["optimizer"], **extra)
        plugin = getattr(AcceleratorState(), "fsdp_plugin", None)
        if plugin is not None:  # Trainer resumes a sharded model only from a file that it does not write here
            save_fsdp_model(plugin, AcceleratorState(), model, str(folder))
        if _uses_deepspeed() and args.should_save:  # a file that Trainer reads by itself when it resumes
            torch.save(lr_scheduler.state_dict(), folder / _trainer.SCHEDULER_NAME)
        _trainer.Trainer._save_rng_state(SimpleNamespace(args=args), str(folder))  # read by Trainer, too

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Loads the checkpoint if training is resumed, except with DeepSpeed. All ranks call this.

        Raises:
            ValueError: this is a run of a hyper-parameter search.
            CheckpointError: see :func:`shardopt.checkpoint.load`.
        """
        if state.is_hyper_param_search:
            raise ValueError(
                "got a hyper-parameter search with PortableCheckpoint, expected a single run, as Trainer does not tell "
                "callbacks the folders of a search; leave the callback out"
            )
        if not state.global_step or _uses_deepspeed():  # a new run; or Trainer itself calls _load_into_engine
            return
        folder = _checkpoint_folder(args, state) if self._resume_from is None else Path(self._resume_from)
        loaded = checkpoint.load(folder / FOLDER, kwargs["model"], kwargs["optimizer"])
        for name, stateful in _schedule_and_scaler(kwargs["optimizer"], kwargs["lr_scheduler"]).items():
            if name in loaded.extra:
                stateful.load_state_dict(loaded.extra[name])


class ClipGradNorm(TrainerCallback):  # type: ignore[misc]
    """Clips gradients by :func:`shardopt.clip_grad_norm_`, whose norm has the same bits on any number of ranks.

    For one process, DistributedDataParallel, FSDP1 and FSDP2, with ``max_grad_norm=0``, so that Trainer does not clip.
    Usage: ``Trainer(..., callbacks=[ClipGradNorm(1.0)])``.

    Args:
        max_norm: the largest norm that the gradients of all parameters may have.
    """

    def __init__(self, max_norm: float) -> None:
        self._max_norm = max_norm

    def on_init_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Raises ValueError if Trainer would clip, too (``max_grad_norm`` is not 0), or DeepSpeed would."""
        if args.max_grad_norm:
            raise ValueError(
                f"got max_grad_norm={args.max_grad_norm} with ClipGradNorm, expected "
                "TrainingArguments(max_grad_norm=0.0): gradients would be clipped twice"
            )
        if _uses_deepspeed():
            raise ValueError(
                "got DeepSpeed with ClipGradNorm, expected another way of sharding: DeepSpeed clips by itself; "
                'leave the callback out, and set max_grad_norm or "gradient_clipping"'
            )

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: Any, control: Any, *, model: Module, optimizer: Optimizer, **kwargs: Any
    ) -> None:
        """Unscales gradients if there is a loss scaler, and clips them by their norm. All ranks call this."""
        scaler, inner = getattr(optimizer, "scaler", None), getattr(optimizer, "optimizer", optimizer)
        if scaler is not None:
            scaler.unscale_(inner)
        multiplies_in_step = isinstance(inner, ShardedOptimizer)  # others' gradients are multiplied here, in place
        clip_grad_norm_(model.parameters(), self._max_norm, optimizer=inner if multiplies_in_step else None)


def _uses_deepspeed() -> bool:
    """Whether Trainer trains by DeepSpeed."""
    return getattr(AcceleratorState(), "deepspeed_plugin", None) is not None


_original_load = _trainer.deepspeed_load_checkpoint


def _load_into_engine(engine: Any, path: str, **kwargs: Any) -> None:
    """Replaces Trainer's loading of DeepSpeed checkpoints: loads shardopt's checkpoint if the folder contains one."""
    if not (Path(path) / FOLDER).is_dir():
        _original_load(engine, path, **kwargs)
        return
    loaded = checkpoint.load(Path(path) / FOLDER, engine)
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(loaded.extra["lr_scheduler"])


_trainer.deepspeed_load_checkpoint = _load_into_engine


def _checkpoint_folder(args: TrainingArguments, state: Any) -> Path:
    """Trainer's folder for the checkpoint of the current step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _schedule_and_scaler(optimizer: Any, lr_scheduler: Any) -> dict[str, Any]:
    """The objects besides model and optimizer whose state is saved: the schedule, and the loss scaler if any."""
    scaler = getattr(optimizer, "scaler", None)  # of Accelerate's wrapper
    return {"lr_scheduler": lr_scheduler} | ({} if scaler is None else {"scaler": scaler})


def _saved_state(stateful: Any) -> dict[str, Any]:
    """The state dict to save: without MultiStepLR's milestones, which have integer keys and come from its arguments."""
    return {key: value for key, value in stateful.state_dict().items() if key != "milestones"}
