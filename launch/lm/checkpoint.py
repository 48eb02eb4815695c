"""The checkpoints of a run: one folder each, such as ``step-00000200``, for any backend and any number of ranks.

A checkpoint is complete once its folder has ``checkpoint.json``, which is written last. Folders without that file are
left over from unfinished saves.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import shardopt.checkpoint
from lm.errors import RanksLost, UserError
from lm.learner import Learner
from shardopt.checkpoint import CheckpointError
from shardopt.checkpoint.errors import LostRanksError
from shardopt.checkpoint.index import INDEX_NAME

_HEADER_KEYS = ("step", "model", "optimizer", "data", "world_size")
_NAME = re.compile(r"step-(\d{8})")

Header = dict[str, Any]


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, from the earliest to the latest."""
    return sorted(path for path in _named(folder) if _is_complete(path))


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def find(resume: str | None, folder: Path) -> Path | None:
    """The checkpoint that ``--resume`` names, or None to start from step 0.

    Args:
        resume: None, "auto", a checkpoint, or a folder of checkpoints.
        folder: the folder of this run's checkpoints, in which "auto" looks for the latest.

    Raises:
        UserError: `resume` is a path with no complete checkpoint.
    """
    if resume is None:
        return None
    path = folder if resume == "auto" else Path(resume)
    candidates = [path] if _is_complete(path) else complete(path)
    if not candidates and resume != "auto":
        raise UserError(f"resume: no complete checkpoint in {path}")
    return candidates[-1] if candidates else None


def read_header(path: Path) -> Header:
    """The job's own header in a checkpoint, beside model and optimizer.

    Raises:
        UserError: the checkpoint cannot be read, or another program than train.py saved it.
    """
    with _user_errors(f"cannot load the checkpoint {path}"):
        header: Header = shardopt.checkpoint.read_header(path)["extra"].get("job", {})
    missing = [key for key in _HEADER_KEYS if key not in header]
    if missing:
        raise UserError(f"checkpoint {path} was not saved by train.py: it lacks {', '.join(missing)}")
    return header


def demand_same(path: Path, what: str, saved: dict[str, Any], asked: dict[str, Any]) -> None:
    """Raises UserError if the checkpoint's model or optimizer (`what`) differs from the run's."""
    differing = [
        f"{key} is {saved.get(key)}, not {asked.get(key)}"
        for key in sorted(saved.keys() | asked.keys())
        if saved.get(key) != asked.get(key)
    ]
    if differing:
        raise UserError(f"checkpoint {path} is from another {what}: {'; '.join(differing)}")


def clear_unfinished(folder: Path) -> None:
    """Removes unfinished checkpoints, which killed runs leave behind."""
    for path in _named(folder):
        if not _is_complete(path):
            shutil.rmtree(path, ignore_errors=True)


def save(folder: Path, header: Header, learner: Learner, keep: int) -> Path:
    """Writes a checkpoint; all ranks take part.

    Args:
        folder: the folder of checkpoints.
        header: the job's header, for :func:`read_header`; must have "step".
        learner: model and optimizer.
        keep: how many checkpoints stay, with this one; 0 keeps all.

    Returns:
        The checkpoint.

    Raises:
        UserError: the checkpoint cannot be written.
        RanksLost: another rank is gone.
    """
    path = folder / f"step-{header['step']:08d}"
    with _user_errors(f"cannot save the checkpoint {path}"):
        shardopt.checkpoint.save(path, learner.module, learner.optimizer, keep_last=keep or None, job=header)
    return path


def load(path: Path, learner: Learner) -> None:
    """Reads parameters and optimizer state into a run of any backend and number of ranks.

    Keeps the optimizer's own hyper-parameters instead of the saved ones.

    Raises:
        UserError: the checkpoint cannot be loaded, for example because a file is missing or damaged.
        RanksLost: another rank is gone.
    """
    kept = [{key: value for key, value in group.items() if key != "params"} for group in learner.optimizer.param_groups]
    with _user_errors(f"cannot load the checkpoint {path}"):
        shardopt.checkpoint.load(path, learner.module, learner.optimizer)
    for group, options in zip(learner.optimizer.param_groups, kept, strict=True):
        group.update(options)


def _named(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []


def _is_complete(path: Path) -> bool:
    return (path / INDEX_NAME).is_file()


@contextmanager
def _user_errors(what: str) -> Iterator[None]:
    """Turns errors of checkpoints into a UserError that says what failed; the loss of a rank is no such error."""
    try:
        yield
    except LostRanksError as error:
        raise RanksLost.because(error.__cause__ or error) from error
    except CheckpointError as error:
        raise UserError(f"{what}: {error}") from error
