"""A reduce-scatter that sums micro-batches in a fixed order: an all-to-all, then each rank sums its own chunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from shardopt.comm.pairwise import PairwiseSum, partial_levels
from shardopt.comm.progress import Progress
from shardopt.comm.wire import Wire, WireFormat
from shardopt.kernels.autograd import without_autograd


class Reduction:
    """This rank's chunk (some rows of each of several parameters) of the gradient sum over a step's micro-batches.

    ``mesh`` has the process group whose ranks own a chunk each; under HSDP also the group of the chunk's replicas, each
    of which sums a part of it; nothing for one process.
    """

    def __init__(
        self, progress: Progress, wire: WireFormat, shapes: Iterable[Sequence[int]], mesh: Sequence[ProcessGroup]
    ) -> None:
        self._progress = progress
        self._shards = mesh[0] if mesh else None
        self._replicas = mesh[1] if len(mesh) > 1 else None
        self.size, self.rank = (1, 0) if self._shards is None else (self._shards.size(), self._shards.rank())
        self.wire = Wire(wire, shapes, self.size)
        self.sum = PairwiseSum()  # of this rank's chunk, under HSDP of a part of the chunk
        progress.sums.add(self.sum)

    @without_autograd
    def reduce_scatter(self, chunks: Tensor, out: Tensor) -> None:
        """Exchanges chunks of one micro-batch's gradient per rank, and adds the received ones to this rank's sum.

        Collective. ``chunks`` is this rank's gradient, a row per rank that owns a chunk. ``out``, this rank's chunk and
        perhaps a row of them, is overwritten by zeros, and in the step's last pass by the mean over all micro-batches,
        rounded once: under HSDP in this replica's part, the rest being zeros, since FSDP2 all-reduces over the replicas
        next.
        """
        self.sum.add_zeros_before(self._progress.first_micro_batch)  # for passes that did not use the parameters
        message = self.wire.encode(chunks)
        pieces = message  # a row per rank: its micro-batch's gradient of this rank's chunk
        if self.size > 1:
            pieces = torch.empty_like(message)
            dist.all_to_all_single(pieces, message, group=self._shards)
        if self._replicas is None:
            self.sum.add(map(self.wire.decode, pieces))
        else:
            self._add_replicas(pieces, self._replicas)
        if not self._progress.is_last:
            out.zero_()
            return
        mean = self.sum.pop_mean(self._progress.micro_batches)
        if self._replicas is not None:
            out = out.zero_()[self._replicas.rank() * len(mean) :][: len(mean)]
        out.copy_(mean[: len(out)])  # without the last replica's padding

    def _add_replicas(self, pieces: Tensor, replicas: ProcessGroup) -> None:
        """Under HSDP: exchanges partial sums among replicas of the chunk, and adds those of its part to :attr:`sum`.

        Collective. Each replica first sums its own micro-batches' gradients, ``pieces``. Replica i then gets the i-th
        part of all replicas' partial sums, which it adds in the order of micro-batches.
        """
        size, count, first = replicas.size(), len(pieces), self._progress.first_micro_batch
        own_sum = PairwiseSum(first + replicas.rank() * count)
        own_sum.add(map(self.wire.decode, pieces))
        numel = -(-self.wire.numel // size)  # of a replica's part
        padding = numel * size - self.wire.numel
        message = torch.stack([pad(x, (0, padding)).view(size, numel) for x in own_sum.tensors], 1)
        levels = [partial_levels(first + replica * count, count) for replica in range(size)]
        received_sizes, sent_sizes = [len(each) for each in levels], [message.shape[1]] * size
        received = message.new_empty(sum(received_sizes), numel)
        dist.all_to_all_single(received, message.view(-1, numel), received_sizes, sent_sizes, group=replicas)
        for level, term in zip(chain(*levels), received, strict=True):
            self.sum.add([term], level)
