"""Every option of the job, with its default and its help line.

The values that an option takes are in :mod:`lm.config`, which reads the options, because tables above this file list
some of them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardopt.optim.deferred import MOST_WAITING


def opt(default: Any, help: str, *, low: float | None = None) -> Any:
    """A field of `Config`: its default, its help line, and its least value."""
    return dataclasses.field(default=default, metadata={"help": help, "low": low})


@dataclass(frozen=True)
class Config:
    """The options. A value of None leaves the choice to the model size or to the optimizer."""

    # What runs where.
    backend: str = opt("fsdp2", "how the model is spread over the ranks")
    deepspeed: str | None = opt(None, "DeepSpeed's config (JSON), for the backend deepspeed")
    device: str = opt("auto", "auto takes one GPU per rank where there are any")
    precision: str = opt("fp32", "bf16-mixed computes in bfloat16 on float32 parameters, bf16 stores them so too")
    deterministic: bool = opt(False, "on a GPU: the same bits in every run, at some cost; a CPU gives them anyhow")
    timeout: float = opt(600.0, "seconds that a rank waits for another before the run ends", low=1)
    seed: int = opt(0, "seeds the initial weights and the order of the data", low=0)

    # The model.
    size: str = opt("small", "named model size")
    dim: int | None = opt(None, "width of the model (default: from --size)", low=2)
    layers: int | None = opt(None, "number of layers (default: from --size)", low=1)
    heads: int | None = opt(None, "number of attention heads (default: from --size)", low=1)
    tied: bool = opt(False, "share the embedding with the output layer")

    # The data.
    data: str | None = opt(None, "text file or folder (default: the Python standard library)")
    heldout: float = opt(0.05, "share of the text that is kept out of training", low=1e-6)
    context: int = opt(256, "bytes that the model sees at once", low=2)
    batch: int = opt(32, "windows per optimizer step, over all ranks and accumulation steps together", low=1)

    # The training.
    steps: int = opt(1000, "optimizer steps of the whole run; sets the learning-rate schedule", low=1)
    stop_at_step: int | None = opt(None, "end early, the schedule unchanged", low=1)
    accumulate: int = opt(1, "gradient accumulation steps per optimizer step", low=1)
    lr: float = opt(1e-3, "peak learning rate", low=0)
    min_lr: float = opt(0.1, "final learning rate, as a share of the peak", low=0)
    warmup: int = opt(50, "steps of linear warm-up before the cosine", low=0)
    clip: float = opt(1.0, "largest norm of the gradient; 0 clips nothing", low=0)
    release_gradients: bool = opt(False, "step each parameter during the backward pass and free its gradient")
    waiting_gradients: int = opt(
        MOST_WAITING, "with it and --offload step, steps that may be under way on the host", low=1
    )
    overlap_forward: bool = opt(False, "with both, the host's last steps go on during the next forward pass")

    # The optimizer. None leaves the library's default.
    optimizer: str = opt("adamw", "update rule")
    betas: tuple[float, float] | None = opt(None, "moment decay rates of adamw, adam and lion")
    eps: float | None = opt(None, "added to the denominator of adamw and adam")
    weight_decay: float | None = opt(None, "decay of the matrices; vectors have none")
    momentum: float | None = opt(None, "momentum of sgd")
    dampening: float | None = opt(None, "dampening of sgd")
    nesterov: bool | None = opt(None, "Nesterov momentum of sgd")
    codec: str | None = opt(None, "how the state is stored: log8 (default), fp32, ...")
    block_size: int | None = opt(None, "elements that share a scale")
    min_quantized_numel: int | None = opt(None, "smaller parameters keep float32 state")
    master_weight_bits: int | None = opt(None, "extra bits behind bfloat16 parameters: 24 or 32")
    stochastic_rounding: bool | None = opt(None, "round bfloat16 parameters stochastically")
    stochastic_rounding_seed: int | None = opt(None, "seeds that (default: 0)")
    offload: str | None = opt(None, "what is done on the host: state (it is kept there) or step")
    device_state_budget: str | None = opt(None, "with --offload, state that stays on the device, as 2GiB")
    pin_memory: bool | None = opt(None, "with --offload, whether the host's memory is page-locked (default: yes)")
    nonfinite: str | None = opt(None, "what a NaN or Inf gradient does: skip, raise or propagate")

    # What is written.
    output: str = opt("runs/default", "folder of metrics.jsonl, loss.png and summary.json")
    checkpoint_dir: str | None = opt(None, "folder of checkpoints (default: OUTPUT/checkpoints)")
    checkpoint_interval: int = opt(200, "steps between checkpoints, one more at the end; 0 writes none", low=0)
    keep_checkpoints: int = opt(0, "newest checkpoints to keep; 0 keeps all", low=0)
    resume: str | None = opt(
        None,
        "checkpoint, or folder of checkpoints whose latest is taken; auto takes the latest of "
        "--checkpoint-dir or starts afresh",
    )
    verify: bool = opt(False, "write digests of all tensors with a checkpoint, and compare them on --resume")
    eval_interval: int = opt(200, "steps between held-out losses, one more at the end; 0: end only", low=0)
    eval_windows: int = opt(64, "held-out windows, the same for every run", low=1)
    log_interval: int = opt(10, "steps between lines of metrics", low=1)

    @property
    def checkpoint_folder(self) -> Path:
        """Where checkpoints are written."""
        return Path(self.checkpoint_dir or Path(self.output, "checkpoints"))

    @property
    def last_step(self) -> int:
        """The step after which this run ends."""
        return min(self.steps, self.stop_at_step or self.steps)
