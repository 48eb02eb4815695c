"""The exchange during a step among ranks that share blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardopt import _C
from shardopt.layout import Exchange, FlatShard, LocalBlocks, Shard
from shardopt.state.flat_encoding import shared_blocks
from shardopt.state.slice_state import SliceState


class CutParameter(NamedTuple):
    """A parameter whose blocks are cut: what its owners exchange."""

    spec: SliceState
    blocks: LocalBlocks
    scales: list[Tensor]  # float32, (rows, blocks[, scales per block]), one per moment
    extremes: list[Tensor]  # int32, (rows, blocks, 2), one per moment


class FlatCuts:
    """The extremes of the blocks that flat shards cut, of all parameters of an optimizer on a device.

    They take part in every step, whether or not this rank holds anything of a parameter or has its gradient: other
    ranks cannot know. One collective carries them all.

    Args:
        specs: the states of all parts under flat shards, in the same order on all ranks.
        device: where they live.
    """

    def __init__(self, specs: Sequence[SliceState], device: torch.device) -> None:
        self._numbers: dict[Shard, dict[int, int]] = {}  # per part, the blocks' places in its row of the buffer
        self._first: dict[Shard, Tensor] = {}  # per part: (moments, blocks, 2)
        self.relative = False
        counts: dict[Exchange, int] = {}
        parts = []
        for spec in specs:
            numbers = shared_blocks(spec)
            if numbers:
                assert isinstance(spec.shard, FlatShard)
                assert spec.shard.exchange is not None
                exchange = spec.shard.exchange
                first = counts.get(exchange, 0)
                counts[exchange] = first + len(spec.moments) * len(numbers)
                parts.append((spec, exchange, first, numbers))
                self.relative |= spec.relative
        self._buffers = {x: torch.zeros((n, 2), dtype=torch.int32, device=device) for x, n in counts.items()}
        for spec, exchange, first, numbers in parts:
            rows = self._buffers[exchange][first : first + len(spec.moments) * len(numbers)]
            self._first[spec.shard] = rows.view(len(spec.moments), len(numbers), 2)
            self._numbers[spec.shard] = {number: place for place, number in enumerate(numbers)}

    def __bool__(self) -> bool:
        return bool(self._buffers)

    @property
    def bytes(self) -> int:
        """Bytes that one round of the exchange carries."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def addresses(self, spec: SliceState, number: int) -> list[int]:
        """Where the extremes of a block are, per moment; empty for a block that is not shared."""
        places = self._numbers.get(spec.shard, {})
        if number not in places:
            return []
        rows = self._first[spec.shard]
        found = [rows[k, places[number]].data_ptr() for k in range(len(spec.moments))]
        return found + [0] * (_C.max_moments - len(found))

    def clear(self) -> None:
        """Forgets the last step's extremes: 0 is neutral."""
        for buffer in self._buffers.values():
            buffer.zero_()

    def exchange(self) -> None:
        """Replaces the extremes by those over all owners of a block."""
        for exchange, buffer in self._buffers.items():
            exchange.all_reduce_max(buffer)


class CutBlocks:
    """The cut blocks of a step.

    Args:
        parameters: those with column shards that cut blocks.
        flat: the blocks that flat shards cut.
    """

    def __init__(self, parameters: Sequence[CutParameter], flat: FlatCuts) -> None:
        self._parameters = parameters
        self._flat = flat
        self._by_exchange: dict[Exchange, list[CutParameter]] = {}
        for cut in parameters:
            assert cut.blocks.exchange is not None
            self._by_exchange.setdefault(cut.blocks.exchange, []).append(cut)
        self.relative = flat.relative or any(cut.spec.relative for cut in parameters)

    def __bool__(self) -> bool:
        return bool(self._parameters) or bool(self._flat)

    def clear_extremes(self) -> None:
        """Forgets the last step's extremes: 0 is neutral."""
        self._flat.clear()
        for cut in self._parameters:
            for extremes in cut.extremes:
                extremes.zero_()

    def exchange_extremes(self) -> None:
        """Replaces the extremes by those over all owners of a block."""
        self._flat.exchange()
        for exchange, cuts in self._by_exchange.items():
            _all_reduce_max(exchange, [e for cut in cuts for e in cut.extremes])

    def share_scales(self) -> None:
        """Puts the scales of all blocks of a row on every rank that has a column shard of it."""
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
