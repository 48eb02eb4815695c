"""Calls the compiled kernels: one call for all entries of a step on a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt import _C

DTYPES: dict[torch.dtype, int] = {
    torch.float32: int(_C.DType.float32),
    torch.bfloat16: int(_C.DType.bfloat16),
    torch.float16: int(_C.DType.float16),
}

_target = _C.cpu_targets()[0]


def cpu_target() -> str:
    """The instruction set in use on the CPU."""
    return _target


@contextmanager
def use_cpu_target(target: str) -> Iterator[None]:
    """Uses another of the instruction sets that ``_C.cpu_targets()`` lists, for tests and benchmarks."""
    global _target
    saved, _target = _target, target
    try:
        yield
    finally:
        _target = saved


class Call:
    """The tables of one step on one device; :meth:`run` may be called for several phases.

    Args:
        device: where all tensors of the entries live.
        entries: rows of ``_C.tensor_entry``.
        groups: rows of ``_C.group_entry``.
        steps: float32 0-d tensors; the first phase counts each up by one.
        tables: what each codec looks up (``Codec.table``), by the codec's index.
    """

    def __init__(
        self,
        device: torch.device,
        entries: Sequence[tuple[object, ...]],
        groups: Sequence[tuple[object, ...]],
        steps: Sequence[Tensor],
        tables: Sequence[Tensor | None],
    ) -> None:
        if device.type != "cpu" and not (device.type == "cuda" and _C.with_cuda):
            raise RuntimeError(
                f"got parameters on {device}, but this build of shardopt has kernels for "
                f"{'cpu and cuda' if _C.with_cuda else 'cpu'} only; for CUDA, reinstall with nvcc on PATH "
                "and SHARDOPT_CUDA=1"
            )
        self._device = device
        self._entries = np.array(entries, dtype=_C.tensor_entry)
        self._groups = np.array(groups, dtype=_C.group_entry)
        self._steps = _addresses(steps)
        self._tables = _addresses([None if t is None else _on(t, device) for t in tables])

    def run(self, phase: _C.Phase = _C.Phase.step) -> int:
        """Runs one phase.

        Returns:
            How many gradient elements were not finite (and skipped).
        """
        return int(
            _C.step_cpu(
                self._entries,
                self._groups,
                self._steps,
                self._tables,
                phase=phase,
                threads=torch.get_num_threads(),
                target=_target,
            )
        )


_table_copies: dict[tuple[int, torch.device], Tensor] = {}


def _on(table: Tensor, device: torch.device) -> Tensor:
    """The codec's table on that device; codecs and their tables live as long as the process."""
    if device.type == "cpu":
        return table
    return _table_copies.setdefault((table.data_ptr(), device), table.to(device))


def _addresses(tensors: Sequence[Tensor | None]) -> npt.NDArray[np.uint64]:
    return np.array([0 if t is None else t.data_ptr() for t in tensors], dtype=np.uint64)
