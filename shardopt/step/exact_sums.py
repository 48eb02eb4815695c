"""Sums over whole parameters or all of them, with the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardopt import _C
from shardopt.layout import Counted, Exchange
from shardopt.state.rule import Rule
from shardopt.state.tensor_state import TensorState
from shardopt.step.over_all import OverAll, no_common_mesh, ranks_of_sums

#: Takes the sums over all parameters: int64, (sums, words), or None without any on this rank. Returns, per param group,
#: the hyper-parameters that follow from the sums.
TakeTotals = Callable[[Tensor | None], Sequence[Mapping[str, float]]]


@dataclass(frozen=True)
class Summed:
    """A tensor whose rule needs sums over each of its parameters, or over all of the optimizer's.

    Attributes:
        index: the tensor's index in the step.
        spec: describes the tensor's state.
        rule: says how many sums each parameter has, or all parameters together.
        device: the device of the kernels that step the tensor.
    """

    index: int
    spec: TensorState
    rule: Rule
    device: torch.device


class ExactSums:
    """The sums of all parameters of a step whose rule needs some.

    The kernels add whole numbers, so that the order does not matter. One all-reduce per set of ranks adds up the sums
    of parameters that these ranks share; all of these sums take part in every step, with or without gradients. Each
    set's message has room for one sum over all parameters; a part that several sets hold is added to the largest one's.

    Args:
        tensors: in an order that is equal on all ranks.
    """

    def __init__(self, tensors: Iterable[Summed]) -> None:
        counts: dict[Exchange | None, int] = {}
        devices: dict[Exchange | None, set[torch.device]] = {}
        places: dict[int, list[tuple[Exchange | None, int, torch.device]]] = {}  # by tensor: one per slice
        self._totals: dict[Exchange | None, slice] = {}
        self._own: dict[Counted | None, dict[torch.device, Tensor]] = {}  # parts of the sums over all parameters
        own_of: dict[tuple[int, int], Tensor] = {}
        for summed in tensors:
            places[summed.index] = []
            for part in summed.spec.slices:
                ranks = ranks_of_sums(part.shard, summed.rule)
                devices.setdefault(ranks, set()).add(summed.device)
                place = self._totals.get(ranks) if summed.rule.totals else None
                if place is None:
                    place = slice(counts.get(ranks, 0), counts.get(ranks, 0) + summed.rule.sums)
                    counts[ranks] = place.stop
                if summed.rule.totals:
                    self._totals[ranks] = place
                    own = self._own.setdefault(part.shard.counted(), {})
                    if summed.device not in own:
                        shape = (summed.rule.sums, _C.sum_words)
                        own[summed.device] = torch.zeros(shape, dtype=torch.int64, device=summed.device)
                    own_of[summed.index, len(places[summed.index])] = own[summed.device]
                places[summed.index].append((ranks, place.start, summed.device))
        # int64, (sums, words). Each device has room for all sums, as ranks may differ in devices.
        self._buffers = {
            ranks: {d: torch.zeros((count, _C.sum_words), dtype=torch.int64, device=d) for d in devices[ranks]}
            for ranks, count in counts.items()
        }
        self._addresses = {
            index: [
                own_of.get((index, at), self._buffers[ranks][device][first]).data_ptr()
                for at, (ranks, first, device) in enumerate(of_slices)
            ]
            for index, of_slices in places.items()
        }
        self._over_all = OverAll(self._own)
        if self._over_all.is_bridge:  # on all ranks: the plan says so, too
            raise no_common_mesh()

    @property
    def memory(self) -> list[Tensor]:
        """The tensors that are no state."""
        of_own = (own for by_device in self._own.values() for own in by_device.values())
        return [*self._each_buffer(), *of_own]

    def _each_buffer(self) -> Iterator[Tensor]:
        return (buffer for buffers in self._buffers.values() for buffer in buffers.values())

    def addresses(self, index: int) -> list[int]:
        """Addresses of the sums of a tensor's slices; empty for a tensor without sums."""
        return self._addresses.get(index, [])

    @property
    def communicates(self) -> bool:
        """Whether sums are added up over several ranks."""
        return any(ranks is not None for ranks in self._buffers)

    def clear(self) -> None:
        """Forgets the last step's sums."""
        for buffer in self._each_buffer():
            buffer.zero_()
        for by_device in self._own.values():
            for own in by_device.values():
                own.zero_()

    def exchange(self) -> None:
        """Adds up the sums of all ranks that hold parts of the same parameters."""
        for counted, by_device in self._own.items():
            home = self._over_all.home(counted)
            if home is None or self._over_all.counts(counted, home):
                joins = self._totals[None if home is None else home.ranks]
                buffer = next(iter(self._buffers[None if home is None else home.ranks].values()))
                for own in by_device.values():
                    buffer[joins] += own.to(buffer.device)
        for ranks, buffers in self._buffers.items():
            if ranks is not None:
                total, *others = buffers.values()
                for other in others:
                    total += other.to(total.device)
                ranks.all_reduce_sum(total)
                for other in others:
                    other.copy_(total)

    def totals(self) -> Iterator[Tensor]:
        """The sums over all parameters, after the exchange: int64, (sums, words), on the host, one per set of ranks.

        Raises:
            RuntimeError: a CUDA graph captures the step.
        """
        found = {}
        messages = [message.ranks for message in self._over_all.messages]
        for ranks, place in self._totals.items():
            if ranks is not None and ranks not in messages:
                continue  # the message of more ranks has them, too
            buffers = list(self._buffers[ranks].values())
            for buffer in buffers[:1]:  # exchanged buffers are equal
                if buffer.is_cuda and torch.cuda.is_current_stream_capturing():
                    raise RuntimeError(
                        "got a CUDA graph that captures a step with sums over all parameters, expected such a step "
                        "outside of graphs, as the host reads the sums; take it there, or use another optimizer"
                    )
                found[ranks] = buffer[place].cpu()
        yield from found.values()
        if found:
            like = next(iter(found.values()))
            for of_others in self._over_all.noted([found[ranks] for ranks in messages], like):
                yield of_others.view_as(like)


def total_of(sums: Iterable[ExactSums]) -> Tensor | None:
    """The sums over all parameters on all devices: int64, (sums, words); None without any."""
    totals = [total for on_device in sums for total in on_device.totals()]
    return torch.stack(totals).sum(0) if totals else None
