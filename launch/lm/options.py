"""Every option of the job, with its default and its help line.

:mod:`lm.config` reads the options and lists their allowed values: some are the keys of tables that need this file.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardopt.release.deferred import MOST_WAITING

# precision -> dtype of the parameters
PRECISIONS = {
    "fp32": torch.float32,
    "bf16-mixed": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float32,
}


def opt(default: Any, help: str, *, low: float | None = None) -> Any:
    """A field of `Config` with its default, its help line and its least value."""
    return dataclasses.field(default=default, metadata={"help": help, "low": low})


@dataclass(frozen=True)
class Config:
    """The options. None stands for the default of the model size or of the optimizer."""

    # Backend, device and precision.
    backend: str = opt("fsdp2", "how the model is spread over the ranks")
    deepspeed: str | None = opt(None, "DeepSpeed's config (JSON), for the backend deepspeed")
    device: str = opt("auto", "auto takes one GPU per rank if the machine has GPUs")
    precision: str = opt(
        "fp32",
        "bf16-mixed computes in bfloat16 on float32 parameters, bf16 also stores parameters in bfloat16, fp16 stores "
        "and computes in float16 without a loss scale, fp8 is bf16-mixed whose hidden layers multiply in FP8, unscaled",
    )
    deterministic: bool = opt(False, "give the same bits in every run on a GPU, at some cost; a CPU always does")
    timeout: float = opt(600.0, "seconds that a rank waits for another rank before the run ends", low=1)
    seed: int = opt(0, "seeds the initial weights, the order of the data and dropout", low=0)

    # The model.
    parametrization: str = opt(
        "sp", "sp is the standard one; u-mup scales all tensors to std 1, and --lr is that of its rule, about 1"
    )
    size: str = opt("small", "named model size")
    dim: int | None = opt(None, "width of the model (default: from --size)", low=2)
    layers: int | None = opt(None, "number of layers (default: from --size)", low=1)
    heads: int | None = opt(None, "number of attention heads (default: from --size)", low=1)
    tied: bool = opt(False, "share the embedding with the output layer")

    # The data.
    data: str | None = opt(None, "text file or folder (default: the Python standard library)")
    heldout: float = opt(0.05, "share of the text held out of training", low=1e-6)
    context: int = opt(256, "context length of the model, in bytes", low=2)
    batch: int = opt(32, "windows per optimizer step, summed over ranks and accumulation steps", low=1)

    # The training.
    steps: int = opt(1000, "optimizer steps of the whole run, which the learning-rate schedule spans", low=1)
    stop_at_step: int | None = opt(None, "step after which to end early, without changing the schedule", low=1)
    accumulate: int = opt(1, "gradient accumulation steps per optimizer step", low=1)
    ordered: bool = opt(
        False, "sum gradients in the order of --micro-batches: the same bits on any number of ranks that divides it"
    )
    micro_batches: int = opt(8, "with --ordered, forward and backward passes per step, over all ranks", low=1)
    wire: str = opt("fp32", "with --ordered, the format that gradients travel in")
    dropout: float = opt(0.0, "share of each layer's outputs that training drops, seeded per micro-batch", low=0)
    lr: float = opt(1e-3, "peak learning rate", low=0)
    min_lr: float = opt(0.1, "final learning rate, as a share of the peak", low=0)
    warmup: int = opt(50, "steps of linear warm-up before the cosine", low=0)
    clip: float = opt(1.0, "largest norm of the gradients; 0 turns clipping off", low=0)
    release_gradients: bool = opt(
        False, "step each parameter during the backward pass of the last --accumulate, and free its gradient at once"
    )
    waiting_gradients: int = opt(
        MOST_WAITING,
        "with --release-gradients and --offload step, gradients that may wait on the device for the host",
        low=1,
    )
    overlap_forward: bool = opt(
        False, "with --release-gradients and --offload step, run the steps during the next forward pass: allows --clip"
    )

    # The optimizer. None stands for the library's default.
    optimizer: str = opt("adamw8bit", "update rule, with 8bit or 4bit behind it for such a state, else float32")
    betas: tuple[float, ...] | None = opt(None, "decay rates of moments, as many as the optimizer has")
    eps: float | None = opt(None, "added to the denominator of adamw and its kin")
    adamw_lr: float = opt(
        3e-4, "with (nor)muon, peak learning rate of what adamw steps: embedding, output, norms", low=0
    )
    weight_decay: float | None = opt(None, "weight decay of matrices; vectors do not decay")
    momentum: float | None = opt(None, "momentum of muon, normuon, sgd, rmsprop and signum")
    nesterov: bool | None = opt(None, "Nesterov momentum of muon, normuon and sgd")
    codec: str | None = opt(None, "codec of the state (default: the optimizer's: fp32, log8 or log4)")
    block_size: int | None = opt(None, "elements that share a scale")
    min_quantized_numel: int | None = opt(None, "elements below which a parameter keeps float32 state")
    master_weight_bits: int | None = opt(None, "bits of master weights beside bfloat16 parameters: 24 or 32")
    stochastic_rounding: bool | None = opt(None, "round bfloat16 parameters stochastically")
    offload: str | None = opt(None, "state keeps the optimizer state on the host, step also steps there")
    nonfinite: str | None = opt(None, "handling of NaN and Inf gradients: skip, raise or propagate")

    # The output.
    output: str = opt("runs/default", "folder for metrics.jsonl, loss.png and summary.json")
    checkpoint_dir: str | None = opt(None, "folder of checkpoints (default: OUTPUT/checkpoints)")
    checkpoint_interval: int = opt(200, "steps between checkpoints, besides one at the end; 0 writes none", low=0)
    keep_checkpoints: int = opt(0, "newest checkpoints to keep; 0 keeps all", low=0)
    resume: str | None = opt(
        None,
        "checkpoint to resume, or folder whose latest checkpoint to resume; auto resumes the latest of "
        "--checkpoint-dir, or starts from step 0 if there is none",
    )
    verify: bool = opt(
        False, "save digests of all tensors with a checkpoint, and compare the tensors with them on --resume"
    )
    eval_interval: int = opt(
        200, "steps between held-out losses, besides one at the end; 0 evaluates at the end only", low=0
    )
    eval_windows: int = opt(64, "held-out windows, the same for every run", low=1)
    log_interval: int = opt(10, "steps between lines of metrics", low=1)

    @property
    def stored(self) -> torch.dtype:
        """The dtype of the parameters."""
        return PRECISIONS[self.precision]

    @property
    def mixed(self) -> bool:
        """Whether to compute in bfloat16 on float32 parameters."""
        return self.precision in ("bf16-mixed", "fp8")

    @property
    def checkpoint_folder(self) -> Path:
        """The folder of this run's checkpoints."""
        return Path(self.checkpoint_dir or Path(self.output, "checkpoints"))

    @property
    def last_step(self) -> int:
        """The last step of this run."""
        return min(self.steps, self.stop_at_step or self.steps)
