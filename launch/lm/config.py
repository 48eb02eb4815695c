"""Every option of the job: command line, YAML files and defaults come from this one list."""

from __future__ import annotations

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from lm import engine_config, runtime
from lm.backends import BACKENDS
from lm.errors import UserError
from lm.model import SIZES
from lm.optimizers import OPTIMIZERS
from shardopt.optim.deferred import MOST_WAITING

PRECISIONS = ("fp32", "bf16-mixed", "bf16")
DEVICES = ("auto", "cpu", "cuda")


def opt(default: Any, help: str, *, low: float | None = None, choices: Sequence[str] | None = None) -> Any:
    """A field of `Config`: its default, its help line, and what values it takes."""
    return dataclasses.field(default=default, metadata={"help": help, "low": low, "choices": choices})


@dataclass(frozen=True)
class Config:
    """The options. A value of None leaves the choice to the model size or to the optimizer."""

    # What runs where.
    backend: str = opt("fsdp2", "how the model is spread over the ranks", choices=tuple(BACKENDS))
    deepspeed: str | None = opt(None, "DeepSpeed's config (JSON), for the backend deepspeed")
    device: str = opt("auto", "auto takes one GPU per rank where there are any", choices=DEVICES)
    precision: str = opt(
        "fp32",
        "bf16-mixed computes in bfloat16 on float32 parameters, bf16 stores them so too",
        choices=PRECISIONS,
    )
    deterministic: bool = opt(False, "on a GPU: the same bits in every run, at some cost; a CPU gives them anyhow")
    timeout: float = opt(600.0, "seconds that a rank waits for another before the run ends", low=1)
    seed: int = opt(0, "seeds the initial weights and the order of the data", low=0)

    # The model.
    size: str = opt("small", "named model size", choices=tuple(SIZES))
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
    optimizer: str = opt("adamw", "update rule", choices=tuple(OPTIMIZERS))
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


_FIELDS = {field.name: field for field in dataclasses.fields(Config)}
_TYPES = typing.get_type_hints(Config)


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `UserError`s."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def load(argv: Sequence[str]) -> Config:
    """Reads the options: defaults, then the YAML file of ``--config``, then the command line.

    Args:
        argv: the command line without the program's name.

    Raises:
        UserError: an unknown option, or a value that does not fit its option.
    """
    given = vars(_parser().parse_args(argv))
    given.pop("local_rank", None)
    path = given.pop("config", None)
    values = _read_yaml(path) if path is not None else {}
    for name, value in given.items():
        values[name] = _checked(name, value, "--" + name.replace("_", "-"))
    _take_over_deepspeed(values)
    config = Config(**values)
    if config.warmup > config.steps:
        raise UserError(f"warmup is {config.warmup} steps of {config.steps}: it must fit in")
    if config.release_gradients:
        _check_release(config)
    if config.overlap_forward and not (config.release_gradients and config.offload == "step"):
        raise UserError("overlap-forward: got it alone, expected --release-gradients and --offload step beside it")
    return config


def _take_over_deepspeed(values: dict[str, Any]) -> None:
    """Adds what the DeepSpeed config says to the options that were given, which must not say otherwise."""
    path, backend = values.get("deepspeed"), values.get("backend", Config.backend)
    if (path is None) == (backend == "deepspeed"):
        got = "none" if path is None else path
        raise UserError(f"backend {backend}: got --deepspeed {got}; --backend deepspeed and a config go together")
    if path is None:
        return
    world_size = runtime.discover(values.get("device", Config.device)).world_size
    for name, (place, value) in engine_config.options(engine_config.read(path), path, world_size).items():
        said = _checked(name, value, f"{path}: {place}")
        if values.setdefault(name, said) != said:
            raise UserError(
                f"{path} says {place} {value}, but {name} is given as {values[name]}: "
                f'give it once, or say "auto" in the file'
            )


def _check_release(config: Config) -> None:
    """Raises UserError where another option needs all gradients at once."""
    able = ", ".join(name for name, backend in BACKENDS.items() if backend.releases_gradients)
    for name, fits, expected in (
        ("backend", BACKENDS[config.backend].releases_gradients, f"one of {able}: others step all parameters together"),
        ("accumulate", config.accumulate == 1, "1: each backward pass is a step"),
        ("clip", config.clip == 0, "0: the norm of all gradients is known only after the first ones were used"),
        ("nonfinite", config.nonfinite != "raise", "skip: parameters are stepped before other gradients are known"),
    ):
        if not fits:
            got = getattr(config, name)
            raise UserError(f"release-gradients: got {name} {got}, expected {expected}; or leave release-gradients out")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="train.py",
        description="Trains a byte-level language model; runs alone or under torchrun, deepspeed, mpirun or srun.",
        allow_abbrev=False,
    )
    # The launchers of DeepSpeed and of older PyTorch give it; the environment has it, too.
    parser.add_argument("--local_rank", "--local-rank", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("--config", default=argparse.SUPPRESS, help="YAML file of options")
    for name, field in _FIELDS.items():
        flag = "--" + name.replace("_", "-")
        text = field.metadata["help"].replace("%", "%%")
        if field.default is not None:
            text += f" (default: {field.default})"
        inner, _ = _without_none(_TYPES[name])
        extra: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
        if inner is bool:
            extra["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(inner) is tuple:
            extra["nargs"] = len(typing.get_args(inner))
        if field.metadata["choices"]:
            extra["metavar"] = "{" + ",".join(field.metadata["choices"]) + "}"
        parser.add_argument(flag, **extra)
    return parser


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the config {path}: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold 'option: value' lines")
    for name in values:
        if name not in _FIELDS:
            raise UserError(f"{path}: unknown option {name!r}; see train.py --help")
    return {name: _checked(name, value, f"{path}: {name}") for name, value in values.items()}


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Splits ``T | None`` into T and whether None was allowed."""
    if typing.get_origin(hint) is types.UnionType:
        (inner,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
        return inner, True
    return hint, False


def _checked(name: str, value: Any, where: str) -> Any:
    """Brings `value`, of the command line or of YAML, to the option's type, or raises UserError."""
    hint, optional = _without_none(_TYPES[name])
    if optional and value in (None, "none"):
        return None
    result = _convert(value, hint, where)
    metadata = _FIELDS[name].metadata
    if metadata["choices"] and result not in metadata["choices"]:
        raise UserError(f"{where}: got {result!r}, expected one of {', '.join(metadata['choices'])}")
    if metadata["low"] is not None and result < metadata["low"]:
        raise UserError(f"{where}: got {result}, expected at least {metadata['low']}")
    if name == "heldout" and result >= 1:
        raise UserError(f"{where}: got {result}, expected a share below 1")
    return result


def _convert(value: Any, hint: Any, where: str) -> Any:
    expected = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        if not isinstance(value, list | tuple) or len(value) != len(parts):
            raise UserError(f"{where}: got {value!r}, expected {len(parts)} numbers")
        return tuple(_convert(part, to, where) for part, to in zip(value, parts, strict=True))
    wrong = UserError(f"{where}: got {value!r}, expected {expected[hint]}")
    if hint is bool or isinstance(value, bool):
        if hint is bool and isinstance(value, bool):
            return value
        raise wrong
    if hint is str:
        if isinstance(value, str):
            return value
        raise wrong
    if hint is int and isinstance(value, float):
        raise wrong
    try:
        result = hint(value)
    except (TypeError, ValueError):
        raise wrong from None
    if not math.isfinite(result):
        raise wrong
    return result
