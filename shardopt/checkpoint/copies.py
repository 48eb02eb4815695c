"""Compares replicated tensors across ranks by 64-bit digests: only one rank writes a tensor that several hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.items import Chunks
from shardopt.checkpoint.ranks import Ranks
from shardopt.checkpoint.wording import few
from shardopt.kernels.memory import as_bytes

_REMEDY = (
    "expected one tensor by one name; name modules that differ between ranks differently (pipeline stages and experts "
    "keep their names in the whole model), or make copies alike with torch.distributed.broadcast"
)
_WORDS = 1 << 20  # words of 8 bytes that are summed at once; weights repeat after so many
_WORDS_IN_CACHE = 1 << 16  # words that a CPU sums at once, so that words and weights fit into its cache


class Copies(NamedTuple):
    """Tensors that are replicated in the same way over ranks; all replicas must be bitwise equal.

    Attributes:
        tensors: names, each with the offsets of the one rectangle to compare, or None to compare all of this rank's.
        starts: for each rank, the first rank of the replica (sharded or not) that the rank has a part of, or else -1.
    """

    tensors: list[tuple[str, tuple[int, ...] | None]]
    starts: npt.NDArray[np.int64]

    def digests(self, chunks: Mapping[str, Chunks], rank: int) -> list[int]:
        """One digest per tensor, over this rank's parts of it; an empty list if this rank is in no replica."""
        if self.starts[rank] < 0:
            return []
        return [
            _combined(digest(x) for offsets, x in chunks[name].parts.items() if only in (None, offsets))
            for name, only in self.tensors
        ]


def digests(copies: Sequence[Copies], chunks: Mapping[str, Chunks], rank: int) -> list[int]:
    """One digest per element of ``copies``, over this rank's parts of all its tensors; 0 if this rank has none."""
    return [_combined(each.digests(chunks, rank)) for each in copies]


def check_digests(
    copies: Sequence[Copies], by_rank: Sequence[Sequence[int]], chunks: Mapping[str, Chunks], ranks: Ranks
) -> None:
    """Checks that replicas are bitwise equal, by comparing their digests. All ranks must call this.

    ``by_rank`` has each rank's result of :func:`digests`. Where digests differ, the ranks all-gather one digest per
    tensor to name the tensors in the error; all ranks see the same ``by_rank``, so all take part.

    Raises:
        CheckpointError: on all ranks: replicas differ. The message has the tensors' names.
    """
    for number, each in enumerate(copies):
        if not _are_alike([values[number] for values in by_rank], each.starts):
            parts = ranks.gathered_numbers(lambda each=each: each.digests(chunks, ranks.rank))  # type: ignore[misc]
            by_tensor = zip(*(values or [0] * len(each.tensors) for values in parts), strict=True)
            named = zip(each.tensors, by_tensor, strict=True)
            refuse({name for (name, _), values in named if not _are_alike(values, each.starts)}, "values")


def _are_alike(of_ranks: Sequence[int], starts: npt.NDArray[np.int64]) -> bool:
    """Whether ranks that hold the same part (rank minus first rank of their replica is equal) have equal digests."""
    value_at: dict[int, int] = {}
    return all(
        value_at.setdefault(rank - start, of_ranks[rank]) == of_ranks[rank]
        for rank, start in enumerate(starts.tolist())
        if start >= 0
    )


def _combined(digests: Iterable[int]) -> int:
    combined = 0
    for each in digests:
        combined = (combined * 0x9E3779B97F4A7C15 + each + 1) % 2**64
    return combined


def digest(tensor: Tensor) -> int:
    """A 64-bit digest of a tensor's bytes, computed on the tensor's device.

    Each half of a word of 8 bytes has a random weight of 64 bits, so that a difference in any number of bytes is missed
    with a probability of 2**-32 over the weights. One weight for the whole word would miss pairs of flipped top bits,
    which are signs of floats: twice 2**63 times an odd number is 0.
    """
    data = as_bytes(tensor)
    weights = _weights(data.device)
    whole = data.numel() // 8 * 8
    sums = []
    if whole:
        # A view of int64 needs an offset that is a multiple of 8 bytes, which a slice may not have.
        aligned = data[:whole] if data.storage_offset() % 8 == 0 else data[:whole].clone()
        sums = [_sum(words, *weights) for words in torch.split(aligned.view(torch.int64), _WORDS)]
    rest = torch.zeros(8, dtype=torch.uint8, device=data.device)
    rest[: data.numel() - whole] = data[whole:]
    return _combined([data.numel(), *torch.stack([*sums, rest.view(torch.int64)[0]]).tolist()])


def _sum(words: Tensor, weights: Tensor, more_of_upper: Tensor) -> Tensor:
    """Sums both halves of all words, times their weights; the upper half's weight is ``(weight << 32) + more``."""
    length = _WORDS_IN_CACHE if words.device.type == "cpu" else _WORDS
    parts = zip(*(torch.split(of[: len(words)], length) for of in (words, weights, more_of_upper)), strict=True)
    return torch.stack([(x * weight).sum() + ((x >> 32) * more).sum() for x, weight, more in parts]).sum()


@cache
def _weights(device: torch.device) -> tuple[Tensor, Tensor]:
    """Two random weights per word of a digest: odd numbers from a fixed seed, equal on all ranks and devices."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**63), 2**63 - 1, (2, _WORDS), dtype=torch.int64, generator=generator, device="cpu")
    first, second = (numbers | 1).to(device)
    return first, second


def refuse(names: Collection[str], what: str) -> None:
    """Raises an error that names the tensors in ``names``, whose ``what`` differ between ranks, if there are any.

    Raises:
        CheckpointError: ``names`` is not empty.
    """
    if names:
        raise CheckpointError(f"got different {what} of {few(names)} on different ranks, {_REMEDY}")
