"""Sums of chunks over the ranks, in the order of the micro-batches: each rank owns a chunk of the sum."""

from __future__ import annotations

from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardopt.comm.counter import Counter, levels_of
from shardopt.comm.progress import Progress
from shardopt.comm.wire import Wire
from shardopt.kernels.autograd import without_autograd
from shardopt.kernels.messages import Layout, Part


class Reduction:
    """The sum of a step's micro-batches in this rank's chunk.

    Args:
        progress: tells the number of the running micro-batch.
        wire: a chunk's parts.
        shards: the ranks that own a chunk each; None for this rank alone.
        replicas: HSDP's ranks that have one and the same chunk, and own a part of it each; None without.
    """

    def __init__(
        self, progress: Progress, wire: Wire, shards: ProcessGroup | None, replicas: ProcessGroup | None
    ) -> None:
        self._progress, self.wire = progress, wire
        self._shards, self._replicas = shards, replicas
        self._own = wire.numel if replicas is None else -(-wire.numel // replicas.size())  # elements of a sum
        self._plain = Layout([Part(1, self._own, False)])
        self.counter = Counter(self._own)
        self.counter.skip(progress.first)
        self.is_behind = True  # it has nothing of the running pass

    @without_autograd
    def push(self, chunks: Tensor, out: Tensor) -> None:
        """Adds a micro-batch of each rank.

        Args:
            chunks: this rank's gradient, (ranks that own a chunk, elements).
            out: this rank's chunk. In the step's last pass, gets the mean over its micro-batches, rounded once to the
                dtype, of HSDP's the part that this rank owns; else zeros. May be ``chunks``.
        """
        self.is_behind = False
        message = self.wire.encode(chunks)
        pieces = message
        if self._shards is not None and self._shards.size() > 1:
            pieces = torch.empty_like(message)
            dist.all_to_all_single(pieces, message, group=self._shards)
        if self._replicas is None:
            self._add(pieces, self.wire.layout, 0, out if self._progress.is_last else None)
        else:
            received, levels = self._from_replicas(pieces)
            begin = 0
            for level, group in groupby(levels):  # of terms that are added at once
                end = begin + len(list(group))
                is_last = self._progress.is_last and end == len(levels)
                self._add(received[begin:end], self._plain, level, out if is_last else None)
                begin = end
        if not self._progress.is_last:
            out.zero_()

    def _add(self, terms: Tensor, layout: Layout, level: int, out: Tensor | None) -> None:
        if out is None:
            self.counter.push(terms, layout, level)
            return
        mean = out
        if self._replicas is not None:
            mean = out.new_empty(self._own)
        self.counter.finish(terms, layout, mean, self._progress.micro_batches, level)
        if self._replicas is not None:
            part = out.zero_()[self._replicas.rank() * self._own :][: self._own]
            part.copy_(mean[: len(part)])

    def _from_replicas(self, pieces: Tensor) -> tuple[Tensor, list[int]]:
        """Sums this replica's micro-batches, and sends each replica its part of the sums; what it gets, and levels."""
        assert self._replicas is not None
        replicas, shards, first = self._replicas.size(), len(pieces), self._progress.first
        inner = Counter(self._own * replicas, first + self._replicas.rank() * shards)
        inner.push(pieces, self.wire.layout)
        message = torch.stack([x.view(replicas, self._own) for x in inner.tensors], 1)
        levels = [levels_of(first + replica * shards, shards) for replica in range(replicas)]
        received = message.new_empty(sum(map(len, levels)), self._own)
        sizes = list(map(len, levels))
        sent = [message.shape[1]] * replicas
        dist.all_to_all_single(received, message.view(-1, self._own), sizes, sent, group=self._replicas)
        return received, [level for of_replica in levels for level in of_replica]

    @without_autograd
    def finish(self, out: Tensor) -> None:
        """Writes the mean where the last pass had no gradient here. The others of HSDP's replicas have zeros."""
        self._add(out.new_empty(0, self._own, dtype=torch.float32), self._plain, 0, out)

    def end(self) -> None:
        """Adds zeros for a pass that had no gradient here."""
        if self.is_behind:
            self.counter.skip(self._progress.ranks)
        self.is_behind = True

    @property
    def tensors(self) -> list[Tensor]:
        """The sums so far."""
        return self.counter.tensors

    def reset(self) -> None:
        self.counter = Counter(self._own)
        self.is_behind = True
