"""Sums over several parameters that reach all ranks which hold some of them, each part counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from shardopt.layout import Counted
from shardopt.step.agreement import digest_of

#: In the last word of a message: its rank cannot add up what its sets of ranks hold. That word is otherwise at most
#: _MOST_LOST, as it counts terms that are not finite: those of fewer than 2^15 ranks can be added up.
_REFUSAL, _MOST_LOST = 1 << 48, 1 << 32

_calls = Counter[str]()  # by subject; goes on if process groups are made again, which may use the same store
#: Calls whose messages stay in the store, about 2 MB, for ranks that are behind.
_KEPT = 4096


class OverAll:
    """The messages by which sums over all parameters reach all ranks.

    Ranks that hold a parameter exchange one message, which also carries the sums of parameters that only some of
    these ranks hold: ranks that leave those parameters out need not know of them. A rank that is on no mesh with
    them, but has their parameters without elements, reads the result from the store, where one of them puts it.

    Args:
        held: the parameters' ranks; None for a parameter that each rank has all of.
    """

    def __init__(self, held: Iterable[Counted | None]) -> None:
        known = list(dict.fromkeys(held))
        own = [counted for counted in known if counted is not None and counted.ranks is not None]
        #: The ranks of each message, in the parameters' order.
        self.messages = _largest(own)
        everyone = frozenset[int]().union(*(counted.numbers for counted in self.messages))
        others = [c for c in known if c is not None and c.ranks is None and not c.numbers <= everyone]
        self._read_from = _largest(others)
        self._may_have_readers = bool(others) or None in known  # other ranks may have a copy of a parameter
        # Subjects are counted apart: a rank that has no sums over these sets of ranks may have sums over other ones.
        sets = sorted(sorted(counted.numbers) for counted in (*self.messages, *self._read_from))
        self._subject = digest_of(repr((sets, None in known))).hex()
        takes_several = len(self.messages) > 1 and not all(everyone <= counted.reach for counted in own)
        reach = frozenset[int]().union(*(counted.reach for counted in own))
        has_nothing = not own and None not in known
        # Whether ranks would miss parts that others count, or count copies twice.
        self._is_incomplete = takes_several or any(has_nothing or reach & counted.numbers for counted in others)
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
            RuntimeError: no mesh has all ranks that hold some of the parameters, such as ranks 0, 1 and ranks 1, 2, or
                other ranks raise an error.
        """
        _calls[self._subject] += 1
        totals = [words for held, of_held in shares.items() if held not in self._home for words in of_held]
        refused = self._is_incomplete
        for message in self.messages:
            joins = [of_held for held, of_held in shares.items() if self._joins(held, message)]
            words = _joined([like, *chain.from_iterable(joins)], largest)
            words[-1:].clamp_(max=_MOST_LOST)
            if self._is_incomplete:
                words[-1] = _REFUSAL
            if len(message.numbers) > 1:
                assert message.ranks is not None
                (message.ranks.all_reduce_max if largest else message.ranks.all_reduce_sum)(words)
            if self._is_new or not words.is_cuda:
                refused |= int(words[-1]) >= _REFUSAL
            self._write(message, words)
            totals.append(words)
        self._is_new = False
        if refused:
            raise RuntimeError(
                "got parameters on meshes of some ranks and none on a mesh with all of these ranks, such as ranks 0, 1 "
                "and ranks 1, 2, expected a mesh with all ranks that share parameters, as each rank needs the sum over "
                "all of them; put one of the parameters on such a mesh (distribute_tensor with Replicate())"
            )
        return _joined([like, *totals, *map(self._read, self._read_from)], largest)

    def refuse(self) -> None:
        """In place of a total: ranks that read this rank's messages from the store raise an error."""
        _calls[self._subject] += 1
        for message in self.messages:
            self._write(message, torch.tensor([_REFUSAL], device="cpu"))

    def _write(self, message: Counted, words: Tensor) -> None:
        assert message.ranks is not None
        if self._may_have_readers and message.store is not None and message.ranks.number == min(message.numbers):
            message.store.set(self._key(message, 0), words.cpu().numpy().tobytes())
            message.store.delete_key(self._key(message, _KEPT))

    def _read(self, counted: Counted) -> Tensor:
        try:
            words = torch.frombuffer(bytearray(counted.store.get(self._key(counted, 0))), dtype=torch.int64)
        except RuntimeError as error:
            raise RuntimeError(
                f"got no sum of ranks {sorted(counted.numbers)}, expected one in each call, as this rank has their "
                "parameters without elements; make the call on all ranks that have the parameters"
            ) from error
        if int(words[-1]) >= _REFUSAL:
            raise RuntimeError(
                f"got an error on ranks {sorted(counted.numbers)}, expected the sum of their parameters, which this "
                "rank has without elements; see the error of those ranks"
            )
        return words

    def _key(self, counted: Counted, age: int) -> str:
        return f"shardopt {self._subject} {sorted(counted.numbers)} {_calls[self._subject] - age}"

    def _joins(self, counted: Counted | None, message: Counted) -> bool:
        """Whether this rank's part belongs into a message: it is not yet in it, as a copy."""
        return counted is not None and self._home.get(counted) is message and not counted.before & message.numbers


def _largest(held: Sequence[Counted]) -> list[Counted]:
    """The sets of ranks that are in no larger set, the first of equal ones, in order."""
    sets = {counted.numbers: counted for counted in reversed(held)}
    return [c for c in held if sets[c.numbers] is c and not any(c.numbers < other for other in sets)]


def _joined(parts: Sequence[Tensor], largest: bool) -> Tensor:
    """The sum or the maximum of some words, on the first ones' device."""
    total = parts[0].clone()
    for part in parts[1:]:
        there = part.to(total.device)
        total = torch.maximum(total, there) if largest else total.add_(there)
    return total
