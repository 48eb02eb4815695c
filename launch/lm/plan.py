"""The plan of a run, made from checked input before the process group exists."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from lm import checkpoint, data, engine_config, optimizers, runtime
from lm.backends import BACKENDS
from lm.data import Corpus
from lm.errors import UserError
from lm.model import ModelConfig
from lm.options import Config
from lm.runtime import Ranks


@dataclass(frozen=True)
class Plan:
    """A run whose input has been checked.

    Attributes:
        config: the options.
        ranks: this process among the ranks.
        model_config: the dimensions of the model.
        corpus: the text.
        resume: the checkpoint to resume; None to start from step 0.
        header: the job's header in that checkpoint; empty without one.
    """

    config: Config
    ranks: Ranks
    model_config: ModelConfig
    corpus: Corpus
    resume: Path | None
    header: checkpoint.Header

    @property
    def start(self) -> int:
        """The steps that the resumed checkpoint has done; 0 without one."""
        step: int = self.header.get("step", 0)
        return step

    @property
    def micro_batches(self) -> int:
        """Forward and backward passes of a step, over all ranks."""
        config = self.config
        return config.micro_batches if config.ordered else self.ranks.world_size * config.accumulate

    @property
    def micro_batch(self) -> int:
        """Windows per pass."""
        return self.config.batch // self.micro_batches


def prepare(config: Config) -> Plan:
    """Reads and checks all input, as far as one rank alone can, and makes the output folders.

    Raises:
        UserError: an option, the text or the checkpoint cannot be used, or an output folder cannot be made.
    """
    ranks = runtime.discover(config.device)
    _check_ranks(config, ranks.world_size)
    model_config = ModelConfig.of(config)
    state_layout = optimizers.check(config)
    corpus = data.load(config.data, config.heldout)
    data.check(corpus, config.context)
    resume = checkpoint.find(config.resume, config.checkpoint_folder)
    header = checkpoint.read_header(resume) if resume else {}
    if resume:
        saved = {"parametrization": "sp", **header["model"]}  # older checkpoints do not say it
        checkpoint.demand_same(resume, "model", saved, dataclasses.asdict(model_config))
        checkpoint.demand_same(resume, "optimizer", header["optimizer"], state_layout)
    plan = Plan(config, ranks, model_config, corpus, resume, header)
    _check_steps(plan)
    for folder in (Path(config.output), *([config.checkpoint_folder] if config.checkpoint_interval else [])):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {folder}: {error.strerror}") from error
    return plan


def _check_ranks(config: Config, world_size: int) -> None:
    parts = world_size * config.accumulate
    if not BACKENDS[config.backend].needs_group and world_size > 1:
        raise UserError(f"backend {config.backend} runs one process, not {world_size}")
    if config.ordered and (config.micro_batches % world_size or config.batch % config.micro_batches):
        raise UserError(
            f"micro-batches: got {config.micro_batches} with {world_size} ranks and a batch of {config.batch}, "
            "expected a multiple of the ranks that divides the batch; change one of the three"
        )
    if not config.ordered and config.batch % parts:
        raise UserError(
            f"batch {config.batch} cannot be split evenly over {world_size} ranks and "
            f"{config.accumulate} accumulation steps: it must be a multiple of {parts}"
        )
    if config.backend == "deepspeed":
        engine_config.complete(config, world_size)


def _check_steps(plan: Plan) -> None:
    config = plan.config
    if plan.start > config.last_step:
        raise UserError(f"checkpoint {plan.resume} is at step {plan.start}, beyond the last step {config.last_step}")
    if config.verify and plan.resume and "digests" not in plan.header:
        raise UserError(f"checkpoint {plan.resume} has no digests: it was saved without --verify")
    existing = checkpoint.complete(config.checkpoint_folder) if config.checkpoint_interval else []
    if existing and checkpoint.step_of(existing[-1]) > plan.start:
        raise UserError(
            f"{config.checkpoint_folder} holds {existing[-1].name}, later than this run's start at "
            f"step {plan.start}: --resume it, or choose another --checkpoint-dir"
        )
