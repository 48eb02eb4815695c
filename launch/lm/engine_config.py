"""DeepSpeed's config and the job's options, which overlap.

Options missing or ``"auto"`` in either place are taken from the other; conflicts end the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lm import optimizers
from lm.errors import UserError
from lm.options import Config
from shardopt.sharding.deepspeed.hooks import TYPES

Settings = dict[str, Any]

AUTO = "auto"

# DeepSpeed's names of the job's options.
_BATCH = {
    "train_batch_size": "batch",
    "gradient_accumulation_steps": "accumulate",
    "gradient_clipping": "clip",
}
_MICRO = "train_micro_batch_size_per_gpu"
# Sections that the job refuses, with the remedy.
_REFUSED = {
    "scheduler": "the job has a schedule of its own: leave it out, see --warmup and --min-lr",
    "fp16": "the job computes in float32 or bfloat16: leave it out, see --precision",
    "amp": "the job computes in float32 or bfloat16: leave it out, see --precision",
}
# Settings that keep bfloat16 parameters without float32 master weights.
_NO_MASTERS = ("bf16_master_weights_and_grads", "bf16_optimizer_states")


def read(path: str) -> Settings:
    """Reads DeepSpeed's config.

    Raises:
        UserError: the file cannot be read or is no DeepSpeed config, or the config has a section that the job refuses.
    """
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the DeepSpeed config {path}: {error}") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(settings, dict):
        raise UserError(f"{path}: got {type(settings).__name__}, expected an object of DeepSpeed's sections")
    for name in ("optimizer", "bf16", "zero_optimization"):
        if not isinstance(settings.get(name, {}), dict):
            raise UserError(f"{path}: got {name} {settings[name]!r}, expected an object, or leave it out")
    if not isinstance(settings.get("optimizer", {}).get("params", {}), dict):
        raise UserError(f"{path}: got optimizer.params {settings['optimizer']['params']!r}, expected an object")
    for name in (*_BATCH, _MICRO):
        value = settings.get(name, 1)
        if value != AUTO and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(f'{path}: got {name} {value!r}, expected a number or "auto"')
    for name, remedy in _REFUSED.items():
        section = settings.get(name)
        if section is not None and not (isinstance(section, dict) and section.get("enabled") is False):
            raise UserError(f"{path}: got {name}, but {remedy}")
    return settings


def options(settings: Settings, path: str, world_size: int) -> dict[str, tuple[str, Any]]:
    """The job's options that DeepSpeed's config sets.

    Args:
        settings: the config.
        path: the file of the config, for errors.
        world_size: the number of ranks.

    Returns:
        option -> (its key in the config, value).

    Raises:
        UserError: the config names an optimizer that the job does not have, or its batch sizes do not fit together.
    """
    found = {option: (place, settings[place]) for place, option in _BATCH.items() if _says(settings, place)}
    if _says(settings, _MICRO):
        parts = found.get("accumulate", ("", 1))[1] * world_size
        batch = settings[_MICRO] * parts
        if found.setdefault("batch", (f"{_MICRO} on {world_size} ranks", batch))[1] != batch:
            raise UserError(
                f"{path}: got train_batch_size {found['batch'][1]}, expected {batch}: {_MICRO} {settings[_MICRO]} x "
                f"{parts // world_size} accumulation steps x {world_size} ranks; leave one of them out"
            )
    optimizer = settings.get("optimizer", {})
    if _says(optimizer, "type"):
        kind = str(optimizer["type"]).lower()
        if kind not in TYPES:
            named = ", ".join(known.__name__ for known in TYPES.values())
            raise UserError(
                f"{path}: got optimizer.type {optimizer['type']!r}, expected one of {named}, or leave it out"
            )
        found["optimizer"] = ("optimizer.type", kind)
    params = optimizer.get("params", {})
    found.update(
        {name: (f"optimizer.params.{name}", params[name]) for name in optimizers.ARGUMENTS if _says(params, name)}
    )
    bf16 = settings.get("bf16", {})
    if _says(bf16, "enabled"):
        stored = bf16["enabled"] and bf16.get(_NO_MASTERS[0], False)
        precision = "bf16" if stored else "bf16-mixed" if bf16["enabled"] else "fp32"
        found["precision"] = ("bf16", precision)
    return found


def complete(config: Config, world_size: int) -> Settings:
    """DeepSpeed's config completed by the job's options.

    Args:
        config: the options, which include those from the config.
        world_size: the number of ranks.

    Raises:
        UserError: DeepSpeed is not installed, or the config has "auto" for a setting that no option of the job
            determines.
    """
    if find_spec("deepspeed") is None:
        raise UserError("backend deepspeed: DeepSpeed is not installed: pip install 'shardopt[deepspeed]'")
    assert config.deepspeed is not None
    settings = read(config.deepspeed)
    settings.update(
        train_batch_size=config.batch,
        train_micro_batch_size_per_gpu=config.batch // (config.accumulate * world_size),
        gradient_accumulation_steps=config.accumulate,
        gradient_clipping=config.clip,
    )
    kind, params = optimizers.chosen(config)
    section = settings.setdefault("optimizer", {})
    section["type"] = kind.__name__
    if config.optimizer not in TYPES:  # DeepSpeed has that name itself
        section["type"] += "8bit"
        params.setdefault("codec", "fp32")
    said = section.get("params", {})
    for name in optimizers.ARGUMENTS:
        if not _says(said, name):
            said.pop(name, None)
    section["params"] = {**said, **params}
    bf16 = settings.setdefault("bf16", {})
    bf16["enabled"] = config.precision != "fp32"
    if config.precision == "bf16":
        bf16.update(dict.fromkeys(_NO_MASTERS, True))
    for place in _autos(settings):
        raise UserError(f'{config.deepspeed}: got "auto" for {place}, which the job does not know; leave it out')
    return settings


def _says(section: Mapping[str, Any], name: str) -> bool:
    return bool(section.get(name, AUTO) != AUTO)


def _autos(section: Mapping[str, Any], within: str = "") -> Iterator[str]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _autos(value, f"{within}{name}.")
        elif value == AUTO:
            yield within + name
