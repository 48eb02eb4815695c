"""Sums over several parameters that reach all ranks which hold some of them, each part counted once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from shardopt.layout import Counted, Notes

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
        known = list(dict.fromkeys(held))
        own = [counted for counted in known if counted is not None and counted.ranks is not None]
        sets = {counted.numbers: counted for counted in reversed(own)}  # the first of equal ones
        largest = [counted for counted in own if sets[counted.numbers] is counted]
        #: The ranks of each message, in the parameters' order.
        self.messages = [counted for counted in largest if not any(counted.numbers < other for other in sets)]
        everyone = frozenset[int]().union(*(counted.numbers for counted in self.messages))
        #: Whether a rank takes part in two messages while another rank takes part in only one of them.
        self.is_bridge = len(self.messages) > 1 and not all(everyone <= counted.reach for counted in own)
        self._home: dict[Counted | None, Counted] = {
            counted: next(message for message in self.messages if counted.numbers <= message.numbers) for counted in own
        }
        absent = [c for c in known if c is not None and c.ranks is None and not c.numbers <= everyone]
        sets_of_others = {counted.numbers: counted for counted in reversed(absent)}
        self._absent = [c for c in sets_of_others.values() if not any(c.numbers < other for other in sets_of_others)]
        self._notes = bool(self._absent) or None in known  # ranks that are not in reach may have a copy of a parameter
        #: Whether this rank holds nothing, and other ranks do.
        self.is_empty = bool(self._absent) and not own and None not in known
        # Notes are numbered per subject: a rank that reads none about these sets of ranks may read those about others.
        reached = {counted.reach for counted in known if counted is not None}
        subject = sorted(sorted(ranks) for ranks in reached if not any(ranks < other for other in reached))
        self._subject = hashlib.sha256(repr((subject, None in known)).encode()).hexdigest()[:16]
        self._is_new = True

    def total(self, shares: Mapping[Counted | None, Sequence[Tensor]], like: Tensor, *, largest: bool) -> Tensor:
        """The sum or maximum over all parameters and ranks. All ranks must call this.

        Args:
            shares: words of this rank's parts, int64, by the parameters' ranks.
            like: words for nothing, on the device of the result.
            largest: whether words are joined by their maximum.

        Raises:
            RuntimeError: meshes overlap and none contains all of their ranks, such as ranks 0, 1 and ranks 1, 2.
        """
        totals = [words for held, of_held in shares.items() if held not in self._home for words in of_held]
        refused = False
        for message in self.messages:
            joins = [of_held for held, of_held in shares.items() if self._joins(held, message)]
            words = _joined([like, *chain.from_iterable(joins)], largest)
            if len(message.numbers) > 1:
                words[-1:].clamp_(max=_MOST_LOST)
                if self.is_bridge:
                    words[-1] = _REFUSAL
                assert message.ranks is not None
                (message.ranks.all_reduce_max if largest else message.ranks.all_reduce_sum)(words)
            if self.is_bridge or self._is_new or not words.is_cuda:
                refused |= int(words[-1]) >= _REFUSAL
            totals.append(words)
        self._is_new = False
        if refused:
            self.refuse()
            raise no_common_mesh()
        if self._notes and any(message.notes is not None for message in self.messages):
            self._write([words.cpu().numpy().tobytes() for words in totals[-len(self.messages) :]])
        notes = [bytearray(notes.read(self._subject)) for notes in self._readable()]  # all of them: calls are numbered
        if not all(notes):
            raise RuntimeError(
                "got an error on other ranks, whose parts the sum over all parameters needs, expected a sum that all "
                "ranks can take; see the error of those ranks"
            )
        totals += [torch.frombuffer(note, dtype=like.dtype) for note in notes]
        return _joined([like, *totals], largest)

    def _joins(self, counted: Counted | None, message: Counted) -> bool:
        """Whether this rank's part belongs into a message: it is not yet in it, as a copy."""
        return counted is not None and self._home.get(counted) is message and not counted.before & message.numbers

    def refuse(self) -> None:
        """Writes and reads no totals in this call: ranks that read them raise an error. All ranks must call this."""
        self._write([b""] * len(self.messages))
        for notes in self._readable():
            notes.skip(self._subject)

    def _readable(self) -> list[Notes]:
        return [c.notes for c in self._absent if c.notes is not None and not self.is_empty]

    def _write(self, notes: Sequence[bytes]) -> None:
        for message, note in zip(self.messages, notes, strict=True):
            if message.notes is not None and self._notes:
                message.notes.write(self._subject, note)


def no_common_mesh() -> RuntimeError:
    """The error of ranks that cannot add up what their sets of ranks hold."""
    return RuntimeError(
        "got parameters on meshes of ranks of which none has all the others, such as ranks 0, 1 and ranks 1, 2, "
        "expected a mesh with all ranks that share parameters, as each rank needs the sum over all of them; put one of "
        "the parameters on such a mesh"
    )


def _joined(parts: Sequence[Tensor], largest: bool) -> Tensor:
    """The sum or the maximum of some words, on the first ones' device."""
    total = parts[0].clone()
    for part in parts[1:]:
        there = part.to(total.device)
        total = torch.maximum(total, there) if largest else total.add_(there)
    return total
