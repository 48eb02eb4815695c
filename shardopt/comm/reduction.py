"""A reduce-scatter that sums micro-batches in a fixed order: an all-to-all, then each rank sums its own chunk."""

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
    """This rank's chunk (some rows of each of several parameters) of the gradient sum over a step's micro-batches.

    Args:
        progress: counts backward passes, which gives the index of the running micro-batch.
        wire: the number format of gradients in messages.
        shapes: the shapes of the parameters.
        mesh: the process group whose ranks own a chunk each; under HSDP also the group of the chunk's replicas, each of
            which sums a part of it; empty for one process.
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
        """Exchanges chunks of one micro-batch's gradient per rank, and adds the received ones to this rank's sum.

        Args:
            chunks: this rank's gradient, a row per rank that owns a chunk.
            out: this rank's chunk, may be a row of ``chunks``. Set to zeros, and in the step's last pass to the mean
                over all micro-batches, rounded once to its dtype (under HSDP in this replica's part, else zeros).
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
        if self._replicas is not None:  # FSDP2 all-reduces next: other replicas have zeros where this one has the mean
            size = -(-self.wire.numel // self._replicas.size())
            out = out.zero_()[self._replicas.rank() * size :][:size]
        self.counter.finish(out, self._progress.micro_batches)

    def _push_replicas(self, pieces: Tensor, group: ProcessGroup) -> None:
        """Under HSDP: sums this replica's micro-batches, exchanges partial sums by all-to-all, and adds all of them."""
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
