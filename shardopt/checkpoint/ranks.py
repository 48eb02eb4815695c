"""Doing something on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from shardopt.checkpoint.errors import CheckpointError

T = TypeVar("T")


def on_every_rank(work: Callable[[], T]) -> T:
    """Calls a function on every rank, and raises on all of them if it raised on any.

    Raises:
        CheckpointError: it raised on another rank. On this one, what it raised is raised.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    error: Exception | None = None
    try:
        result = work()
    except Exception as raised:  # whatever it is, the other ranks must not wait for this one
        error = raised
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed = {rank: message for rank, message in enumerate(errors) if message is not None}
    if failed:
        rank, message = next(iter(failed.items()))
        raise CheckpointError(f"got an error on rank {rank} and {len(failed) - 1} others, nothing was done: {message}")
    return result
