"""The DeepSpeed backend: an engine made from DeepSpeed's config, completed by the job's options."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm import engine_config, optimizers, runtime
from lm.errors import UserError
from lm.learner import Learner
from lm.networks import Network
from lm.options import Config
from lm.runtime import Ranks
from shardopt.sharding.deepspeed.engine import opened


def check(config: Config, world_size: int) -> None:
    """Raises UserError if DeepSpeed is not installed, or if the job's options cannot complete DeepSpeed's config."""
    if find_spec("deepspeed") is None:
        raise UserError("backend deepspeed: DeepSpeed is not installed: pip install 'shardopt[deepspeed]'")
    engine_config.complete(config, world_size)


def build(model: Network, ranks: Ranks, config: Config) -> Learner:
    """Makes the engine.

    Args:
        model: the bare model on the CPU.
        ranks: this rank.
        config: the options.

    Raises:
        UserError: DeepSpeed refuses the config.
    """
    deepspeed = _import_deepspeed(ranks)
    tables = {name: buffer.clone() for name, buffer in model.named_buffers()}
    groups = optimizers.groups(config, model, optimizers.matrices(model))
    settings = engine_config.complete(config, ranks.world_size)
    try:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=settings)
    except ValueError as error:
        raise UserError(f"{config.deepspeed}: {error}") from error
    for name, buffer in model.named_buffers():  # cast to bfloat16 with the parameters
        buffer.data = tables[name].to(buffer.device)
    return EngineLearner(engine, ranks.device)


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


class EngineLearner(Learner):
    """The learner of DeepSpeed, whose engine is model and optimizer in one."""

    def __init__(self, engine: Any, device: torch.device) -> None:
        self.module = engine
        self._engine = engine
        self._device = device

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._engine.basic_optimizer.param_groups
        return groups

    @property
    def parts(self) -> tuple[Any, ...]:
        return (self._engine,)

    def held(self) -> AbstractContextManager[tuple[nn.Module, Optimizer]]:
        return opened(self._engine)

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        yield
        if not last:
            self._engine.step()  # here DeepSpeed only counts the accumulation steps

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self) -> tuple[float | None, float]:
        runtime.synchronize(self._device)
        began = time.perf_counter()
        self._engine.step()
        runtime.synchronize(self._device)
        seconds = time.perf_counter() - began
        norm = self._engine.get_global_grad_norm()
        return None if norm is None else float(norm), seconds
