"""The checkpoints of a run: one folder each, such as ``step-00000200``, for any backend and any number of ranks.

A checkpoint is complete once its folder has ``checkpoint.json``, which is written last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import shardopt.checkpoint
from lm.backends import Learner
from lm.errors import RanksLost, UserError
from lm.model import build
from lm.options import Config
from lm.runtime import Ranks
from shardopt.checkpoint import CheckpointError
from shardopt.checkpoint.errors import LostRanksError
from shardopt.checkpoint.index import INDEX_NAME


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, from the earliest to the latest."""
    return sorted(path for path in folder.glob("step-*") if _is_complete(path))


def find(resume: str, folder: Path) -> Path | None:
    """The checkpoint that ``--resume`` names, or a folder's latest; "auto" takes this run's folder, or None.

    Raises:
        UserError: `resume` is a path with no complete checkpoint.
    """
    path = folder if resume == "auto" else Path(resume)
    found = [path] if _is_complete(path) else complete(path)
    if not found and resume != "auto":
        raise UserError(f"resume: no complete checkpoint in {path}")
    return found[-1] if found else None


def read_header(path: Path) -> dict[str, Any]:
    """The job's own header in a checkpoint, beside model and optimizer.

    Raises:
        UserError: the checkpoint cannot be read, or another program than train.py saved it.
    """
    with _user_errors(f"cannot load the checkpoint {path}"):
        header: dict[str, Any] = shardopt.checkpoint.read_header(path)["extra"].get("job", {})
    if "step" not in header:
        raise UserError(f"checkpoint {path} was not saved by train.py: it has no step")
    return header


def save(folder: Path, header: dict[str, Any], learner: Learner, keep: int) -> Path:
    """Writes a checkpoint with a header that has "step"; the newest `keep` stay, or with 0 all. All ranks take part.

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
        UserError: the checkpoint cannot be loaded: it is damaged, or of another model or codec.
        RanksLost: another rank is gone.
    """
    with _user_errors(f"cannot load the checkpoint {path}"):
        shardopt.checkpoint.load(path, learner.module, learner.optimizer, hyper_parameters="keep")


def contents(path: Path) -> dict[str, bytes]:
    """The bytes of every parameter and tensor of optimizer state, as one process without sharding loads them.

    All ranks take part, and each loads all of the checkpoint into the host's memory.

    Raises:
        UserError: the checkpoint cannot be loaded.
        RanksLost: another rank is gone.
    """
    config = replace(Config(**read_header(path)["options"]), backend="single", device="cpu", ordered=False)
    network = build(config.model, config.context, config.seed, config.stored)
    bare = Learner(network, Ranks(0, 1, 0, torch.device("cpu")), config)
    load(path, bare)
    found = {f"model.{name}": param.detach() for name, param in network.named_parameters()}
    for name, param in network.named_parameters():
        found.update((f"optimizer.{name}.{key}", x) for key, x in bare.optimizer.state[param].items())
    return {name: x.flatten().view(torch.uint8).numpy().tobytes() for name, x in found.items()}


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
