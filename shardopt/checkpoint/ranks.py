"""Runs work on all ranks so that all fail if one does, and all-gathers small messages, as bytes without pickle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import Module

from shardopt.checkpoint.errors import CheckpointError, LostRanksError, ReplacedError
from shardopt.checkpoint.wording import one_line
from shardopt.layout import meet
from shardopt.layout.rank_group import MissingRanksError
from shardopt.sharding.rank_group import TorchRankGroup, device_of

T = TypeVar("T")

_DONE, _REPLACED, _FAILED = range(3)  # a message's first byte: whether the rank's work succeeded


class Ranks:
    """The process group that saves or loads a checkpoint, with collectives that pass errors on to all ranks.

    All methods raise LostRanksError if a collective fails, as when another rank has died.

    Args:
        group: the process group; None for the default group, or for one process without torch.distributed.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        group = dist.group.WORLD if group is None and dist.is_initialized() else group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        # A single rank takes no collectives: its asynchronous save may outlive the process group.
        self._group = None if group is None or self.size == 1 else TorchRankGroup((group,), device_of(group))

    @classmethod
    def met(cls, call: str) -> Ranks:
        """All ranks, once all of them have made this call (``save``); raises a CheckpointError if some do not."""
        ranks = cls()
        try:
            with _lost_ranks():
                meet([] if ranks._group is None else [ranks._group], call)
        except MissingRanksError as error:
            raise CheckpointError(f"{error}; nothing was changed") from None
        return ranks

    def exchange(self, work: Callable[[], tuple[T, bytes]]) -> tuple[T, list[bytes]]:
        """Calls ``work``, which returns a result and a message; returns this rank's result and all ranks' messages.

        Raises on all ranks if ``work`` raised on any: no rank waits for one that failed. All ranks must call this.

        Raises:
            ReplacedError: the function raised ReplacedError on one rank or more, and no other error on any rank.
            CheckpointError: the function raised on another rank only. The message has the first such rank's error.
            BaseException: the function's own error, on each rank where it raised.
        """
        if self._group is None:
            result, message = work()
            return result, [message]
        error: BaseException | None = None
        try:
            result, message = work()
        except BaseException as raised:  # also KeyboardInterrupt: the other ranks must not wait for this rank
            error, message = raised, f"{type(raised).__name__}: {raised}".encode(errors="replace")
        outcome = _DONE if error is None else _REPLACED if isinstance(error, ReplacedError) else _FAILED
        # Success without a message sends no byte: if no rank sends one, a single collective is enough, not two.
        sent = bytes([outcome]) + message if outcome != _DONE or message else b""
        with _lost_ranks():
            received = list(self._group.all_gather(sent).values())
        outcomes, messages = [each[0] if each else _DONE for each in received], [each[1:] for each in received]
        failed = [rank for rank, each in enumerate(outcomes) if each != _DONE]
        if failed:
            kind = CheckpointError if _FAILED in outcomes else ReplacedError  # another attempt helps only if all agree
            if error is not None:
                raise kind(str(error)) if isinstance(error, ReplacedError) else error
            first = messages[failed[0]].decode()
            raise kind(f"got an error on rank {failed[0]} and {len(failed) - 1} others, nothing was done: {first}")
        return result, messages

    def agree(self, work: Callable[[], T]) -> T:
        """Calls ``work`` and returns its result; raises on all ranks if it raised on any, as :meth:`exchange` does."""
        return self.exchange(lambda: (work(), b""))[0]

    def all_gather(self, message: bytes) -> list[bytes]:
        """All-gathers a message: returns those of all ranks, by rank. All ranks must call this."""
        return self.exchange(lambda: (None, message))[1]

    def all_gather_numbers(self, work: Callable[[], Sequence[int]]) -> list[list[int]]:
        """All-gathers the numbers, from 0 to 2**64 - 1, that ``work`` returns; fails as :meth:`exchange` does."""
        _, messages = self.exchange(lambda: (None, np.array(work(), dtype="<u8").tobytes()))
        return [np.frombuffer(message, dtype="<u8").tolist() for message in messages]

    def broadcast(self, source: int, message: bytes) -> bytes:
        """Broadcasts the message of rank ``source``; other ranks' messages are ignored. All ranks must call this."""
        if self._group is None:
            return message
        length = torch.tensor([len(message)], dtype=torch.int64, device=self._group.device)
        with _lost_ranks():
            self._group.broadcast(length, source)()
            sent = torch.zeros(int(length), dtype=torch.uint8, device=self._group.device)
            if not sent.numel():
                return b""
            if self.rank == source:
                sent.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
            self._group.broadcast(sent, source)()
            return sent.cpu().numpy().tobytes()


@contextmanager
def _lost_ranks() -> Iterator[None]:
    """Turns a failure of the collectives inside, and of the wait for their results, into a LostRanksError."""
    try:
        yield
    except MissingRanksError:
        raise
    except RuntimeError as error:  # of the back end: of gloo a RuntimeError, of others a DistBackendError, which is one
        raise LostRanksError(
            f"the ranks cannot talk to each other any more: {one_line(error)}; see which of them failed, and why"
        ) from error


@contextmanager
def on_device_of(model: Module) -> Iterator[None]:
    """Makes the GPU of a model's parameters, if there is one, the current GPU inside: NCCL sends messages from it."""
    device = next((param.device for param in model.parameters() if param.is_cuda), None)
    with nullcontext() if device is None else torch.cuda.device(device):
        yield
