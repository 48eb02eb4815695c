"""A binary counter of sums: numbered terms are added pairwise, in a tree that depends on how many there are alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

#: Elements that are converted at a time, which stay in a processor's cache.
_SLICE = 1 << 16


class Counter:
    """Partial sums of terms that arrive in the order of their numbers.

    Two sums of 2^k terms, the first of which begins at a multiple of 2^(k+1), become one of 2^(k+1). None stands for
    zeros, which take no memory.

    Attributes:
        next: the number of the next term.
        sums: (k, sum of 2^k terms in float32), the latest terms last.
    """

    def __init__(self, begin: int = 0) -> None:
        self.next = begin
        self.sums: list[tuple[int, Tensor | None]] = []

    def reset(self) -> None:
        self.next, self.sums = 0, []

    @property
    def tensors(self) -> list[Tensor]:
        """The sums of terms that are not all zeros."""
        return [x for _, x in self.sums if x is not None]

    def push(self, terms: Iterable[Tensor | None], level: int = 0) -> None:
        """Adds terms, each itself a sum of 2^level terms. Their memory is not kept."""
        for term in terms:
            total, reached = term, level
            while self.sums and self.sums[-1][0] == reached and self.next >> reached & 1:
                total = _sum(self.sums.pop()[1], total)
                reached += 1
            if term is not None and total is term:
                total = term.to(torch.float32, copy=True)
            self.sums.append((reached, total))
            self.next += 1 << level

    def skip_to(self, number: int) -> None:
        """Adds zeros for the terms before a number that have not arrived."""
        self.push([None] * (number - self.next))

    def finish(self, mean: Tensor, divisor: int) -> None:
        """Writes the sum of all terms, from the latest to the oldest, over the divisor, rounded once.

        ``mean`` may have fewer elements than sums: it gets the first ones.
        """
        total = None
        while self.sums:
            total = _sum(self.sums.pop()[1], total)
        if total is None:
            mean.zero_()
            return
        # A number as divisor would be multiplied by its reciprocal on a GPU. -0 becomes +0.
        over = torch.full((), divisor, dtype=torch.float32, device=total.device)
        mean.copy_(total.div_(over).add_(0.0)[: len(mean)])


def _sum(earlier: Tensor | None, later: Tensor | None) -> Tensor | None:
    """In the memory of the earlier sum, where that has some."""
    if earlier is None or later is None:
        return later if earlier is None else earlier
    if later.is_cuda or later.dtype == earlier.dtype:
        return earlier.add_(later)
    for begin in range(0, len(later), _SLICE):  # on the CPU PyTorch converts all that it is given before it adds
        earlier[begin : begin + _SLICE].add_(later[begin : begin + _SLICE])
    return earlier


def levels_of(begin: int, terms: int) -> list[int]:
    """Levels of the partial sums left after ``terms`` terms, the first of which has the number ``begin``."""
    counter = Counter(begin)
    counter.skip_to(begin + terms)
    return [level for level, _ in counter.sums]
