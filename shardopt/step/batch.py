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
from shardopt.kernels.devices import make_call
from shardopt.kernels.dispatch import Call, LossScaling, Tables
from shardopt.kernels.skipped import SkippedElements
from shardopt.kernels.streamed import KEPT_MOVES, StreamedCall
from shardopt.kernels.strided import StridedCall
from shardopt.state import residency as residencies
from shardopt.state.residency import Offload, StateResidency
from shardopt.step.cut_blocks import CutBlocks
from shardopt.step.exact_sums import TakeTotals

_CODEC_TABLES: list[Tensor | None] = [codec.table for codec in sorted(CODECS.values(), key=lambda codec: codec.index)]
_CPU = torch.device("cpu")


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
        offload: the operands that are copied for the step.
        rows: of :data:`shardopt.step.rows.ROW`.
        steps: addresses of the step counts that the call counts up.
        strided: the index of the one parameter that the rows are of, if it or its gradient is not contiguous.
        context: where state lives, and the counter of skipped elements.
        gradients_kept: whether the gradients are in the host's memory, where ``offload="step"`` needs them.
    """

    def __init__(
        self,
        device: torch.device,
        offload: Offload,
        rows: npt.NDArray[np.void],
        steps: list[int],
        strided: int | None,
        context: StepContext,
        gradients_kept: bool = False,
    ) -> None:
        self.tables = Tables(rows["kernel_row"].copy(), np.array(steps, dtype=np.uint64), _CODEC_TABLES)
        self.tensors, self.elements = rows["tensor"].copy(), rows["element"].copy()
        self.kernels = kernels_of(device, offload)
        self.call: Call | None = None
        self.strided = strided
        self._device, self._offload, self._rows, self._context = device, offload, rows, context
        self._moves = KEPT_MOVES if gradients_kept else residencies.MOVES.get(offload or "")

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
        skipped = self._context.skipped
        call: Call
        if self._offload is None:
            call = make_call(self._device, self.tables, skipped)
        else:
            new_unit = np.diff(self.tensors, prepend=-1) != 0
            new_unit |= np.diff(self._rows["unit"], prepend=-1) != 0
            extents, units = self._rows["extent"], np.cumsum(new_unit)
            transfers = self._context.residency.transfers(self._device, self._offload)
            assert self._moves is not None
            make = partial(make_call, self.kernels, skipped=skipped)
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
    cuts.exchange_extremes()
    if cuts.relative:
        for call in calls:
            call.run(_C.Phase.relative)
        cuts.exchange_extremes()
    for call in calls:
        call.run(_C.Phase.finish)
    cuts.share_scales()
