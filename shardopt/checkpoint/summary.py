"""Summary of a portable checkpoint, without the model: sizes, ranges of values, codes, NaN and infinities.

Data are read once, chunk by chunk, and verified: memory does not grow with the checkpoint.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardopt.checkpoint.data_file import DataFiles
from shardopt.checkpoint.groups import checked_groups
from shardopt.checkpoint.index import Index, StoredTensor, load_index, noticing_replacement
from shardopt.checkpoint.reading import stored_chunks
from shardopt.checkpoint.storage import Folder, folder_at
from shardopt.checkpoint.table import StoredChunk
from shardopt.state.slice_spec import LOW_BITS, SHARED_CODES

_OWN_NAMES = ("step", LOW_BITS, SHARED_CODES)


@dataclass
class Values:
    """Values of a tensor.

    Attributes:
        nan: how many are NaN.
        infinite: how many are infinite.
        low: the least finite one, of scales that are stored with a step each the least scale; infinity without one.
        high: the largest finite one; minus infinity without one.
        counts: of uint8, how often each value occurs: int64, (256,).
    """

    nan: int = 0
    infinite: int = 0
    low: float = math.inf
    high: float = -math.inf
    counts: Tensor = field(default_factory=lambda: torch.zeros(256, dtype=torch.int64, device="cpu"))

    def add(self, x: Tensor, stride: int = 1) -> None:
        """Takes more values: 1-D, any dtype. Every ``stride``-th one counts for ``low`` and ``high``."""
        if x.dtype == torch.uint8:
            self.counts += torch.bincount(x, minlength=256)
        if not x.is_floating_point() or not x.numel():
            return
        x = x if x.dtype.itemsize > 1 else x.float()  # of float8 PyTorch has few functions
        counted = x[::stride]
        if not all(math.isfinite(end) for end in torch.aminmax(x)):
            self.nan += int(x.isnan().sum())
            self.infinite += int(x.isinf().sum())
            counted = counted[counted.isfinite()]
        if counted.numel():
            low, high = (float(end) for end in torch.aminmax(counted))
            self.low, self.high = min(self.low, low), max(self.high, high)

    @property
    def bits_used(self) -> float:
        """Entropy of the codes, bits: 8 where all occur alike, less where few do most of the work."""
        share = self.counts.double() / max(int(self.counts.sum()), 1)
        return float(-(share[share > 0] * share[share > 0].log2()).sum())


@dataclass
class Parameter:
    """A parameter of the checkpoint, or a buffer.

    Attributes:
        name: its name in the model.
        weights: the stored tensor, if the model was saved.
        state: the stored entries of the optimizer's state, by name.
        options: of its param group; empty for one without.
        values: of all these, by their names in the checkpoint; empty where they were not read.
    """

    name: str
    weights: StoredTensor | None
    state: dict[str, StoredTensor]
    options: dict[str, Any]
    values: dict[str, Values]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape, of the weights or else of the first entry that has an element for each."""
        if self.weights is not None:
            return self.weights.shape
        whole = [entry.shape for key, entry in self.state.items() if key != "step" and not key.endswith("_scales")]
        return whole[0] if whole else ()

    @property
    def codec(self) -> str:
        """The codec of the state: "fp32" where it is not quantized, "" without state."""
        if not self.state:
            return ""
        quantized = any(key.endswith("_codes") for key in self.state)
        moments = [key for key in self.state if key not in _OWN_NAMES]
        named = str(self.options.get("codec", "?"))
        return named if quantized or named == "bf16" else "fp32" if moments else ""

    def nbytes(self) -> dict[str, int]:
        """Bytes by kind: weights, codes, scales, moments without codes, master low bits."""
        nbytes = {"weights": 0 if self.weights is None else self.weights.nbytes}
        nbytes |= dict.fromkeys(("codes", "scales", "moments", "master low bits"), 0)
        for key, entry in self.state.items():
            kind = "codes" if key.endswith("_codes") else "scales" if key.endswith("_scales") else "moments"
            nbytes["master low bits" if key == LOW_BITS else kind] += entry.nbytes
        return nbytes


@dataclass
class Summary:
    """A checkpoint.

    Attributes:
        path: its folder.
        header: as :func:`shardopt.checkpoint.read_header` gives it.
        files: the lengths of the data files, bytes.
        parameters: parameters and buffers, in the order of their names.
        others: further tensors, by name: those of ``extra``, and state that belongs to no parameter.
    """

    path: str
    header: dict[str, Any]
    files: dict[str, int]
    parameters: list[Parameter]
    others: dict[str, StoredTensor]

    def problems(self) -> Iterator[str]:
        """Lines: of tensors with NaN or infinities, and of step counts that differ."""
        steps = set()
        for parameter in self.parameters:
            for key, values in parameter.values.items():
                if values.nan or values.infinite:
                    yield f"{key}: {values.nan:,} NaN, {values.infinite:,} infinite"
                if key.endswith(".step"):
                    steps.add(values.low)
        if len(steps) > 1:
            yield f"step counts differ: {', '.join(f'{step:g}' for step in sorted(steps))}"


def summarize(
    path: str | os.PathLike[str],
    *,
    values: bool = True,
    progress: Callable[[int], object] = lambda _: None,
) -> Summary:
    """Reads what a portable checkpoint holds.

    Args:
        path: the folder.
        values: whether to read the data; without, only the index.
        progress: called with the bytes of each chunk that was read.

    Raises:
        CheckpointError: it cannot be read, or is damaged.
    """
    folder = folder_at(path)
    index = load_index(folder)
    groups = checked_groups(str(folder), index.header.get("param_groups", []))
    options = {name: group["options"] for group in groups for name in group["parameters"]}
    names = dict.fromkeys(key.removeprefix("model.") for key in index.tensors if key.startswith("model."))
    names |= dict.fromkeys(options)
    parameters = {
        name: Parameter(name, index.tensors.get(f"model.{name}"), {}, options.get(name, {}), {}) for name in names
    }
    others = {}
    for key, tensor in index.tensors.items():
        name, _, entry = key.removeprefix("optimizer.").rpartition(".")
        if key.startswith("optimizer.") and name in parameters:
            parameters[name].state[entry] = tensor
        elif not key.startswith("model."):
            others[key] = tensor
    files = {index.file_name(i): each.data + each.table for i, each in enumerate(index.files) if each is not None}
    summary = Summary(str(folder), index.header, files, list(parameters.values()), others)
    if values:
        values_of: dict[str, Values] = defaultdict(Values)
        with noticing_replacement(folder, index):
            _read(folder, index, values_of, progress)
        for parameter in summary.parameters:
            keys = [f"model.{parameter.name}", *(f"optimizer.{parameter.name}.{key}" for key in parameter.state)]
            parameter.values.update({key: values_of[key] for key in keys if key in values_of})
    return summary


def _read(
    folder: Folder,
    index: Index,
    values_of: dict[str, Values],
    progress: Callable[[int], object],
) -> None:
    """Reads and verifies all tensors."""
    of_chunk: dict[StoredChunk, str] = {}
    wanted: list[tuple[int, StoredChunk]] = []
    for key, chunks in stored_chunks(folder, index).items():
        of_chunk.update((chunk, key) for _, chunk in chunks)
        wanted += chunks
    with DataFiles(folder, index) as files, files.chunks(wanted) as chunks_read:
        for _, chunk, data in chunks_read:
            key = of_chunk[chunk]
            has_steps = key.startswith("optimizer.") and key.endswith("_scales") and len(chunk.shape) > 2
            values_of[key].add(data.view(index.tensors[key].dtype), chunk.shape[-1] if has_steps else 1)
            progress(chunk.bytes)
