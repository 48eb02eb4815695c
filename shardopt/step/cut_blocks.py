"""The exchange during a step among ranks that share blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardopt import _C
from shardopt.layout import Exchange, FlatShard, Shard, reduce_together
from shardopt.state.encoding import shared_blocks
from shardopt.state.slice_spec import SliceSpec
from shardopt.step.agreement import order_of


class CutParameter(NamedTuple):
    """A parameter with cut blocks: the tensors that its owners exchange.

    Attributes:
        spec: describes the parameter's state.
        exchange: the parameter's owners.
        scales: float32, ``(rows, blocks[, scales per block])``, one per moment.
        extremes: int32, ``(pieces, rows, blocks, 2)``, one per moment: this rank may hold several pieces of a block.
        old_scales: float32, ``(pieces - 1, *scales.shape)``, one per moment with scales: the kernels decode further
            pieces of a block with these, as the first piece may have replaced the block's scales by then.
        others: int64, 1-D: blocks of a row of which this rank holds nothing.
    """

    spec: SliceSpec
    exchange: Exchange
    scales: list[Tensor]
    extremes: list[Tensor]
    old_scales: list[Tensor | None]
    others: Tensor

    @classmethod
    def of(
        cls, spec: SliceSpec, exchange: Exchange, scales: Sequence[Tensor | None], device: torch.device
    ) -> CutParameter:
        """Makes the tensors that ranks exchange for the cut blocks of a parameter.

        Args:
            spec: describes the parameter's state.
            exchange: the parameter's owners.
            scales: per moment; None for a moment without scales.
            device: the parameter's device.
        """
        size, pieces_of = spec.grid.block_size, np.zeros(spec.grid.blocks_per_row, np.int64)
        for first, end in spec.shard.columns:
            pieces_of[first // size : -(-end // size)] += 1
        pieces = max(int(pieces_of.max()), 1)
        shape = (pieces, spec.shard.rows, len(pieces_of), 2)
        return cls(
            spec,
            exchange,
            [of_moment for of_moment in scales if of_moment is not None],
            [torch.zeros(shape, dtype=torch.int32, device=device) for _ in spec.moments],
            [None if x is None else x.new_empty((pieces - 1, *x.shape)) for x in scales],
            torch.from_numpy(np.flatnonzero(pieces_of == 0)).to(device),
        )

    @property
    def memory(self) -> list[Tensor]:
        """The tensors that are no state."""
        return [*self.extremes, *(x for x in self.old_scales if x is not None), self.others]

    def keep_scales(self) -> None:
        """Copies the scales for further pieces of a block."""
        if len(self.extremes[0]) > 1:
            for copies, scales in zip((x for x in self.old_scales if x is not None), self.scales, strict=True):
                copies.copy_(scales)


class FlatCuts:
    """The extremes of the blocks that flat shards cut, of all parameters of an optimizer on a device.

    All extremes take part in every step, even if this rank holds nothing of a parameter or has no gradient of it: other
    ranks cannot know. One collective carries all extremes.

    Args:
        specs: of all parameters under flat shards, in an order that is equal on all ranks.
        device: device of the extremes.
    """

    def __init__(self, specs: Sequence[SliceSpec], device: torch.device) -> None:
        self._numbers: dict[Shard, dict[int, int]] = {}  # per part, the blocks' places in the part's row of the buffer
        self._first: dict[Shard, Tensor] = {}  # per part: (moments, blocks, 2)
        self.relative = False
        counts: dict[Exchange, int] = {}
        shared = []
        for spec in specs:
            numbers = shared_blocks(spec)
            if numbers:
                assert isinstance(spec.shard, FlatShard)
                assert spec.shard.exchange is not None
                exchange = spec.shard.exchange
                first = counts.get(exchange, 0)
                counts[exchange] = first + len(spec.moments) * len(numbers)
                shared.append((spec, exchange, first, numbers))
                self.relative |= spec.relative
        self._buffers = {x: torch.zeros((n, 2), dtype=torch.int32, device=device) for x, n in counts.items()}
        for spec, exchange, first, numbers in shared:
            rows = self._buffers[exchange][first : first + len(spec.moments) * len(numbers)]
            self._first[spec.shard] = rows.view(len(spec.moments), len(numbers), 2)
            self._numbers[spec.shard] = {number: place for place, number in enumerate(numbers)}

    def __bool__(self) -> bool:
        return bool(self._buffers)

    @property
    def memory(self) -> list[Tensor]:
        """The tensors that are no state."""
        return list(self._buffers.values())

    def addresses(self, spec: SliceSpec, number: int) -> list[int]:
        """Addresses of a block's extremes, per moment; empty for a block that is not shared."""
        places = self._numbers.get(spec.shard, {})
        if number not in places:
            return []
        rows = self._first[spec.shard]
        addresses = [rows[k, places[number]].data_ptr() for k in range(len(spec.moments))]
        return addresses + [0] * (_C.max_moments - len(addresses))

    def clear(self) -> None:
        """Forgets the last step's extremes: 0 is neutral."""
        for buffer in self._buffers.values():
            buffer.zero_()

    def exchange(self) -> None:
        """Replaces a block's extremes by the extremes over all its owners."""
        for exchange, buffer in self._buffers.items():
            exchange.all_reduce_max(buffer)


class CutBlocks:
    """The cut blocks of a step.

    Args:
        parameters: the parameters with column shards that cut blocks.
        flat: the blocks that flat shards cut.
    """

    def __init__(self, parameters: Sequence[CutParameter], flat: FlatCuts) -> None:
        self._parameters, self._flat = parameters, flat
        self._by_exchange: dict[Exchange, list[CutParameter]] = {}
        for cut in sorted(parameters, key=lambda cut: order_of(cut.exchange)):
            self._by_exchange.setdefault(cut.exchange, []).append(cut)
        self.relative = flat.relative or any(cut.spec.relative for cut in parameters)

    def __bool__(self) -> bool:
        return bool(self._parameters) or bool(self._flat)

    @property
    def memory(self) -> list[Tensor]:
        """The tensors that are no state."""
        of_cuts = (tensor for cut in self._parameters for tensor in cut.memory)
        return [*self._flat.memory, *of_cuts]

    def keep_scales(self) -> None:
        """Copies the scales of blocks of which this rank holds several pieces, before the kernels read them."""
        for cut in self._parameters:
            cut.keep_scales()

    def clear_extremes(self) -> None:
        """Forgets the last step's extremes: 0 is neutral."""
        self._flat.clear()
        for cut in self._parameters:
            for extremes in cut.extremes:
                extremes.zero_()

    def exchange_extremes(self) -> None:
        """Replaces a block's extremes by the extremes over all its owners."""
        self._flat.exchange()
        for exchange, cuts in self._by_exchange.items():
            every = [extremes for cut in cuts for extremes in cut.extremes]
            for extremes in every:
                if len(extremes) > 1:
                    extremes[0] = extremes.amax(0)
            reduce_together(exchange.all_reduce_max, [extremes[0] for extremes in every])
            for extremes in every:
                extremes[1:] = extremes[0]

    def share_scales(self) -> None:
        """Sends the scales of all blocks of a row to every rank that has a column shard of the row."""
        for exchange, cuts in self._by_exchange.items():
            for cut in cuts:
                for scales in cut.scales:
                    scales.index_fill_(1, cut.others, 0)
            # Scales are not negative: the order of their bits as integers is their order as floats.
            reduce_together(exchange.all_reduce_max, [s.view(torch.int32) for cut in cuts for s in cut.scales])
