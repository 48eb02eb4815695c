"""Pairwise summation of numbered terms, in a binary tree that depends only on the number of terms."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

#: Elements that are converted to float32 and added at a time, so that they stay in the CPU's cache.
_SLICE = 1 << 16


class PairwiseSum:
    """A sum of terms (micro-batches' gradients) that arrive in the order of their numbers: the tree's partial sums.

    Like a binary counter's carry: two adjacent sums of 2^k terms are added to one of 2^(k+1) terms as soon as both are
    there, if the first one's first term has a number divisible by 2^(k+1). None stands for a sum of zeros.

    Attributes:
        partial_sums: pairs (k, sum of 2^k terms in float32), the latest terms last.
    """

    def __init__(self, next_term: int = 0) -> None:
        self.next_term = next_term
        self.partial_sums: list[tuple[int, Tensor | None]] = []

    def reset(self) -> None:
        """Drops all terms: the next one has number 0."""
        self.next_term, self.partial_sums = 0, []

    @property
    def tensors(self) -> list[Tensor]:
        """The partial sums that take up memory: all but the ones that are known to be zeros."""
        return [x for _, x in self.partial_sums if x is not None]

    def add(self, terms: Iterable[Tensor | None], level: int = 0) -> None:
        """Adds terms, each a sum of 2^level terms already, or None for zeros. Copies what it keeps of them."""
        for term in terms:
            total, reached = term, level
            # A sum of 2^k terms is the right half of a sum of 2^(k+1) if bit k of its first term's number is set.
            while self.partial_sums and self.partial_sums[-1][0] == reached and self.next_term >> reached & 1:
                total = _add_in_place(self.partial_sums.pop()[1], total)
                reached += 1
            if term is not None and total is term:
                total = term.to(torch.float32, copy=True)
            self.partial_sums.append((reached, total))
            self.next_term += 1 << level

    def add_zeros_before(self, number: int) -> None:
        """Adds zeros in place of the terms that are missing before the term of this number."""
        self.add([None] * (number - self.next_term))

    def pop_mean(self, divisor: int) -> Tensor:
        """Removes the partial sums, adds them, latest first, and divides by ``divisor``: float32."""
        total = None
        while self.partial_sums:
            total = _add_in_place(self.partial_sums.pop()[1], total)
        assert total is not None, "all terms are zeros"
        # Divides by a tensor: PyTorch on a GPU would multiply by a Python number's reciprocal. add_ turns -0 into +0.
        over = torch.full((), divisor, dtype=torch.float32, device=total.device)
        return total.div_(over).add_(0.0)


def _add_in_place(earlier: Tensor | None, later: Tensor | None) -> Tensor | None:
    """Adds ``later`` to ``earlier`` in place and returns it. None stands for zeros: then returns the other one."""
    if earlier is None or later is None:
        return later if earlier is None else earlier
    if later.is_cuda or later.dtype == earlier.dtype:
        return earlier.add_(later)
    for begin in range(0, len(later), _SLICE):  # on the CPU PyTorch converts all that it is given before it adds
        earlier[begin : begin + _SLICE].add_(later[begin : begin + _SLICE])
    return earlier


def partial_levels(first: int, count: int) -> list[int]:
    """Levels k of partial sums, of 2^k terms each, after ``count`` terms, the first of which has number ``first``."""
    sums = PairwiseSum(first)
    sums.add_zeros_before(first + count)
    return [level for level, _ in sums.partial_sums]
