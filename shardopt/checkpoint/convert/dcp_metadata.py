"""The file ``.metadata`` of torch.distributed.checkpoint: a pickle, in which only DCP's own classes are found."""

from __future__ import annotations

import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from shardopt.checkpoint.convert.pickled import Dict, refusing, size, unpickled
from shardopt.checkpoint.errors import CheckpointError

METADATA = ".metadata"

#: For errors.
WRITTEN = (
    "what DCP writes: tensors and plain values of the classes that it needs; save it again with "
    "torch.distributed.checkpoint"
)
_MOST_BYTES = 1 << 31


class Index(metadata.MetadataIndex):
    """A key of ``storage_data``, whose hash is a text's: a file can choose offsets whose hashes are equal."""

    def __hash__(self) -> int:
        return hash(f"{self.offset} {self.fqn}")


def _memory_format(value: Any) -> Any:
    """In place of an Enum, whose members a pickle might change."""
    return metadata._MEM_FORMAT_ENCODING(value)


def _enum_member(kind: Any, name: Any) -> Any:
    """In place of ``getattr``, by which Python 3.11.0 to 3.11.3 pickle members of an Enum."""
    if kind is not _memory_format:
        raise pickle.UnpicklingError(f"getattr of {type(kind).__name__}")
    return metadata._MEM_FORMAT_ENCODING[name]


_CLASSES: dict[tuple[str, str], Any] = {
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        )
    },
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"): Index,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _memory_format,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.__getitem__,
    ("torch", "Size"): size,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "WindowsPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    ("pathlib._local", "WindowsPath"): PurePosixPath,
    ("collections", "OrderedDict"): Dict,
    ("builtins", "getattr"): _enum_member,
}


def metadata_in(folder: Path) -> metadata.Metadata:
    """The content of ``.metadata``.

    Raises:
        CheckpointError: it is damaged, or has anything else than DCP writes.
    """
    path = folder / METADATA
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise CheckpointError(f"{path}: got {size} bytes, expected at most {_MOST_BYTES}; save it again")
    with refusing(str(path), WRITTEN):
        content = unpickled(path.read_bytes(), _CLASSES)
    if type(content) is not metadata.Metadata or not all(
        isinstance(getattr(content, key, None), dict) for key in ("state_dict_metadata", "planner_data", "storage_data")
    ):
        raise CheckpointError(f"{path}: got metadata of another kind, expected those of DCP's default planner")
    return content
