"""Checkpoints that any backend and any number of ranks can load, and that are never half there.

A checkpoint is a folder ``step-00000200`` that holds what torch.distributed.checkpoint writes and
``checkpoint.json`` with everything else. It is written under a temporary name beside its place and
renamed when complete, so that what bears the final name is complete.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from lm import runtime
from lm.errors import UserError, one_line
from lm.runtime import Ranks

AUTO = "auto"
_HEADER = "checkpoint.json"
_HEADER_KEYS = ("step", "model", "optimizer", "data", "world_size")
_FORMAT = 1
_TEMPORARY = ".tmp-"
_NAME = re.compile(r"step-(\d{8})")

Header = dict[str, Any]


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, the latest last."""
    if not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    return sorted(path for path in found if (path / _HEADER).is_file())


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def find(resume: str | None, folder: Path) -> Path | None:
    """The checkpoint that ``--resume`` means, or None to start afresh.

    Args:
        resume: None, "auto", a checkpoint, or a folder of checkpoints.
        folder: where this run's checkpoints go; "auto" looks there.

    Raises:
        UserError: there is no complete checkpoint.
    """
    if resume is None:
        return None
    path = folder if resume == AUTO else Path(resume)
    if (path / _HEADER).is_file() and not path.name.startswith(_TEMPORARY):
        return path
    found = complete(path)
    if not found and resume != AUTO:
        raise UserError(f"resume: no complete checkpoint in {path}")
    return found[-1] if found else None


def read_header(path: Path) -> Header:
    """Reads ``checkpoint.json``.

    Raises:
        UserError: it cannot be read, or is of another format.
    """
    try:
        header: Header = json.loads((path / _HEADER).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the checkpoint {path}: {error}") from error
    found = header.get("format") if isinstance(header, dict) else None
    if found != _FORMAT:
        raise UserError(f"checkpoint {path}: format {found}, this version reads format {_FORMAT}")
    missing = [key for key in _HEADER_KEYS if key not in header]
    if missing:
        raise UserError(f"checkpoint {path}: {_HEADER} lacks {', '.join(missing)}")
    return header


def demand_same(path: Path, what: str, saved: dict[str, Any], asked: dict[str, Any]) -> None:
    """Raises UserError where the checkpoint's model or optimizer is not the run's."""
    differing = [
        f"{key} is {saved.get(key)}, not {asked.get(key)}"
        for key in sorted(saved.keys() | asked.keys())
        if saved.get(key) != asked.get(key)
    ]
    if differing:
        raise UserError(f"checkpoint {path} is from another {what}: {'; '.join(differing)}")


def clear_unfinished(folder: Path) -> None:
    """Removes what a killed run left under temporary names."""
    for path in folder.glob(_TEMPORARY + "*"):
        shutil.rmtree(path, ignore_errors=True)


def save(
    folder: Path,
    header: Header,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
) -> Path:
    """Writes a checkpoint; all ranks take part.

    Args:
        folder: the folder of checkpoints.
        header: what goes into ``checkpoint.json``; has "step".
        model: as the backend wrapped it.
        optimizer: over its parameters.
        ranks: this process.

    Returns:
        The checkpoint.
    """
    name = f"step-{header['step']:08d}"
    final, temporary = folder / name, folder / (_TEMPORARY + name)
    if ranks.first:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    runtime.barrier()
    with _no_warning_without_group():
        save_tensors(_tensors(model, optimizer), storage_writer=FileSystemWriter(temporary))
    if ranks.first:
        _write_durably(temporary / _HEADER, json.dumps({"format": _FORMAT, **header}, indent=1))
        _sync_folder(temporary)
        temporary.rename(final)
        _sync_folder(folder)
    runtime.barrier()
    return final


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Reads parameters and optimizer state into a run of any backend and number of ranks.

    The hyper-parameters stay as the optimizer has them.

    Raises:
        UserError: a file is missing or damaged.
    """
    tensors = _tensors(model, optimizer)
    try:
        with _no_warning_without_group():
            load_tensors(tensors, storage_reader=_Reader(path), planner=_TensorsOnly())
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        reason = one_line(causes[0]) if causes else one_line(error)
        raise UserError(f"checkpoint {path} is damaged: {reason}") from error
    set_model_state_dict(model, tensors["model"])
    groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
    set_optimizer_state_dict(model, optimizer, {"state": tensors["optimizer"], "param_groups": groups})


def prune(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints; 0 keeps all."""
    for path in complete(folder)[:-keep] if keep else []:
        doomed = path.with_name(_TEMPORARY + "old-" + path.name)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer)["state"],
    }


@contextmanager
def _no_warning_without_group() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _TensorsOnly(DefaultLoadPlanner):
    """Refuses pickled objects: all that is no tensor is in ``checkpoint.json``."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is no tensor")


class _MetadataUnpickler(pickle.Unpickler):
    """Makes what torch.distributed.checkpoint's index consists of, and nothing else."""

    _INDEX = "torch.distributed.checkpoint.metadata"
    _KNOWN = frozenset(
        {
            (_INDEX, "Metadata"),
            (_INDEX, "MetadataIndex"),
            (_INDEX, "TensorStorageMetadata"),
            (_INDEX, "BytesStorageMetadata"),
            (_INDEX, "ChunkStorageMetadata"),
            (_INDEX, "TensorProperties"),
            (_INDEX, "StorageMeta"),
            (_INDEX, "_MEM_FORMAT_ENCODING"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            ("torch", "Size"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        # A path's class depends on the system and the Python that wrote it; nothing needs the path.
        if module.startswith("pathlib"):
            return PurePosixPath
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in self._KNOWN or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the index names {module}.{name}")


class _Reader(FileSystemReader):
    """Reads the index without running what a stranger may have put into it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path, ".metadata"), "rb") as file:
            metadata: Metadata = _MetadataUnpickler(file).load()
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata
