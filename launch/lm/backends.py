"""Backends, each a way to spread a model and its optimizer over the ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
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

from lm import engine_config, optimizers, runtime
from lm.errors import UserError
from lm.learner import Learner
from lm.model import Transformer
from lm.options import Config
from lm.runtime import Ranks
from shardopt.sharding.deepspeed.engine import opened


class Ddp(Learner):
    """DistributedDataParallel: every rank holds all."""

    needs_group = True

    def wrap(self, model: Transformer, ranks: Ranks) -> nn.Module:
        devices = [ranks.device] if ranks.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


class ZeroRedundancy(Ddp):
    """DistributedDataParallel with ZeroRedundancyOptimizer: every rank holds the state of some parameters."""

    releases_gradients = False

    def make_optimizer(self, kind: type[Optimizer], groups: optimizers.Groups, options: dict[str, Any]) -> Optimizer:
        return ZeroRedundancyOptimizer(groups, optimizer_class=kind, **options)


class Fsdp1(Learner):
    """FullyShardedDataParallel: flat shards."""

    needs_group = True
    releases_gradients = False
    orders_gradients = False
    autocasts = False

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


class Fsdp2(Learner):
    """fully_shard: DTensors."""

    needs_group = True
    autocasts = False

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


class Engine(Learner):
    """DeepSpeed, whose engine is model and optimizer in one, made from its config and the job's options."""

    needs_group = True
    releases_gradients = False
    orders_gradients = False
    autocasts = False

    module: Any

    def __init__(self, model: Transformer, ranks: Ranks, config: Config) -> None:
        """Makes the engine. Raises UserError if DeepSpeed refuses the config."""
        self._config = config
        self._device = ranks.device
        deepspeed = _import_deepspeed(ranks)
        tables = {name: buffer.clone() for name, buffer in model.named_buffers()}
        groups = optimizers.groups(config, model, optimizers.matrices(model))
        settings = engine_config.complete(config, ranks.world_size)
        try:
            self.module, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=settings)
        except ValueError as error:
            raise UserError(f"{config.deepspeed}: {error}") from error
        for name, buffer in model.named_buffers():  # cast to bfloat16 with the parameters
            buffer.data = tables[name].to(buffer.device)
        self.optimizer = self.module.basic_optimizer

    def held(self) -> AbstractContextManager[tuple[nn.Module, Optimizer]]:
        return opened(self.module)

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        yield
        if not last:
            self.module.step()  # here DeepSpeed only counts the accumulation steps

    def backward(self, loss: Tensor) -> None:
        self.module.backward(loss, scale_wrt_gas=False)

    def step(self) -> tuple[float | None, float]:
        seconds = runtime.timed(self._device, self.module.step)
        norm = self.module.get_global_grad_norm()
        return None if norm is None else float(norm), seconds


def _import_deepspeed(ranks: Ranks) -> Any:
    # DeepSpeed reads its rank from the environment, and takes a GPU if there is one and DS_ACCELERATOR is not set.
    os.environ["DS_ACCELERATOR"] = ranks.device.type
    os.environ.update(RANK=str(ranks.rank), LOCAL_RANK=str(ranks.local_rank), WORLD_SIZE=str(ranks.world_size))
    import deepspeed  # type: ignore[import-untyped]

    deepspeed.utils.logger.setLevel("WARNING")
    # DeepSpeed calls functions that PyTorch has renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if ranks.device.type == "cpu":
        # Compiling DeepSpeed's collectives over shared memory takes minutes; gloo's do as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


BACKENDS: dict[str, type[Learner]] = {
    "fsdp2": Fsdp2,
    "fsdp1": Fsdp1,
    "ddp": Ddp,
    "zero_redundancy": ZeroRedundancy,
    "deepspeed": Engine,
    "single": Learner,
}
