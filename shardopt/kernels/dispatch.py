"""Runs the compiled step kernels for many parameters at once: the interface of a launch, and its CPU implementation."""

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

#: The integers by which the kernels identify dtypes of parameters and gradients.
DTYPES: dict[torch.dtype, int] = {getattr(torch, name): int(kind) for name, kind in _C.DType.__members__.items()}

#: Structs ``_C.kernel_row``, each with the addresses of a rectangle of a parameter's local shard.
KernelRows = npt.NDArray[np.void]
Addresses = npt.NDArray[np.uint64]
CodecTables = Sequence[Tensor | None]

_target = _C.cpu_targets()[0]


def cpu_target() -> str:
    """Name of the CPU instruction set whose kernels are used, by default the first of ``_C.cpu_targets()``."""
    return _target


@contextmanager
def use_cpu_target(target: str) -> Iterator[None]:
    """Has CPU kernels use another instruction set of ``_C.cpu_targets()`` inside the block, in tests and benchmarks."""
    global _target
    saved, _target = _target, target
    try:
        yield
    finally:
        _target = saved


class LossScaling(NamedTuple):
    """Float32 scalars with which the kernels scale gradients as they read them, or skip the step; None if unused.

    Attributes:
        grad_scale: loss scale of torch.amp.GradScaler, by which gradients are divided.
        found_inf: torch.amp.GradScaler's flag: the step is skipped if not zero.
        coefficient: clip coefficient, by which gradients are multiplied.
    """

    grad_scale: Tensor | None
    found_inf: Tensor | None
    coefficient: Tensor | None = None


class Call(Protocol):
    """Launches the kernels for the same kernel rows in every step: :meth:`update`, then :meth:`run` per phase."""

    def update(self, rows_changed: bool, groups: npt.NDArray[np.void], scaling: LossScaling) -> None:
        """Sets the arguments of the phases that follow; may be called again between phases.

        Args:
            rows_changed: whether the kernel rows changed in place since the last update, as by new gradients. True in
                the first call.
            groups: structs ``_C.group_row``, one per param group, with its hyper-parameters.
            scaling: loss scale and clip coefficient.
        """

    def run(self, phase: _C.Phase) -> None:
        """Launches the kernels of one phase of the step, such as ``sums`` or ``step`` (csrc/core/call.h)."""


def runs_in(phase: _C.Phase, kernel_rows: KernelRows) -> bool:
    """Whether any kernel row takes part in a phase.

    All do in ``step``, those of rules with sums in ``sums``, and those of blocks that several ranks share in the rest.
    """
    field = "sums" if phase == _C.Phase.sums else "cut"
    return phase == _C.Phase.step or bool(kernel_rows[field].any())


def check_device(name: str, device: torch.device) -> None:
    """Raises RuntimeError if this build of the extension has no kernels for a parameter's device."""
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
    """The :class:`Call` for operands in host memory, which runs the CPU kernels in PyTorch's number of threads.

    Args:
        kernel_rows: the operands, whose addresses the caller may change in place between steps.
        steps: addresses of the step counts, one float32 scalar per parameter, which the phase ``step`` increments.
        codec_tables: the codecs' lookup tables (``Codec.table``) by ``Codec.index``.
        skipped: counts gradient elements that the kernels skip: NaN, Inf, or overflowing a moment.
    """

    def __init__(
        self, kernel_rows: KernelRows, steps: Addresses, codec_tables: CodecTables, skipped: SkippedElements
    ) -> None:
        self._step = _C.CpuStep(kernel_rows, steps, addresses(codec_tables))
        self._kept_alive = codec_tables  # CpuStep owns the arrays, but not the tensors whose addresses are in them
        self._found_inf = False
        self._skipped = skipped

    def update(self, rows_changed: bool, groups: npt.NDArray[np.void], scaling: LossScaling) -> None:
        """Prepares a step; see :class:`Call`."""
        scale, found_inf, coefficient = scaling
        self._found_inf = found_inf is not None and bool(found_inf.item())
        if scale is not None:
            groups = groups.copy()  # as other calls of this step use the caller's array, too
            with np.errstate(divide="ignore", over="ignore"):  # scale 0 makes gradients Inf or NaN, as in torch
                groups["gradient_scale"] *= np.divide(1.0, float(scale))
        if coefficient is not None:
            groups = groups.copy()
            groups["gradient_scale"] *= np.float32(float(coefficient))
        self._step.prepare(groups, torch.get_num_threads(), _target)

    def run(self, phase: _C.Phase) -> None:
        """Runs one phase; see :class:`Call`."""
        if self._found_inf:  # torch.amp.GradScaler has the whole step skipped
            return
        if skipped := self._step.run(phase):
            self._skipped.add(skipped)


def addresses(tensors: Sequence[Tensor | None]) -> Addresses:
    """The tensors' data pointers as kernel arguments; 0 for None."""
    return np.array([0 if t is None else t.data_ptr() for t in tensors], dtype=np.uint64)
