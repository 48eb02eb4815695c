"""The rows of a step that one call of the kernels handles, and the phases that calls go through together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt import _C
from shardopt.codec import CODECS
from shardopt.kernels.dispatch import Call, LossScaling, Tables
from shardopt.kernels.dispatch_cuda import make_call
from shardopt.kernels.streamed import KEPT_MOVES, StreamedCall
from shardopt.kernels.strided import StridedCall
from shardopt.state import residency as residencies
from shardopt.state.residency import Offload
from shardopt.step.context import StepContext
from shardopt.step.cut_blocks import CutBlocks
from shardopt.step.inputs import Input

_CODEC_TABLES: list[Tensor | None] = [codec.table for codec in sorted(CODECS.values(), key=lambda codec: codec.index)]
_CPU = torch.device("cpu")


#: Parameters whose rows may be in one batch: the operands that are copied for their steps, and the index of the only
#: parameter if it or its gradient is not contiguous.
Alike = tuple[Offload, int | None]


class Batch:
    """The rows that one call of the kernels steps.

    Args:
        device: the device of the parameters.
        alike: what they have in common.
        rows: of :data:`shardopt.step.rows.ROW`.
        counted: the parameters whose step counts the call counts up.
        context: the optimizer.
    """

    def __init__(
        self,
        device: torch.device,
        alike: Alike,
        rows: npt.NDArray[np.void],
        counted: Sequence[Input],
        context: StepContext,
    ) -> None:
        offload, self.strided = alike
        steps = np.array([parameter.step for parameter in counted], dtype=np.uint64)
        self.tables = Tables(rows["kernel_row"].copy(), steps, _CODEC_TABLES)
        self.tensors, self.elements = rows["tensor"].copy(), rows["element"].copy()
        self.kernels = kernels_of(device, offload)
        self.is_new = True  # until the first update
        make = partial(make_call, self.kernels, skipped=context.skipped)
        if offload is None:
            call: Call = make(self.tables)
        else:
            new_unit = (np.diff(self.tensors, prepend=-1) != 0) | (np.diff(rows["unit"], prepend=-1) != 0)
            is_on_host = any(parameter.gradient_on_host for parameter in counted)  # where offload="step" needs it
            moves = KEPT_MOVES if is_on_host else residencies.MOVES[offload]
            transfers, size = context.residency.transfers(device, offload), residencies.CHUNK_BYTES
            call = StreamedCall(self.tables, rows["extent"], np.cumsum(new_unit), moves, transfers, size, make)
        self.call: Call = call if self.strided is None else StridedCall(self.tables, self.elements, call)

    def fill(self, watched: _C.Inputs) -> bool:
        """Fills in the gradients' addresses; returns whether one is new."""
        return watched.fill(self.tables.kernel_rows, self.tensors, self.elements)

    def update(self, rows_changed: bool, groups: npt.NDArray[np.void], scaling: LossScaling) -> None:
        """Prepares a step.

        Args:
            rows_changed: whether the tables' kernel rows were changed.
            groups: rows of ``_C.group_row``.
            scaling: the loss scale.
        """
        self.call.update(rows_changed or self.is_new, groups, scaling)
        self.is_new = False

    @property
    def copied_bytes(self) -> int:
        """Bytes that the step takes for contiguous copies."""
        return self.call.copied_bytes if isinstance(self.call, StridedCall) else 0


def kernels_of(device: torch.device, offload: Offload) -> torch.device:
    """The device whose kernels step a parameter on a device."""
    return _CPU if offload == "step" else device


def run_phases(calls: Sequence[Call], cuts: CutBlocks | None) -> None:
    """Runs all phases that change something, even if only other ranks have something to step."""
    if cuts:
        cuts.keep_scales()
        cuts.clear_extremes()
    for call in calls:
        call.run(_C.Phase.step)
    if not cuts:
        return
    for phase in (_C.Phase.relative, _C.Phase.finish) if cuts.relative else (_C.Phase.finish,):
        cuts.exchange_extremes()
        for call in calls:
            call.run(phase)
    cuts.share_scales()
