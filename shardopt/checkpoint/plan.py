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
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from shardopt.checkpoint.contents import Contents
from shardopt.checkpoint.copies import Copies, refuse
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.groups import union
from shardopt.checkpoint.index import StoredTensor, tensor_from_json, tensor_to_json
from shardopt.checkpoint.items import Chunks
from shardopt.checkpoint.ranks import Ranks
from shardopt.checkpoint.rectangles import fills
from shardopt.layout.partition import Part, Partition

_SPREAD_BYTES = 1 << 16  # replicated tensors of fewer bytes are written by the first rank that has them
_DIGEST_BYTES = 16

#: Ways and stride of each cut of a partition. Partitions with equal strides share one start (rank at offset 0).
Strides = tuple[tuple[int, int], ...]


class RankKind(NamedTuple):
    """Ranks whose descriptions of their tensors are equal, and the description. Pipeline stages are different kinds.

    Attributes:
        ranks: the ranks, ascending.
        groups: the optimizer's param groups, as in the header; None without an optimizer.
        unequal: names of tensors that may differ between ranks (buffers).
        tensors: the tensors by name, with ``start`` unset; without a partition where their rectangles must be listed.
    """

    ranks: npt.NDArray[np.int64]
    groups: list[dict[str, Any]] | None
    unequal: frozenset[str]
    tensors: dict[str, StoredTensor]


class Plan(NamedTuple):
    """The plan of a save: which rank writes what. All attributes but ``own`` are the same on all ranks.

    Attributes:
        tensors: all tensors, sorted by name, as the index describes them.
        groups: the merged param groups of all ranks; None without an optimizer.
        copies: the replicated tensors, whose digests the ranks compare.
        own: the rectangles that this rank writes: the tensor's position in ``tensors``, offsets and data.
    """

    tensors: dict[str, StoredTensor]
    groups: list[dict[str, Any]] | None
    copies: list[Copies]
    own: list[tuple[int, tuple[int, ...], Tensor]]


class Planning:
    """One rank's description of what it saves, and the plan that follows from the descriptions of all ranks.

    Attributes:
        message: to be all-gathered: a digest of the description, and per kind of partition the rank at offset 0.

    Raises:
        CheckpointError: a name cannot be encoded as UTF-8, or a kind of shard describes its partition wrongly.
    """

    def __init__(self, contents: Contents, ranks: Ranks) -> None:
        self._contents, self._tensors, self._ranks = contents, contents.tensors, ranks
        self._described: dict[str, StoredTensor] = {}
        offsets: dict[Strides, int] = {}
        for name, chunks in sorted(self._tensors.items()):
            partition, offset = chunks.placed or (None, 0)
            if partition is not None and offsets.setdefault(partition.strides, offset) != offset:
                partition = None  # a message has one start per strides: list this tensor's rectangles
            if partition is not None:
                _check_parts(name, chunks, partition, offset)
            self._described[name] = StoredTensor(chunks.dtype, chunks.shape, partition=partition)
        try:
            "".join(self._described).encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(
                f"got a name that is no text: {error}; name parameters and extra values by text"
            ) from None
        content = {
            "groups": contents.header.get("param_groups"),
            "unequal": sorted(contents.unequal),
            "tensors": {name: tensor_to_json(stored) for name, stored in self._described.items()},
        }
        self._text = json.dumps(content).encode()
        starts = np.array([ranks.rank - offsets[strides] for strides in sorted(offsets)], dtype="<i8")
        self.message = hashlib.blake2b(self._text, digest_size=_DIGEST_BYTES).digest() + starts.tobytes()

    def plan(self, messages: Sequence[bytes], *, assumes: bool = True) -> Plan:
        """Makes the plan from the messages of all ranks, by rank. All ranks must call this.

        ``assumes``: whether ranks may have described state that they do not have (:func:`contents_of` does for empty
        shards). If no rank has such state, the ranks describe only what they have, and plan again.

        Raises:
            CheckpointError: on all ranks: tensors of one name differ in shape or dtype, or parts do not fill a tensor
                or overlap.
        """
        self._read_messages(messages)
        for name, partition in sorted(self._ruled()):
            shape = self._all[name].shape
            if any(partition.parts(shape, offset) for offset in self._copies[name][2]):  # a replica lacks a part
                if not assumes:
                    raise _not_filled(name, shape)
                planning, messages = self._ranks.exchange(self._of_own_parts)
                return planning.plan(messages, assumes=False)
        unequal: frozenset[str] = frozenset().union(*(kind.unequal for kind in self._kinds))
        copies: dict[tuple[Any, ...], Copies] = {}
        stored = self._written(unequal) | self._listed(unequal, copies)
        tensors = {name: stored[name] for name in sorted(stored)}
        for name, partition in sorted(self._ruled()):
            starts, of_ranks, _ = self._copies[name]
            if len(starts) > 1 and name not in unequal:
                key = (self._kinds_of[name], partition.strides)
                copies.setdefault(key, Copies([], of_ranks)).tensors.append((name, None))
        own = []
        for number, (name, each) in enumerate(tensors.items()):
            for offsets, tensor in self._tensors[name].parts.items() if name in self._tensors else ():
                if each.partition is None:
                    is_own = (self._ranks.rank, (offsets, tuple(tensor.shape))) in each.parts
                else:
                    is_own = self._starts[each.partition.strides][self._ranks.rank] == each.start
                if is_own:
                    own.append((number, offsets, tensor))
        groups = [kind.groups for kind in self._kinds if kind.groups is not None]
        return Plan(tensors, union(groups) if groups else None, list(copies.values()), own)

    def _of_own_parts(self) -> tuple[Planning, bytes]:
        """A Planning of only the tensors of which this rank holds elements (or which have none), and its message."""
        tensors = {name: each for name, each in self._tensors.items() if each.parts or 0 in each.shape}
        planning = Planning(self._contents._replace(tensors=tensors), self._ranks)
        return planning, planning.message

    def _read_messages(self, messages: Sequence[bytes]) -> None:
        """Groups ranks by their digests, gets each kind's description, and finds the replicas of each tensor."""
        own_digest = messages[self._ranks.rank][:_DIGEST_BYTES]
        members_of: dict[bytes, list[int]] = defaultdict(list)
        for rank, message in enumerate(messages):
            members_of[message[:_DIGEST_BYTES]].append(rank)
        self._kinds: list[RankKind] = []
        self._starts: dict[Strides, npt.NDArray[np.int64]] = {}
        for each, members in members_of.items():
            kind = self._kind(members, is_own=each == own_digest, is_only=len(members_of) == 1)
            self._kinds.append(kind)
            values = np.array([np.frombuffer(messages[rank][_DIGEST_BYTES:], dtype="<i8") for rank in members])
            rules = {x.partition.strides for x in kind.tensors.values() if x.partition is not None}
            for column, strides in enumerate(sorted(rules)):
                starts = self._starts.setdefault(strides, np.full(self._ranks.size, -1, dtype=np.int64))
                starts[members] = values[:, column]
        self._kinds_of: dict[str, tuple[int, ...]] = {}
        for i, kind in enumerate(self._kinds):
            for name in kind.tensors:
                self._kinds_of[name] = (*self._kinds_of.get(name, ()), i)
        self._all = {name: stored for kind in reversed(self._kinds) for name, stored in kind.tensors.items()}
        if len(self._kinds) > 1:
            self._compare_kinds()
        #: Per tensor: the first ranks of its replicas; for each rank, the first rank of its replica (-1 without one);
        #: and the offsets in the partition at which at least one replica has no rank.
        self._copies: dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], set[int]]] = {}
        known: dict[tuple[Any, ...], tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], set[int]]] = {}
        for name, partition in self._ruled():
            key = (self._kinds_of[name], partition.strides)
            if key not in known:
                of_ranks = np.full(self._ranks.size, -1, dtype=np.int64)
                for i in key[0]:
                    members_of_kind = self._kinds[i].ranks
                    of_ranks[members_of_kind] = self._starts[partition.strides][members_of_kind]
                starts = np.unique(of_ranks[of_ranks >= 0])
                steps = (range(0, ways * stride, stride) for ways, stride in partition.strides)
                offsets = set(map(sum, itertools.product(*steps)))
                present = ({*(np.flatnonzero(of_ranks == start) - start).tolist()} for start in starts)
                known[key] = starts, of_ranks, set().union(*(offsets - held for held in present))
            self._copies[name] = known[key]

    def _kind(self, members: Sequence[int], *, is_own: bool, is_only: bool) -> RankKind:
        """The description that the ranks ``members`` share; the first broadcasts it if there are other descriptions."""
        sent = b""
        if not is_only:
            sent = self._ranks.from_rank(members[0], zlib.compress(self._text) if is_own else b"")
        if is_own:
            groups, unequal = self._contents.header.get("param_groups"), frozenset(self._contents.unequal)
            return RankKind(np.array(members), groups, unequal, self._described)
        content = json.loads(zlib.decompress(sent))
        tensors = {name: tensor_from_json(name, stored, sys.maxsize) for name, stored in content["tensors"].items()}
        return RankKind(np.array(members), content["groups"], frozenset(content["unequal"]), tensors)

    def _compare_kinds(self) -> None:
        """Checks that shapes and dtypes agree by name. Drops partitions that differ: such tensors are listed."""
        every = self._all
        named = [(name, stored) for kind in self._kinds for name, stored in kind.tensors.items()]
        refuse({name for name, stored in named if stored[:2] != every[name][:2]}, "shapes or dtypes")
        other = {name for name, stored in named if stored != every[name]}
        every.update({name: every[name]._replace(partition=None) for name in other})

    def _ruled(self) -> Iterator[tuple[str, Partition]]:
        """Name and partition of each tensor that has a partition, the same on all ranks that hold the tensor."""
        return ((name, x.partition) for name, x in self._all.items() if x.partition is not None)

    def _written(self, unequal: frozenset[str]) -> dict[str, StoredTensor]:
        """Chooses a replica to write of each tensor with a partition: the entries of the index, with ``start`` set."""
        stored: dict[str, StoredTensor] = {}
        loads = np.zeros(self._ranks.size)
        for less, name in sorted((-self._all[name].nbytes, name) for name, _ in self._ruled()):
            dtype, shape, _, partition, _ = self._all[name]
            assert partition is not None
            starts, _, _ = self._copies[name]
            start = int(starts[0])
            if len(starts) > 1 and -less >= _SPREAD_BYTES and name not in unequal:
                start = int(starts[np.argmin(loads[starts])])
            loads[start] -= less / math.prod(ways for ways, _ in partition.strides)
            stored[name] = StoredTensor(dtype, shape, start, partition)
        return stored

    def _listed(self, unequal: frozenset[str], copies: dict[tuple[Any, ...], Copies]) -> dict[str, StoredTensor]:
        """All-gathers the rectangles of tensors without a partition; the first rank that holds a rectangle writes it.

        Returns the entries of the index, and adds rectangles that several ranks hold to ``copies``.
        """
        names = [name for name, each in self._all.items() if each.partition is None]
        if not names:
            return {}
        mine = {}
        for name in names:
            written = self._tensors[name].parts if name in self._tensors else {}
            mine[name] = [(offsets, tuple(tensor.shape)) for offsets, tensor in written.items()]
        holders: dict[str, dict[Part, list[int]]] = {name: {} for name in names}
        for rank, message in enumerate(self._ranks.gathered(json.dumps(mine).encode())):
            for name, parts in json.loads(message).items():
                for offsets, shape in parts:
                    holders[name].setdefault((tuple(offsets), tuple(shape)), []).append(rank)
        stored: dict[str, StoredTensor] = {}
        for name, of_parts in holders.items():
            if name in unequal and of_parts:
                first = min(of[0] for of in of_parts.values())
                of_parts = {part: [first] for part, of in of_parts.items() if first in of}
            if not fills(self._all[name].shape, list(of_parts)):
                raise _not_filled(name, self._all[name].shape)
            stored[name] = self._all[name]._replace(parts=tuple(sorted((of[0], part) for part, of in of_parts.items())))
            for (offsets, _), of in of_parts.items():
                if len(of) > 1:
                    starts = np.full(self._ranks.size, -1, dtype=np.int64)
                    starts[of] = of
                    copies.setdefault(("listed", *of), Copies([], starts)).tensors.append((name, offsets))
        return stored


def _check_parts(name: str, chunks: Chunks, partition: Partition, offset: int) -> None:
    """Checks that this rank's rectangles of a tensor are those that its partition gives at this rank's offset."""
    written = [(of, tuple(tensor.shape)) for of, tensor in chunks.parts.items()]
    if written != partition.parts(chunks.shape, offset):
        raise CheckpointError(
            f"got {name} in parts {written[:3]} of shape {chunks.shape} on this rank, expected those of {partition} at "
            f"offset {offset}: the kind of shard describes its partition wrongly; return None there"
        )


def _not_filled(name: str, shape: Sequence[int]) -> CheckpointError:
    return CheckpointError(
        f"got chunks of {name} to save that do not fill its shape {tuple(shape)} or overlap, expected each element "
        "once; save on all ranks that have a part of it"
    )
