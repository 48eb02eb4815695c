"""The DeepSpeed backend: an engine made from DeepSpeed's config, completed by the job's options."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lm import engine_config, optimizers, runtime
from lm.errors import UserError
from lm.learner import Learner
from lm.model import Transformer
from lm.options import Config
from lm.runtime import Ranks
from shardopt.sharding.deepspeed.engine import opened


class Engine(Learner):
    """The learner of DeepSpeed, whose engine is model and optimizer in one."""

    module: Any

    def __init__(self, model: Transformer, ranks: Ranks, config: Config) -> None:
        """Makes the engine. Raises UserError if DeepSpeed refuses the config."""
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
        self._device = ranks.device

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
