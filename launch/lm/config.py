"""Reads the job's options from the command line, a YAML file and DeepSpeed's config."""

from __future__ import annotations

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from lm import engine_config, runtime
from lm.backends import BACKENDS
from lm.errors import UserError
from lm.model import SIZES
from lm.networks import PARAMETRIZATIONS
from lm.optimizers import OF_UNIT_SCALING, OPTIMIZERS, rule_of
from lm.options import Config
from lm.precision import PRECISIONS
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
        UserError: an option is unknown, has a value that it does not allow, or contradicts another option.
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
        raise UserError(f"warmup: got {config.warmup} steps, expected at most the {config.steps} steps of the run")
    if config.release_gradients:
        _check_release(config)
    if config.ordered:
        _check_order(config)
    if config.parametrization == "u-mup":
        _check_unit_scaling(config)
    if config.backend == "deepspeed" and config.precision in ("fp16", "fp8"):
        raise UserError(f"precision: got {config.precision} with backend deepspeed, expected fp32, bf16-mixed or bf16")
    if config.overlap_forward and not (config.release_gradients and config.offload == "step"):
        raise UserError(
            "overlap-forward: got this option alone, expected --release-gradients and --offload step beside it"
        )
    return config


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


def _check_release(config: Config) -> None:
    """Raises UserError if another option needs all gradients at once."""
    able = ", ".join(name for name, backend in BACKENDS.items() if backend.releases_gradients)
    _demand(
        config,
        "release-gradients",
        ("backend", BACKENDS[config.backend].releases_gradients, f"one of {able}: others step all parameters together"),
        ("accumulate", config.accumulate == 1, "1: each backward pass is a step"),
        ("clip", config.clip == 0, "0: the norm of all gradients is known only after the first ones were used"),
        ("nonfinite", config.nonfinite != "raise", "skip: parameters are stepped before other gradients are known"),
    )


def _check_order(config: Config) -> None:
    """Raises UserError if another option has gradients summed otherwise."""
    able = ", ".join(name for name, backend in BACKENDS.items() if backend.orders_gradients)
    _demand(
        config,
        "ordered",
        ("backend", BACKENDS[config.backend].orders_gradients, f"one of {able}"),
        ("accumulate", config.accumulate == 1, "1: it follows from --micro-batches and the number of ranks"),
        ("release_gradients", not config.release_gradients, "none: it uses gradients before they are summed"),
    )


def _check_unit_scaling(config: Config) -> None:
    """Raises UserError if another option does not go with u-muP."""
    able = ", ".join(OF_UNIT_SCALING)
    _demand(
        config,
        "parametrization u-mup",
        (
            "optimizer",
            rule_of(config.optimizer) in OF_UNIT_SCALING,
            f"one of {able}: the learning rates are for their updates",
        ),
        ("backend", config.backend != "deepspeed", "another one: this job runs u-mup on PyTorch's backends"),
        ("dropout", config.dropout == 0, "0: its layers keep std 1, which dropout does not"),
        ("tied", not config.tied, "no tied embedding: embedding and output layer have other factors and rates"),
        ("clip", config.clip == 0, "0: gradients have std 1, so that their norm is the root of the model's size"),
    )


def _demand(config: Config, option: str, *demands: tuple[str, bool, str]) -> None:
    """Raises UserError at the first (other option, whether its value fits, expectation) that does not fit."""
    for name, fits, expected in demands:
        if not fits:
            got = getattr(config, name)
            raise UserError(f"{option}: got {name} {got}, expected {expected}; or leave {option} out")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="train.py",
        description="Trains a byte-level language model; runs alone or under torchrun, deepspeed, mpirun or srun.",
        allow_abbrev=False,
    )
    # DeepSpeed's and older PyTorch's launchers pass the local rank, which the environment has, too.
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
            extra["nargs"] = "+"
        if name in _CHOICES:
            extra["metavar"] = "{" + ",".join(_CHOICES[name]) + "}"
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
    """Splits a type into its part other than None, and whether None is allowed."""
    if typing.get_origin(hint) is types.UnionType:
        (inner,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
        return inner, True
    return hint, False


def _checked(name: str, value: Any, where: str) -> Any:
    """Converts `value`, from the command line or YAML, to the option's type. Raises UserError if that fails."""
    hint, optional = _without_none(_TYPES[name])
    if optional and value in (None, "none"):
        return None
    result = _convert(value, hint, where)
    if name in _CHOICES and result not in _CHOICES[name]:
        raise UserError(f"{where}: got {result!r}, expected one of {', '.join(_CHOICES[name])}")
    low = _FIELDS[name].metadata["low"]
    if low is not None and result < low:
        raise UserError(f"{where}: got {result}, expected at least {low}")
    if name in ("heldout", "dropout") and result >= 1:
        raise UserError(f"{where}: got {result}, expected a share below 1")
    return result


def _convert(value: Any, hint: Any, where: str) -> Any:
    expected = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    if typing.get_origin(hint) is tuple:
        to, _ = typing.get_args(hint)  # and an ellipsis
        if not isinstance(value, list | tuple):
            raise UserError(f"{where}: got {value!r}, expected a list of numbers")
        return tuple(_convert(part, to, where) for part in value)
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
