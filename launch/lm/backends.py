"""Backends, each a way to spread a model and its optimizer over the ranks: PyTorch's own, and the table of all."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import shardopt
from lm import optimizers, runtime
from lm.engine import Engine
from lm.learner import Learner
from lm.model import Transformer
from lm.options import Config
from lm.runtime import Ranks


class Single(Learner):
    """A model in one process, and the base of PyTorch's other backends."""

    needs_group = False
    releases_gradients = True
    orders_gradients = True

    def __init__(self, model: Transformer, ranks: Ranks, config: Config) -> None:
        self._config = config
        self._device = ranks.device
        matrices = optimizers.matrices(model)
        self.module = self.wrap(model.to(ranks.device), ranks)
        if config.ordered:
            shardopt.comm.ordered_gradients(
                self.module,
                micro_batches=config.micro_batches,
                wire=config.wire,  # type: ignore[arg-type]
            )
        groups = optimizers.groups(config, self.module, matrices)
        self.optimizer = optimizers.build(config, groups, self.make_optimizer)
        if config.release_gradients:
            shardopt.release_gradients(
                self.module,
                self.optimizer,  # type: ignore[arg-type]
                overlap_forward=config.overlap_forward,
                waiting_gradients=config.waiting_gradients,
            )

    def wrap(self, model: Transformer, ranks: Ranks) -> nn.Module:
        """Wraps the model, which is on the rank's device."""
        return model

    def make_optimizer(self, kind: type[Optimizer], groups: optimizers.Groups, options: dict[str, Any]) -> Optimizer:
        """Makes the optimizer of the wrapped model's parameters."""
        return optimizers.plain(kind, groups, options)

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backward passes accumulate gradients without exchanging them."""
        return nullcontext()

    @contextmanager
    def held(self) -> Iterator[tuple[nn.Module, Optimizer]]:
        yield self.module, self.optimizer

    def autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._config.mixed)

    def micro_step(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last or self._config.ordered else self.no_sync()

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> tuple[float | None, float]:
        limit = self._config.clip
        norm = shardopt.clip_grad_norm_(self.module.parameters(), limit).item() if limit else None
        seconds = runtime.timed(self._device, self.optimizer.step)
        self.optimizer.zero_grad()
        return norm, seconds


class Ddp(Single):
    """DistributedDataParallel: every rank holds all."""

    needs_group = True

    def wrap(self, model: Transformer, ranks: Ranks) -> nn.Module:
        devices = [ranks.device] if ranks.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.module.no_sync()  # type: ignore[no-any-return, operator]


class ZeroRedundancy(Ddp):
    """DistributedDataParallel with ZeroRedundancyOptimizer: every rank holds the state of some parameters."""

    releases_gradients = False

    def make_optimizer(self, kind: type[Optimizer], groups: optimizers.Groups, options: dict[str, Any]) -> Optimizer:
        return ZeroRedundancyOptimizer(groups, optimizer_class=kind, **options)


class Fsdp1(Single):
    """FullyShardedDataParallel: flat shards."""

    needs_group = True
    releases_gradients = False
    orders_gradients = False

    def wrap(self, model: Transformer, ranks: Ranks) -> nn.Module:
        policy = None
        if self._config.mixed:
            policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        wrap = partial(FullyShardedDataParallel, device_id=ranks.device, use_orig_params=True, mixed_precision=policy)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")  # on a single rank
            for index, block in enumerate(model.blocks):
                model.blocks[index] = wrap(block)
            return wrap(model)

    def make_optimizer(self, kind: type[Optimizer], groups: optimizers.Groups, options: dict[str, Any]) -> Optimizer:
        optimizer = super().make_optimizer(kind, groups, options)
        optimizer.attach(self.module)  # type: ignore[attr-defined]  # its parameters do not refer to their modules
        return optimizer

    def no_sync(self) -> AbstractContextManager[None]:
        return self.module.no_sync()  # type: ignore[no-any-return, operator]

    def autocast(self) -> AbstractContextManager[None]:
        return nullcontext()


class Fsdp2(Single):
    """fully_shard: DTensors."""

    needs_group = True

    def wrap(self, model: Transformer, ranks: Ranks) -> nn.Module:
        mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
        policy = MixedPrecisionPolicy()
        if self._config.mixed:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        # By default the outermost module keeps its parameters gathered after a forward pass, until the backward pass;
        # evaluation has no backward pass.
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        return model

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(False)
        yield
        self.module.set_requires_gradient_sync(True)

    def autocast(self) -> AbstractContextManager[None]:
        return nullcontext()


BACKENDS: dict[str, type[Learner]] = {
    "fsdp2": Fsdp2,
    "fsdp1": Fsdp1,
    "ddp": Ddp,
    "zero_redundancy": ZeroRedundancy,
    "deepspeed": Engine,
    "single": Single,
}
