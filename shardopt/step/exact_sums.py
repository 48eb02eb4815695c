"""Sums of squares over whole parameters, with the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardopt import _C
from shardopt.layout import Exchange
from shardopt.state.tensor_state import TensorState


class ExactSums:
    """The sums of all parameters of a step whose rule needs some.

    The kernels add to them in whole numbers, so that the order does not matter; one collective adds up those of all
    ranks that hold parts of the same parameters. All of these take part in every step, with or without gradients.

    Args:
        states: the parameters' states, by their indices, in the same order on all ranks.
        counts: how many sums each parameter has.
        devices: the devices of the kernels that step each.
    """

    def __init__(
        self, states: Mapping[int, TensorState], counts: Mapping[int, int], devices: Mapping[int, torch.device]
    ) -> None:
        self._buffers: dict[torch.device, Tensor] = {}  # int64: (sums, words)
        self._views: dict[int, list[Tensor]] = {}  # by parameter: one per slice
        self._by_exchange: dict[Exchange, list[Tensor]] = {}
        numbers = {index: counts[index] * len(spec.slices) for index, spec in states.items()}
        for device in set(devices.values()):
            total = sum(number for index, number in numbers.items() if devices[index] == device)
            self._buffers[device] = torch.zeros((total, _C.sum_words), dtype=torch.int64, device=device)
        first = dict.fromkeys(self._buffers, 0)
        for index, spec in states.items():
            device = devices[index]
            rows = self._buffers[device][first[device] : first[device] + numbers[index]]
            first[device] += numbers[index]
            self._views[index] = list(torch.split(rows, counts[index]))
            for each, view in zip(spec.slices, self._views[index], strict=True):
                parts = each.spec.shard.parts
                if parts is not None:
                    self._by_exchange.setdefault(parts, []).append(view)

    def __bool__(self) -> bool:
        return bool(self._buffers)

    def addresses(self, index: int) -> list[int]:
        """Where the sums of a parameter's slices are; empty for one without."""
        return [view.data_ptr() for view in self._views.get(index, ())]

    def clear(self) -> None:
        """Forgets the last step's sums."""
        for buffer in self._buffers.values():
            buffer.zero_()

    def exchange(self) -> None:
        """Adds up the sums of all ranks that hold parts of the same parameters."""
        for exchange, views in self._by_exchange.items():
            device = views[0].device
            flat = torch.cat([view.to(device) for view in views])
            exchange.all_reduce_sum(flat)
            for view, new in zip(views, torch.split(flat, [len(view) for view in views]), strict=True):
                view.copy_(new)
