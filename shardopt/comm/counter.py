"""A binary counter of sums: numbered terms are added pairwise, in a tree that depends on how many there are alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Counter:
    """Partial sums of float32 terms that arrive in the order of their numbers.

    Two sums of 2^k terms, the first of which begins at a multiple of 2^(k+1), become one of 2^(k+1). None stands for a
    term of zeros, which takes no memory.

    Args:
        first: the number of the first term.

    Attributes:
        sums: (k, sum of 2^k terms), the latest terms last.
    """

    def __init__(self, first: int = 0) -> None:
        self.sums: list[tuple[int, Tensor | None]] = []
        self._next = first

    def push(self, term: Tensor | None, level: int = 0) -> None:
        """Adds the next 2^level terms, whose sum is given. The tensor may be used again afterwards.

        Args:
            term: float32.
            level: the terms' number is a multiple of 2^level.
        """
        place = self._next >> level
        self._next += 1 << level
        is_owned = False
        while place & 1 and self.sums and self.sums[-1][0] == level:
            left = self.sums.pop()[1]
            if left is not None:
                term = left if term is None else left.add_(term)
                is_owned = True
            place, level = place >> 1, level + 1
        self.sums.append((level, term if is_owned or term is None else term.clone()))

    def skip(self, terms: int) -> None:
        """Adds terms of zeros."""
        for _ in range(terms):
            self.push(None)

    @staticmethod
    def of_parts(parts: Sequence[tuple[Counter, slice]]) -> Counter:
        """A counter of terms that are made of parts of others' terms, which had as many."""
        first, counter = parts[0][0], Counter()
        counter._next = first._next
        for i, (level, _) in enumerate(first.sums):
            sums = [(other.sums[i][1], place) for other, place in parts]
            device = next((x.device for x, _ in sums if x is not None), None)
            zeros = [torch.zeros(p.stop - p.start, device=device) if x is None else x[p] for x, p in sums]
            counter.sums.append((level, None if device is None else torch.cat(zeros)))
        return counter

    def total(self) -> Tensor | None:
        """The sum of all terms; None if all are zeros. The counter is empty afterwards."""
        total: Tensor | None = None
        while self.sums:
            left = self.sums.pop()[1]
            total = left if total is None else total if left is None else left.add_(total)
        self._next = 0
        return total


def levels_of(first: int, terms: int) -> list[int]:
    """The levels of the sums that successive terms leave.

    Args:
        first: the number of the first of them.
        terms: how many they are.
    """
    counter = Counter(first)
    counter.skip(terms)
    return [level for level, _ in counter.sums]
