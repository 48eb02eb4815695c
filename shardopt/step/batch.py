"""Batches, the table rows that one kernel call updates, and the order of kernel calls and all-reduces in a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt import _C
from shardopt.codec import CODECS
from shardopt.kernels.dispatch import Call, LossScaling
from shardopt.kernels.dispatch_cuda import make_call
from shardopt.kernels.streamed import PARAM_FIELDS, StreamedCall
from shardopt.kernels.strided import StridedCall
from shardopt.state import residency as residencies
from shardopt.state.residency import Offload
from shardopt.step.context import StepContext
from shardopt.step.cut_blocks import CutBlocks
from shardopt.step.inputs import StepParameter

_CODEC_TABLES: list[Tensor | None] = [codec.table for codec in sorted(CODECS.values(), key=lambda codec: codec.index)]
_CPU = torch.device("cpu")

#: The key that all parameters of a batch share: the option ``offload``; and None if they and their gradients are
#: contiguous, otherwise the index of the batch's only parameter.
BatchKey = tuple[Offload, int | None]


class Batch:
    """The table rows of some parameters on a device, with the kernel call that updates these parameters.

    Args:
        key: the key of the batch, equal for all its parameters.
        rows: table rows of the dtype :data:`shardopt.step.rows.ROW`.
        counted: the parameters whose step counts the call increments.

    Attributes:
        strided_index: the index of the only parameter, if it or its gradient is strided; otherwise None.
        strided_call: ``call`` if there is a ``strided_index``; needs the parameter and the gradient during a step.
        parameters: per row, the parameter's index.
        first_elements: per row, the index of its first element in the parameter's local tensor.
    """

    def __init__(
        self,
        device: torch.device,
        key: BatchKey,
        rows: npt.NDArray[np.void],
        counted: Sequence[StepParameter],
        context: StepContext,
    ) -> None:
        offload, self.strided_index = key
        steps = np.array([parameter.step_address for parameter in counted], dtype=np.uint64)
        self.kernel_rows = rows["kernel_row"].copy()
        self.parameters, self.first_elements = rows["parameter"].copy(), rows["element"].copy()
        self.kernel_device = kernel_device(device, offload)
        self.is_new = True  # until the first update
        make = partial(make_call, self.kernel_device, codec_tables=_CODEC_TABLES, skipped=context.skipped)
        if offload is None:
            call: Call = make(self.kernel_rows, steps)
        else:
            # Rows are sorted by parameter and unit: a unit begins where either changes. No row has the number -1.
            units = np.cumsum((np.diff(self.parameters, prepend=-1) != 0) | (np.diff(rows["unit"], prepend=-1) != 0))
            gradient_on_host = any(parameter.gradient_on_host for parameter in counted)
            # A gradient that is in the host's memory already, where the kernels run, is not copied.
            fields = PARAM_FIELDS if gradient_on_host else residencies.MOVES[offload]
            transfers, size = context.residency.transfers(device, offload), residencies.CHUNK_BYTES
            call = StreamedCall(self.kernel_rows, steps, rows["extent"], units, fields, transfers, size, make)
        self.strided_call: StridedCall | None = None
        if self.strided_index is not None:
            call = self.strided_call = StridedCall(self.kernel_rows, self.first_elements, call)
        self.call = call

    def fill(self, watched: _C.Inputs) -> bool:
        """Writes the gradients' current addresses into the table; returns whether an address has changed."""
        return watched.fill(self.kernel_rows, self.parameters, self.first_elements)

    def update(self, rows_changed: bool, groups: npt.NDArray[np.void], scaling: LossScaling) -> None:
        """Passes changed rows, the rows of options and the loss scale to the kernel call; see :meth:`Call.update`."""
        self.call.update(rows_changed or self.is_new, groups, scaling)
        self.is_new = False


def kernel_device(device: torch.device, offload: Offload) -> torch.device:
    """The device whose kernels update a parameter: the CPU with ``offload="step"``, or the parameter's own device."""
    return _CPU if offload == "step" else device


def run_phases(calls: Sequence[Call], cuts: CutBlocks | None) -> None:
    """Updates parameters by kernel calls, with all-reduces of cut blocks between phases, which all ranks must join.

    The first phase updates whole blocks, and computes this rank's extremes of cut blocks, which the last one updates.
    """
    if cuts:
        cuts.copy_scales()
        cuts.clear_extremes()
    for call in calls:
        call.run(_C.Phase.step)
    if not cuts:
        return
    for phase in (_C.Phase.relative, _C.Phase.finish) if cuts.has_relative else (_C.Phase.finish,):
        cuts.reduce_extremes()
        for call in calls:
            call.run(phase)
    cuts.share_scales()
