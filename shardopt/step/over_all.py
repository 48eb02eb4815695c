"""Sums over several parameters that reach all ranks which hold some of them, each part counted once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from shardopt.layout import Counted

#: In the last word of a message: its rank cannot add up what its sets of ranks hold. That word is otherwise at most
#: _MOST_LOST, as it counts terms that are not finite: those of fewer than 2^15 ranks can be added up.
_REFUSAL, _MOST_LOST = 1 << 48, 1 << 32


class OverAll:
    """The messages by which sums over all parameters reach all ranks.

    Ranks that hold a parameter exchange one message, which also carries the sums of parameters that only some of
    these ranks hold: ranks that leave those parameters out need not know of them.

    Args:
        held: the parameters' ranks; None for a parameter that each rank has all of.
    """

    def __init__(self, held: Iterable[Counted | None]) -> None:
        known = [counted for counted in dict.fromkeys(held) if counted is not None]
        own = [counted for counted in known if counted.ranks is not None]
        sets = {counted.numbers: counted for counted in reversed(own)}  # the first of equal ones
        largest = [counted for counted in own if sets[counted.numbers] is counted]
        #: The ranks of each message, in the parameters' order.
        self.messages = [counted for counted in largest if not any(counted.numbers < other for other in sets)]
        everyone = frozenset[int]().union(*(counted.numbers for counted in self.messages))
        takes_several = len(self.messages) > 1 and not all(everyone <= counted.reach for counted in own)
        # Whether other ranks hold something of which this rank's messages do not reach all, or tell it nothing.
        self._is_incomplete = takes_several or not all(counted.numbers <= everyone for counted in known)
        self._home: dict[Counted | None, Counted] = {
            counted: next(message for message in self.messages if counted.numbers <= message.numbers) for counted in own
        }
        self._is_new = True

    def total(self, shares: Mapping[Counted | None, Sequence[Tensor]], like: Tensor, *, largest: bool) -> Tensor:
        """The sum or maximum over all parameters and ranks. All ranks must call this.

        Args:
            shares: words of this rank's parts, int64, by the parameters' ranks.
            like: words for nothing, on the device of the result.
            largest: whether words are joined by their maximum.

        Raises:
            RuntimeError: no mesh has all ranks that hold some of the parameters, such as ranks 0, 1 and ranks 1, 2.
        """
        totals = [words for held, of_held in shares.items() if held not in self._home for words in of_held]
        refused = self._is_incomplete
        for message in self.messages:
            joins = [of_held for held, of_held in shares.items() if self._joins(held, message)]
            words = _joined([like, *chain.from_iterable(joins)], largest)
            if len(message.numbers) > 1:
                words[-1:].clamp_(max=_MOST_LOST)
                if self._is_incomplete:
                    words[-1] = _REFUSAL
                assert message.ranks is not None
                (message.ranks.all_reduce_max if largest else message.ranks.all_reduce_sum)(words)
            if self._is_new or not words.is_cuda:
                refused |= int(words[-1]) >= _REFUSAL
            totals.append(words)
        self._is_new = False
        if refused:
            raise RuntimeError(
                "got parameters on meshes of some ranks and none on a mesh with all of these ranks, such as ranks 0, 1 "
                "and ranks 1, 2, expected a mesh with all ranks that share parameters, as each rank needs the sum over "
                "all of them; put one of the parameters on such a mesh (distribute_tensor with Replicate())"
            )
        return _joined([like, *totals], largest)

    def _joins(self, counted: Counted | None, message: Counted) -> bool:
        """Whether this rank's part belongs into a message: it is not yet in it, as a copy."""
        return counted is not None and self._home.get(counted) is message and not counted.before & message.numbers


def _joined(parts: Sequence[Tensor], largest: bool) -> Tensor:
    """The sum or the maximum of some words, on the first ones' device."""
    total = parts[0].clone()
    for part in parts[1:]:
        there = part.to(total.device)
        total = torch.maximum(total, there) if largest else total.add_(there)
    return total
