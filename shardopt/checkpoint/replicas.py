"""Compares replicated tensors across ranks by 64-bit digests: only one rank writes a tensor that several hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, partial
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
_WORDS_PER_SUM = 1 << 20  # words of 8 bytes; also the number of weights, which repeat from one sum to the next
_WORDS_IN_CACHE = 1 << 16  # words that a CPU sums at once, so that words and weights fit into its cache


class ReplicatedTensors(NamedTuple):
    """Tensors with the same replicas, which must be bitwise equal. A replica is known by its first rank.

    Attributes:
        tensors: names, each with the offsets of the one rectangle to compare, or None to compare all of this rank's.
        replica_of_rank: for each rank, the first rank of the replica (sharded or not) that it has a part of, or -1.
    """

    tensors: list[tuple[str, tuple[int, ...] | None]]
    replica_of_rank: npt.NDArray[np.int64]

    def tensor_digests(self, chunks: Mapping[str, Chunks], rank: int) -> list[int]:
        """One digest per tensor, over this rank's parts of it; an empty list if this rank is in no replica."""
        if self.replica_of_rank[rank] < 0:
            return []
        return [
            _combined(digest(part) for offsets, part in chunks[name].parts.items() if only in (None, offsets))
            for name, only in self.tensors
        ]


def replica_digests(replicated: Sequence[ReplicatedTensors], chunks: Mapping[str, Chunks], rank: int) -> list[int]:
    """One digest per element of ``replicated``, over this rank's parts of all its tensors; 0 if this rank has none."""
    return [_combined(each.tensor_digests(chunks, rank)) for each in replicated]


def check_replicas(
    replicated: Sequence[ReplicatedTensors],
    digests_of_ranks: Sequence[Sequence[int]],
    chunks: Mapping[str, Chunks],
    ranks: Ranks,
) -> None:
    """Checks that replicas are bitwise equal, by comparing their digests. All ranks must call this.

    ``digests_of_ranks`` has each rank's result of :func:`replica_digests`. Only where digests differ, the ranks
    all-gather one digest per tensor, to name the tensors in the error. All ranks compare the same digests, so all of
    them take part.

    Raises:
        CheckpointError: on all ranks: replicas differ. The message has the tensors' names.
    """
    for number, each in enumerate(replicated):
        if not _are_equal([digests[number] for digests in digests_of_ranks], each.replica_of_rank):
            gathered = ranks.all_gather_numbers(partial(each.tensor_digests, chunks, ranks.rank))
            by_tensor = zip(*(digests or [0] * len(each.tensors) for digests in gathered), strict=True)
            differing = {
                name
                for (name, _), digests in zip(each.tensors, by_tensor, strict=True)
                if not _are_equal(digests, each.replica_of_rank)
            }
            refuse_differing(differing, "values")


def _are_equal(digests: Sequence[int], replica_of_rank: npt.NDArray[np.int64]) -> bool:
    """Whether ranks with the same part have equal digests: ranks equally far behind the first ranks of their replicas.

    ``digests`` has one per rank; those of ranks without a part do not count.
    """
    expected: dict[int, int] = {}
    for rank, first_rank in enumerate(replica_of_rank.tolist()):
        if first_rank >= 0 and expected.setdefault(rank - first_rank, digests[rank]) != digests[rank]:
            return False
    return True


def _combined(digests: Iterable[int]) -> int:
    """Combines digests into one of 64 bits, which depends on their order and number; 0 for none."""
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
    weights, upper_weights = _weights(data.device)
    whole = data.numel() // 8 * 8  # bytes that make up whole words
    sums = []
    if whole:
        # A view of int64 needs an offset that is a multiple of 8 bytes, which a slice may not have.
        aligned = data[:whole] if data.storage_offset() % 8 == 0 else data[:whole].clone()
        words = torch.split(aligned.view(torch.int64), _WORDS_PER_SUM)
        sums = [_weighted_sum(each, weights, upper_weights) for each in words]
    last_word = torch.zeros(8, dtype=torch.uint8, device=data.device)
    last_word[: data.numel() - whole] = data[whole:]
    return _combined([data.numel(), *torch.stack([*sums, last_word.view(torch.int64)[0]]).tolist()])


def _weighted_sum(words: Tensor, weights: Tensor, upper_weights: Tensor) -> Tensor:
    """Sums both halves of all words, times their weights, modulo 2**64.

    The lower half's weight is ``weight``. The upper half's is ``(weight << 32) + upper_weight``, since it is in
    ``word * weight``, too.
    """
    length = _WORDS_IN_CACHE if words.device.type == "cpu" else _WORDS_PER_SUM
    pieces = [torch.split(each[: len(words)], length) for each in (words, weights, upper_weights)]
    sums = [(x * weight).sum() + ((x >> 32) * upper).sum() for x, weight, upper in zip(*pieces, strict=True)]
    return torch.stack(sums).sum()


@cache
def _weights(device: torch.device) -> tuple[Tensor, Tensor]:
    """Two random weights per word of :func:`digest`: odd numbers from a fixed seed, equal on all ranks and devices."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(
        -(2**63), 2**63 - 1, (2, _WORDS_PER_SUM), dtype=torch.int64, generator=generator, device="cpu"
    )
    weights, upper_weights = (numbers | 1).to(device)
    return weights, upper_weights


def refuse_differing(names: Collection[str], what: str) -> None:
    """Raises a CheckpointError with the tensors in ``names``, whose ``what`` differ between ranks, if there are any."""
    if names:
        raise CheckpointError(f"got different {what} of {few(names)} on different ranks, {_REMEDY}")
