"""Pairwise summation of numbered terms, in a binary tree that depends only on the number of terms."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

#: Elements that are converted to float32 and added at a time, so that they stay in the CPU's cache.
_SLICE = 1 << 16


class Counter:
    """Pending partial sums of the tree, for terms (micro-batches' gradients) that arrive in the order of their numbers.

    Like a binary counter's carry: two adjacent sums of 2^k terms are added to one of 2^(k+1) terms as soon as both are
    there, if the first one's first term has a number divisible by 2^(k+1). None stands for a sum of zeros.

    Attributes:
        next: the number of the next term.
        sums: pairs (k, sum of 2^k terms in float32), the latest terms last.
    """

    def __init__(self, begin: int = 0) -> None:
        self.next = begin
        self.sums: list[tuple[int, Tensor | None]] = []

    def reset(self) -> None:  # to the state before the step's first micro-batch
        self.next, self.sums = 0, []

    @property
    def tensors(self) -> list[Tensor]:
        """The partial sums that take up memory: all but the ones that are known to be zeros."""
        return [x for _, x in self.sums if x is not None]

    def push(self, terms: Iterable[Tensor | None], level: int = 0) -> None:
        """Appends inputs, each a sum of 2^level terms already, and adds up pairs. Keeps no reference to the inputs."""
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
        """Appends zeros in place of the missing terms, up to but without the term of this number."""
        self.push([None] * (number - self.next))

    def finish(self, mean: Tensor, divisor: int) -> None:
        """Adds the partial sums, latest first, divides by ``divisor``, and rounds the result once, to ``mean``.

        If ``mean`` has fewer elements than the sums, as without padding, it gets the first ones.
        """
        total = None
        while self.sums:
            total = _sum(self.sums.pop()[1], total)
        if total is None:
            mean.zero_()
            return
        # Divides by a tensor: PyTorch on a GPU would multiply by a Python number's reciprocal. add_ turns -0 into +0.
        over = torch.full((), divisor, dtype=torch.float32, device=total.device)
        mean.copy_(total.div_(over).add_(0.0)[: len(mean)])


def _sum(earlier: Tensor | None, later: Tensor | None) -> Tensor | None:
    """Adds ``later`` to ``earlier`` in place. None stands for zeros: then returns the other sum itself."""
    if earlier is None or later is None:
        return later if earlier is None else earlier
    if later.is_cuda or later.dtype == earlier.dtype:
        return earlier.add_(later)
    for begin in range(0, len(later), _SLICE):  # on the CPU PyTorch converts all that it is given before it adds
        earlier[begin : begin + _SLICE].add_(later[begin : begin + _SLICE])
    return earlier


def levels_of(begin: int, terms: int) -> list[int]:
    """Levels k of the partial sums, of 2^k terms each, into which ``terms`` terms from number ``begin`` on go."""
    counter = Counter(begin)
    counter.skip_to(begin + terms)
    return [level for level, _ in counter.sums]
