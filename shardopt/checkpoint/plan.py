"""The plan of a save: which rank writes which tensors.

Every rank makes the plan by itself, from what it holds and the partitions of its tensors. Ranks that describe the same
tensors, which are all of them unless there are pipeline stages or experts, only tell each other a digest of the
description and the rank with which each kind of partition begins: some 100 bytes, whatever the model. Where
descriptions differ, one rank of each kind sends its own to all.

A tensor that several ranks hold is written once: a small one by the first rank that has it, so that a load finds all of
them in one file; large ones by ranks in turn, so that each writes about as much.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt.checkpoint.copies import Copies, digest, refuse
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.groups import union
from shardopt.checkpoint.index import StoredTensor, dtype_named, partition_from_json, partition_to_json
from shardopt.checkpoint.items import Chunks
from shardopt.checkpoint.ranks import Ranks
from shardopt.checkpoint.rectangles import fill
from shardopt.layout.partition import Part, Partition

_SPREAD_BYTES = 1 << 16  # of a tensor; smaller ones are written by the first rank that has them
_DIGEST_BYTES = 16

#: Ways and stride of the cuts of a partition.
Strides = tuple[tuple[int, int], ...]
#: Dtype, shape and partition of a tensor; None as partition where there is no rule.
_Entry = tuple[torch.dtype, tuple[int, ...], Partition | None]


class Described(NamedTuple):
    """A description of tensors, which some ranks have in common.

    Attributes:
        ranks: these ranks, ascending.
        groups: the optimizer's param groups, as in the header; None without an optimizer.
        unequal: names of tensors that may differ between ranks.
        tensors: these, by name.
    """

    ranks: npt.NDArray[np.int64]
    groups: list[dict[str, Any]] | None
    unequal: frozenset[str]
    tensors: dict[str, _Entry]


class Plan(NamedTuple):
    """Which rank writes what. All attributes but ``own`` are the same on all ranks.

    Attributes:
        tensors: all tensors, in the order of their names.
        groups: the param groups of all ranks; None without an optimizer.
        copies: the tensors that ranks compare.
        own: what this rank writes: number of the tensor, offsets and data.
    """

    tensors: dict[str, StoredTensor]
    groups: list[dict[str, Any]] | None
    copies: list[Copies]
    own: list[tuple[int, tuple[int, ...], Tensor]]


def plan_save(
    tensors: Mapping[str, Chunks], groups: list[dict[str, Any]] | None, unequal: Collection[str], ranks: Ranks
) -> Plan:
    """Plans a save. All ranks must call this.

    Raises:
        CheckpointError: on all ranks: tensors of one name differ in shape or dtype, or parts do not fill a tensor or
            overlap.
    """
    any_assumed = any(chunks.is_assumed for chunks in tensors.values())
    planning = _Planning(tensors, groups, unequal, ranks, any_assumed)
    if planning.lacks_elements and planning.some_rank_assumed:
        # No rank has the state that ranks without elements assumed.
        certain = {name: chunks for name, chunks in tensors.items() if not chunks.is_assumed}
        planning = _Planning(certain, groups, unequal, ranks, False)
    return planning.plan()


class _Planning:
    """A plan in the making. All ranks must make it, and call :meth:`plan`."""

    def __init__(
        self,
        tensors: Mapping[str, Chunks],
        groups: list[dict[str, Any]] | None,
        unequal: Collection[str],
        ranks: Ranks,
        any_assumed: bool,
    ) -> None:
        self._ranks, self._tensors = ranks, tensors

        def described() -> tuple[tuple[dict[str, _Entry], bytes], bytes]:
            """This rank's description; its digest, with the numbers that differ between ranks."""
            entries, offsets = _described(tensors)
            content = {"groups": groups, "unequal": sorted(unequal), "tensors": _as_json(entries)}
            text = json.dumps(content).encode()
            held = sum(_numel_written(chunks) for chunks in tensors.values() if chunks.placed is not None)
            starts = [ranks.rank - offset for offset in offsets.values()]
            digest_of_text = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
            return (entries, text), digest_of_text + np.array([held, any_assumed, *starts], dtype="<i8").tobytes()

        (entries, text), messages = ranks.exchange(described)
        own_key = messages[ranks.rank][:_DIGEST_BYTES]
        of_digest: dict[bytes, list[int]] = defaultdict(list)
        for rank, message in enumerate(messages):
            of_digest[message[:_DIGEST_BYTES]].append(rank)
        self._kinds = []
        self._starts: dict[Strides, npt.NDArray[np.int64]] = {}
        self._held = 0
        self.some_rank_assumed = False
        for key, members in of_digest.items():
            sent = b""
            if len(of_digest) > 1:
                sent = ranks.from_rank(members[0], zlib.compress(text) if key == own_key else b"")
            if key == own_key:
                kind = Described(np.array(members), groups, frozenset(unequal), entries)
            else:
                content = json.loads(zlib.decompress(sent))
                kind = Described(
                    np.array(members),
                    content["groups"],
                    frozenset(content["unequal"]),
                    _from_json(content["tensors"]),
                )
            self._kinds.append(kind)
            for name, (_, shape, partition) in kind.tensors.items():
                if partition and sum((ways - 1) * stride for ways, stride in partition.strides) >= ranks.size:
                    raise _not_filled(name, shape)  # more ranks than save together
            values = np.array([np.frombuffer(messages[rank][_DIGEST_BYTES:], dtype="<i8") for rank in members])
            self._held += int(values[:, 0].sum())
            self.some_rank_assumed |= bool(values[:, 1].any())
            for column, each in enumerate(_strides_of(kind.tensors), start=2):
                if each not in self._starts:
                    self._starts[each] = np.full(ranks.size, -1, dtype=np.int64)
                self._starts[each][members] = values[:, column]
        self._kinds_of: dict[str, tuple[int, ...]] = {}
        for i, kind in enumerate(self._kinds):
            for name in kind.tensors:
                self._kinds_of[name] = (*self._kinds_of.get(name, ()), i)
        self._all = {name: entry for kind in reversed(self._kinds) for name, entry in kind.tensors.items()}
        self._copies_of: dict[tuple[Any, ...], tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}
        if len(self._kinds) > 1:
            self._compare_kinds()

    @property
    def lacks_elements(self) -> bool:
        """Whether the ranks hold fewer elements than the copies of all tensors with a rule have."""
        wanted = 0
        for name, (_, shape, partition) in self._all.items():
            if partition is not None:
                wanted += math.prod(shape) * len(self._copies(name, partition)[0])
        return self._held != wanted

    def plan(self) -> Plan:
        """The plan."""
        if self.lacks_elements:
            self._refuse_holes()
        unequal = frozenset().union(*(kind.unequal for kind in self._kinds))
        stored = self._written(unequal)
        listed = [name for name, (_, _, partition) in self._all.items() if partition is None]
        own_parts: dict[str, list[Part]] = {}
        if listed:
            stored |= self._listed(listed, unequal, own_parts)
        tensors = {name: stored[name] for name in sorted(stored)}
        copies: dict[tuple[Any, ...], Copies] = {}
        for name, (_, _, partition) in sorted(self._all.items()):
            if partition is not None and name not in unequal:
                starts, of_ranks = self._copies(name, partition)
                if len(starts) > 1:
                    key = (self._kinds_of[name], partition.strides)
                    copies.setdefault(key, Copies([], of_ranks)).names.append(name)
        own = []
        for number, (name, each) in enumerate(tensors.items()):
            chunks = self._tensors.get(name)
            if chunks is None:
                continue
            if each.partition is None:
                own += [(number, o, x) for o, x in chunks.written.items() if (o, tuple(x.shape)) in own_parts[name]]
            elif self._starts[each.partition.strides][self._ranks.rank] == each.start:
                own += [(number, offsets, x) for offsets, x in chunks.written.items()]
        groups = [kind.groups for kind in self._kinds if kind.groups is not None]
        return Plan(tensors, union(groups) if groups else None, list(copies.values()), own)

    def _copies(self, name: str, partition: Partition) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The rank that begins each copy of a tensor, and for each rank, the one that begins its copy, or -1."""
        key = (self._kinds_of[name], partition.strides)
        if key not in self._copies_of:
            of_ranks = np.full(self._ranks.size, -1, dtype=np.int64)
            for kind in key[0]:
                members = self._kinds[kind].ranks
                of_ranks[members] = self._starts[partition.strides][members]
            self._copies_of[key] = np.unique(of_ranks[of_ranks >= 0]), of_ranks
        return self._copies_of[key]

    def _compare_kinds(self) -> None:
        """Compares what ranks say of tensors by one name. A tensor of which they have different rules has none."""
        every = self._all
        named = [(name, entry) for kind in self._kinds for name, entry in kind.tensors.items()]
        refuse({name for name, entry in named if entry[:2] != every[name][:2]}, "shapes or dtypes")
        other = {name for name, entry in named if entry != every[name]}
        if not other:
            return
        for name in other:
            every[name] = (*every[name][:2], None)
        own_numel = sum(
            _numel_written(chunks)
            for name, chunks in self._tensors.items()
            if chunks.placed is not None and name not in other
        )
        self._held = sum(held for (held,) in self._ranks.gathered_numbers(lambda: [own_numel]))

    def _refuse_holes(self) -> None:
        """Raises the error of tensors whose parts not all ranks hold."""
        names = sorted(self._all)
        of_ranks = self._ranks.gathered_numbers(lambda: [_numel_written(self._tensors.get(name)) for name in names])
        held = dict(zip(names, map(sum, zip(*of_ranks, strict=True)), strict=True))
        for name, (_, shape, partition) in sorted(self._all.items()):
            if partition is not None:
                copies = len(self._copies(name, partition)[0])
                if held[name] != copies * math.prod(shape):
                    raise _not_filled(name, shape)

    def _written(self, unequal: Collection[str]) -> dict[str, StoredTensor]:
        """The tensors that have a rule, each with the rank that begins the copy to write."""
        stored: dict[str, StoredTensor] = {}
        loads = np.zeros(self._ranks.size)
        in_order = sorted(self._all.items(), key=lambda item: (-_nbytes(item[1]), item[0]))
        for name, (dtype, shape, partition) in in_order:
            if partition is None:
                continue
            starts, _ = self._copies(name, partition)
            nbytes = _nbytes((dtype, shape, partition))
            start = int(starts[0])
            if len(starts) > 1 and nbytes >= _SPREAD_BYTES and name not in unequal:
                start = int(starts[np.argmin(loads[starts])])
            loads[start] += nbytes / math.prod(ways for ways, _ in partition.strides)
            stored[name] = StoredTensor(dtype, shape, start, partition)
        return stored

    def _listed(
        self, names: Sequence[str], unequal: Collection[str], own: dict[str, list[Part]]
    ) -> dict[str, StoredTensor]:
        """The tensors that have no rule, of which the ranks tell each other their rectangles.

        Puts the rectangles that this rank writes into ``own``.
        """
        mine = {}
        for name in names:
            written = self._tensors[name].written if name in self._tensors else {}
            mine[name] = [(offsets, tuple(tensor.shape)) for offsets, tensor in written.items()]
        holders: dict[str, dict[Part, list[int]]] = {name: {} for name in names}
        for rank, message in enumerate(self._ranks.gathered(json.dumps(mine).encode())):
            for name, parts in json.loads(message).items():
                for offsets, shape in parts:
                    holders[name].setdefault((tuple(offsets), tuple(shape)), []).append(rank)
        stored_tensors: dict[str, StoredTensor] = {}
        shared: list[tuple[str, Part]] = []
        for name, of_parts in holders.items():
            dtype, shape, _ = self._all[name]
            if name in unequal and of_parts:
                first = min(of[0] for of in of_parts.values())
                of_parts = {part: [first] for part, of in of_parts.items() if first in of}
            if not fill(shape, list(of_parts)):
                raise _not_filled(name, shape)
            stored = sorted((of[0], part) for part, of in of_parts.items())
            stored_tensors[name] = StoredTensor(dtype, shape, parts=tuple(stored))
            own[name] = [part for part, of in of_parts.items() if of[0] == self._ranks.rank]
            shared += [(name, part) for part, of in of_parts.items() if len(of) > 1]
        if shared:
            self._compare_listed(shared, holders)
        return stored_tensors

    def _compare_listed(
        self, shared: Sequence[tuple[str, Part]], holders: Mapping[str, Mapping[Part, list[int]]]
    ) -> None:
        """Compares rectangles that several ranks hold of tensors without a rule. All ranks must call this."""
        by_rank = self._ranks.gathered_numbers(
            lambda: [
                digest(self._tensors[name].written[part[0]]) if self._ranks.rank in holders[name][part] else 0
                for name, part in shared
            ]
        )
        by_part = zip(shared, zip(*by_rank, strict=True), strict=True)
        alike = ((name, {of_ranks[rank] for rank in holders[name][part]}) for (name, part), of_ranks in by_part)
        refuse({name for name, values in alike if len(values) > 1}, "values")


def _described(tensors: Mapping[str, Chunks]) -> tuple[dict[str, _Entry], dict[Strides, int]]:
    """This rank's tensors, in the order of names, and the offset of this rank in each kind of partition."""
    entries: dict[str, _Entry] = {}
    offsets: dict[Strides, int] = {}
    for name, chunks in sorted(tensors.items()):
        # A partition of another group with ranks in the same steps: the rectangles are listed.
        if chunks.placed and offsets.setdefault(chunks.placed.partition.strides, chunks.placed.offset) != (
            chunks.placed.offset
        ):
            chunks.placed = None
        partition = None
        if chunks.placed is not None:
            partition, offset = chunks.placed
            written = [(of, tuple(tensor.shape)) for of, tensor in chunks.written.items()]
            if written != partition.parts(chunks.shape, offset):
                raise CheckpointError(
                    f"got {name} in parts {written[:3]} of shape {chunks.shape} on this rank, expected those of "
                    f"{partition} at offset {offset}: the kind of shard describes its partition wrongly; return None "
                    "there"
                )
        entries[name] = chunks.dtype, chunks.shape, partition
    try:
        "".join(entries).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"got a name that is no text: {error}; name parameters and extra values by text"
        ) from None
    return entries, {each: offsets[each] for each in _strides_of(entries)}


def _strides_of(entries: Mapping[str, _Entry]) -> list[Strides]:
    return sorted({partition.strides for _, _, partition in entries.values() if partition is not None})


def _as_json(entries: Mapping[str, _Entry]) -> dict[str, Any]:
    return {
        name: [str(dtype).removeprefix("torch."), shape, partition and partition_to_json(partition)]
        for name, (dtype, shape, partition) in entries.items()
    }


def _from_json(lines: Mapping[str, Any]) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for name, (dtype, shape, rule) in lines.items():
        known = dtype_named(dtype)
        assert known is not None
        shape = tuple(shape)
        entries[name] = known, shape, None if rule is None else partition_from_json(rule, shape, sys.maxsize)
    return entries


def _nbytes(entry: _Entry) -> int:
    return entry[0].itemsize * math.prod(entry[1])


def _numel_written(chunks: Chunks | None) -> int:
    return 0 if chunks is None else sum(tensor.numel() for tensor in chunks.written.values())


def _not_filled(name: str, shape: Sequence[int]) -> CheckpointError:
    return CheckpointError(
        f"got chunks of {name} to save that do not fill its shape {tuple(shape)} or overlap, expected each element "
        "once; save on all ranks that have a part of it"
    )
