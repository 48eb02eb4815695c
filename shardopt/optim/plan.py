"""One step as tables for the kernels, and its phases where blocks are cut between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardopt import _C
from shardopt.codec import CODECS
from shardopt.kernels.dispatch import DTYPES, LossScaling, Tables, make_call
from shardopt.layout import Exchange, LocalBlocks, Rectangle, rectangles
from shardopt.optim.rule import Rule
from shardopt.optim.state import ParameterState, StateDict

_PLAIN_BLOCK = 1024  # elements that a kernel handles at a time where there are no blocks

_TABLES: list[Tensor | None] = [codec.table for codec in sorted(CODECS.values(), key=lambda codec: codec.index)]


class Group(NamedTuple):
    """What all parameters of a param group share in a step."""

    rule: Rule
    hyper: dict[str, float]
    gradient_sign: float
    nonfinite: str

    def row(self) -> tuple[object, ...]:
        """The group as a row of ``_C.group_entry``."""
        policy = _C.NonFinite.propagate if self.nonfinite == "propagate" else _C.NonFinite.skip
        return (self.rule.hyper_row(self.hyper), 0, self.gradient_sign, self.rule.index, int(policy))


class _CutParameter(NamedTuple):
    """A parameter whose blocks are cut: what its owners exchange."""

    spec: ParameterState
    blocks: LocalBlocks
    scales: list[Tensor]  # float32, (rows, blocks[, scales per block]), one per moment
    extremes: list[Tensor]  # int32, (rows, blocks, 2), one per moment


class Plan:
    """Collects the parameters of one step on one device, then runs it."""

    def __init__(self, device: torch.device, groups: Sequence[Group]) -> None:
        self._device = device
        self._groups = groups
        self._entries: list[tuple[object, ...]] = []
        self._steps: list[Tensor] = []
        self._gradients: list[Tensor] = []  # kept alive: a redistributed one is nobody else's
        self._cut: dict[Exchange, list[_CutParameter]] = {}

    def add(self, group: int, spec: ParameterState, param: Tensor, gradient: Tensor, state: StateDict) -> None:
        """Adds a parameter: this rank's parts of parameter and gradient, and its state."""
        self._steps.append(state["step"])
        self._gradients.append(gradient)
        coded = [spec.local_coded(state, moment) for moment in spec.moments]
        if not spec.codec.blockwise:
            whole = Rectangle(0, param.numel(), 0, cut=False)
            blocks = LocalBlocks(0, -(-param.numel() // _PLAIN_BLOCK), None)
            parts, rows, cols, size = [whole], 1, param.numel(), _PLAIN_BLOCK
        else:
            blocks = spec.shard.local_blocks(spec.grid)
            rows, cols, size = spec.shard.rows, spec.shard.cols, spec.grid.block_size
            parts = [Rectangle(0, cols, blocks.first, cut=False)]
        extremes: list[Tensor] = []
        if blocks.exchange is not None:
            parts = rectangles(spec.grid, spec.shard.first_col, cols)
            scales = [c.scales for c in coded if c.scales is not None]
            extremes = [torch.zeros((rows, blocks.per_row, 2), dtype=torch.int32, device=self._device) for _ in scales]
            cut = _CutParameter(spec, blocks, scales, extremes)
            self._cut.setdefault(blocks.exchange, []).append(cut)
        for part in parts:
            if rows * part.cols == 0:
                continue
            block = part.block - blocks.first
            self._entries.append(
                (
                    _address(param, part.col),
                    _address(gradient, part.col),
                    state["step"].data_ptr(),
                    0,
                    _addresses([c.codes for c in coded], part.col),
                    _addresses(
                        [c.scales for c in coded],
                        block,
                        [spec.codec.scales(signed=m.signed) for m in spec.moments],
                    ),
                    _addresses(extremes, block, [2] * len(extremes)),
                    rows,
                    part.cols,
                    cols,
                    blocks.per_row,
                    0,
                    0,
                    0,
                    size,
                    DTYPES[param.dtype],
                    DTYPES[gradient.dtype],
                    spec.codec.index,
                    group,
                    part.cut,
                )
            )

    def run(self, scaling: LossScaling) -> int | Tensor:
        """Carries out the step.

        Returns:
            How many gradient elements were skipped: on a GPU, a tensor there.
        """
        entries = np.array(self._entries, dtype=_C.tensor_entry)
        groups = np.array([group.row() for group in self._groups], dtype=_C.group_entry)
        call = make_call(self._device, Tables(entries, groups, self._steps, _TABLES, scaling))
        nonfinite = call.run(_C.Phase.step)
        if self._cut:
            self._exchange_extremes()
            if any(cut.spec.relative for cuts in self._cut.values() for cut in cuts):
                call.run(_C.Phase.relative)
                self._exchange_extremes()
            nonfinite = nonfinite + call.run(_C.Phase.finish)
            self._share_scales()
        return nonfinite

    def _exchange_extremes(self) -> None:
        for exchange, cuts in self._cut.items():
            _all_reduce_max(exchange, [e for cut in cuts for e in cut.extremes])

    def _share_scales(self) -> None:
        """Puts the scales of all blocks on every rank that holds a part of their rows."""
        for exchange, cuts in self._cut.items():
            for cut in cuts:
                shard, size = cut.spec.shard, cut.spec.grid.block_size
                first = shard.first_col // size - cut.blocks.first
                last = -(-(shard.first_col + shard.cols) // size) - cut.blocks.first
                for scales in cut.scales:
                    scales[:, :first] = 0
                    scales[:, max(first, last) if shard.cols else 0 :] = 0
            # The scales are not negative: as integers they are ordered as they are as floats.
            _all_reduce_max(exchange, [s.view(torch.int32) for cut in cuts for s in cut.scales])


def _all_reduce_max(exchange: Exchange, tensors: list[Tensor]) -> None:
    """One collective for all tensors, in place."""
    flat = torch.cat([t.reshape(-1) for t in tensors])
    exchange.all_reduce_max(flat)
    for tensor, new in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(new.view_as(tensor))


def _address(tensor: Tensor, index: int) -> int:
    return tensor.data_ptr() + index * tensor.element_size()


def _addresses(tensors: Sequence[Tensor | None], index: int, widths: Sequence[int] | None = None) -> list[int]:
    """Addresses of the elements at ``index``, filled up to the table's width. ``widths``: elements per index."""
    found = [
        0 if tensor is None else _address(tensor, index * (1 if widths is None else widths[k]))
        for k, tensor in enumerate(tensors)
    ]
    return found + [0] * (_C.max_moments - len(found))
