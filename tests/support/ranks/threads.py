"""Ranks that are threads of this process: enough for what flat shards exchange, and cheap enough to try many splits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class ThreadRankGroup:
    """Agreement among threads, of which each must call the same methods in the same order.

    Attributes:
        calls: how many collectives there were.
        global_ranks: of the threads.
        global_ranks_by_group: the same, as of one process group.
    """

    def __init__(self, threads: int) -> None:
        self._barrier = threading.Barrier(threads, timeout=20)
        self._given: list[Tensor] = []
        self._own = threading.local()
        self.calls = 0
        self.global_ranks = tuple(range(threads))
        self.global_ranks_by_group = (self.global_ranks,)

    @property
    def rank(self) -> int:
        """The place of the thread that asks."""
        rank: int = self._own.rank
        return rank

    def all_reduce_max(self, tensor: Tensor) -> None:
        self._all_reduce(tensor, lambda given: given.amax(0))

    def all_reduce_sum(self, tensor: Tensor) -> None:
        self._all_reduce(tensor, lambda given: given.sum(0))

    def _all_reduce(self, tensor: Tensor, reduce: Callable[[Tensor], Tensor]) -> None:
        self._given.append(tensor.clone())
        self._barrier.wait()
        reduced = reduce(torch.stack(self._given))
        if self._barrier.wait() == 0:
            self._given = []
            self.calls += 1
        self._barrier.wait()
        tensor.copy_(reduced)

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Calls ``function(rank)`` for every rank at the same time; returns the results by rank."""

        def call(rank: int) -> T:
            self._own.rank = rank
            try:
                return function(rank)
            except BaseException:
                self._barrier.abort()  # the threads that wait fail
                raise

        with ThreadPoolExecutor(self._barrier.parties) as pool:
            futures = [pool.submit(call, rank) for rank in range(self._barrier.parties)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]
