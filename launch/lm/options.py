"""Every option of the job, read from the command line and a YAML file."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml

import shardopt
from lm.errors import UserError
from lm.model import SIZES, ModelConfig

BACKENDS = ("fsdp2", "fsdp1", "ddp", "deepspeed", "single")
PRECISIONS = {"fp32": torch.float32, "bf16-mixed": torch.float32, "bf16": torch.bfloat16}  # dtypes of the parameters


def opt(default: Any, help: str, *, low: float = 0, choices: Iterable[str] = ()) -> Any:
    """A field of `Config` with its default, its help line, its least value, and the values that it allows."""
    return dataclasses.field(default=default, metadata={"help": help, "low": low, "choices": list(choices)})


@dataclass(frozen=True)
class Config:
    """The options. None stands for the default of the model size, or for nothing."""

    # Backend, device and precision.
    backend: str = opt("fsdp2", "how the model is spread over the ranks", choices=BACKENDS)
    deepspeed: str | None = opt(None, "DeepSpeed's config (JSON) for the backend deepspeed: ZeRO's stage and offload")
    device: str = opt("auto", "auto takes one GPU per rank if there are GPUs", choices=("auto", "cpu", "cuda"))
    precision: str = opt("fp32", "dtype of compute; bf16 also stores parameters in bfloat16", choices=PRECISIONS)
    deterministic: bool = opt(False, "give the same bits in every run on a GPU, at some cost; a CPU always does")
    timeout: float = opt(600.0, "seconds that a rank waits for another rank before the run ends", low=1)
    seed: int = opt(0, "seeds the initial weights, the order of the data and dropout")

    # The model and its data.
    size: str = opt("small", "named model size", choices=SIZES)
    dim: int | None = opt(None, "width of the model (default: from --size)", low=2)
    layers: int | None = opt(None, "number of layers (default: from --size)", low=1)
    heads: int | None = opt(None, "number of attention heads (default: from --size)", low=1)
    dropout: float = opt(0.0, "share of each layer's outputs that training drops, seeded per micro-batch")
    data: str | None = opt(None, "text file or folder (default: the Python standard library)")
    heldout: float = opt(0.05, "share of the text held out of training", low=1e-6)
    context: int = opt(256, "context length of the model, in bytes", low=2)
    batch: int = opt(32, "windows per optimizer step, summed over ranks and accumulation steps", low=1)

    # The training.
    steps: int = opt(1000, "optimizer steps of the whole run, which the learning-rate schedule spans", low=1)
    stop_at_step: int | None = opt(None, "step after which to end early, without changing the schedule", low=1)
    accumulate: int = opt(1, "gradient accumulation steps per optimizer step", low=1)
    ordered: bool = opt(False, "sum gradients in the order of --micro-batches: the same bits on any number of ranks")
    micro_batches: int = opt(8, "with --ordered, passes per step over all ranks, whose number divides it", low=1)
    lr: float = opt(1e-3, "peak learning rate")
    min_lr: float = opt(0.1, "final learning rate, as a share of the peak")
    warmup: int = opt(50, "steps of linear warm-up before the cosine")
    clip: float = opt(1.0, "largest norm of the gradients; 0 turns clipping off")

    # The optimizer.
    optimizer: str = opt("adamw8bit", "update rule and bits of its state", choices=shardopt.optim.OPTIMIZERS)
    adamw_lr: float = opt(3e-4, "with (nor)muon, peak learning rate of embedding, output and norms")
    options: dict[str, Any] = dataclasses.field(
        default_factory=dict,
        metadata={"help": "the optimizer's other arguments, such as codec=bf16", "low": 0, "choices": ()},
    )

    # The output.
    output: str = opt("runs/default", "folder for metrics.jsonl, summary.json and checkpoints")
    checkpoint_interval: int = opt(200, "steps between checkpoints, besides one at the end; 0 writes none")
    keep_checkpoints: int = opt(0, "newest checkpoints to keep; 0 keeps all")
    resume: str | None = opt(None, "checkpoint, or folder whose latest one to resume; auto: of --output, if any")
    verify: bool = opt(False, "with --resume, save what was loaded again, and compare all tensors' bits")
    eval_interval: int = opt(200, "steps between held-out losses, besides one at the end; 0: at the end only")
    eval_windows: int = opt(64, "held-out windows, the same for every run", low=1)
    log_interval: int = opt(10, "steps between lines of metrics", low=1)

    @property
    def stored(self) -> torch.dtype:
        """The dtype of the parameters."""
        return PRECISIONS[self.precision]

    @property
    def model(self) -> ModelConfig:
        """The dimensions of the model: those of its size, but for those that were given."""
        given = (self.dim, self.layers, self.heads)
        return ModelConfig(*(mine or named for mine, named in zip(given, SIZES[self.size], strict=True)))

    @property
    def checkpoints(self) -> Path:
        """The folder of this run's checkpoints."""
        return Path(self.output, "checkpoints")

    @property
    def last_step(self) -> int:
        """The last step of this run."""
        return min(self.steps, self.stop_at_step or self.steps)


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `UserError`s."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def load(argv: Sequence[str]) -> Config:
    """Reads the options: defaults, then the YAML file of ``--config``, then the command line.

    Args:
        argv: the command line without the program's name.

    Raises:
        UserError: an option is unknown, has a value that it does not allow, or contradicts another option.
    """
    fields = {field.name: field for field in dataclasses.fields(Config)}
    parser = _parser(fields.values())
    path = parser.parse_args(argv).config
    values = read(path, yaml.safe_load) if path else {}
    for name in values.keys() - fields.keys():
        raise UserError(f"{path}: unknown option {name!r}; see train.py --help")
    options = values.pop("options", {})
    parser.set_defaults(**{name: value if type(value) is bool else str(value) for name, value in values.items()})
    given = vars(parser.parse_args(argv))
    given = {name: None if given[name] == "none" else given[name] for name in fields}
    config = Config(**{**given, "options": {**options, **dict(given["options"])}})
    for name, field in fields.items():
        value, low, choices = getattr(config, name), field.metadata["low"], field.metadata["choices"]
        if choices and value not in choices:
            raise UserError(f"{name}: got {value!r}, expected one of {', '.join(choices)}")
        if type(value) in (int, float) and not low <= value < math.inf:  # NaN, too
            raise UserError(f"{name}: got {value}, expected at least {low}")
        if type(value) is not bool and field.type == "bool":
            raise UserError(f"{name}: got {value!r}, expected true or false")
    if max(config.heldout, config.dropout) >= 1:
        raise UserError(f"got heldout {config.heldout} and dropout {config.dropout}, expected shares below 1")
    if config.warmup > config.steps:
        raise UserError(f"warmup: got {config.warmup} steps, expected at most the {config.steps} steps of the run")
    if (config.backend == "deepspeed") != (config.deepspeed is not None):
        got = f"backend {config.backend} and --deepspeed {config.deepspeed}"
        raise UserError(f"got {got}; --backend deepspeed and a config go together")
    if config.ordered and (config.backend in ("fsdp1", "deepspeed") or config.accumulate > 1):
        raise UserError(
            f"ordered: got backend {config.backend} and accumulate {config.accumulate}, expected fsdp2, ddp or single "
            "and 1: other backends sum gradients in an order of their own, and micro-batches replace accumulation"
        )
    return config


def _parser(fields: Iterable[dataclasses.Field[Any]]) -> argparse.ArgumentParser:
    description = "Trains a byte-level language model; runs alone or under torchrun or DeepSpeed's launcher."
    parser = _Parser(prog="train.py", description=description, allow_abbrev=False)
    # DeepSpeed's and older PyTorch's launchers pass the local rank, which the environment has, too.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    parser.add_argument("--config", help="YAML file of options")
    for field in fields:
        default = [] if field.name == "options" else field.default
        text = field.metadata["help"].replace("%", "%%")
        if default not in (None, []):
            text += f" (default: {default})"
        how: dict[str, Any] = {"type": {"int": int, "float": float}.get(field.type.removesuffix(" | None"), str)}
        if field.type == "bool":
            how = {"action": argparse.BooleanOptionalAction}
        if field.name == "options":
            how = {"type": _named_value, "action": "extend", "nargs": "+", "metavar": "NAME=VALUE"}
        if field.metadata["choices"]:
            how["metavar"] = "{" + ",".join(field.metadata["choices"]) + "}"
        parser.add_argument("--" + field.name.replace("_", "-"), help=text, default=default, **how)
    return parser


def read(path: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    """The mapping in a YAML or JSON file.

    Raises:
        UserError: the file cannot be read, or has no mapping.
    """
    try:
        values = parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: got {type(values).__name__}, expected names with values")
    return values


def _named_value(text: str) -> tuple[str, Any]:
    """The name and the value of NAME=VALUE; a value that is not JSON is a text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
