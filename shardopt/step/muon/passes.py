"""The kernels' two passes over a wave: momentum and directions first, then weights by orthogonalized directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.dispatch import DTYPES, Call, LossScaling
from shardopt.kernels.weights import WeightFormat
from shardopt.step.batch import Batch, BatchKey
from shardopt.step.context import StepContext
from shardopt.step.groups import GroupTables
from shardopt.step.muon.matrices import BYTES, Wave

_DIRECTION = WeightFormat(torch.bfloat16)

#: Given a parameter's index, returns this rank's shards of the parameter and of its gradient.
Operands = Callable[[int], tuple[Tensor, Tensor]]


class Passes:
    """Two kernel passes over rows of a wave: one updates momentum and writes directions, one updates the weights.

    Args:
        wave: the matrices.
        begins: index of each matrix's direction in the wave's buffer of directions.
        key: the key of the batch, equal for all rows' parameters.
        rows: table rows of the dtype :data:`shardopt.step.rows.ROW`.
        matrix_of_row: per row, the index in the wave of the matrix that the row is part of.
    """

    def __init__(
        self,
        wave: Wave,
        begins: Sequence[int],
        device: torch.device,
        key: BatchKey,
        rows: npt.NDArray[np.void],
        matrix_of_row: npt.NDArray[np.int64],
        context: StepContext,
    ) -> None:
        offload, self._strided_index = key
        shifts = np.array([begin - matrix.local_begin for begin, matrix in zip(begins, wave, strict=True)])
        self._offsets = (BYTES * (rows["element"] + shifts[matrix_of_row])).astype(np.uint64)  # in the buffer
        scales = [(m.parameter.group, m.options.scale(m.rows, m.cols)) for m in wave]
        scale_of_row = [scales[index] for index in matrix_of_row.tolist()]
        self._scales = tuple(dict.fromkeys(scale_of_row))
        # The first pass updates the momentum, and writes directions in the place of weights without low bits.
        momentum, apply = rows.copy(), rows.copy()
        momentum["kernel_row"]["low_bits"] = momentum["extent"]["low_bits"] = 0
        momentum["kernel_row"]["weight_format"] = _DIRECTION.index
        # The second updates the weights, has no moments, and reads directions in the place of gradients.
        for field in ("codes", "scales"):
            apply["kernel_row"][field] = apply["extent"][field] = 0
        apply["kernel_row"]["extremes"] = apply["kernel_row"]["cut"] = 0
        apply["kernel_row"]["gradient_dtype"] = DTYPES[torch.bfloat16]
        apply["kernel_row"]["group"] = [self._scales.index(scale) for scale in scale_of_row]
        self._operands: tuple[Tensor, Tensor] | None = None  # of the only parameter, if strided; during a step
        self._gradient: Tensor | None = None
        self._momentum = Batch(device, (offload, None), momentum, [], context)
        # Of the offloaded state, the second pass needs the low bits of weights only.
        apply_offload = offload if apply["kernel_row"]["low_bits"].any() else None
        self._apply = Batch(device, (apply_offload, None), apply, [], context)

    def update(self, watched: _C.Inputs, groups: GroupTables, scaling: LossScaling, operands: Operands) -> None:
        """Prepares a step with its gradients and options. The first call allocates the memory that the kernels need."""
        self._momentum_options = groups.rows_for(self._momentum.kernel_device), scaling
        # The first pass has scaled the gradients. Both passes skip the step if a gradient scaler found infinities.
        unscaled = scaling._replace(grad_scale=None, coefficient=None)
        self._apply_options = groups.rows_for(self._apply.kernel_device, self._scales), unscaled
        self._operands = None if self._strided_index is None else operands(self._strided_index)
        self._has_new_gradients = self._momentum.fill(watched)
        if self._momentum.is_new:
            self._momentum.update(True, *self._momentum_options)
            self._apply.update(True, *self._apply_options)

    def momentum_into(self, memory: Tensor) -> Call:
        """Prepares the first pass, to write directions to ``memory``; returns the kernel call for the caller to run."""
        kernel_rows = self._momentum.kernel_rows
        changed = self._has_new_gradients | _write_addresses(kernel_rows["param"], memory, self._offsets)
        if self._operands is not None:  # strided: the kernels read a contiguous copy of the gradient
            _, gradient = self._operands
            self._gradient = gradient.resolve_neg().contiguous()
            offsets = (self._momentum.first_elements * gradient.itemsize).astype(np.uint64)
            changed |= _write_addresses(kernel_rows["gradient"], self._gradient, offsets)
        self._momentum.update(changed, *self._momentum_options)
        return self._momentum.call

    def apply(self, directions: Tensor) -> None:
        """Runs the second pass, which updates the weights by the orthogonalized directions."""
        kernel_rows = self._apply.kernel_rows
        changed = _write_addresses(kernel_rows["gradient"], directions, self._offsets)
        if self._operands is not None:  # strided: the kernels update a contiguous copy of the parameter
            param = self._operands[0].detach()
            copy = param.contiguous()
            offsets = (self._apply.first_elements * copy.itemsize).astype(np.uint64)
            changed |= _write_addresses(kernel_rows["param"], copy, offsets)
        self._apply.update(changed, *self._apply_options)
        self._apply.call.run(_C.Phase.step)
        if self._operands is not None and copy is not param:
            param.copy_(copy)
        self._operands = self._gradient = None


def _write_addresses(addresses: npt.NDArray[np.uint64], tensor: Tensor, offsets: npt.NDArray[np.uint64]) -> bool:
    """Writes addresses of a contiguous tensor, at offsets in bytes, into a column; returns whether they are new."""
    new = np.uint64(tensor.data_ptr()) + offsets
    if np.array_equal(addresses, new):
        return False
    addresses[...] = new
    return True
