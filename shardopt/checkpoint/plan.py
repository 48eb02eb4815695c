"""Plans a save: all ranks determine, identically, which rank writes which rectangles of which tensors.

Each rank describes its tensors: names, shapes and partitions, which are the same on all ranks unless there are pipeline
stages or experts. The ranks all-gather a digest of the description, and for each kind of partition the rank at its
offset 0: tens of bytes, whatever the model. Where digests differ, one rank per digest broadcasts its description. From
these, each rank computes the plan by itself.

Replicated tensors are written once: small ones by the first rank that has them, so that a load finds them in one file;
each large one by the replica whose first rank has the least to write so far.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import sys
import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from shardopt.checkpoint.contents import Contents
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.groups import merged_groups
from shardopt.checkpoint.index import StoredTensor, tensor_from_json, tensor_to_json
from shardopt.checkpoint.ranks import Ranks
from shardopt.checkpoint.rectangles import fills
from shardopt.checkpoint.replicas import ReplicatedTensors, refuse_differing
from shardopt.layout.partition import Part

_SPREAD_BYTES = 1 << 16  # replicated tensors of fewer bytes are written by the first rank that has them
_DIGEST_BYTES = 16

#: Ways and stride of each cut of a partition. Partitions with equal strides share one start (rank at offset 0).
Strides = tuple[tuple[int, int], ...]
#: For each rectangle of a tensor, the ranks that hold it, ascending.
Holders = dict[Part, list[int]]


class DescriptionGroup(NamedTuple):
    """Ranks whose descriptions of their tensors are equal, and the description. Each pipeline stage is a group.

    Attributes:
        replica_of_rank: by the partition's strides: for each rank of the save, the rank at offset 0, which begins the
            rank's replica; -1 for ranks outside this group.
        param_groups: the optimizer's param groups, as in the header; None without an optimizer.
        unequal: names of tensors that may differ between ranks (buffers).
        tensors: the tensors by name, with ``start`` unset; without a partition where their rectangles must be listed.
    """

    replica_of_rank: dict[Strides, npt.NDArray[np.int64]]
    param_groups: list[dict[str, Any]] | None
    unequal: Collection[str]
    tensors: dict[str, StoredTensor]


class Replicas(NamedTuple):
    """The ranks that hold the replicas of a tensor with a partition. A replica is known by its first rank.

    Attributes:
        first_ranks: the first rank (at offset 0) of each replica, ascending.
        replica_of_rank: for each rank, the first rank of the replica that the rank belongs to, or -1.
        missing: offsets in the partition at which at least one replica has no rank.
    """

    first_ranks: npt.NDArray[np.int64]
    replica_of_rank: npt.NDArray[np.int64]
    missing: set[int]


class Plan(NamedTuple):
    """The plan of a save: which rank writes what. All attributes but ``own`` are the same on all ranks.

    Attributes:
        tensors: all tensors, sorted by name, as the index describes them.
        param_groups: the merged param groups of all ranks; None without an optimizer.
        replicated: the replicated tensors, whose digests the ranks compare.
        own: the rectangles that this rank writes: the tensor's position in ``tensors``, offsets and data.
    """

    tensors: dict[str, StoredTensor]
    param_groups: list[dict[str, Any]] | None
    replicated: list[ReplicatedTensors]
    own: list[tuple[int, tuple[int, ...], Tensor]]


class Planning:
    """One rank's description of what it saves, and the plan that follows from the descriptions of all ranks.

    Raises CheckpointError if a kind of shard describes its partition wrongly, UnicodeEncodeError if a name is no text.

    Attributes:
        contents: what this rank saves.
        message: to be all-gathered: a digest of the description, and the rank at offset 0, for the strides in order.
    """

    def __init__(self, contents: Contents, ranks: Ranks) -> None:
        self.contents, self._ranks = contents, ranks
        self._described: dict[str, StoredTensor] = {}
        offsets: dict[Strides, int] = {}
        for name, chunks in sorted(contents.tensors.items()):
            partition, offset = chunks.placed or (None, 0)
            if partition is not None and offsets.setdefault(partition.strides, offset) != offset:
                partition = None  # a message has one start per strides: list this tensor's rectangles
            if partition is not None and chunks.rectangles != partition.parts(chunks.shape, offset):
                raise CheckpointError(
                    f"got {name} in parts {chunks.rectangles[:3]} of shape {chunks.shape} on this rank, expected those "
                    f"of {partition} at offset {offset}: the kind of shard describes its partition wrongly; return "
                    "None there"
                )
            self._described[name] = StoredTensor(chunks.dtype, chunks.shape, partition=partition)
        "".join(self._described).encode()  # raises a UnicodeEncodeError for a name that is no text
        self._starts = {strides: ranks.rank - offset for strides, offset in sorted(offsets.items())}
        content = {
            "groups": contents.header.get("param_groups"),
            "unequal": sorted(contents.unequal),
            "tensors": {name: tensor_to_json(stored) for name, stored in self._described.items()},
        }
        self._text = json.dumps(content).encode()
        digest = hashlib.blake2b(self._text, digest_size=_DIGEST_BYTES).digest()
        self.message = digest + np.array([*self._starts.values()], dtype="<i8").tobytes()

    def plan(self, messages: Sequence[bytes], *, is_retry: bool = False) -> Plan:
        """Makes the plan from the messages of all ranks, by rank. All ranks must call this.

        Ranks may have described state that they do not have (:func:`contents_of` does for empty shards). If parts of it
        are on no rank, the ranks describe only the tensors of which they have elements, and plan again (``is_retry``).
        Raises CheckpointError on all ranks if tensors of one name differ in shape or dtype, or parts overlap or leave
        gaps.
        """
        groups = self._description_groups(messages)
        tensors = _merged_tensors(groups)
        replicas = _find_replicas(groups, tensors)
        incomplete = next((name for name in sorted(replicas) if _lacks_parts(tensors[name], replicas[name])), None)
        if incomplete is not None:
            if is_retry:
                raise _not_filled(incomplete, tensors[incomplete].shape)
            planning, messages = self._ranks.exchange(self._without_absent_tensors)
            return planning.plan(messages, is_retry=True)
        unequal: frozenset[str] = frozenset().union(*(group.unequal for group in groups))
        holders = self._gathered_holders([name for name, each in tensors.items() if each.partition is None], unequal)
        chosen = _with_chosen_replicas(tensors, replicas, unequal, self._ranks.size)
        stored = dict(sorted({**chosen, **_with_listed_parts(tensors, holders)}.items()))
        replicated = _replicated(replicas, holders, unequal, self._ranks.size)
        param_groups = [group.param_groups for group in groups if group.param_groups is not None]
        return Plan(stored, merged_groups(param_groups) if param_groups else None, replicated, self._own_parts(stored))

    def _without_absent_tensors(self) -> tuple[Planning, bytes]:
        """A Planning of only the tensors of which this rank holds elements (or which have none), and its message."""
        tensors = {name: each for name, each in self.contents.tensors.items() if each.parts or 0 in each.shape}
        planning = Planning(self.contents._replace(tensors=tensors), self._ranks)
        return planning, planning.message

    def _description_groups(self, messages: Sequence[bytes]) -> list[DescriptionGroup]:
        """Groups ranks by their digests. If there are several groups, the first rank of each broadcasts its text."""
        ranks_by_digest: dict[bytes, list[int]] = defaultdict(list)
        for rank, message in enumerate(messages):
            ranks_by_digest[message[:_DIGEST_BYTES]].append(rank)
        groups = []
        for ranks in ranks_by_digest.values():
            is_own, sent = self._ranks.rank in ranks, b""
            if len(ranks_by_digest) > 1:
                sent = self._ranks.broadcast(ranks[0], zlib.compress(self._text) if is_own else b"")
            if is_own:
                param_groups, unequal = self.contents.header.get("param_groups"), self.contents.unequal
                tensors = self._described
            else:
                content = json.loads(zlib.decompress(sent))
                param_groups, unequal = content["groups"], content["unequal"]
                tensors = {name: tensor_from_json(name, x, sys.maxsize) for name, x in content["tensors"].items()}
            strides = sorted({each.partition.strides for each in tensors.values() if each.partition is not None})
            replica_of_rank = np.full((len(strides), self._ranks.size), -1, dtype=np.int64)
            for rank in ranks:
                replica_of_rank[:, rank] = np.frombuffer(messages[rank][_DIGEST_BYTES:], dtype="<i8")
            by_strides = dict(zip(strides, replica_of_rank, strict=True))
            groups.append(DescriptionGroup(by_strides, param_groups, unequal, tensors))
        return groups

    def _gathered_holders(self, names: Sequence[str], unequal: Collection[str]) -> dict[str, Holders]:
        """All-gathers which ranks hold which rectangles of the tensors ``names``, which have no partition.

        Of ``unequal`` tensors only the first rank with a rectangle counts: values of several ranks must not mix.
        """
        if not names:
            return {}
        tensors = self.contents.tensors
        own = {name: tensors[name].rectangles if name in tensors else [] for name in names}
        holders: dict[str, Holders] = {name: {} for name in names}
        for rank, message in enumerate(self._ranks.all_gather(json.dumps(own).encode())):
            for name, parts in json.loads(message).items():
                for offsets, shape in parts:
                    holders[name].setdefault((tuple(offsets), tuple(shape)), []).append(rank)
        for name in holders.keys() & set(unequal):
            first = min((ranks[0] for ranks in holders[name].values()), default=-1)
            holders[name] = {part: [first] for part, ranks in holders[name].items() if first in ranks}
        return holders

    def _own_parts(self, stored: Mapping[str, StoredTensor]) -> list[tuple[int, tuple[int, ...], Tensor]]:
        """The rectangles that this rank writes, as in :attr:`Plan.own`."""
        own = []
        for number, (name, each) in enumerate(stored.items()):
            chunks = self.contents.tensors.get(name)
            for offsets, tensor in chunks.parts.items() if chunks is not None else ():
                if each.partition is None:
                    is_own = (self._ranks.rank, (offsets, tuple(tensor.shape))) in each.parts
                else:
                    is_own = self._starts[each.partition.strides] == each.start
                if is_own:
                    own.append((number, offsets, tensor))
        return own


def _merged_tensors(groups: Sequence[DescriptionGroup]) -> dict[str, StoredTensor]:
    """All tensors by name, without the partitions of those for which groups have different ones; checks shapes."""
    merged = {name: stored for group in reversed(groups) for name, stored in group.tensors.items()}
    described = [(name, stored) for group in groups for name, stored in group.tensors.items()]
    refuse_differing({name for name, stored in described if stored[:2] != merged[name][:2]}, "shapes or dtypes")
    for name, stored in described:
        if stored != merged[name]:
            merged[name] = merged[name]._replace(partition=None)
    return merged


def _find_replicas(groups: Sequence[DescriptionGroup], tensors: Mapping[str, StoredTensor]) -> dict[str, Replicas]:
    """Finds the replicas of each tensor with a partition. Tensors with the same groups and strides share one object."""
    groups_of: dict[str, tuple[int, ...]] = {}
    for number, group in enumerate(groups):
        for name in group.tensors:
            groups_of[name] = (*groups_of.get(name, ()), number)
    known: dict[tuple[tuple[int, ...], Strides], Replicas] = {}
    replicas = {}
    for name, tensor in tensors.items():
        if tensor.partition is not None:
            numbers, strides = groups_of[name], tensor.partition.strides
            if (numbers, strides) not in known:
                of_groups = [groups[number].replica_of_rank[strides] for number in numbers]
                known[numbers, strides] = _replicas_on(np.maximum.reduce(of_groups), strides)
            replicas[name] = known[numbers, strides]
    return replicas


def _replicas_on(replica_of_rank: npt.NDArray[np.int64], strides: Strides) -> Replicas:
    """The replicas of tensors with these strides, from the first rank of each rank's replica (-1: none)."""
    first_ranks = np.unique(replica_of_rank[replica_of_rank >= 0])
    steps = (range(0, ways * stride, stride) for ways, stride in strides)
    offsets = set(map(sum, itertools.product(*steps)))
    missing: set[int] = set()
    for first_rank in first_ranks:
        members = np.flatnonzero(replica_of_rank == first_rank)
        missing |= offsets - {*(members - first_rank).tolist()}
    return Replicas(first_ranks, replica_of_rank, missing)


def _lacks_parts(tensor: StoredTensor, replicas: Replicas) -> bool:
    """Whether a part of the tensor that is not empty belongs to an offset at which a replica has no rank."""
    assert tensor.partition is not None
    return any(tensor.partition.parts(tensor.shape, offset) for offset in replicas.missing)


def _with_chosen_replicas(
    tensors: Mapping[str, StoredTensor], replicas: Mapping[str, Replicas], unequal: Collection[str], size: int
) -> dict[str, StoredTensor]:
    """Sets ``start``, the replica to write, of each partitioned tensor: large ones first, as small ones even out."""
    stored: dict[str, StoredTensor] = {}
    bytes_of_first_rank = np.zeros(size)
    for name in sorted(replicas, key=lambda name: (-tensors[name].nbytes, name)):
        tensor, first_ranks = tensors[name], replicas[name].first_ranks
        assert tensor.partition is not None
        start = int(first_ranks[0])
        if len(first_ranks) > 1 and tensor.nbytes >= _SPREAD_BYTES and name not in unequal:
            start = int(first_ranks[np.argmin(bytes_of_first_rank[first_ranks])])
        bytes_of_first_rank[start] += tensor.nbytes / math.prod(ways for ways, _ in tensor.partition.strides)
        stored[name] = tensor._replace(start=start)
    return stored


def _replicated(
    replicas: Mapping[str, Replicas], holders: Mapping[str, Holders], unequal: Collection[str], size: int
) -> list[ReplicatedTensors]:
    """The tensors to compare, by their replicas: rectangles of those without a partition, and whole ones with one."""
    found: dict[object, ReplicatedTensors] = {}
    for name, ranks_of_part in holders.items():
        for (offsets, _), ranks in ranks_of_part.items():
            if len(ranks) > 1:  # each of these ranks holds a replica
                replica_of_rank = np.full(size, -1, dtype=np.int64)
                replica_of_rank[ranks] = ranks
                found.setdefault(tuple(ranks), ReplicatedTensors([], replica_of_rank)).tensors.append((name, offsets))
    for name, each in sorted(replicas.items(), key=lambda item: item[0]):
        if len(each.first_ranks) > 1 and name not in unequal:
            found.setdefault(id(each), ReplicatedTensors([], each.replica_of_rank)).tensors.append((name, None))
    return list(found.values())


def _with_listed_parts(tensors: Mapping[str, StoredTensor], holders: Mapping[str, Holders]) -> dict[str, StoredTensor]:
    """The entries of the index of tensors without a partition: the first rank that holds a rectangle writes it."""
    stored = {}
    for name, ranks_of_part in holders.items():
        if not fills(tensors[name].shape, list(ranks_of_part)):
            raise _not_filled(name, tensors[name].shape)
        parts = sorted((ranks[0], part) for part, ranks in ranks_of_part.items())
        stored[name] = tensors[name]._replace(parts=tuple(parts))
    return stored


def _not_filled(name: str, shape: Sequence[int]) -> CheckpointError:
    """The error for a tensor whose parts on all ranks are not the whole tensor."""
    return CheckpointError(
        f"got chunks of {name} to save that do not fill its shape {tuple(shape)} or overlap, expected each element "
        "once; save on all ranks that have a part of it"
    )
