"""Sums over whole parameters or all of them, with the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardopt import _C
from shardopt.layout import Exchange
from shardopt.state.rule import Rule
from shardopt.state.tensor_state import TensorState
from shardopt.step.agreement import Opening, Plan, Reduction, Roll

#: Takes the sums over all parameters: int64, (sums, words), or None without any on this rank. Gives, per param group,
#: the hyper-parameters that follow from them.
TakeTotals = Callable[[Tensor | None], Sequence[Mapping[str, float]]]


@dataclass(frozen=True)
class Summed:
    """A tensor whose rule needs sums over each of its parameters, or over all of the optimizer's.

    Attributes:
        index: its index in the step.
        spec: its state.
        rule: says how many sums each parameter has, or all of them together.
        device: of the kernels that step it.
    """

    index: int
    spec: TensorState
    rule: Rule
    device: torch.device


class ExactSums:
    """The sums of all parameters of a step whose rule needs some.

    The kernels add to them in whole numbers, so that the order does not matter. One all-reduce per set of ranks adds up
    those of parameters that these ranks share; all of them take part in every step, with or without gradients. Sums
    over all parameters are there once per set of ranks.

    Args:
        plan: the ranks' agreement.
        tensors: in the same order on all ranks.
    """

    def __init__(self, plan: Plan, tensors: Iterable[Summed]) -> None:
        counts: dict[Exchange | None, int] = {}
        devices: dict[Exchange | None, set[torch.device]] = {}
        places: dict[int, list[tuple[Exchange | None, int, torch.device]]] = {}  # by tensor: one per slice
        indices: dict[Exchange | None, dict[int, None]] = {}
        self._totals: dict[Exchange | None, slice] = {}
        for each in tensors:
            places[each.index] = []
            for part in each.spec.slices:
                ranks = part.spec.shard.parts
                devices.setdefault(ranks, set()).add(each.device)
                indices.setdefault(ranks, {})[each.index] = None
                own = self._totals.get(ranks) if each.rule.totals else None
                if own is None:
                    own = slice(counts.get(ranks, 0), counts.get(ranks, 0) + each.rule.sums)
                    counts[ranks] = own.stop
                if each.rule.totals:
                    self._totals[ranks] = own
                places[each.index].append((ranks, own.start, each.device))
        # int64: a roll, then sums, each of some words: on each device room for all, as ranks may differ in devices.
        rolls = {ranks: 2 * (1 + len(of_ranks)) for ranks, of_ranks in indices.items()}
        self._messages = {
            ranks: {
                d: torch.zeros(rolls[ranks] + count * _C.sum_words, dtype=torch.int64, device=d) for d in devices[ranks]
            }
            for ranks, count in counts.items()
        }
        self._buffers = {
            ranks: {d: message[rolls[ranks] :].view(-1, _C.sum_words) for d, message in messages.items()}
            for ranks, messages in self._messages.items()
        }
        self._rolls = [
            Roll(plan, ranks, next(iter(messages.values()))[: rolls[ranks]].view(-1, 2), list(indices[ranks]))
            for ranks, messages in self._messages.items()
            if ranks is not None
        ]
        self._addresses = {
            index: [self._buffers[ranks][device][first].data_ptr() for ranks, first, device in of_slices]
            for index, of_slices in places.items()
        }

    @property
    def communicates(self) -> bool:
        """Whether other ranks take part."""
        return any(ranks is not None for ranks in self._buffers)

    @property
    def memory(self) -> list[Tensor]:
        """The tensors that are no state."""
        return [*self._each_message(), *(roll.own for roll in self._rolls)]

    def _each_message(self) -> Iterator[Tensor]:
        return (message for messages in self._messages.values() for message in messages.values())

    def addresses(self, index: int) -> list[int]:
        """Where the sums of a tensor's slices are; empty for one without."""
        return self._addresses.get(index, [])

    def openings(self) -> list[Opening]:
        """The form of its messages."""
        first = ((ranks, next(iter(messages.values()))) for ranks, messages in self._messages.items())
        return [Reduction(ranks, message.numel(), message.dtype) for ranks, message in first if ranks is not None]

    def step(self) -> None:
        """Takes the gradients that there are, of which the plan was told."""
        for roll in self._rolls:
            roll.step()

    def clear(self) -> None:
        """Forgets the last step's sums."""
        for message in self._each_message():
            message.zero_()
        for roll in self._rolls:
            roll.enter()

    def exchange(self) -> None:
        """Adds up the sums of all ranks that hold parts of the same parameters.

        Raises:
            RuntimeError: the ranks differ.
        """
        for ranks, messages in self._messages.items():
            if ranks is not None:
                total, *others = messages.values()
                for other in others:
                    total += other.to(total.device)
                ranks.all_reduce_sum(total)
                for other in others:
                    other.copy_(total)
        for roll in self._rolls:
            roll.check()

    def totals(self) -> Iterator[Tensor]:
        """The sums over all parameters, after the exchange: int64, (sums, words), on the host, one per set of ranks.

        Raises:
            RuntimeError: a CUDA graph captures the step.
        """
        for ranks, own in self._totals.items():
            buffers = list(self._buffers[ranks].values())
            for buffer in buffers if ranks is None else buffers[:1]:  # exchanged ones are alike
                if buffer.is_cuda and torch.cuda.is_current_stream_capturing():
                    raise RuntimeError(
                        "got a CUDA graph that captures a step with sums over all parameters, which the host reads, "
                        "expected none; take the step outside of the graph, or with another optimizer"
                    )
                yield buffer[own].cpu()


def total_of(sums: Iterable[ExactSums]) -> Tensor | None:
    """The sums over all parameters on all devices: int64, (sums, words); None without any."""
    totals = [each for on_device in sums for each in on_device.totals()]
    return torch.stack(totals).sum(0) if totals else None
