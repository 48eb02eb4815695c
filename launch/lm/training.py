"""The training loop: resume, train, evaluate, save."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from lm import checkpoint, data, digests, metrics, model, optimizers, runtime
from lm.backends import BACKENDS
from lm.errors import UserError
from lm.options import Config
from lm.plan import Plan
from shardopt.checkpoint.contents import held_tensors

# Optimizer steps at the start of a run that are not timed.
_UNTIMED_STEPS = 3


def run(plan: Plan) -> dict[str, Any]:
    """Trains, and returns the summary that rank 0 writes to ``summary.json``."""
    config = plan.config
    group = runtime.process_group(plan.ranks, config.timeout) if BACKENDS[config.backend].needs_group else nullcontext()
    with runtime.deterministic() if config.deterministic else nullcontext(), group:
        return Trainer(plan).run()


class Trainer:
    """One rank's part of a run."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.config = config = plan.config
        self.ranks = plan.ranks
        network = model.build(
            plan.model_config,
            config.context,
            config.seed,
            config.stored,
            config.precision == "fp8",
            *((plan.micro_batches, 1) if config.ordered else (self.ranks.world_size, config.accumulate)),
            config.dropout,
        )
        self.numel = sum(parameter.numel() for parameter in network.parameters())
        self.learner = BACKENDS[config.backend](network, self.ranks, config)
        self.peak_lrs = [group["lr"] for group in self.learner.optimizer.param_groups]
        self.metrics = Path(config.output, "metrics.jsonl")
        self.optimizer_seconds: list[float] = []
        self.saved: Path | None = plan.resume
        self.verified: dict[str, int] | None = None

    def run(self) -> dict[str, Any]:
        """Resumes, trains, evaluates and saves."""
        plan, config = self.plan, self.config
        self._say(f"data: {plan.corpus.description}")
        self._resume()
        if self.ranks.first:
            metrics.begin(self.metrics, plan.start)
        progress = tqdm(
            range(plan.start + 1, config.last_step + 1),
            initial=plan.start,
            total=config.last_step,
            disable=not self.ranks.first,
            mininterval=0.5 if sys.stderr.isatty() else 10.0,
        )
        began = time.perf_counter()
        for step in progress:
            row = self._train_step(step)
            last = step == config.last_step
            if last or step % config.log_interval == 0:
                row["train_loss"] = _mean(row["train_loss"])
                progress.set_postfix(loss=f"{row['train_loss']:.3f}", refresh=False)
                self._record(row)
            if not last and config.eval_interval and step % config.eval_interval == 0:
                self._record({"step": step, "heldout_loss": self._heldout_loss()})
            if config.checkpoint_interval and (last or step % config.checkpoint_interval == 0):
                self._save(step)
        seconds = time.perf_counter() - began
        heldout = self._heldout_loss()
        self._record({"step": config.last_step, "heldout_loss": heldout})
        summary = self._summary(heldout, seconds)
        path = Path(config.output, "summary.json")
        if self.ranks.first:
            metrics.plot_losses({"": self.metrics}, Path(summary["plot"]))
            metrics.write_summary(path, summary)
        self._say(f"held-out loss {heldout:.4f} nats per byte; see {path}")
        runtime.all_sum([0.0])  # all ranks end after rank 0 has written
        return summary

    def _say(self, line: str) -> None:
        if self.ranks.first:
            tqdm.write(line)

    def _record(self, row: metrics.Row) -> None:
        if self.ranks.first:
            metrics.append(self.metrics, row)

    def _resume(self) -> None:
        plan = self.plan
        if self.config.checkpoint_interval and self.ranks.first:
            checkpoint.clear_unfinished(self.config.checkpoint_folder)
        if plan.resume is None:
            return
        checkpoint.load(plan.resume, self.learner)
        note = ""
        if self.config.verify:
            self.verified = self._verify(plan.resume, plan.header["digests"])
            note = (
                f"; all {self.verified['tensors']} tensors, {self.verified['codes']} of codes and "
                f"{self.verified['scales']} of scales among them, are bit for bit as saved"
            )
        self._say(
            f"resumed {plan.resume} at step {plan.start}: "
            f"saved by a world of {plan.header['world_size']}, now {self.ranks.world_size}{note}"
        )
        if plan.header["data"] != plan.corpus.fingerprint:
            self._say("note: the text is not the one that the checkpoint was trained on")

    def _digests(self) -> dict[str, str]:
        """Digests of every parameter, buffer and tensor of the optimizer's live state."""
        with self.learner.held() as (module, optimizer):
            return digests.of_tensors(held_tensors(module, optimizer))

    def _verify(self, path: Path, saved: dict[str, str]) -> dict[str, int]:
        loaded = self._digests()
        wrong = [name for name in sorted(saved.keys() | loaded.keys()) if saved.get(name) != loaded.get(name)]
        if wrong:
            raise UserError(
                f"checkpoint {path}: {len(wrong)} of {len(saved)} tensors did not come back as "
                f"saved, {wrong[0]} the first of them"
            )
        return {
            "world_size": self.plan.header["world_size"],
            "tensors": len(loaded),
            "codes": sum(name.endswith("_codes") for name in loaded),
            "scales": sum(name.endswith("_scales") for name in loaded),
        }

    def _train_step(self, step: int) -> dict[str, Any]:
        """Takes one optimizer step and returns its metrics, with this rank's losses, by micro-batch."""
        plan, config = self.plan, self.config
        factor = lr_factor(step, config)
        for group, peak in zip(self.learner.optimizer.param_groups, self.peak_lrs, strict=True):
            group["lr"] = peak * factor
        offsets = data.train_offsets(plan.corpus, config.context, config.batch, config.seed, step)
        losses = torch.zeros(plan.micro_batches, device=self.ranks.device)
        numbers = range(self.ranks.rank, plan.micro_batches, self.ranks.world_size)
        for number in numbers:
            if config.dropout:
                torch.manual_seed(data.seed_of(config.seed, step, number))
            windows = offsets[number * plan.micro_batch :][: plan.micro_batch]
            with self.learner.micro_step(last=number == numbers[-1]):
                loss = self._losses(plan.corpus.train, windows).mean()
                self.learner.backward(loss if config.ordered else loss / len(numbers))
            losses[number] = loss.detach()
        norm, seconds = self.learner.step()
        if not config.release_gradients:  # else the step is part of the backward pass
            self.optimizer_seconds.append(seconds)
        return {
            "step": step,
            "train_loss": losses.tolist(),
            "lr": config.lr * factor,
            "grad_norm": norm,
            "optimizer_ms": 1e3 * self.optimizer_seconds[-1] if self.optimizer_seconds else None,
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
        corpus, ranks = self.plan.corpus, self.ranks
        offsets = data.heldout_offsets(corpus, self.config.context, self.config.eval_windows)
        size = self.plan.micro_batch
        losses = [0.0] * len(offsets)
        self.learner.module.eval()
        # Every rank makes as many forward passes as rank 0, because forward passes are collective, all of full batches,
        # so that a loss does not depend on them.
        for first in range(0, len(offsets), size * ranks.world_size):
            mine = range(len(offsets))[first + ranks.rank * size :][:size]
            padded = [*mine, *[0] * (size - len(mine))]
            of_batch = self._losses(corpus.heldout, [offsets[i] for i in padded])
            losses[mine.start : mine.stop] = of_batch[: len(mine)].tolist()
        self.learner.module.train()
        return _mean(losses)

    def _save(self, step: int) -> None:
        config = self.config
        header = {
            "step": step,
            "model": dataclasses.asdict(self.plan.model_config),
            "optimizer": optimizers.describe(config, self.learner.optimizer),
            "options": dataclasses.asdict(config),
            "data": self.plan.corpus.fingerprint,
            "world_size": self.ranks.world_size,
        }
        if config.verify:
            header["digests"] = self._digests()
        self.saved = checkpoint.save(config.checkpoint_folder, header, self.learner, config.keep_checkpoints)

    def _summary(self, heldout: float, seconds: float) -> dict[str, Any]:
        config = self.config
        with self.learner.held() as (_, optimizer):
            local = optimizers.state_memory(optimizer)
        memory = dict(zip(local, runtime.all_sum(list(local.values())), strict=True))
        numel, weights = memory.pop("numel"), memory.pop("parameters")
        timed = self.optimizer_seconds[_UNTIMED_STEPS:] or self.optimizer_seconds
        return {
            "heldout_loss": heldout,
            "codec": optimizers.describe(config, self.learner.optimizer)["codec"],
            "weight_bytes_per_parameter": weights / numel,
            "state_bytes_per_parameter": sum(memory.values()) / numel,
            "state_bytes": {kind: int(size) for kind, size in memory.items()},
            "optimizer_ms": 1e3 * statistics.median(timed) if timed else None,
            "text_bytes_per_second": (config.last_step - self.plan.start) * config.batch * config.context / seconds,
            "step": config.last_step,
            "parameters": self.numel,
            "world_size": self.ranks.world_size,
            "device": self.ranks.device.type,
            "verified": self.verified,
            "metrics": str(self.metrics),
            "plot": str(Path(config.output, "loss.png")),
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
