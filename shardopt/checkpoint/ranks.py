"""Agreement of all ranks on success or failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from shardopt.checkpoint.errors import CheckpointError, ReplacedError

T = TypeVar("T")


def on_every_rank(work: Callable[[], T]) -> T:
    """Calls a function on every rank, and raises on all of them if it raised on any.

    Raises:
        ReplacedError: the function raised ReplacedError on one rank or more, and no other error on any rank.
        CheckpointError: the function raised on another rank only. The message has the first such rank's error.
        Exception: the function's own error, on each rank where it raised.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    error: Exception | None = None
    try:
        result = work()
    except Exception as raised:  # any exception: the other ranks must not wait for this rank
        error = raised
    messages = gathered(None if error is None else f"{type(error).__name__}: {error}")
    replaced = gathered(isinstance(error, ReplacedError)) if any(messages) else []
    kind = ReplacedError if messages.count(None) + replaced.count(True) == len(messages) else CheckpointError
    if error is not None:
        raise kind(str(error)) if isinstance(error, ReplacedError) else error
    failed = {rank: message for rank, message in enumerate(messages) if message is not None}
    if failed:
        rank, message = next(iter(failed.items()))
        raise kind(f"got an error on rank {rank} and {len(failed) - 1} others, nothing was done: {message}")
    return result


def gathered(value: T) -> list[T]:
    """The value of each rank. All ranks must call this."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
