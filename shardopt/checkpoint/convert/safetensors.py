"""Files in the safetensors format, https://github.com/huggingface/safetensors, read and written in pieces.

Parameters and buffers are ``model.<name>``, state entries ``optimizer.<name>.<entry>``. The optimizer's class and the
param groups stand as JSON in the header's metadata. There is no checksum: portable checkpoints have them.

The library checks a header. Data are read from the file, because the library maps it into memory: a file for PyTorch
that is larger than memory is refused, and one that is cut off meanwhile ends the process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from io import BufferedReader
from typing import Any

import torch
from torch import Tensor

from shardopt.checkpoint.convert.pickled import refusing
from shardopt.checkpoint.convert.recoding import FLOAT32, add_states, class_of_entries, of_names
from shardopt.checkpoint.convert.stream import Checkpoint, LazyTensor, places_of, write_pieces
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.groups import checked_groups
from shardopt.checkpoint.owner import is_of_quantize_state
from shardopt.checkpoint.storage import PathLike
from shardopt.checkpoint.table import MAX_DIMS
from shardopt.checkpoint.wording import few, named, shown
from shardopt.kernels.memory import memoryview_of

#: Bytes before the header, which have its length; the header's first byte is ``{``.
HEADER_BEGIN = 8

_FORMAT_VERSION = 1
_METADATA = "__metadata__"  # of the header
_KEY = "shardopt"  # of the metadata
_MAX_NESTING = 16  # of the JSON in the metadata
_WHOLE = "a whole safetensors file of shardopt convert; write it again"

#: The format's names of the dtypes.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def read_safetensors(path: PathLike, optimizer: str | None, closing: ExitStack) -> Checkpoint:
    """A file of :func:`write_safetensors`, or a dequantized one, as earlier versions wrote.

    The header is checked at once; data are read when they are needed.

    Args:
        path: the file.
        optimizer: the optimizer's class; None to take the one that the file names.
        closing: closes the file.

    Raises:
        CheckpointError: the file is damaged or of another kind.
        ModuleNotFoundError: the package safetensors is not installed.
    """
    text = os.fspath(path)
    file = closing.enter_context(open(path, "rb"))  # noqa: SIM115  closing closes the file
    header, begin = _checked_header(text, file)
    dequantized, groups, saved_optimizer = _saved_options(text, header.pop(_METADATA, None) or {})
    tensors = {name: _lazy(text, file, begin, name, described) for name, described in header.items()}
    if dequantized:
        groups = [{**group, "options": {**group["options"], **FLOAT32}} for group in groups]
    checkpoint = Checkpoint(text, groups=groups)
    checkpoint.tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith("optimizer.")}
    entries = of_names(tensors)
    checkpoint.optimizer = optimizer or saved_optimizer or class_of_entries(checkpoint, entries)
    add_states(checkpoint, entries)
    return checkpoint


def _checked_header(path: str, file: BufferedReader) -> tuple[dict[str, Any], int]:
    """The header of a file, and the position of the data.

    The library has checked the header's structure, and that the tensors cover the data one after another.
    """
    try:
        from safetensors import safe_open
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path}: got a safetensors file, which needs the package safetensors; install shardopt[safetensors]"
        ) from error
    with refusing(path, _WHOLE):
        try:
            with safe_open(path, framework="numpy"):
                pass
        except MemoryError as error:
            raise CheckpointError(
                f"{path}: got no addresses to map the file, expected {os.path.getsize(path)} bytes of them; "
                "raise the limit on the process's address space (ulimit -v)"
            ) from error
        length = int.from_bytes(file.read(HEADER_BEGIN), "little")
        return _parsed(file.read(length)), HEADER_BEGIN + length


def _lazy(path: str, file: BufferedReader, data_begin: int, name: str, described: Mapping[str, Any]) -> LazyTensor:
    """A tensor of a file, from its description in the header."""
    if not isinstance(described, dict):  # the library takes a list, too
        raise CheckpointError(f"{path}: got {named(name)} as {shown(described)}, expected {_WHOLE}")
    dtype, shape = described["dtype"], tuple(described["shape"])
    if dtype not in _DTYPES or len(shape) > MAX_DIMS or max(shape, default=0) >> 63:
        raise CheckpointError(
            f"{path}: got {named(name)} of {shown(dtype)} and shape {shown(shape)}, expected one of "
            f"{', '.join(_DTYPES)} with at most {MAX_DIMS} dimensions of less than 2^63; save it in another format"
        )
    read = partial(_read, path, file, _DTYPES[dtype], data_begin + described["data_offsets"][0])
    return LazyTensor(_DTYPES[dtype], shape, read)


def _read(path: str, file: BufferedReader, dtype: torch.dtype, begin: int, first: int, end: int) -> Tensor:
    """The elements ``[first, end)`` of a flattened tensor that begins at a position of the file."""
    elements = torch.empty(end - first, dtype=dtype, device="cpu")
    try:
        file.seek(begin + first * dtype.itemsize)
        count = file.readinto(memoryview_of(elements))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}; write it again") from error
    if count < elements.nbytes:
        raise CheckpointError(f"{path}: ended while it was read, expected {_WHOLE}")
    return elements


def _saved_options(path: str, metadata: Mapping[str, str]) -> tuple[bool, list[dict[str, Any]], str | None]:
    """Whether moments are dequantized, the param groups, and the optimizer's class if the metadata name it.

    Raises:
        CheckpointError: the metadata are of another program, of a newer version, or damaged.
    """
    if _KEY not in metadata:
        raise CheckpointError(f"{path}: got a safetensors file of another kind, expected one of shardopt convert")
    with refusing(path, _WHOLE):
        saved = _parsed(metadata[_KEY])
    fields = saved if isinstance(saved, dict) else {}
    version, dequantized, optimizer = (fields.get(key) for key in ("format_version", "dequantized", "optimizer"))
    if type(version) is not int or version < 0 or not isinstance(dequantized, bool):
        raise CheckpointError(
            f"{path}: got format_version {shown(version)} and dequantized {shown(dequantized)}, expected {_WHOLE}"
        )
    if version > _FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: got format version {shown(version)}, expected at most {_FORMAT_VERSION}; update shardopt"
        )
    groups = checked_groups(path, fields.get("param_groups"))
    return dequantized, groups, optimizer if isinstance(optimizer, str) else None


def _parsed(text: str | bytes) -> Any:
    """The value of a JSON text from a file that may be damaged, or made to do harm.

    Raises:
        ValueError: the text is no JSON, has a key twice, or is nested deeper than any saved value.
        RecursionError: the text is nested deeper than Python's parser allows.
    """
    value = json.loads(text, object_pairs_hook=_without_duplicates)
    if not _is_flat(value, _MAX_NESTING):
        raise ValueError(f"nesting deeper than {_MAX_NESTING}")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key that stands twice")
    return values


def _is_flat(value: object, levels: int) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(levels > 0 and _is_flat(item, levels - 1) for item in items)


def write_safetensors(checkpoint: Checkpoint, path: PathLike, numel: int, progress: Callable[[int], object]) -> None:
    """Writes a safetensors file. The library's own writer wants all tensors in memory at once.

    Args:
        checkpoint: the checkpoint.
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
            "optimizer of shardopt; choose another format"
        )
    _leave_out_extra(checkpoint)
    places = places_of(checkpoint.described)
    header = _header_of(checkpoint, places)
    with open(path, "xb") as file:
        file.write(header)
        write_pieces(checkpoint, file, places, numel, progress, begin=len(header))
        file.flush()
        os.fsync(file.fileno())


def _header_of(checkpoint: Checkpoint, places: Mapping[str, int]) -> bytes:
    """The bytes before the data of a file, in which the tensors have these places."""
    saved = {
        "format_version": _FORMAT_VERSION,
        "dequantized": False,
        "optimizer": checkpoint.optimizer,
        "param_groups": checkpoint.groups,
    }
    header: dict[str, Any] = {_METADATA: {"format": "pt", _KEY: json.dumps(saved)}}
    described = checkpoint.described
    for key, begin in places.items():
        dtype, shape = described[key]
        if dtype not in _NAMES:
            raise CheckpointError(
                f"{checkpoint.path}: got {named(key)} of {dtype}, expected one of {', '.join(map(str, _NAMES))}; "
                "choose another format"
            )
        end = begin + described[key].nbytes
        header[key] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin aligned
    return len(text).to_bytes(HEADER_BEGIN, "little") + text


def _leave_out_extra(checkpoint: Checkpoint) -> None:
    """Removes ``extra``, for which a format has no place."""
    keys = [*checkpoint.extra, *(key.removeprefix("extra.") for key in checkpoint.tensors if key.startswith("extra."))]
    if keys:
        checkpoint.left_out.append(f"extra: {few(keys)}")
    checkpoint.extra = {}
    checkpoint.tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if not key.startswith("extra.")}
