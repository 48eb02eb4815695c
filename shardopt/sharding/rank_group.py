"""Implements :class:`shardopt.layout.RankGroup` with process groups and collectives of torch.distributed."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import (
    GroupMember,
    ProcessGroup,
    ReduceOp,
    _get_default_store,
    all_gather,
    all_reduce,
    all_to_all_single,
    broadcast,
    get_backend,
    get_global_rank,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    new_group,
)

from shardopt.layout import RankGroup
from shardopt.layout.rank_group import MissingRanksError

#: Environment variable: seconds for which a call waits for ranks that do not make it; else as collectives, or 600.
WAIT_FOR_RANKS = "SHARDOPT_WAIT_FOR_RANKS"
_LATE_AFTER = 20.0  # seconds, after which a call that waits for other ranks says so
_ALL_CAME = "all ranks came"

_logger = logging.getLogger("shardopt")


def local_device(device_type: str, group: ProcessGroup | None = None) -> torch.device:
    """This rank's device of a type ("cpu", "cuda"): the device that the group is bound to, else the current one."""
    if device_type == "cpu":
        return torch.device("cpu")
    bound: torch.device | None = getattr(group, "bound_device_id", None)
    return bound if bound is not None else torch.device(device_type, getattr(torch, device_type).current_device())


def device_of(group: ProcessGroup | None) -> torch.device:
    """The device of tensors for a group's collectives: the CPU if the group has a back end for it, such as gloo."""
    group = GroupMember.WORLD if group is None else group
    assert group is not None
    devices = {device.type for device in group._device_types}
    return local_device("cpu" if "cpu" in devices or not devices else sorted(devices)[0], group)


def move_to(device: torch.device, tensor: Tensor) -> Tensor:
    """The tensor, copied to the device if its device is of another kind: NCCL cannot reach an offloaded tensor."""
    return tensor if tensor.device.type == device.type else tensor.to(device)


_made_groups: dict[tuple[ProcessGroup | None, tuple[int, ...]], ProcessGroup] = {}


def make_group(ranks: Sequence[int]) -> ProcessGroup:
    """Makes the process group of global ranks (ascending), or returns the one made before. Collective among them."""
    world = GroupMember.WORLD
    if world is not None and len(ranks) == get_world_size():
        return world
    group = _made_groups.get((world, tuple(ranks)))
    if group is None:
        group = new_group(list(ranks), use_local_synchronization=True)  # type: ignore[no-untyped-call]
        _made_groups[world, tuple(ranks)] = group
    return group


@dataclass(frozen=True)
class TorchRankGroup(RankGroup):
    """A rank group of torch.distributed. Tensors whose rank groups are equal can share one collective.

    Attributes:
        groups: the group of the ranks, or several groups, used one after another, as along the dimensions of a mesh.
        device: the device that this rank's tensors must have for the groups' back end.
    """

    groups: tuple[ProcessGroup, ...]
    device: torch.device

    def all_reduce_max(self, tensor: Tensor) -> None:
        self._all_reduce(tensor, ReduceOp.MAX)

    def all_reduce_sum(self, tensor: Tensor) -> None:
        self._all_reduce(tensor, ReduceOp.SUM)

    @property
    def global_rank(self) -> int:
        return get_rank()

    @property
    def global_ranks_by_group(self) -> tuple[tuple[int, ...], ...]:
        # After destroy_process_group() and another init_process_group() DTensors may still have the old groups, which
        # get_process_group_ranks() does not know: groups of one rank still work.
        return tuple(
            (get_rank(),) if group.size() == 1 else tuple(get_process_group_ranks(group)) for group in self.groups
        )

    def all_gather(self, message: bytes) -> dict[int, bytes]:
        messages = {get_rank(): message}
        for group, global_ranks in zip(self.groups, self.global_ranks_by_group, strict=True):
            if len(messages) == 1:
                messages = dict(zip(global_ranks, self._all_gather(group, message), strict=True))
                continue
            # Further groups, along other mesh dimensions, exchange what the ranks know from the groups before.
            text = json.dumps({rank: known.hex() for rank, known in messages.items()}).encode()
            for known_there in map(json.loads, self._all_gather(group, text)):
                messages.update((int(rank), bytes.fromhex(known)) for rank, known in known_there.items())
        return messages

    def _all_gather(self, group: ProcessGroup, message: bytes) -> list[bytes]:
        """All-gathers messages in one process group: their lengths, then, unless all are empty, the bytes, padded."""
        length = torch.tensor([len(message)], dtype=torch.int64, device=self.device)
        lengths = [torch.empty_like(length) for _ in range(get_world_size(group))]
        all_gather(lengths, length, group=group)
        sizes = torch.cat(lengths).tolist()
        if not any(sizes):
            return [b"" for _ in sizes]
        sent = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        if message:
            sent[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in sizes]
        all_gather(received, sent, group=group)
        return [data[:size].cpu().numpy().tobytes() for size, data in zip(sizes, received, strict=True)]

    def to_group_device(self, tensor: Tensor) -> Tensor:
        return move_to(self.device, tensor)

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> Callable[[], object]:
        (group,) = self.groups
        bytes_received = [size * received.itemsize for size in received_sizes]
        bytes_sent = [size * sent.itemsize for size in sent_sizes]
        received, sent = (x.view(torch.uint8) for x in (received, sent))  # back ends differ in the dtypes they take
        work = all_to_all_single(received, sent, bytes_received, bytes_sent, group=group, async_op=True)
        return cast(Callable[[], object], work.wait)

    def broadcast(self, tensor: Tensor, source: int) -> Callable[[], object]:
        (group,) = self.groups
        work = broadcast(tensor, get_global_rank(group, source), group=group, async_op=True)
        assert work is not None
        return cast(Callable[[], object], work.wait)

    def begin_meeting(self, call: str, ranks: tuple[int, ...], *, once: bool) -> Callable[[], None]:
        world = GroupMember.WORLD
        if len(ranks) < 2 or world is None or get_backend() in ("fake", "mpi"):  # these have no store
            return lambda: None
        counts, name = _meetings.setdefault(world, Counter()), f"shardopt {call} {hash(ranks)}"
        return (lambda: None) if once and counts[name] else _Meeting(call, ranks, counts, name).wait

    def _all_reduce(self, tensor: Tensor, op: Any) -> None:
        reduced = self.to_group_device(tensor)
        for group in self.groups:  # one after another, along the dimensions of a mesh
            all_reduce(reduced, op, group=group)
        if reduced is not tensor:  # it is a copy on the group's device
            tensor.copy_(reduced)


#: How many meetings of each name were successful, by the default process group at the time.
_meetings: WeakKeyDictionary[ProcessGroup, Counter[str]] = WeakKeyDictionary()


class _Meeting:
    """Ranks that wait, by torch.distributed's store, until all of them have made a call.

    A collective would hang, or mix with another one, if a rank does not call. The last rank to come ends the meeting.
    So does a rank that has waited too long or is interrupted, with an error for all that wait; later ranks ignore it.
    """

    def __init__(self, call: str, ranks: tuple[int, ...], counts: Counter[str], name: str) -> None:
        self._call, self._ranks, self._counts, self._name = call, ranks, counts, name
        self._store, self._number = _get_default_store(), counts[name]
        while self._store.check([self._key("end")]):  # it cannot have succeeded without this rank
            self._number += 1
        setting = os.environ.get(WAIT_FOR_RANKS, f"{max(600.0, cast(Any, self._store).timeout.total_seconds()):f}")
        self._limit = float(setting) if re.fullmatch(r"[0-9]*\.?[0-9]+", setting) else 0.0
        if not self._limit:
            raise ValueError(f"{WAIT_FOR_RANKS}: got {setting!r}, expected seconds above 0, such as 600")
        self._store.set(self._key(get_rank()), "")
        came = self._store.add(self._key("count"), 1)
        self._is_first = came == 1  # speaks for all that wait
        if came == len(ranks):
            self._end(_ALL_CAME)

    def wait(self) -> None:
        """Waits for the meeting's end; MissingRanksError if it ended before all ranks had come."""
        start, pause, is_silent = time.monotonic(), 0.001, not self._is_first
        try:
            while not self._store.check([self._key("end")]):
                waited = time.monotonic() - start
                if waited > min(_LATE_AFTER, self._limit / 2) and not is_silent:
                    is_silent = True
                    _logger.warning("%s waits for %s: all ranks must call it", self._call, self._missing())
                if waited > self._limit and (missing := self._missing()):
                    self._end(
                        f"got no call of {self._call} on {missing} in {self._limit:g} seconds, expected all "
                        f"{len(self._ranks)} ranks to call it; call it on every rank, not under `if rank == 0`, or set "
                        f"the environment variable {WAIT_FOR_RANKS} to more seconds if ranks are slow"
                    )
                time.sleep(pause)
                pause = min(2 * pause, 0.25)
        except BaseException as error:  # such as KeyboardInterrupt: the other ranks must not go on without this rank
            with suppress(RuntimeError):
                self._end(f"{self._call} was ended on rank {get_rank()} by {type(error).__name__}")
            raise
        if (outcome := self._store.get(self._key("end")).decode()) != _ALL_CAME:
            raise MissingRanksError(outcome)
        self._counts[self._name] = self._number + 1
        self._store.delete_key(self._key(get_rank()))
        if self._store.add(self._key("left"), 1) == len(self._ranks):
            for what in ("count", "end", "left"):
                self._store.delete_key(self._key(what))

    def _key(self, what: int | str) -> str:
        return f"{self._name} {self._number} {what}"

    def _end(self, outcome: str) -> None:
        self._store.compare_set(self._key("end"), "", outcome)  # unless it has ended

    def _missing(self) -> str:
        """Names the ranks that have not come; empty if all have."""
        missing = [rank for rank in self._ranks if not self._store.check([self._key(rank)])]
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        what = "ranks" if len(missing) > 1 else "rank"
        return f"{what} {', '.join(map(str, missing[:10]))}{more}" if missing else ""


def rank_group_of(group: ProcessGroup | None) -> TorchRankGroup:
    """The rank group of a process group (None: of all ranks), for tensors on the GPU unless the back end is gloo."""
    group = GroupMember.WORLD if group is None else group
    assert group is not None
    on_gpu = get_backend(group) != "gloo" and torch.cuda.is_available()
    return TorchRankGroup((group,), local_device("cuda" if on_gpu else "cpu", group))
