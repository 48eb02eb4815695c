"""Calls the CUDA kernels: the tables of a step in device memory, one launch per codec and rule."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.dispatch import Tables, addresses


class CudaCall:
    """A step on a CUDA device, in its current stream."""

    def __init__(self, device: torch.device, tables: Tables) -> None:
        self._device = device
        groups, entries = tables.groups, tables.entries
        rules = groups["rule"][entries["group"]] if len(entries) else np.zeros(0, dtype=np.int32)
        order = np.lexsort((rules, entries["codec"]))
        entries, rules = entries[order], rules[order]
        blocks = entries["rows"] * -(-entries["cols"] // np.maximum(entries["block_size"], 1))
        first_blocks = np.concatenate([[0], np.cumsum(blocks)]).astype(np.int64)
        self._batches = _batches(entries["codec"], rules, first_blocks)
        self._step_count = len(tables.steps)
        scale, found_inf = (None if t is None else t.to(device) for t in tables.scaling)
        codec_tables = [None if t is None else _on(t, device) for t in tables.codec_tables]
        self._nonfinite = torch.zeros((), dtype=torch.int64, device=device)
        scratch = torch.empty(max(len(entries), 1) * _C.max_rule_bytes, dtype=torch.uint8, device=device)
        # Each of these is an address in the kernels' call: the tensors must outlive it.
        self._arguments: dict[str, Tensor | None] = {
            "entries": _upload(entries, device),
            "groups": _upload(groups, device),
            "first_blocks": _upload(first_blocks, device),
            "steps": _upload(addresses(tables.steps), device),
            "tables": _upload(addresses(codec_tables), device),
            "rules": scratch,
            "grad_scale": scale,
            "found_inf": found_inf,
            "nonfinite": self._nonfinite,
        }

    def run(self, phase: _C.Phase) -> Tensor:
        """Runs one phase; see :class:`shardopt.kernels.dispatch.Call`."""
        self._nonfinite = self._nonfinite.zero_()
        with torch.cuda.device(self._device):
            _C.step_cuda(
                **{name: 0 if t is None else t.data_ptr() for name, t in self._arguments.items()},
                step_count=self._step_count,
                phase=phase,
                batches=self._batches,
                stream=torch.cuda.current_stream(self._device).cuda_stream,
            )
        return self._nonfinite.clone()


def _batches(
    codecs: npt.NDArray[np.int32], rules: npt.NDArray[np.int32], first_blocks: npt.NDArray[np.int64]
) -> list[tuple[int, int, int, int, int]]:
    """The runs of entries with one codec and one rule: (codec, rule, begin, end, blocks)."""
    changes = np.flatnonzero((np.diff(codecs) != 0) | (np.diff(rules) != 0)) + 1
    edges = [0, *changes.tolist(), len(codecs)] if len(codecs) else []
    return [
        (int(codecs[begin]), int(rules[begin]), begin, end, int(first_blocks[end] - first_blocks[begin]))
        for begin, end in pairwise(edges)
    ]


_table_copies: dict[tuple[int, torch.device], Tensor] = {}


def _on(table: Tensor, device: torch.device) -> Tensor:
    """A codec's table on that device; codecs and their tables live as long as the process."""
    key = (table.data_ptr(), device)
    if key not in _table_copies:
        _table_copies[key] = table.to(device)
    return _table_copies[key]


def _upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    raw = np.frombuffer(np.ascontiguousarray(array).tobytes(), dtype=np.uint8).copy()
    return torch.from_numpy(raw).to(device, non_blocking=True)
