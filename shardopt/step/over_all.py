"""Sums or maxima over all parameters on all ranks, as for the norm of all gradients; replicas are counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from shardopt.layout import HoldersForSums
from shardopt.step.agreement import digest_of

#: The last word of a sum counts terms that are not finite. Clamped to _MOST_LOST, the words of fewer than 2^15 ranks
#: add up to less than _REFUSAL, which a rank sends to say that the total cannot be computed.
_REFUSAL, _MOST_LOST = 1 << 48, 1 << 32

_calls = Counter[str]()  # per subject, for the store's keys; never reset, as new process groups may use the same store
#: How many of the last calls keep their results in the store, about 2 MB, for ranks that read them later.
_KEPT = 4096


class OverAll:
    """Computes sums or maxima over all parameters, from each rank's shards, so that every rank has the total.

    Each set of ranks that is part of no larger set runs one all-reduce, for all parameters that are sharded over the
    set or over some of its ranks. A rank that is outside of the set, but has its parameters without elements (their
    mesh leaves the rank out), reads the result from torch.distributed's store, where the set's lowest rank puts it.

    Args:
        held: per parameter, the ranks that hold its shards; None for a parameter that each rank has all of.
    """

    def __init__(self, held: Iterable[HoldersForSums | None]) -> None:
        known = list(dict.fromkeys(held))
        own = [counted for counted in known if counted is not None and counted.ranks is not None]
        #: The sets of ranks that run an all-reduce, in the order of the parameters.
        self.messages = _largest(own)
        everyone = frozenset[int]().union(*(counted.members for counted in self.messages))
        others = [c for c in known if c is not None and c.ranks is None and not c.members <= everyone]
        self._read_from = _largest(others)
        self._may_have_readers = bool(others) or None in known  # whether other ranks may read from the store
        # The subject identifies the sets of ranks. Calls are counted per subject, as ranks may be in different sets.
        sets = sorted(sorted(counted.members) for counted in (*self.messages, *self._read_from))
        self._subject = digest_of(repr((sets, None in known))).hex()
        takes_several = len(self.messages) > 1 and not all(everyone <= counted.known_holders for counted in own)
        reach = frozenset[int]().union(*(counted.known_holders for counted in own))
        has_nothing = not own and None not in known
        # Whether a total would lack some ranks' shards, or count replicas twice.
        self._is_incomplete = takes_several or any(has_nothing or reach & counted.members for counted in others)
        self._home: dict[HoldersForSums | None, HoldersForSums] = {
            counted: next(message for message in self.messages if counted.members <= message.members) for counted in own
        }
        self._is_new = True

    def total(self, shares: Mapping[HoldersForSums | None, Sequence[Tensor]], like: Tensor, *, largest: bool) -> Tensor:
        """The sum or maximum over all parameters and ranks. All ranks must call this.

        Args:
            shares: this rank's partial sums or maxima, int64, by the ranks that hold the parameters.
            like: zeros in the shape of a partial sum, on the device of the result.
            largest: whether to take the maximum instead of the sum.

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
            if len(message.members) > 1:
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
        """Called instead of :meth:`total` after an error: ranks that read this rank's results from the store raise."""
        _calls[self._subject] += 1
        for message in self.messages:
            self._write(message, torch.tensor([_REFUSAL], device="cpu"))

    def _write(self, message: HoldersForSums, words: Tensor) -> None:
        assert message.ranks is not None
        if self._may_have_readers and message.store is not None and message.ranks.global_rank == min(message.members):
            message.store.set(self._key(message, 0), words.cpu().numpy().tobytes())
            message.store.delete_key(self._key(message, _KEPT))

    def _read(self, counted: HoldersForSums) -> Tensor:
        try:
            words = torch.frombuffer(bytearray(counted.store.get(self._key(counted, 0))), dtype=torch.int64)
        except RuntimeError as error:
            raise RuntimeError(
                f"got no sum of ranks {sorted(counted.members)}, expected one in each call, as this rank has their "
                "parameters without elements; make the call on all ranks that have the parameters"
            ) from error
        if int(words[-1]) >= _REFUSAL:
            raise RuntimeError(
                f"got an error on ranks {sorted(counted.members)}, expected the sum of their parameters, which this "
                "rank has without elements; see the error of those ranks"
            )
        return words

    def _key(self, counted: HoldersForSums, age: int) -> str:
        return f"shardopt {self._subject} {sorted(counted.members)} {_calls[self._subject] - age}"

    def _joins(self, held: HoldersForSums | None, message: HoldersForSums) -> bool:
        """Whether this rank adds its shards to an all-reduce: no lower rank in it holds (and adds) the same shards."""
        return held is not None and self._home.get(held) is message and not held.lower_replicas & message.members


def _largest(held: Sequence[HoldersForSums]) -> list[HoldersForSums]:
    """The sets of ranks that are contained in no larger set, in order; of equal sets only the first."""
    sets = {counted.members: counted for counted in reversed(held)}
    return [c for c in held if sets[c.members] is c and not any(c.members < other for other in sets)]


def _joined(parts: Sequence[Tensor], largest: bool) -> Tensor:
    """The elementwise sum or maximum of tensors, on the first tensor's device."""
    total = parts[0].clone()
    for part in parts[1:]:
        there = part.to(total.device)
        total = torch.maximum(total, there) if largest else total.add_(there)
    return total
