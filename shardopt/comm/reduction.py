"""Sums of chunks over the ranks, in the order of the micro-batches: each rank owns a chunk of the sum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from shardopt.comm.counter import Counter, levels_of
from shardopt.comm.progress import Progress
from shardopt.comm.wire import Wire
from shardopt.kernels.autograd import without_autograd


class Reduction:
    """The sum of a step's micro-batches in this rank's chunk.

    Args:
        progress: tells the number of the running micro-batch.
        wire: a chunk's parts.
        shards: the ranks that own a chunk each; None for this rank alone.
        replicas: HSDP's ranks that have one and the same chunk, and own a part of it each; None without.
    """

    def __init__(
        self,
        progress: Progress,
        wire: Wire,
        shards: ProcessGroup | None = None,
        replicas: ProcessGroup | None = None,
    ) -> None:
        self._progress, self.wire = progress, wire
        self._shards, self._replicas = shards, replicas
        self.counter = Counter()
        progress.reductions.add(self)

    @property
    def is_behind(self) -> bool:
        """Whether it has nothing of the running pass."""
        return self.counter.next <= self._progress.first

    @without_autograd
    def push(self, chunks: Tensor, out: Tensor) -> None:
        """Adds a micro-batch of each rank.

        Args:
            chunks: this rank's gradient, (ranks that own a chunk, elements).
            out: this rank's chunk. In the step's last pass, gets the mean over its micro-batches, rounded once to the
                dtype, of HSDP's the part that this rank owns; else zeros. May be ``chunks``.
        """
        self.counter.skip_to(self._progress.first)
        message = self.wire.encode(chunks)
        pieces = message
        if self._shards is not None and self._shards.size() > 1:
            pieces = torch.empty_like(message)
            dist.all_to_all_single(pieces, message, group=self._shards)
        terms = map(self.wire.decode, pieces)
        if self._replicas is None:
            self.counter.push(terms)
        else:
            for level, term in self._from_replicas(terms, len(pieces)):
                self.counter.push([term], level)
        if self._progress.is_last:
            self.finish(out)
        else:
            out.zero_()

    def _from_replicas(self, terms: Iterable[Tensor], shards: int) -> Iterator[tuple[int, Tensor]]:
        """Adds up this replica's micro-batches, exchanges parts of the sums; what it gets, with levels."""
        assert self._replicas is not None
        replicas, first = self._replicas.size(), self._progress.first
        inner = Counter(first + self._replicas.rank() * shards)
        inner.push(terms)
        own = -(-self.wire.numel // replicas)
        filling = own * replicas - self.wire.numel
        message = torch.stack([pad(x, (0, filling)).view(replicas, own) for x in inner.tensors], 1)
        levels = [levels_of(first + replica * shards, shards) for replica in range(replicas)]
        received = message.new_empty(sum(map(len, levels)), own)
        sent = [message.shape[1]] * replicas
        dist.all_to_all_single(received, message.view(-1, own), list(map(len, levels)), sent, group=self._replicas)
        return zip((level for of_replica in levels for level in of_replica), received, strict=True)

    @without_autograd
    def finish(self, out: Tensor) -> None:
        """Writes the mean. The others of HSDP's replicas have zeros in the part that this one owns."""
        own = out
        if self._replicas is not None:
            size = -(-self.wire.numel // self._replicas.size())
            own = out.zero_()[self._replicas.rank() * size :][:size]
        self.counter.skip_to(self._progress.micro_batches)
        self.counter.finish(own, self._progress.micro_batches)
