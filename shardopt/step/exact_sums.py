"""Sums over each parameter, or over all parameters, bitwise equal on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardopt import _C
from shardopt.layout import Counted, RankGroup
from shardopt.state.rule import Rule
from shardopt.step.inputs import StepParameter
from shardopt.step.over_all import OverAll


class ExactSums:
    """The buffers and all-reduces of the sums over each parameter, or over all parameters, that update rules need.

    The kernels add integers, so that the order does not matter. One all-reduce per set of ranks adds up the sums of all
    parameters that these ranks share. Every step all-reduces every sum, with or without gradients on this rank.

    Sets ``sum_addresses`` of the parameters.

    Args:
        parameters: the parameters whose rules need sums, each with its rule and the device of the kernels that update
            it; in an order that is equal on all ranks.
    """

    def __init__(self, parameters: Iterable[tuple[StepParameter, Rule, torch.device]]) -> None:
        # Buffers are told apart by whether their sums are over all parameters, and by the ranks that hold the shards.
        counts: dict[tuple[bool, Any], int] = {}
        slices: list[tuple[StepParameter, int, torch.device, tuple[bool, Any], int]] = []
        for parameter, rule, device in parameters:
            for index, slice_ in enumerate(parameter.slices):
                key = rule.totals, slice_.shard.counted() if rule.totals else slice_.shard.divided_among()
                first = 0 if rule.totals else counts.get(key, 0)  # in totals, all parameters add to the same sums
                slices.append((parameter, index, device, key, first))
                counts[key] = first + rule.sums
        # int64, (sums, words). Each device's buffer has all sums of a set of ranks, as ranks may differ in devices.
        buffers: dict[tuple[bool, Any], dict[torch.device, Tensor]] = {key: {} for key in counts}
        for parameter, index, device, key, first in slices:
            if device not in buffers[key]:
                shape = (counts[key], _C.sum_words)
                buffers[key][device] = torch.zeros(shape, dtype=torch.int64, device=device)
            parameter.sum_addresses[index] = buffers[key][device][first].data_ptr()
        self._per_parameter: dict[RankGroup | None, list[Tensor]] = {}
        self._totals: dict[Counted | None, list[Tensor]] = {}  # this rank's parts
        for (is_total, ranks), by_device in buffers.items():
            (self._totals if is_total else self._per_parameter)[ranks] = list(by_device.values())
        self._over_all = OverAll(self._totals)

    @property
    def memory(self) -> list[Tensor]:
        """All buffers of sums, which the kernels of a step write."""
        return [buffer for buffers in (*self._per_parameter.values(), *self._totals.values()) for buffer in buffers]

    @property
    def communicates(self) -> bool:
        """Whether sums are all-reduced over several ranks."""
        return any(ranks is not None for ranks in self._per_parameter) or bool(self._over_all.reductions)

    def clear(self) -> None:
        """Sets all sums to zero, at the beginning of a step."""
        for buffer in self.memory:
            buffer.zero_()

    def all_reduce(self) -> None:
        """All-reduces the sums over each parameter, within the ranks that hold shards of the parameter."""
        for ranks, (total, *others) in self._per_parameter.items():
            if ranks is not None:
                for other in others:
                    total += other.to(total.device)
                ranks.all_reduce_sum(total)
                for other in others:
                    other.copy_(total)

    def total(self) -> Tensor | None:
        """The sums over all parameters and ranks: int64, (sums, words), on the host; None if no parameter is here.

        Collective, among all ranks.

        Raises:
            RuntimeError: a CUDA graph captures the step, or no mesh has all ranks that share parameters.
        """
        shares = {counted: [buffer.view(-1) for buffer in buffers] for counted, buffers in self._totals.items()}
        for first, *_ in shares.values():
            if first.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "got a CUDA graph that captures a step with sums over all parameters, expected such a step "
                    "outside of graphs, as the host reads the sums; take it there, or use another optimizer"
                )
        if not shares:
            return None
        nothing = torch.zeros_like(next(iter(shares.values()))[0])
        return self._over_all.total(shares, nothing, largest=False).view(-1, _C.sum_words).cpu()
