"""The run: check the input, resume, train, evaluate, save."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardopt
from lm import checkpoint, data, metrics, model, runtime
from lm.backends import Engine, Learner
from lm.errors import UserError
from lm.options import Config

# Optimizer steps at the start of a run that are not timed.
_UNTIMED_STEPS = 3
_SAY_EVERY = 10.0  # seconds


def run(config: Config) -> dict[str, Any]:
    """Trains, and returns the summary that rank 0 writes to ``summary.json``.

    Raises:
        UserError: an option, the text or the checkpoint cannot be used, or an output folder cannot be made.
        RanksLost: another rank is gone.
    """
    trainer = Trainer(config)
    group = nullcontext() if config.backend == "single" else runtime.process_group(trainer.ranks, config.timeout)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.use_deterministic_algorithms(True)
    with group:
        summary = trainer.run()
        del trainer  # DDP's last reference to a group that is destroyed would wait for gloo's threads with the GIL
    return summary


class Trainer:
    """One rank's part of a run. Making it reads and checks all input, as far as one rank alone can."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.ranks = ranks = runtime.discover(config.device)
        # Forward and backward passes of a step, over all ranks, and windows of each.
        self.micro_batches = config.micro_batches if config.ordered else ranks.world_size * config.accumulate
        self.micro_batch = config.batch // self.micro_batches
        if config.batch % self.micro_batches or self.micro_batches % ranks.world_size:
            raise UserError(
                f"micro-batches: got {self.micro_batches} on {ranks.world_size} ranks and a batch of {config.batch}, "
                "expected a multiple of the ranks that divides the batch; change one of the three"
            )
        if config.backend == "single" and ranks.world_size > 1:
            raise UserError(f"backend single runs one process, not {ranks.world_size}")
        self.model_config = config.model
        self.corpus = data.load(config.data, config.heldout)
        for name, text in (("training", self.corpus.train), ("held-out", self.corpus.heldout)):
            if len(text) <= config.context:
                raise UserError(f"the {name} text has {len(text)} bytes, too few for a context of {config.context}")
        self.resumed = checkpoint.find(config.resume, config.checkpoints) if config.resume else None
        self.header = checkpoint.read_header(self.resumed) if self.resumed else {}
        self.start: int = self.header.get("step", 0)
        if self.start > config.last_step:
            raise UserError(f"checkpoint {self.resumed} is beyond the last step {config.last_step}")
        existing = checkpoint.complete(config.checkpoints) if config.checkpoint_interval else []
        if existing and int(existing[-1].name.removeprefix("step-")) > self.start:
            later = f"{existing[-1].name}, later than this run's start at step {self.start}"
            raise UserError(f"{config.checkpoints} holds {later}: --resume it, or choose another --output")
        try:
            config.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {config.checkpoints}: {error.strerror}") from error
        self.metrics = Path(config.output, "metrics.jsonl")
        self.optimizer_seconds: list[float] = []
        self.saved: Path | None = self.resumed
        self.verified: dict[str, int] | None = None

    def run(self) -> dict[str, Any]:
        """Resumes, trains, evaluates and saves."""
        config = self.config
        network = model.build(self.model_config, config.context, config.seed, config.stored, config.dropout)
        self.numel = sum(parameter.numel() for parameter in network.parameters())
        self.learner = (Engine if config.backend == "deepspeed" else Learner)(network, self.ranks, config)
        self.peak_lrs = [group["lr"] for group in self.learner.optimizer.param_groups]
        self._say(f"data: {self.corpus.description}")
        self._resume()
        if self.ranks.rank == 0:
            metrics.begin(self.metrics, self.start)
        said = time.perf_counter()
        for step in range(self.start + 1, config.last_step + 1):
            row = self._train_step(step)
            last = step == config.last_step
            if last or step % config.log_interval == 0:
                row["train_loss"] = _mean(row["train_loss"])
                self._record(row)
                if time.perf_counter() > said + _SAY_EVERY:
                    said = time.perf_counter()
                    self._say(f"step {step} of {config.last_step}: loss {row['train_loss']:.4f}")
            if not last and config.eval_interval and step % config.eval_interval == 0:
                self._record({"step": step, "heldout_loss": self._heldout_loss()})
            if config.checkpoint_interval and (last or step % config.checkpoint_interval == 0):
                self._save(step)
        heldout = self._heldout_loss()
        self._record({"step": config.last_step, "heldout_loss": heldout})
        summary = self._summary(heldout)
        path = Path(config.output, "summary.json")
        if self.ranks.rank == 0:
            metrics.write_summary(path, summary)
        self._say(f"held-out loss {heldout:.4f} nats per byte; see {path}")
        runtime.all_sum([0.0])  # all ranks end after rank 0 has written
        return summary

    def _say(self, line: str) -> None:
        if self.ranks.rank == 0:
            print(line, flush=True)

    def _record(self, row: metrics.Row) -> None:
        if self.ranks.rank == 0:
            metrics.append(self.metrics, row)

    def _resume(self) -> None:
        if self.resumed is None:
            return
        checkpoint.load(self.resumed, self.learner)
        saved_by, note = self.header["world_size"], ""
        if self.config.verify:
            found = self.verified = {"world_size": saved_by, **self._verify(self.resumed)}
            note = f"; all {found['tensors']} tensors are bit for bit as saved, {found['codes']} of codes among them"
        self._say(f"resumed {self.resumed}: saved by {saved_by} ranks, now {self.ranks.world_size}{note}")
        if self.header["data"] != self.corpus.fingerprint:
            self._say("note: the text is not the one that the checkpoint was trained on")

    def _verify(self, path: Path) -> dict[str, int]:
        """Saves what was loaded again, and compares the two checkpoints; counts the tensors."""
        again = checkpoint.save(Path(self.config.output, "verify"), self.header, self.learner, keep=1)
        saved, loaded = checkpoint.contents(path), checkpoint.contents(again)
        runtime.all_sum([0.0])  # all ranks have read it
        if self.ranks.rank == 0:
            shutil.rmtree(again.parent)
        wrong = [name for name in sorted(saved.keys() | loaded.keys()) if saved.get(name) != loaded.get(name)]
        if wrong:
            raise UserError(
                f"checkpoint {path}: {len(wrong)} of {len(saved)} tensors are not as saved, such as {wrong[0]}"
            )
        kinds = {kind: sum(name.endswith(f"_{kind}") for name in loaded) for kind in ("codes", "scales")}
        return {"tensors": len(loaded), **kinds}

    def _train_step(self, step: int) -> dict[str, Any]:
        """Takes one optimizer step and returns its metrics, with this rank's losses, by micro-batch."""
        config = self.config
        factor = lr_factor(step, config)
        for group, peak in zip(self.learner.optimizer.param_groups, self.peak_lrs, strict=True):
            group["lr"] = peak * factor
        offsets = data.train_offsets(self.corpus, config.context, config.batch, config.seed, step)
        losses = torch.zeros(self.micro_batches, device=self.ranks.device)
        numbers = range(self.ranks.rank, self.micro_batches, self.ranks.world_size)
        for number in numbers:
            if config.dropout:
                torch.manual_seed(data.seed_of(config.seed, step, number))
            windows = offsets[number * self.micro_batch :][: self.micro_batch]
            with self.learner.micro_step(last=number == numbers[-1]):
                loss = self._losses(self.corpus.train, windows).mean()
                self.learner.backward(loss if config.ordered else loss / len(numbers))
            losses[number] = loss.detach()
        norm, seconds = self.learner.step()
        self.optimizer_seconds.append(seconds)
        return {
            "step": step,
            "train_loss": losses.tolist(),
            "lr": config.lr * factor,
            "grad_norm": norm,
            "optimizer_ms": 1e3 * seconds,
        }

    def _losses(self, text: data.Bytes, offsets: list[int]) -> Tensor:
        """Mean loss of each window of a text, in nats per byte: float32, (windows,)."""
        inputs, targets = (part.to(self.ranks.device) for part in data.windows(text, offsets, self.config.context))
        with self.learner.autocast():
            logits = self.learner.module(inputs)
        each = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        return each.view_as(targets).mean(1)

    @torch.no_grad()
    def _heldout_loss(self) -> float:
        """Mean loss over the held-out windows, which do not depend on the number of ranks."""
        ranks, size = self.ranks, self.micro_batch
        offsets = data.heldout_offsets(self.corpus, self.config.context, self.config.eval_windows)
        losses = [0.0] * len(offsets)
        self.learner.module.eval()
        # Every rank makes as many forward passes as rank 0, because forward passes are collective, all of full batches,
        # so that a loss does not depend on them.
        for first in range(0, len(offsets), size * ranks.world_size):
            mine = range(len(offsets))[first + ranks.rank * size :][:size]
            padded = [*mine, *[0] * (size - len(mine))]
            of_batch = self._losses(self.corpus.heldout, [offsets[i] for i in padded])
            losses[mine.start : mine.stop] = of_batch[: len(mine)].tolist()
        self.learner.module.train()
        return _mean(losses)

    def _save(self, step: int) -> None:
        config = self.config
        header = {
            "step": step,
            "options": dataclasses.asdict(config),
            "data": self.corpus.fingerprint,
            "world_size": self.ranks.world_size,
        }
        self.saved = checkpoint.save(config.checkpoints, header, self.learner, config.keep_checkpoints)

    def _summary(self, heldout: float) -> dict[str, Any]:
        config = self.config
        with self.learner.held() as (_, optimizer):
            report = shardopt.memory_report(optimizer)
        kinds = ("parameters", "state", "scales", "master_weights")
        held = [float(getattr(report.host, kind) + getattr(report.device, kind)) for kind in kinds]
        numel, weights, *state = runtime.all_sum([report.numel, *held])  # of all ranks
        timed = self.optimizer_seconds[_UNTIMED_STEPS:] or self.optimizer_seconds
        return {
            "heldout_loss": heldout,
            "codec": self.learner.optimizer.param_groups[0]["codec"],
            "weight_bytes_per_parameter": weights / numel,
            "state_bytes_per_parameter": sum(state) / numel,
            "optimizer_ms": 1e3 * statistics.median(timed) if timed else None,
            "parameters": self.numel,
            "world_size": self.ranks.world_size,
            "verified": self.verified,
            "checkpoint": str(self.saved) if self.saved else None,
            "options": dataclasses.asdict(config),
        }


def _mean(losses: list[float]) -> float:
    """The mean over all ranks, of which each has some losses and zeros for the others', in no rank's order."""
    return math.fsum(runtime.all_sum(losses)) / len(losses)


def lr_factor(step: int, config: Config) -> float:
    """The learning rate of `step` (from 1) as a share of the peak: linear warm-up, then a cosine."""
    if step <= config.warmup:
        return step / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.min_lr + (1 - config.min_lr) * (1 + math.cos(math.pi * done)) / 2
