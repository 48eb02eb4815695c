"""The call of the compiled kernels, one for all rows of a batch: the interface, and the CPU's implementation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.skipped import SkippedElements

#: The kernels' numbers of the dtypes of parameters and gradients.
DTYPES: dict[torch.dtype, int] = {getattr(torch, name): int(kind) for name, kind in _C.DType.__members__.items()}

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


class LossScaling(NamedTuple):
    """Scalars on which the gradients of a step depend: float32, or None.

    Attributes:
        grad_scale: factor by which the loss was multiplied (torch.amp.GradScaler).
        found_inf: not zero if the step is to be left out (torch.amp.GradScaler).
        coefficient: factor by which the gradients are to be multiplied (clipping).
    """

    grad_scale: Tensor | None
    found_inf: Tensor | None
    coefficient: Tensor | None = None


class Tables(NamedTuple):
    """Arguments of the kernels for the steps of some parameters.

    Attributes:
        kernel_rows: rows of ``_C.kernel_row``, which point to memory of one device.
        steps: addresses of float32 scalars, one per parameter; the phase ``step`` counts each up by one.
        codec_tables: the codecs' lookup tables (``Codec.table``), by the codecs' index.
    """

    kernel_rows: npt.NDArray[np.void]
    steps: npt.NDArray[np.uint64]
    codec_tables: Sequence[Tensor | None]


class Call(Protocol):
    """Steps of the same tables on one device: made once, then updated and run for each step."""

    def update(self, rows_changed: bool, groups: npt.NDArray[np.void], scaling: LossScaling) -> None:
        """Prepares a step.

        Args:
            rows_changed: whether rows of ``Tables.kernel_rows`` were changed in place.
            groups: rows of ``_C.group_row``.
            scaling: the loss scale.
        """

    def run(self, phase: _C.Phase) -> None:
        """Runs one phase of the step."""


def runs_in(phase: _C.Phase, kernel_rows: npt.NDArray[np.void]) -> bool:
    """Whether a phase has rows to take: ``sums`` rows with sums, ``step`` all, later phases rows of cut blocks."""
    return phase == _C.Phase.step or bool(kernel_rows["sums" if phase == _C.Phase.sums else "cut"].any())


def check_device(name: str, device: torch.device) -> None:
    """Checks that this build has kernels for a device.

    Raises:
        RuntimeError: this build has no kernels for the device.
    """
    if device.type == "cpu" or (device.type == "cuda" and _C.with_cuda):
        return
    built = "cpu and cuda" if _C.with_cuda else "cpu"
    remedy = {
        "meta": "give it memory with to_empty() and load or initialize its weights before the step",
        "cuda": "install it again with nvcc on PATH and SHARDOPT_CUDA=1",
    }.get(device.type, "move it there, or step it with another optimizer")
    raise RuntimeError(
        f"{name}: got a parameter on {device}, expected one on {built}, for which this build of shardopt has kernels; "
        f"{remedy}"
    )


class CpuCall:
    """Steps on the CPU.

    Args:
        tables: the kernels' arguments.
        skipped: counter of skipped elements.
    """

    def __init__(self, tables: Tables, skipped: SkippedElements) -> None:
        self._step = _C.CpuStep(tables.kernel_rows, tables.steps, addresses(tables.codec_tables))
        self._tables = tables  # kept alive: the step has addresses of these arrays
        self._off = False
        self._skipped = skipped

    def update(self, rows_changed: bool, groups: npt.NDArray[np.void], scaling: LossScaling) -> None:
        """Prepares a step; see :class:`Call`."""
        scale, found_inf, coefficient = scaling
        self._off = found_inf is not None and bool(found_inf.item())
        if scale is not None:
            groups = groups.copy()
            with np.errstate(divide="ignore", over="ignore"):  # scale 0 makes gradients Inf or NaN, as in torch
                groups["gradient_scale"] *= np.divide(1.0, float(scale))
        if coefficient is not None:
            groups = groups.copy()
            groups["gradient_scale"] *= np.float32(float(coefficient))
        self._step.prepare(groups, torch.get_num_threads(), _target)

    def run(self, phase: _C.Phase) -> None:
        """Runs one phase; see :class:`Call`."""
        if self._off:
            return
        if skipped := self._step.run(phase):
            self._skipped.add(skipped)


def addresses(tensors: Sequence[Tensor | None]) -> npt.NDArray[np.uint64]:
    """Addresses of the tensors' data; 0 for None."""
    return np.array([0 if t is None else t.data_ptr() for t in tensors], dtype=np.uint64)
