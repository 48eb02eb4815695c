"""Sums of chunks over the ranks, in the order of the micro-batches: each rank owns a chunk of the sum."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardopt.comm.counter import Counter, levels_of
from shardopt.comm.progress import Progress
from shardopt.comm.wire import Wire


class Reduction:
    """The sum of a step's micro-batches in this rank's chunk.

    Args:
        progress: which micro-batch it is.
        wire: a chunk's parts.
        shards: the ranks that own a chunk each; None for this rank alone.
        replicas: HSDP's ranks that own one and the same chunk; None without. Sums over the shards go to a part of the
            chunk per replica.
    """

    def __init__(self, progress: Progress, wire: Wire, shards: ProcessGroup | None, replicas: ProcessGroup | None):
        self._progress, self.wire = progress, wire
        self._shards, self._replicas = shards, replicas
        self.counter = Counter()
        self.counter.skip(progress.first)
        self.is_behind = True  # it has nothing of the running pass

    @torch.no_grad()
    def push(self, chunks: Tensor) -> None:
        """Adds the ranks' micro-batches.

        Args:
            chunks: this rank's gradient, (ranks that own a chunk, elements), in a floating dtype.
        """
        self.is_behind = False
        message = self.wire.encode(chunks)
        pieces = message
        if self._shards is not None and self._shards.size() > 1:
            pieces = torch.empty_like(message)
            dist.all_to_all_single(pieces, message, group=self._shards)
        if self._replicas is None:
            for piece in pieces:
                self.counter.push(self.wire.decode(piece))
        else:
            self._push_replicas(pieces)

    def _push_replicas(self, pieces: Tensor) -> None:
        """Sums this replica's micro-batches, and sends each replica its part of the sums."""
        assert self._replicas is not None
        replicas, shards = self._replicas.size(), len(pieces)
        first = self._progress.first
        inner = Counter(first + self._replicas.rank() * shards)
        for piece in pieces:
            inner.push(self.wire.decode(piece))
        part = -(-self.wire.numel // replicas)
        sums = [torch.nn.functional.pad(x, (0, part * replicas - len(x))) for _, x in inner.sums if x is not None]
        message = torch.stack([x.view(replicas, part) for x in sums], 1)
        levels = [levels_of(first + replica * shards, shards) for replica in range(replicas)]
        received = message.new_empty(sum(map(len, levels)), part)
        sizes = [len(sums)] * replicas
        dist.all_to_all_single(
            received, message.view(-1, part), [len(level) for level in levels], sizes, group=self._replicas
        )
        for piece, level in zip(received, (level for each in levels for level in each), strict=True):
            self.counter.push(piece, level)

    @torch.no_grad()
    def total(self, out: Tensor) -> bool:
        """Writes the mean over the step's micro-batches; of HSDP's, this replica's part of it, zeros elsewhere.

        Args:
            out: this rank's chunk. The mean is rounded once to its dtype.

        Returns:
            Whether there is any but zeros, of which no memory was taken.
        """
        out.zero_()
        total = self.counter.total()
        if total is None:
            return False
        total.div_(self._progress.micro_batches).add_(0.0)  # -0 becomes +0
        start = 0 if self._replicas is None else self._replicas.rank() * len(total)
        own = out[start : start + len(total)]
        own.copy_(total[: len(own)])
        return True

    def end(self) -> None:
        """Adds zeros for a pass that had no gradient here."""
        if self.is_behind:
            self.counter.skip(self._progress.ranks)
        self.is_behind = True

    def reset(self) -> None:
        self.counter = Counter()
        self.is_behind = True
