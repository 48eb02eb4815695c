"""Ranks that exchange moments raise together where one of them must."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from shardopt.layout import Exchange, shard_of

T = TypeVar("T")


def agreeing(params: Iterable[Tensor]) -> list[Exchange]:
    """The ranks that exchange moments with this one when state is loaded: those that share flat or column shards.

    Raises:
        UnknownShardError: nothing says what shard a parameter is.
    """
    holders = [shard.holders for shard in map(shard_of, params) if shard.cuts_rows]
    return list(dict.fromkeys(exchange for exchange in holders if exchange is not None))


def all_or_none(exchanges: Sequence[Exchange], work: Callable[[], T]) -> T:
    """Calls a function without collectives, and raises on all of some ranks if it raised on any of them.

    Args:
        exchanges: the ranks; see :func:`agreeing`.
        work: the function.

    Raises:
        ValueError: the function raised on another rank. On this one, its own error is raised.
    """
    error: Exception | None = None
    try:
        result = work()
    except Exception as raised:  # whatever it is, the other ranks must not wait for this one
        error = raised
    if on_any_rank(exchanges, error is not None):
        raise error or ValueError(
            "got state that another rank refused, expected none of it to be at fault; that rank's error says what is "
            "wrong, and nothing was changed"
        )
    return result


def on_any_rank(exchanges: Sequence[Exchange], here: bool) -> bool:
    """Whether something is so on any of some ranks. All of them must call this.

    Args:
        exchanges: the ranks; see :func:`agreeing`.
        here: whether it is so on this one.
    """
    anywhere = here
    for exchange in exchanges:
        flag = torch.tensor([here], dtype=torch.int32, device="cpu")
        exchange.all_reduce_max(flag)
        anywhere |= bool(flag.item())
    return anywhere
