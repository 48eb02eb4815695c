"""Sums or maxima over all parameters on all ranks, as for the norm of all gradients; replicas are counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

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
        holders: per parameter, the ranks that hold its shards; None for a parameter that each rank has all of.

    Attributes:
        reductions: per set of ranks that runs an all-reduce, in the order of the parameters, the ``holders`` whose
            shards this rank adds; not those of which a lower rank of the set has, and adds, a copy.
    """

    def __init__(self, holders: Iterable[HoldersForSums | None]) -> None:
        distinct = list(dict.fromkeys(holders))
        has_replicated = None in distinct  # a parameter that each rank has all of
        known = [each for each in distinct if each is not None]
        sharded = [each for each in known if each.ranks is not None]  # of which this rank holds a shard
        self.reductions: dict[HoldersForSums, list[HoldersForSums]] = {each: [] for each in _largest(sharded)}
        self._sharded = frozenset(sharded)
        for each in sharded:
            reduction = next(larger for larger in self.reductions if each.members <= larger.members)
            if not each.lower_replicas & reduction.members:
                self.reductions[reduction].append(each)
        reducing_ranks = frozenset[int]().union(*(reduction.members for reduction in self.reductions))
        # Parameters of which this rank holds nothing, on ranks that do not all join its own all-reduces.
        outside = [each for each in known if each.ranks is None and not each.members <= reducing_ranks]
        self._read_from_store = _largest(outside)
        # Only then another rank can read this rank's results without an error: it needs a replicated parameter, which
        # this rank has, too, or a shard on a set of ranks without this one.
        self._writes_to_store = has_replicated or bool(outside)
        # A total of several reductions is complete if each of their ranks takes part in all, or has copies of shards in
        # them. A result from the store must not have counted copies of this rank's shards.
        copied_on = frozenset[int]().union(*(each.known_holders for each in sharded))
        lacks_some = len(self.reductions) > 1 and not all(reducing_ranks <= each.known_holders for each in sharded)
        counts_twice = any(copied_on & each.members for each in outside)
        has_only_empty = bool(outside) and not sharded and not has_replicated  # the other ranks do not write
        self._is_incomplete = lacks_some or counts_twice or has_only_empty
        # Equal on ranks that write a result and ranks that read it. Calls are counted per subject, as ranks may have
        # different sets.
        sets = sorted(sorted(each.members) for each in (*self.reductions, *self._read_from_store))
        self._subject = digest_of(repr((sets, has_replicated))).hex()
        self._is_first = True

    def total(self, shares: Mapping[HoldersForSums | None, Sequence[Tensor]], like: Tensor, *, largest: bool) -> Tensor:
        """The sum or maximum over all parameters and ranks. Collective: all ranks must call this.

        Args:
            shares: this rank's partial sums or maxima, int64, by the ranks that hold the parameters.
            like: zeros in the shape of a partial sum, on the device of the result.
            largest: whether to take the maximum instead of the sum.

        Raises:
            RuntimeError: no mesh has all ranks that hold some of the parameters, such as ranks 0, 1 and ranks 1, 2; or
                other ranks do not put their result into the store.
        """
        _calls[self._subject] += 1
        parts = [part for holders, own in shares.items() if holders not in self._sharded for part in own]
        is_refused = self._is_incomplete
        for reduction, added in self.reductions.items():
            words = _combined([like, *(part for holders in added for part in shares.get(holders, ()))], largest)
            words[-1:].clamp_(max=_MOST_LOST)  # of a maximum this is the only word: its bits are below 2^31
            if self._is_incomplete:
                words[-1] = _REFUSAL
            if len(reduction.members) > 1:
                assert reduction.ranks is not None
                (reduction.ranks.all_reduce_max if largest else reduction.ranks.all_reduce_sum)(words)
            if self._is_first or not words.is_cuda:  # later the host would wait for the GPU, to learn the same
                is_refused |= int(words[-1]) >= _REFUSAL
            self._write(reduction, words)
            parts.append(words)
        self._is_first = False
        from_store = [] if is_refused else list(map(self._read, self._read_from_store))
        if is_refused or any(int(words[-1]) >= _REFUSAL for words in from_store):
            raise RuntimeError(
                "got parameters on meshes of some ranks and none on a mesh with all of these ranks, such as ranks 0, 1 "
                "and ranks 1, 2, expected a mesh with all ranks that share parameters, as each rank needs the sum over "
                "all of them; put one of the parameters on such a mesh (distribute_tensor with Replicate())"
            )
        return _combined([like, *parts, *from_store], largest)

    def _write(self, reduction: HoldersForSums, words: Tensor) -> None:
        """Puts a result into the store if other ranks may read it, and deletes an old one; on the lowest rank only."""
        assert reduction.ranks is not None
        is_lowest = reduction.ranks.global_rank == min(reduction.members)
        if self._writes_to_store and reduction.store is not None and is_lowest:
            reduction.store.set(self._key(reduction, _calls[self._subject]), words.cpu().numpy().tobytes())
            reduction.store.delete_key(self._key(reduction, _calls[self._subject] - _KEPT))

    def _read(self, reduction: HoldersForSums) -> Tensor:
        """Waits for a result of other ranks in the store."""
        try:
            text = reduction.store.get(self._key(reduction, _calls[self._subject]))
        except RuntimeError as error:
            raise RuntimeError(
                f"got no sum of ranks {sorted(reduction.members)}, expected one in each call, as this rank has their "
                "parameters without elements; make the call on all ranks that have the parameters"
            ) from error
        return torch.frombuffer(bytearray(text), dtype=torch.int64)

    def _key(self, reduction: HoldersForSums, call: int) -> str:
        """The store's key for the result of an all-reduce in the ``call``-th call for the same sets of ranks."""
        return f"shardopt {self._subject} {sorted(reduction.members)} {call}"


def _largest(holders: Sequence[HoldersForSums]) -> list[HoldersForSums]:
    """The sets of ranks that are contained in no larger set, in order; of equal sets only the first."""
    first_of = {each.members: each for each in reversed(holders)}
    return [x for x in holders if first_of[x.members] is x and not any(x.members < other for other in first_of)]


def _combined(parts: Sequence[Tensor], largest: bool) -> Tensor:
    """The elementwise sum or maximum of tensors, on the first tensor's device."""
    total = parts[0].clone()
    for part in parts[1:]:
        part = part.to(total.device)
        total = torch.maximum(total, part) if largest else total.add_(part)
    return total
