"""Agreement among ranks that exchange moments: if one of them raises, all of them raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from shardopt.layout import Exchange, shard_of

T = TypeVar("T")


def agreeing(params: Iterable[Tensor]) -> list[Exchange]:
    """The ranks that exchange moments with this rank when state is loaded: ranks that share flat or column shards.

    Raises:
        UnknownShardError: nothing says what shard a parameter is.
    """
    holders = [shard.holders for shard in map(shard_of, params) if shard.cuts_rows]
    return list(dict.fromkeys(exchange for exchange in holders if exchange is not None))


def all_or_none(exchanges: Sequence[Exchange], work: Callable[[], T]) -> T:
    """Calls a function without collectives, and raises on all of some ranks if the function raised on any of them.

    Args:
        exchanges: the ranks; see :func:`agreeing`.
        work: the function.

    Raises:
        ValueError: the function raised on another rank. If it raised on this rank, its own error is raised.
    """
    error: Exception | None = None
    try:
        result = work()
    except Exception as raised:  # any kind of error: other ranks must not wait for this rank
        error = raised
    if on_any_rank(exchanges, error is not None):
        raise error or ValueError(
            "got state that another rank refused, expected state that all ranks can load; that rank's error says what "
            "is wrong, and nothing was changed"
        )
    return result


def on_any_rank(exchanges: Sequence[Exchange], here: bool, rounds: int = 1) -> bool:
    """Whether a condition holds on any of some ranks. All of the ranks must call this.

    Args:
        exchanges: the ranks; see :func:`agreeing`.
        here: whether the condition holds on this rank.
        rounds: 2 to hear from ranks that share no set with this rank, but one with a rank that does.
    """
    for _ in range(rounds):
        for exchange in exchanges:
            flag = torch.tensor([here], dtype=torch.int32, device="cpu")
            exchange.all_reduce_max(flag)
            here |= bool(flag.item())
    return here


def reduce_together(all_reduce: Callable[[Tensor], None], tensors: Sequence[Tensor]) -> None:
    """Reduces tensors of one dtype and device in place, by one collective for all."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    all_reduce(flat)
    for tensor, new in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(new.view_as(tensor))
