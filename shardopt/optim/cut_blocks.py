"""What ranks that share blocks exchange during a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardopt.layout import Exchange, LocalBlocks
from shardopt.optim.state import ParameterState


class CutParameter(NamedTuple):
    """A parameter whose blocks are cut: what its owners exchange."""

    spec: ParameterState
    blocks: LocalBlocks
    scales: list[Tensor]  # float32, (rows, blocks[, scales per block]), one per moment
    extremes: list[Tensor]  # int32, (rows, blocks, 2), one per moment


class CutBlocks:
    """The parameters of a step whose blocks are cut."""

    def __init__(self, parameters: Sequence[CutParameter]) -> None:
        self.parameters = parameters
        self._by_exchange: dict[Exchange, list[CutParameter]] = {}
        for cut in parameters:
            assert cut.blocks.exchange is not None
            self._by_exchange.setdefault(cut.blocks.exchange, []).append(cut)

    def clear_extremes(self) -> None:
        """Forgets the last step's extremes: 0 is neutral."""
        for cut in self.parameters:
            for extremes in cut.extremes:
                extremes.zero_()

    def exchange_extremes(self) -> None:
        """Replaces the extremes by those over all owners of a block."""
        for exchange, cuts in self._by_exchange.items():
            _all_reduce_max(exchange, [e for cut in cuts for e in cut.extremes])

    def share_scales(self) -> None:
        """Puts the scales of all blocks on every rank that holds a part of their rows."""
        for exchange, cuts in self._by_exchange.items():
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
