"""Sums of chunks over the ranks, in the order of the micro-batches: each rank owns a chunk of the sum."""

from __future__ import annotations

from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.nn.functional import pad

from shardopt.comm.counter import Counter, levels_of
from shardopt.comm.progress import Progress
from shardopt.comm.wire import Wire, WireFormat, rows_of
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
        self, progress: Progress, wire: Wire, shards: ProcessGroup | None = None, replicas: ProcessGroup | None = None
    ) -> None:
        self._progress, self.wire = progress, wire
        self._shards, self._replicas = shards, replicas
        self.counter = Counter()
        progress.counters.add(self.counter)

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
        if self._replicas is None:
            self.counter.push(map(self.wire.decode, pieces))
        else:
            self._push_replicas(pieces, self._replicas)
        if self._progress.is_last:
            self.finish(out)
        else:
            out.zero_()

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

    @without_autograd
    def finish(self, out: Tensor) -> None:
        """Writes the mean. The others of HSDP's replicas have zeros in the part that this one owns."""
        own = out
        if self._replicas is not None:
            size = -(-self.wire.numel // self._replicas.size())
            own = out.zero_()[self._replicas.rank() * size :][:size]
        self.counter.skip_to(self._progress.micro_batches)
        self.counter.finish(own, self._progress.micro_batches)


class PlainReducer:
    """Sums of the gradients of a module in one process, which are taken when a backward pass is over."""

    def __init__(self, model: Module, progress: Progress, wire: WireFormat) -> None:
        self._progress = progress
        self._sums = {
            param: Reduction(progress, Wire(wire, [rows_of(param.shape)]))
            for param in model.parameters()
            if param.numel()
        }
        self._hooked: set[Parameter] = set()
        self._hook()
        model.register_forward_pre_hook(lambda *_: self._hook())
        progress.at_end.append(self._end)

    def _hook(self) -> None:
        """Has the gradients of all parameters begin a pass, of those that are no longer frozen, too."""
        for param in self._sums:
            if param.requires_grad and param not in self._hooked:
                self._hooked.add(param)
                param.register_hook(lambda _: self._progress.begin())  # type: ignore[no-untyped-call]

    @without_autograd
    def _end(self) -> None:
        for param, reduction in self._sums.items():
            grad = param.grad
            if grad is not None:
                flat = grad.reshape(1, -1)
                reduction.push(flat, flat[0])
                if flat.data_ptr() != grad.data_ptr():  # a copy, of strided memory
                    grad.copy_(flat.view_as(grad))
