"""Reads the job's options from the command line, a YAML file and DeepSpeed's config."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from lm import engine_config, runtime
from lm.backends import BACKENDS
from lm.errors import UserError
from lm.model import PARAMETRIZATIONS, SIZES
from lm.optimizers import OF_UNIT_SCALING, OPTIMIZERS, rule_of
from lm.options import PRECISIONS, Config
from shardopt.comm.wire import WIRES

# The allowed values of options that have a closed list of them.
_CHOICES: dict[str, Collection[str]] = {
    "wire": WIRES,
    "backend": BACKENDS,
    "device": ("auto", "cpu", "cuda"),
    "precision": PRECISIONS,
    "parametrization": PARAMETRIZATIONS,
    "size": SIZES,
    "optimizer": OPTIMIZERS,
}

# option -> the options on which it depends: their allowed values, and the reason
_DEMANDS: dict[str, dict[str, tuple[Collection[Any], str]]] = {
    "release_gradients": {
        "backend": (
            [name for name, backend in BACKENDS.items() if backend.releases_gradients],
            "others step all parameters together",
        ),
        "nonfinite": (["skip", "propagate", None], "parameters are stepped one by one"),
    },
    "release_without_overlap": {
        "clip": ([0], "the norm of all gradients is known only after the first ones were used"),
        "ordered": ([False], "it uses gradients before they are summed"),
    },
    "ordered": {
        "backend": (
            [name for name, backend in BACKENDS.items() if backend.orders_gradients],
            "others sum gradients in an order of their own",
        ),
        "accumulate": ([1], "it follows from --micro-batches and the number of ranks"),
    },
    "parametrization": {  # u-mup
        "optimizer": (
            [name for name in OPTIMIZERS if rule_of(name) in OF_UNIT_SCALING],
            "the learning rates are for their updates",
        ),
        "backend": ([name for name in BACKENDS if name != "deepspeed"], "this job runs u-mup on PyTorch's backends"),
        "dropout": ([0], "the layers of u-mup keep std 1, which dropout does not"),
        "tied": ([False], "embedding and output layer have other factors and rates"),
        "clip": ([0], "gradients have std 1, so that their norm is the root of the model's size"),
    },
}

_FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def _finite(value: float | str) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


# annotation -> (converter, types that the command line, YAML and JSON have such values in, the words for them)
_KINDS: dict[str, tuple[Callable[[Any], Any], Collection[type], str]] = {
    "int": (int, (int, str), "a whole number"),
    "float": (_finite, (int, float, str), "a number"),
    "bool": (bool, (bool,), "true or false"),
    "str": (str, (str,), "a text"),
    "tuple[float, ...]": (lambda values: tuple(map(_finite, values)), (list,), "a list of numbers"),
}


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
    given = vars(_parser().parse_args(argv))
    given.pop("local_rank", None)
    path = given.pop("config", None)
    values = _read_yaml(path) if path is not None else {}
    for name, value in given.items():
        values[name] = _checked(name, value, _flag(name))
    _take_over_deepspeed(values)
    config = Config(**values)
    if config.warmup > config.steps:
        raise UserError(f"warmup: got {config.warmup} steps, expected at most the {config.steps} steps of the run")
    if config.overlap_forward and not (config.release_gradients and config.offload == "step"):
        raise UserError(
            "overlap-forward: got this option alone, expected --release-gradients and --offload step beside it"
        )
    if config.backend == "deepspeed" and config.precision in ("fp16", "fp8"):
        raise UserError(f"precision: got {config.precision} with backend deepspeed, expected fp32, bf16-mixed or bf16")
    for option, on in (
        ("release_gradients", config.release_gradients),
        ("release_without_overlap", config.release_gradients and not config.overlap_forward),
        ("ordered", config.ordered),
        ("parametrization", config.parametrization == "u-mup"),
    ):
        if on:
            _check_demands(config, option)
    return config


def _check_demands(config: Config, option: str) -> None:
    for other, (allowed, reason) in _DEMANDS[option].items():
        got = getattr(config, other)
        if got not in allowed:
            expected = ("one of " if len(allowed) > 1 else "") + ", ".join(map(str, allowed))
            name = {"release_without_overlap": "release-gradients without overlap-forward"}.get(
                option, option.replace("_", "-")
            )
            raise UserError(f"{name}: got {other} {got}, expected {expected}: {reason}; or leave {name} out")


def _take_over_deepspeed(values: dict[str, Any]) -> None:
    """Adds the options in the DeepSpeed config to `values`. Raises UserError if an option has another value there."""
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


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="train.py",
        description="Trains a byte-level language model; runs alone or under torchrun, deepspeed, mpirun or srun.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    # DeepSpeed's and older PyTorch's launchers pass the local rank, which the environment has, too.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    parser.add_argument("--config", help="YAML file of options")
    for name, field in _FIELDS.items():
        text = field.metadata["help"].replace("%", "%%")
        if field.default is not None:
            text += f" (default: {field.default})"
        extra: dict[str, Any] = {}
        if field.type == "bool" or field.type == "bool | None":
            extra["action"] = argparse.BooleanOptionalAction
        elif "tuple" in field.type:
            extra["nargs"] = "+"
        if name in _CHOICES:
            extra["metavar"] = "{" + ",".join(_CHOICES[name]) + "}"
        parser.add_argument(_flag(name), help=text, **extra)
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


def _checked(name: str, value: Any, where: str) -> Any:
    """Converts `value`, from the command line, YAML or JSON, to the option's type. Raises UserError if that fails."""
    field = _FIELDS[name]
    kind = field.type.removesuffix(" | None")
    if kind != field.type and value in (None, "none"):
        return None
    convert, given, expected = _KINDS[kind]
    wrong = UserError(f"{where}: got {value!r}, expected {expected}")
    if type(value) not in given:
        raise wrong
    try:
        result = convert(value)
    except (TypeError, ValueError):
        raise wrong from None
    if name in _CHOICES and result not in _CHOICES[name]:
        raise UserError(f"{where}: got {result!r}, expected one of {', '.join(_CHOICES[name])}")
    low = field.metadata["low"]
    if low is not None and result < low:
        raise UserError(f"{where}: got {result}, expected at least {low}")
    if name in ("heldout", "dropout") and result >= 1:
        raise UserError(f"{where}: got {result}, expected a share below 1")
    return result
