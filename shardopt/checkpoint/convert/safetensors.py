"""The single-file form of save_safetensors, read and written in pieces."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from shardopt.checkpoint.convert.recoding import FLOAT32, add_states, class_of_entries, of_names
from shardopt.checkpoint.convert.stream import Checkpoint, LazyTensor
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.folder import PathLike
from shardopt.checkpoint.foreign.safetensors_reader import SafetensorsReader
from shardopt.checkpoint.foreign.safetensors_writer import DTYPES, Description, header_of
from shardopt.checkpoint.foreign.single_file import FORMAT_VERSION, KEY, header_in
from shardopt.checkpoint.owner import is_of_quantize_state
from shardopt.checkpoint.wording import few, named


def read_safetensors(path: PathLike, optimizer: str | None, closing: ExitStack) -> Checkpoint:
    """A file of ``save_safetensors``. Its header is checked at once, data are read when they are needed.

    Args:
        path: the file.
        optimizer: the optimizer's class; None to take what the file says.
        closing: closes the file.

    Raises:
        CheckpointError: the file is damaged or of another kind.
    """
    file = closing.enter_context(SafetensorsReader(path))
    header = header_in(os.fspath(path), file)
    tensors = {
        key: LazyTensor(stored.dtype, stored.shape, partial(file.read_range, key))
        for key, stored in file.tensors.items()
    }
    checkpoint = Checkpoint(os.fspath(path), groups=header.param_groups)
    if header.dequantized:
        checkpoint.groups = [{**group, "options": {**group["options"], **FLOAT32}} for group in checkpoint.groups]
    checkpoint.tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith("optimizer.")}
    entries = of_names(tensors)
    checkpoint.optimizer = optimizer or header.optimizer or class_of_entries(checkpoint, entries)
    add_states(checkpoint, entries)
    return checkpoint


def write_safetensors(checkpoint: Checkpoint, path: PathLike, numel: int, progress: Callable[[int], object]) -> None:
    """Writes a file as ``save_safetensors`` does.

    Args:
        checkpoint: what to write.
        path: the file, which must not exist.
        numel: elements of a piece.
        progress: called with the bytes of each piece that was written.

    Raises:
        CheckpointError: the checkpoint could not be read, or the format has no place for it.
        OSError: the system fails to write.
    """
    if checkpoint.optimizer is None or is_of_quantize_state(checkpoint.optimizer):
        raise CheckpointError(
            f"{checkpoint.path}: got a checkpoint of {checkpoint.optimizer or 'no optimizer'}, expected one of an "
            "optimizer of shardopt, as save_safetensors takes; choose another format"
        )
    leave_out_extra(checkpoint)
    described = checkpoint.described
    for key, (dtype, _) in described.items():
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{checkpoint.path}: got {named(key)} of {dtype}, expected one of {', '.join(map(str, DTYPES))}; "
                "choose another format"
            )
    in_order = sorted(described.items(), key=lambda item: -item[1].dtype.itemsize)  # so that each begins aligned
    metadata = {
        "format_version": FORMAT_VERSION,
        "dequantized": False,
        "optimizer": checkpoint.optimizer,
        "param_groups": checkpoint.groups,
    }
    header = header_of([Description(key, *each) for key, each in in_order], {"format": "pt", KEY: json.dumps(metadata)})
    places, end = {}, 8 + len(header)
    for key, each in in_order:
        places[key] = end
        end += each.nbytes
    with open(path, "xb", buffering=0) as file:
        _write_at(file.fileno(), len(header).to_bytes(8, "little") + header, 0)
        for key, first, data in checkpoint.pieces(numel):
            content = data.contiguous().view(torch.uint8).numpy().data
            _write_at(file.fileno(), content, places[key] + first * data.itemsize)
            progress(len(content))
        os.fsync(file.fileno())


def leave_out_extra(checkpoint: Checkpoint) -> None:
    """Removes ``extra``, for which a format has no place."""
    keys = [*checkpoint.extra, *(key.removeprefix("extra.") for key in checkpoint.tensors if key.startswith("extra."))]
    if keys:
        checkpoint.left_out.append(f"extra: {few(keys)}")
    checkpoint.extra = {}
    checkpoint.tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if not key.startswith("extra.")}


def _write_at(descriptor: int, data: Any, position: int) -> None:
    left = memoryview(data)
    while len(left):
        written = os.pwrite(descriptor, left, position)
        left, position = left[written:], position + written
