"""A reduce-scatter of gradients that adds micro-batches in a fixed order: each rank owns a chunk of the sum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from shardopt.comm.counter import Counter, levels_of
from shardopt.comm.progress import Progress
from shardopt.comm.wire import Wire, WireFormat
from shardopt.kernels.autograd import without_autograd


class Reduction:
    """The sum of a step's micro-batches in this rank's chunk: some rows of each of several parameters.

    Args:
        progress: tells the number of the running micro-batch.
        wire: the format of messages.
        shapes: of the parameters.
        mesh: the group whose ranks own a chunk each, and under HSDP the group of the replicas, which divide that chunk;
            empty for one process.
    """

    def __init__(
        self, progress: Progress, wire: WireFormat, shapes: Iterable[Sequence[int]], mesh: Sequence[ProcessGroup]
    ) -> None:
        self._progress = progress
        self._shards, self._replicas = (*mesh, None, None)[:2]
        self.size, self.rank = (1, 0) if self._shards is None else (self._shards.size(), self._shards.rank())
        self.wire = Wire(wire, shapes, self.size)
        self.counter = Counter()
        progress.counters.add(self.counter)

    @without_autograd
    def push(self, chunks: Tensor, out: Tensor) -> None:
        """Adds a micro-batch of each rank.

        Args:
            chunks: this rank's gradient, (ranks that own a chunk, elements).
            out: this rank's chunk. Gets the mean over the step's micro-batches in its last pass, rounded once to the
                dtype (under HSDP this replica's part, and zeros elsewhere), and zeros before. May be in ``chunks``.
        """
        self.counter.skip_to(self._progress.first)
        message = self.wire.encode(chunks)
        pieces = message
        if self.size > 1:
            pieces = torch.empty_like(message)
            dist.all_to_all_single(pieces, message, group=self._shards)
        if self._replicas is None:
            self.counter.push(map(self.wire.decode, pieces))
        else:
            self._push_replicas(pieces, self._replicas)
        if not self._progress.is_last:
            out.zero_()
            return
        if self._replicas is not None:  # the others have zeros in the part that this one owns
            size = -(-self.wire.numel // self._replicas.size())
            out = out.zero_()[self._replicas.rank() * size :][:size]
        self.counter.finish(out, self._progress.micro_batches)

    def _push_replicas(self, pieces: Tensor, group: ProcessGroup) -> None:
        """Adds up this replica's micro-batches, exchanges parts of the sums with the other replicas, adds those."""
        replicas, first = group.size(), self._progress.first
        inner = Counter(first + group.rank() * len(pieces))
        inner.push(map(self.wire.decode, pieces))
        own = -(-self.wire.numel // replicas)
        filling = own * replicas - self.wire.numel
        message = torch.stack([pad(x, (0, filling)).view(replicas, own) for x in inner.tensors], 1)
        levels = [levels_of(first + replica * len(pieces), len(pieces)) for replica in range(replicas)]
        received = message.new_empty(sum(map(len, levels)), own)
        sent = [message.shape[1]] * replicas
        dist.all_to_all_single(received, message.view(-1, own), list(map(len, levels)), sent, group=group)
        for level, term in zip(chain(*levels), received, strict=True):
            self.counter.push([term], level)
