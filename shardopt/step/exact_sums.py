"""Sums over each parameter, or over all parameters, bitwise equal on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardopt import _C
from shardopt.layout import HoldersForSums, RankGroup
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
        self._per_parameter: dict[RankGroup | None, list[Tensor]] = {}
        self._totals: dict[HoldersForSums | None, list[Tensor]] = {}  # this rank's parts
        # By kind of sums (totals or not) and holders: parameter, index of the slice, number of sums, kernels' device.
        alike: dict[tuple[bool, Any], list[tuple[StepParameter, int, int, torch.device]]] = {}
        for parameter, rule, device in parameters:
            for index, slice_ in enumerate(parameter.slices):
                holders = slice_.shard.holders_for_sums() if rule.has_totals else slice_.shard.make_part_group()
                alike.setdefault((rule.has_totals, holders), []).append((parameter, index, rule.sum_count, device))
        for (is_total, holders), slices in alike.items():
            counts = [count for _, _, count, _ in slices]
            shape = (max(counts) if is_total else sum(counts), _C.sum_words)
            # Each device's buffer has all sums of a set of ranks, as ranks may differ in devices.
            devices = dict.fromkeys(device for *_, device in slices)
            buffers = {device: torch.zeros(shape, dtype=torch.int64, device=device) for device in devices}
            first = 0
            for parameter, index, count, device in slices:
                parameter.sum_addresses[index] = buffers[device][first].data_ptr()
                first += 0 if is_total else count  # in totals, all parameters add to the same sums
            (self._totals if is_total else self._per_parameter)[holders] = list(buffers.values())
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
        """The sums over all parameters and ranks: int64, (sums, words), on the host.

        None if this rank has no parameter whose rule needs them. Collective among the ranks that have such parameters.

        Raises:
            RuntimeError: no mesh has all ranks that share parameters; or a CUDA graph captures the step.
        """
        shares = {holders: [buffer.view(-1) for buffer in buffers] for holders, buffers in self._totals.items()}
        if not shares:
            return None
        nothing = torch.zeros_like(next(iter(shares.values()))[0])
        return self._over_all.total(shares, nothing, largest=False).view(-1, _C.sum_words).cpu()
