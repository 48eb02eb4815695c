"""Checkpoints that no save wrote, but whose checksums are right: mutations of one, and what loading makes of them.

The index is changed, or a table of chunks in a data file.

A load may refuse with a CheckpointError, and has then changed nothing. If it succeeds, model, optimizer and extra must
hold, bit for bit, what a strict reading of the format finds, and hyper-parameters that the optimizer accepts.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from random import Random
from typing import Any

import torch

import shardopt
from attack.contents import Content, content, difference, fingerprint
from attack.forked import Outcome, call, fault, ok, shown
from attack.index_file import INDEX, Saved, Tensors, read_saved, strict_tensors, value_of
from attack.mutations import mutated
from attack.recut import recut
from attack.rules import Json
from shardopt.checkpoint import CheckpointError, Loaded


def attack(seed: int, number: int, base: Path) -> Outcome:
    """Loads what one mutation makes of the checkpoint in a folder that :func:`prepare` made."""
    rng = Random(f"hostile {seed} {number}")
    folder = base / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base / "pristine", folder)
    mutation = "none"
    if number:
        mutation, state = mutated(rng, _saved[0])
        state.write(folder)
    with_optimizer = number == 0 or rng.random() > 0.1
    mutation += "" if with_optimizer else "; loaded without optimizer"
    outcome = call(lambda: check(folder, with_optimizer, must_succeed=number == 0))
    return outcome._replace(attack=mutation)


def prepare(base: Path) -> None:
    """Saves a checkpoint of several data files, each tensor in several chunks."""
    folder = base / "pristine"
    rng = torch.arange(300, dtype=torch.int64)
    numbers = [1, -2.5, None, math.inf, {"least": -math.inf, "loss": [math.nan]}]
    made = content(1)
    made.optimizer.param_groups[0]["limits"] = (math.inf, -math.inf)
    extra = {"k": 1, "note": "text", "numbers": numbers, "rng": rng, "json": {"$numberDouble": "NaN"}}
    made.save(folder, extra)
    recut(folder)
    _saved[:] = [read_saved(folder)]
    _targets[:] = [content(7), content(8)]


#: Most characters of an error, without the folder's name.
MOST_CHARACTERS = 600

#: Models to load into, and to try options with: made before the forks.
_targets: list[Content] = []
#: The checkpoints that are mutated.
_saved: list[Saved] = []


def check(folder: Path, with_optimizer: bool, must_succeed: bool) -> Outcome:
    """Loads, in a process of its own."""
    target = _targets[0]
    before = target.fingerprint()
    opened = _opened_files()
    if wrong := wrong_with_header(folder):
        return wrong
    try:
        loaded = shardopt.checkpoint.load(folder, target.model, target.optimizer if with_optimizer else None)
    except BaseException as error:
        outcome = refused(error, folder)
        changed = target.difference(before)
        if changed:
            outcome = fault("changed by a load that failed", f"{changed} {outcome}")
        elif must_succeed:
            outcome = fault("refused without a mutation", shown(str(error)))
    else:
        outcome = succeeded(folder, target, loaded, before, with_optimizer)
    strange = [path for path in opened if not _expected(path, folder)]
    if strange:
        return fault("opened files elsewhere", shown(strange))
    return outcome


def wrong_with_header(folder: Path) -> Outcome | None:
    """The fault of reading the header alone, if there is one."""
    try:
        header = shardopt.checkpoint.read_header(folder)
    except CheckpointError:
        return None
    except BaseException as error:
        return fault(f"read_header: {type(error).__name__}", shown(str(error)))
    return None if isinstance(header, dict) else fault(f"read_header gave {type(header).__name__}")


def refused(error: BaseException, folder: Path) -> Outcome:
    """Judges a load's error: right if it is one CheckpointError that says where, in one short line."""
    if type(error) is not CheckpointError:
        return fault(f"load: {type(error).__name__}", shown(str(error)))
    if str(folder) not in str(error):
        return fault("an error that does not name the folder", shown(str(error)))
    if "Traceback (most recent call last)" in str(error):
        return fault("an error with a traceback in it", shown(str(error)))
    if not str(error).isprintable():
        return fault("an error of several lines, or that cannot be printed", ascii(str(error))[:200])
    if len(str(error).replace(str(folder), "")) > MOST_CHARACTERS:
        return fault("a long error", f"{len(str(error))} characters: {shown(str(error))}")
    return ok("refused")


def succeeded(folder: Path, target: Content, loaded: Loaded, before: Any, with_optimizer: bool) -> Outcome:
    """Compares what was loaded with a strict reading."""
    try:
        content = json.loads((folder / INDEX).read_bytes())
    except (ValueError, RecursionError) as error:
        return fault("loaded what is no JSON", shown(str(error)))
    names = [name for name, _ in target.model.named_parameters()] if with_optimizer else []
    own = ("model.", "extra.", *(f"optimizer.{name}." for name in names))  # nobody reads others
    tensors = strict_tensors(folder, content, lambda name: name.startswith(own))
    if isinstance(tensors, str):
        return fault("loaded what the format forbids", tensors)
    outcome = _same(target, tensors, loaded, content, with_optimizer)
    if outcome.fault or with_optimizer:
        return outcome if outcome.fault else _options(target, value_of(content["header"]), before)
    changed = difference(fingerprint(target.optimizer.state_dict()), before[1][2])
    return fault("optimizer changed without being given", changed) if changed else outcome


def _same(target: Content, tensors: Tensors, loaded: Loaded, content: Json, with_optimizer: bool) -> Outcome:
    """Whether the tensors that were loaded are those expected. A parameter without saved state has none afterwards."""
    wanted: dict[str, Any] = {f"model.{name}": tensor for name, tensor in target.model.state_dict().items()}
    if with_optimizer:
        for name, param in target.model.named_parameters():
            state = target.optimizer.state.get(param, {})
            wanted.update({f"optimizer.{name}.{key}": value for key, value in state.items()})
    extra = {key: value for key, value in loaded.extra.items() if isinstance(value, torch.Tensor)}
    wanted.update({f"extra.{key}": value for key, value in extra.items()})
    for name, tensor in wanted.items():
        if name not in tensors:
            return fault("loaded a tensor that is not there", name)
        dtype, shape, data = tensors[name]
        got = fingerprint(tensor)
        if got != ("tensor", f"torch.{dtype}", shape, data):
            return fault("loaded other bits than the strict reader", f"{name} {shown(got[:3])} {dtype} {shape}")
    if not tensors.keys() <= wanted.keys():
        return fault("a tensor was left out", shown(sorted(tensors.keys() - wanted.keys())))
    plain = {key: value for key, value in loaded.extra.items() if key not in extra}
    header = value_of(content["header"])
    expected = {key: value for key, value in header.get("extra", {}).items() if key not in extra}
    if fingerprint(plain) != fingerprint(expected):
        return fault("another extra", f"{shown(plain)} {shown(expected)}")
    return fault("converted unasked", shown(loaded.converted)) if loaded.converted else ok("loaded")


def _options(target: Content, header: Json, before: Any) -> Outcome:
    """Whether the hyper-parameters are the saved or the old ones, and such as the optimizer takes."""
    saved = [group["options"] for group in header["param_groups"]]
    old = dict(before[1][2][1])["str param_groups"][1]
    for group, was in zip(target.optimizer.state_dict()["param_groups"], old, strict=True):
        own = dict(was[1])
        for key, value in group.items():
            found = [options[key] for options in saved if key in options]
            found += [tuple(value) for value in found if isinstance(value, list)]
            if fingerprint(value) not in [own.get(f"str {key}"), *map(fingerprint, found)]:
                return fault("an option of nowhere", f"{key} = {shown(value)}")
        if wrong := implausible(group):
            return fault("took a hyper-parameter out of range", wrong)
    try:
        _targets[1].optimizer.load_state_dict(target.optimizer.state_dict())
    except Exception as error:  # any error is judged: most kinds are faults
        return fault("took options that load_state_dict refuses", f"{type(error).__name__}: {shown(str(error))}")
    try:
        for param in target.model.parameters():
            param.grad = torch.zeros_like(param) if param.requires_grad else None
        target.optimizer.step()
    except Exception as error:  # any error is judged: most kinds are faults
        return fault("no step is possible afterwards", f"{type(error).__name__}: {shown(str(error))}")
    return ok("loaded")


def implausible(group: Json) -> str:
    """A hyper-parameter that is no number in its range."""
    numbers = {"lr": group["lr"], "eps": group["eps"], "weight_decay": group["weight_decay"]}
    for name, value in numbers.items():
        if not isinstance(value, int | float) or not 0 <= value <= torch.finfo(torch.float32).max:
            return f"{name} = {shown(value)}"
    betas = group["betas"]
    pair = isinstance(betas, list | tuple) and len(betas) == 2
    if not pair or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
        return f"betas = {shown(betas)}"
    return ""


_SOURCES = tuple({*sysconfig.get_paths().values(), sys.base_prefix, str(Path(shardopt.__file__).parent.parent)})


def _expected(path: str, folder: Path) -> bool:
    """Whether opening a file is opening the checkpoint, or Python's own business: imports, and lines of tracebacks."""
    if path == str(folder) or (path.startswith(f"{folder}/") and ".." not in path.split("/")):
        return True
    return path.endswith((".py", ".pyc", ".so")) and path.startswith(_SOURCES)


def _opened_files() -> list[str]:
    """A list to which all that is opened from now on is added."""
    found: list[str] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir") and isinstance(args[0], str | bytes | os.PathLike):
            found.append(os.fsdecode(args[0]))

    sys.addaudithook(hook)
    return found
