"""A binary counter of sums: numbered terms are added pairwise, in a tree that depends on how many there are alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardopt.kernels.messages import Layout, add_up


class Counter:
    """Partial sums of terms that arrive in the order of their numbers.

    Two sums of 2^k terms, the first of which begins at a multiple of 2^(k+1), become one of 2^(k+1). None stands for
    zeros, which take no memory.

    Args:
        numel: elements of a sum.
        begin: the number of the first term.

    Attributes:
        sums: (k, sum of 2^k terms in float32), the latest terms last.
    """

    def __init__(self, numel: int, begin: int = 0) -> None:
        self._numel, self._begin, self._next = numel, begin, begin
        self.sums: list[tuple[int, Tensor | None]] = []

    @property
    def tensors(self) -> list[Tensor]:
        """The sums of terms that are not all zeros."""
        return [x for _, x in self.sums if x is not None]

    def push(self, terms: Tensor, layout: Layout, level: int = 0) -> None:
        """Adds terms.

        Args:
            terms: as in :func:`add_up`.
            layout: of each.
            level: a term is itself a sum, of 2^level terms.
        """
        first, begin = self._next >> level, -(-self._begin >> level)
        levels = [k for k, _ in self.sums]
        least = len(levels)
        for _ in range(len(terms)):
            levels.append(self._merge(levels, level))
            least = min(least, len(levels) - 1)
            self._next += 1 << level
        taken = [x for _, x in self.sums[least:]]
        free = [x for x in taken if x is not None]
        out = [
            free.pop() if free else torch.empty(self._numel, dtype=torch.float32, device=terms.device)
            for _ in levels[least:]
        ]
        add_up(terms, layout, first=first, begin=begin, sums=taken, out=out)
        self.sums[least:] = zip(levels[least:], out, strict=True)

    def finish(self, terms: Tensor, layout: Layout, mean: Tensor, divisor: int, level: int = 0) -> None:
        """Adds the last terms, and writes the sum of all, from the latest to the oldest, over the divisor.

        Args:
            terms: as in :func:`add_up`; none if all have been pushed.
            layout: of each.
            mean: gets the quotient, rounded once to the dtype of ``mean``.
            divisor: of the sum.
            level: of the terms.
        """
        first, sums = self._next >> level, [x for _, x in self.sums]
        add_up(terms, layout, first=first, begin=-(-self._begin >> level), sums=sums, mean=mean, divisor=divisor)
        self.sums, self._next = [], self._begin

    def skip(self, terms: int) -> None:
        """Adds terms of zeros."""
        for _ in range(terms):
            term = None
            levels = [k for k, _ in self.sums]
            level = self._merge(levels, 0)
            for _, left in reversed(self.sums[len(levels) :]):
                term = left if term is None else term if left is None else left.add_(term)
            self.sums[len(levels) :] = [(level, term)]
            self._next += 1

    def _merge(self, levels: list[int], level: int) -> int:
        """Takes the sums away that become one with the next term; its level."""
        while levels and levels[-1] == level and self._next >> level & 1:
            level = levels.pop() + 1
        return level

    @staticmethod
    def of_parts(parts: Sequence[tuple[Counter, slice]]) -> Counter:
        """A counter of terms that are made of parts of others' terms, which had as many."""
        first, counter = parts[0][0], Counter(sum(place.stop - place.start for _, place in parts))
        counter._next = first._next
        for i, (level, _) in enumerate(first.sums):
            sums = [(other.sums[i][1], place) for other, place in parts]
            device = next((x.device for x, _ in sums if x is not None), None)
            zeros = [torch.zeros(p.stop - p.start, device=device) if x is None else x[p] for x, p in sums]
            counter.sums.append((level, None if device is None else torch.cat(zeros)))
        return counter


def levels_of(begin: int, terms: int) -> list[int]:
    """The levels of the sums that terms leave, the first of which has this number."""
    counter = Counter(0, begin)
    counter.skip(terms)
    return [level for level, _ in counter.sums]
