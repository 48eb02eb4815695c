"""Backends, each a way to spread a model and its optimizer over the ranks: a line of the table and its functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import shardopt
from lm import engine, optimizers
from lm.learner import Context, Learner, Parallel, TorchLearner
from lm.networks import Network
from lm.options import Config
from lm.precision import PRECISIONS
from lm.runtime import Ranks


@dataclass(frozen=True)
class Backend:
    """An entry of the table.

    Attributes:
        build: (bare model on the CPU, ranks, options) -> Learner.
        needs_group: whether the backend runs over a process group; other backends run in one process.
        releases_gradients: whether the backend can step parameters during the backward pass.
        orders_gradients: whether gradients can be summed in the order of the micro-batches.
    """

    build: Callable[[Network, Ranks, Config], Learner]
    needs_group: bool = True
    releases_gradients: bool = True
    orders_gradients: bool = True


def _torch(
    wrap: Callable[[Network, Ranks, bool], Parallel], make: optimizers.Make = optimizers.plain
) -> Callable[[Network, Ranks, Config], Learner]:
    """A backend that PyTorch itself provides.

    Args:
        wrap: (model on the rank's device, ranks, whether to compute in bfloat16) -> Parallel.
        make: (class, param groups, options, wrapped model) -> optimizer.
    """

    def build(model: Network, ranks: Ranks, config: Config) -> Learner:
        matrices = optimizers.matrices(model)
        parallel = wrap(model.to(ranks.device), ranks, PRECISIONS[config.precision].mixed)
        if config.ordered:
            shardopt.comm.ordered_gradients(
                parallel.module,
                micro_batches=config.micro_batches,
                wire=config.wire,  # type: ignore[arg-type]
            )
            parallel = replace(parallel, no_sync=nullcontext)
        optimizer = optimizers.build(config, parallel.module, matrices, make)
        if config.release_gradients:
            shardopt.release_gradients(
                parallel.module,
                optimizer,  # type: ignore[arg-type]
                overlap_forward=config.overlap_forward,
                waiting_gradients=config.waiting_gradients,
            )
        return TorchLearner(parallel, optimizer, ranks.device, config.clip)

    return build


def _fsdp2(model: Network, ranks: Ranks, mixed: bool) -> Parallel:
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if mixed else None,
        reduce_dtype=torch.float32 if mixed else None,
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # By default the outermost module keeps its parameters gathered after a forward pass, until the backward pass;
    # evaluation has no backward pass.
    sharded = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)

    @contextmanager
    def no_sync() -> Iterator[None]:
        sharded.set_requires_gradient_sync(False)
        yield
        sharded.set_requires_gradient_sync(True)

    return Parallel(model, no_sync, nullcontext, _clip(model))


def _fsdp1(model: Network, ranks: Ranks, mixed: bool) -> Parallel:
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else None
    wrap = partial(FullyShardedDataParallel, device_id=ranks.device, use_orig_params=True, mixed_precision=policy)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")  # on a single rank
        for index, block in enumerate(model.blocks):
            model.blocks[index] = wrap(block)
        sharded = wrap(model)
    return Parallel(sharded, sharded.no_sync, nullcontext, sharded.clip_grad_norm_)


def _ddp(model: Network, ranks: Ranks, mixed: bool) -> Parallel:
    devices = [ranks.device] if ranks.device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    return Parallel(wrapped, wrapped.no_sync, _autocast(ranks, mixed), _clip(wrapped))


def _single(model: Network, ranks: Ranks, mixed: bool) -> Parallel:
    return Parallel(model, nullcontext, _autocast(ranks, mixed), _clip(model))


def _autocast(ranks: Ranks, mixed: bool) -> Context:
    return lambda: torch.autocast(ranks.device.type, torch.bfloat16, enabled=mixed)


def _clip(module: nn.Module) -> Callable[[float], Tensor]:
    return lambda limit: shardopt.clip_grad_norm_(module.parameters(), limit)


def _attached(
    kind: type[Optimizer], groups: optimizers.Groups, options: dict[str, Any], module: nn.Module
) -> Optimizer:
    optimizer = optimizers.plain(kind, groups, options, module)
    optimizer.attach(module)  # type: ignore[attr-defined]  # FSDP1's parameters do not refer to their modules
    return optimizer


def _zero(kind: type[Optimizer], groups: optimizers.Groups, options: dict[str, Any], module: nn.Module) -> Optimizer:
    return ZeroRedundancyOptimizer(groups, optimizer_class=kind, **options)


BACKENDS = {
    "fsdp2": Backend(_torch(_fsdp2)),
    "fsdp1": Backend(_torch(_fsdp1, _attached), releases_gradients=False, orders_gradients=False),
    "ddp": Backend(_torch(_ddp)),
    "zero_redundancy": Backend(_torch(_ddp, _zero), releases_gradients=False),
    "deepspeed": Backend(engine.build, releases_gradients=False, orders_gradients=False),
    "single": Backend(_torch(_single), needs_group=False),
}
