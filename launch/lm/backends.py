"""How a model is spread over the ranks: one function per backend, one line of the table each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lm.model import Transformer
from lm.runtime import Ranks

Context = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Parallel:
    """A model ready to train.

    Attributes:
        module: what to call, and whose parameters the optimizer takes.
        no_sync: inside it backward gathers gradients without exchanging them.
        autocast: inside it forward computes in the compute dtype.
    """

    module: nn.Module
    no_sync: Context
    autocast: Context


@dataclass(frozen=True)
class Backend:
    """An entry of the table.

    Attributes:
        wrap: (model on the rank's device, ranks, whether to compute in bfloat16) -> Parallel.
        needs_group: whether it runs over a process group; else it is for one process.
    """

    wrap: Callable[[Transformer, Ranks, bool], Parallel]
    needs_group: bool = True


def _fsdp2(model: Transformer, ranks: Ranks, mixed: bool) -> Parallel:
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if mixed else None,
        reduce_dtype=torch.float32 if mixed else None,
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # The outermost module keeps its parameters gathered after a forward pass unless told otherwise,
    # and evaluation has no backward pass to shard them again.
    sharded = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)

    @contextmanager
    def no_sync() -> Iterator[None]:
        sharded.set_requires_gradient_sync(False)
        yield
        sharded.set_requires_gradient_sync(True)

    return Parallel(model, no_sync, nullcontext)


def _ddp(model: Transformer, ranks: Ranks, mixed: bool) -> Parallel:
    devices = [ranks.device] if ranks.device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    return Parallel(wrapped, wrapped.no_sync, _autocast(ranks, mixed))


def _single(model: Transformer, ranks: Ranks, mixed: bool) -> Parallel:
    return Parallel(model, nullcontext, _autocast(ranks, mixed))


def _autocast(ranks: Ranks, mixed: bool) -> Context:
    return lambda: torch.autocast(ranks.device.type, torch.bfloat16, enabled=mixed)


BACKENDS = {
    "fsdp2": Backend(_fsdp2),
    "ddp": Backend(_ddp),
    "single": Backend(_single, needs_group=False),
}
