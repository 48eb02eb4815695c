"""Tensors that several ranks hold: one rank writes each, after all ranks have compared tensors of the same name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.wording import few

#: 64-bit digests of the chunks that other ranks hold, too.
Digests = Mapping[MetadataIndex, int]

_REMEDY = (
    "expected one tensor by one name; name modules that differ between ranks differently (pipeline stages and experts "
    "keep their names in the whole model), or make copies alike with torch.distributed.broadcast"
)
_WORDS = 1 << 20  # words of 8 bytes per sum
_WORDS_IN_CACHE = 1 << 16  # words at a time on the CPU, for its cache


class ReplicaPlanner(DefaultSavePlanner):
    """DCP's planner for saving, extended: ranks that hold the same chunk compare its digests.

    Args:
        unequal: names of tensors that may differ between ranks, such as buffers; the first rank's tensor is saved.
    """

    def __init__(self, unequal: Collection[str] = ()) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._unequal = frozenset(unequal)
        self._shared: Sequence[MetadataIndex] = ()

    def create_local_plan(self) -> SavePlan:
        """The chunks that this rank can write, with the names of tensors that may differ in ``planner_data``."""
        plan = super().create_local_plan()
        return replace(plan, planner_data=self._unequal & {item.index.fqn for item in plan.items})

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The chunks that each rank writes, with the chunks that the rank compares in ``planner_data``.

        Raises:
            CheckpointError: ranks hold different tensors by one name.
        """
        _check_alike(all_plans)
        unequal: set[str] = set().union(*(plan.planner_data for plan in all_plans))
        shared = list(_shared(all_plans, unequal))
        plans, metadata = super().create_global_plan(_first_only(all_plans, unequal))
        return [replace(plan, planner_data=of) for plan, of in zip(plans, shared, strict=True)], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Keeps the chunks to compare, from :meth:`create_global_plan`."""
        self._shared = new_plan.planner_data or ()
        return super().finish_plan(new_plan)

    def digests(self) -> Digests:
        """Digests of this rank's chunks that other ranks hold, too."""
        return {index: digest(self.lookup_object(index)) for index in self._shared}


def check_digests(of_ranks: Sequence[Digests]) -> None:
    """Checks that all ranks that hold a chunk have the same digest of it.

    Raises:
        CheckpointError: the digests of a chunk differ.
    """
    found: dict[MetadataIndex, set[int]] = defaultdict(set)
    for digests in of_ranks:
        for index, value in digests.items():
            found[index].add(value)
    _refuse({index.fqn for index, values in found.items() if len(values) > 1}, "values")


def digest(tensor: Tensor) -> int:
    """A 64-bit digest of a tensor's bytes, computed on the tensor's device.

    Each half of a word of 8 bytes has a random weight of 64 bits, so that a difference in any number of bytes is missed
    with a probability of 2**-32 over the weights. One weight for the whole word would miss pairs of flipped top bits,
    which are signs of floats: twice 2**63 times an odd number is 0.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    weights = _weights(data.device)
    whole = data.numel() // 8 * 8
    sums = []
    if whole:
        # A view of int64 needs an offset that is a multiple of 8 bytes, which a slice may not have.
        aligned = data[:whole] if data.storage_offset() % 8 == 0 else data[:whole].clone()
        sums = [_sum(words, *weights) for words in torch.split(aligned.view(torch.int64), _WORDS)]
    rest = torch.zeros(8, dtype=torch.uint8, device=data.device)
    rest[: data.numel() - whole] = data[whole:]
    found = data.numel()
    for value in torch.stack([*sums, rest.view(torch.int64)[0]]).tolist():
        found = (found * 0x9E3779B97F4A7C15 + value) % 2**64
    return found


def _sum(words: Tensor, weights: Tensor, more_of_upper: Tensor) -> Tensor:
    """The sum of the words' halves, each times its weight; an upper half's weight is ``(weight << 32) + more``."""
    length = _WORDS_IN_CACHE if words.device.type == "cpu" else _WORDS
    parts = zip(*(torch.split(of[: len(words)], length) for of in (words, weights, more_of_upper)), strict=True)
    return torch.stack([(x * weight).sum() + ((x >> 32) * more).sum() for x, weight, more in parts]).sum()


@cache
def _weights(device: torch.device) -> tuple[Tensor, Tensor]:
    """Odd random numbers, the same on every rank and device."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**63), 2**63 - 1, (2, _WORDS), dtype=torch.int64, generator=generator)
    first, second = (numbers | 1).to(device)
    return first, second


def _check_alike(plans: Sequence[SavePlan]) -> None:
    """Checks that tensors of one name agree in shape and dtype on all ranks, and chunks at one offset in shape."""
    tensors: dict[str, object] = {}
    chunks: dict[MetadataIndex, object] = {}
    other: set[str] = set()
    for plan in plans:
        for item in plan.items:
            data = item.tensor_data
            if data is None:
                continue
            described = (data.size, data.properties.dtype)
            if tensors.setdefault(item.index.fqn, described) != described:
                other.add(item.index.fqn)
            if chunks.setdefault(item.index, data.chunk.sizes) != data.chunk.sizes:
                other.add(item.index.fqn)
    _refuse(other, "shapes, dtypes or shards")


def _shared(plans: Sequence[SavePlan], unequal: Collection[str]) -> Iterator[list[MetadataIndex]]:
    """For each rank, the chunks that are also in other ranks' plans."""
    count: dict[MetadataIndex, int] = defaultdict(int)
    for plan in plans:
        for item in plan.items:
            count[item.index] += 1
    for plan in plans:
        indices = (item.index for item in plan.items)
        yield [index for index in indices if count[index] > 1 and index.fqn not in unequal]


def _first_only(plans: Sequence[SavePlan], names: Collection[str]) -> list[SavePlan]:
    """The plans, with each tensor of these names only in the plan of the first rank that has the tensor."""
    seen: set[MetadataIndex] = set()
    found = []
    for plan in plans:
        items = [item for item in plan.items if item.index.fqn not in names or item.index not in seen]
        seen.update(item.index for item in plan.items)
        found.append(replace(plan, items=items))
    return found


def _refuse(names: Collection[str], what: str) -> None:
    if names:
        raise CheckpointError(f"got different {what} of {few(names)} on different ranks, {_REMEDY}")
