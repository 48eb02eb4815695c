"""The rows of a step that one call of the kernels handles, and the phases that calls go through together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt import _C
from shardopt.codec import CODECS
from shardopt.kernels.dispatch import Call, LossScaling, Tables
from shardopt.kernels.dispatch_cuda import make_call
from shardopt.kernels.skipped import SkippedElements
from shardopt.kernels.streamed import KEPT_MOVES, StreamedCall
from shardopt.kernels.strided import StridedCall
from shardopt.state import residency as residencies
from shardopt.state.residency import Offload, StateResidency
from shardopt.step.cut_blocks import CutBlocks
from shardopt.step.exact_sums import TakeTotals
from shardopt.step.inputs import Input

_CODEC_TABLES: list[Tensor | None] = [codec.table for codec in sorted(CODECS.values(), key=lambda codec: codec.index)]
_CPU = torch.device("cpu")


#: Parameters whose rows may be in one batch: the operands that are copied for their steps, and the index of the only
#: parameter if it or its gradient is not contiguous.
Alike = tuple[Offload, int | None]


@dataclass(frozen=True)
class StepContext:
    """Objects of an optimizer that the steps of all its parameters use.

    Attributes:
        residency: where the state of each parameter lives.
        skipped: the counter of skipped elements.
        take_totals: takes the sums over all parameters; not needed by a stepper of a single parameter.
        captured: objects that CUDA graphs keep using: the list grows.
    """

    residency: StateResidency
    skipped: SkippedElements
    take_totals: TakeTotals = lambda totals: ()
    captured: list[object] = field(default_factory=list)


class Batch:
    """The rows that one call of the kernels steps.

    Args:
        device: the device of the parameters.
        alike: what they have in common.
        rows: of :data:`shardopt.step.rows.ROW`.
        counted: the parameters whose step counts the call counts up.
        context: where state lives, and the counter of skipped elements.
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
        self.call: Call | None = None
        self._device, self._offload, self._rows, self._context = device, offload, rows, context
        is_on_host = any(parameter.gradient_on_host for parameter in counted)  # where offload="step" needs gradients
        self._moves = KEPT_MOVES if is_on_host else residencies.MOVES[offload or "state"]

    def fill(self, watched: _C.Inputs) -> bool:
        """Fills in the gradients' addresses; returns whether one is new."""
        return watched.fill(self.tables.kernel_rows, self.tensors, self.elements)

    def update(self, rows_changed: bool, groups: npt.NDArray[np.void], scaling: LossScaling) -> None:
        """Prepares a step; makes the call in the first one.

        Args:
            rows_changed: whether the tables' kernel rows were changed.
            groups: rows of ``_C.group_row``.
            scaling: the loss scale.
        """
        if self.call is None:
            self.call = self._make_call()
            rows_changed = True
        self.call.update(rows_changed, groups, scaling)

    @property
    def copied_bytes(self) -> int:
        """Bytes that the step takes for contiguous copies."""
        return self.call.copied_bytes if isinstance(self.call, StridedCall) else 0

    def _make_call(self) -> Call:
        make = partial(make_call, self.kernels, skipped=self._context.skipped)
        if self._offload is None:
            call: Call = make(self.tables)
        else:
            new_unit = np.diff(self.tensors, prepend=-1) != 0
            new_unit |= np.diff(self._rows["unit"], prepend=-1) != 0
            extents, units = self._rows["extent"], np.cumsum(new_unit)
            transfers = self._context.residency.transfers(self._device, self._offload)
            call = StreamedCall(self.tables, extents, units, self._moves, transfers, residencies.CHUNK_BYTES, make)
        return call if self.strided is None else StridedCall(self.tables, self.elements, call)


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
