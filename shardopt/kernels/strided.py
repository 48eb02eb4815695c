"""Steps a parameter that is not contiguous in memory, or whose gradient is not, by way of contiguous copies.

A gradient that is a negative view (``Tensor.is_neg``) is copied, too, even if it is contiguous.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from shardopt import _C
from shardopt.kernels.dispatch import Call, KernelRows, LossScaling, runs_in


class StridedCall:
    """The :class:`Call` of one parameter that makes contiguous copies, runs another ``Call`` on them, and copies back.

    Each phase copies the parameter and its gradient if they are not contiguous, and copies the parameter back, all on
    the current stream. The copies are freed at the end of the phase: only one parameter at a time has copies.

    Args:
        kernel_rows: the parameter's rows, into which the copies' addresses are written before each phase.
        first_elements: per kernel row, index of its first element in this rank's part of the parameter.
        call: launches the kernels for ``kernel_rows``.
    """

    def __init__(self, kernel_rows: KernelRows, first_elements: npt.NDArray[np.int64], call: Call) -> None:
        self._kernel_rows = kernel_rows
        self._first_elements = first_elements.astype(np.uint64)
        self._call = call
        self._last: tuple[int, int] | None = None  # addresses of parameter and gradient in the last update of the call
        #: This rank's parts of the parameter and its gradient, which the caller sets for the duration of a step.
        self.operands: tuple[Tensor, Tensor] | None = None

    def update(self, rows_changed: bool, groups: npt.NDArray[np.void], scaling: LossScaling) -> None:
        """Prepares a step; see :class:`Call`. In the first, the inner call allocates memory, before any change."""
        self._groups, self._scaling = groups, scaling
        if self._last is None:
            self._call.update(True, groups, scaling)

    @property
    def copied_bytes(self) -> int:
        """Bytes of the contiguous copies that :meth:`run` will make of the present operands."""
        return sum(t.nbytes for t in self.operands or () if not t.is_contiguous() or t.is_neg())

    def run(self, phase: _C.Phase) -> None:
        """Runs one phase; see :class:`Call`."""
        if not runs_in(phase, self._kernel_rows):
            return
        assert self.operands is not None
        param, gradient = (tensor.detach() for tensor in self.operands)
        # Contiguous tensors are not copied: these calls return them as they are.
        param_copy, gradient_copy = param.contiguous(), gradient.resolve_neg().contiguous()
        for field, tensor in (("param", param_copy), ("gradient", gradient_copy)):
            self._kernel_rows[field] = np.uint64(tensor.data_ptr()) + self._first_elements * np.uint64(tensor.itemsize)
        addresses = param_copy.data_ptr(), gradient_copy.data_ptr()
        self._call.update(addresses != self._last, self._groups, self._scaling)
        self._last = addresses
        self._call.run(phase)
        if param_copy is not param and phase != _C.Phase.sums:  # sums change no parameter
            param.copy_(param_copy)
