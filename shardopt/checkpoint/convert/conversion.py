"""Converts a checkpoint: recognizes the format of the source, and writes another one."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from shardopt.checkpoint.convert.pickled import refusing
from shardopt.checkpoint.convert.portable import read_portable, write_portable
from shardopt.checkpoint.convert.recoding import recoded
from shardopt.checkpoint.convert.safetensors import HEADER_BEGIN, read_safetensors, write_safetensors
from shardopt.checkpoint.convert.stream import PIECE_NUMEL, Checkpoint
from shardopt.checkpoint.convert.torch_file import read_torch, write_torch
from shardopt.checkpoint.convert.unfinished import unfinished
from shardopt.checkpoint.convert.universal import COMMON, read_universal
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.header import dumped
from shardopt.checkpoint.index import INDEX_NAME, is_own_name
from shardopt.checkpoint.owner import is_of_quantize_state
from shardopt.checkpoint.storage import LocalFolder, PathLike, folder_at
from shardopt.checkpoint.wording import few

#: Formats that can be written.
FORMATS = ("portable", "safetensors", "torch", "dcp")

#: Formats whose moments are float32.
_FLOAT32 = ("torch",)

#: Bytes of a result for each byte of a source, at most: float32 of 4 bits, and parameters with several names.
_MOST_PER_BYTE = 64

_DCP_METADATA = ".metadata"
_ZIP = b"PK\3\4"


class Converted(NamedTuple):
    """The result of a conversion.

    Attributes:
        source: the format of the source.
        states: the conversion of each parameter whose state was encoded anew, by the parameter's name.
        left_out: what the target cannot hold, in words.
    """

    source: str
    states: dict[str, str]
    left_out: list[str]


def convert(
    source: PathLike,
    target: PathLike,
    to: str = "portable",
    *,
    codec: str | None = None,
    block_size: int | None = None,
    optimizer: str | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
    piece_numel: int = PIECE_NUMEL,
) -> Converted:
    """Converts a checkpoint between codecs and formats, without the model, in pieces of a few MiB.

    Args:
        source: a portable checkpoint, a safetensors file of a conversion, or a file of
            ``torch.save({"model": ..., "optimizer": ...})``, a folder of torch.distributed.checkpoint, or a
            universal checkpoint of DeepSpeed; recognized by its files.
        target: the path or URL of the result, where nothing is yet.
        to: the format of the result, one of :data:`FORMATS`.
        codec: of the moments; None keeps the source's.
        block_size: of quantized moments; None keeps the source's.
        optimizer: the optimizer's class, such as ``"AdamW"``, where the source does not name it.
        progress: called with the bytes that were written, and all that will be.
        piece_numel: elements that are in memory at a time; each takes about 60 bytes.

    Raises:
        CheckpointError: the source cannot be read, is damaged or of an unknown format, the target exists already, or
            cannot hold what is in the source. Nothing is left at the target.
        ModuleNotFoundError: the source is a safetensors file, and the package safetensors is not installed.
    """
    if to not in FORMATS:
        raise CheckpointError(f"got the format {to!r}, expected one of {', '.join(FORMATS)}")
    options = {key: value for key, value in (("codec", codec), ("block_size", block_size)) if value is not None}
    if to in _FLOAT32 and options:
        raise CheckpointError(f"got {few(options)} for {to}, whose moments are float32, expected neither; leave it out")
    if "://" in os.fspath(target) and to != "portable":
        raise CheckpointError(f"got {target} for {to}, expected a path; write it to a disk, and copy it")
    _refuse_existing(target)
    with ExitStack() as closing:
        with refusing(os.fspath(source), "tensors and plain values where such a checkpoint has them; save it again"):
            kind = format_of(source)
            checkpoint = _read(kind, source, optimizer, closing)
        if to != "safetensors":  # which has no extra values
            _check_extra(checkpoint)
        if to in _FLOAT32 and checkpoint.optimizer is not None and not is_of_quantize_state(checkpoint.optimizer):
            options = {"codec": "fp32"}
        checkpoint, states = recoded(checkpoint, options)
        total = sum(described.nbytes for described in checkpoint.described.values())
        _check_total(total, kind, source)
        done = 0

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress(done, total)

        _write(to, checkpoint, target, piece_numel, advance)
    return Converted(kind, states, checkpoint.left_out)


def format_of(source: PathLike) -> str:
    """The format of a checkpoint, by the names of its files.

    Raises:
        CheckpointError: there is nothing, or it is of no known format.
    """
    folder = folder_at(source)
    text = os.fspath(source)
    if "://" in text:
        return "portable"
    path = Path(text)
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or folder, expected a checkpoint; check the path")
    if path.is_dir():
        names = folder.names()
        if INDEX_NAME in names:
            return "portable"
        if _DCP_METADATA in names:
            return "dcp"
        if (path / COMMON).is_file():
            return "universal"
    elif path.is_file():
        with path.open("rb") as file:
            head = file.read(HEADER_BEGIN + 1)
        if head.startswith(_ZIP):
            return "torch"
        if head[HEADER_BEGIN:] == b"{":
            return "safetensors"
        got = f"a file that begins with {head!r}" if head else "an empty file"
        raise CheckpointError(
            f"{path}: got {got}, expected one of safetensors or torch.save, or a checkpoint's folder; check the path"
        )
    raise CheckpointError(
        f"{path}: got no known checkpoint, expected one of {INDEX_NAME} or {_DCP_METADATA} in it; check the path"
    )


def _read(kind: str, source: PathLike, optimizer: str | None, closing: ExitStack) -> Checkpoint:
    if kind == "portable":
        return read_portable(folder_at(source), closing)
    if kind == "dcp":
        from shardopt.checkpoint.convert.dcp import read_dcp  # imports torch.distributed.checkpoint, which takes long

        return read_dcp(source, optimizer)
    if kind == "universal":
        return read_universal(source, optimizer)
    if kind == "torch":
        return read_torch(source, optimizer)
    return read_safetensors(source, optimizer, closing)


def _write(to: str, checkpoint: Checkpoint, target: PathLike, numel: int, progress: Callable[[int], object]) -> None:
    folder = folder_at(target)
    if not isinstance(folder, LocalFolder):
        try:
            write_portable(checkpoint, folder, numel, progress)
        except OSError as error:
            raise CheckpointError(
                f"{folder}: got {error} while writing, expected room for it; choose another URL"
            ) from error
        return
    with unfinished(Path(str(folder))) as path:
        if to == "portable":
            write_portable(checkpoint, folder_at(path), numel, progress)
        elif to == "dcp":
            from shardopt.checkpoint.convert.dcp import write_dcp  # imports torch.distributed.checkpoint

            write_dcp(checkpoint, path, numel, progress)
        else:
            {"safetensors": write_safetensors, "torch": write_torch}[to](checkpoint, path, numel, progress)


def _check_total(total: int, kind: str, source: PathLike) -> None:
    """Raises if tensors share memory, so that the result would be far larger than the source.

    Chunks of portable checkpoints cannot: see :mod:`shardopt.checkpoint.table`.
    """
    if kind in ("torch", "dcp", "universal"):
        path = Path(source)
        size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
        if total > _MOST_PER_BYTE * size:
            raise CheckpointError(
                f"{path}: got tensors that come to {total} bytes in {size} bytes, expected at most {_MOST_PER_BYTE} "
                "times as many; save tensors that share no memory"
            )


def _check_extra(checkpoint: Checkpoint) -> None:
    """Raises if extra values are nested deeper than a save allows, as in checkpoints of earlier versions."""
    try:
        dumped({"extra": checkpoint.extra})
    except TypeError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error


def _refuse_existing(target: PathLike) -> None:
    """Raises if the target exists; what a killed process has left in an object store does not count."""
    folder = folder_at(target)
    if isinstance(folder, LocalFolder):
        exists = os.path.lexists(str(folder))
    else:
        exists = not all(map(is_own_name, folder.names()))
    if exists:
        raise CheckpointError(
            f"{os.fspath(target)}: got a target that exists, expected a new path; remove it, or choose another"
        )
