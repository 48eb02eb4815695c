"""Backends: ways to spread a model and its optimizer over the ranks, which look alike to the training loop."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
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
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import shardopt
from lm import runtime
from lm.errors import UserError
from lm.model import Transformer
from lm.options import Config, read
from lm.runtime import Ranks
from shardopt.layout.names import parameter_names
from shardopt.sharding.deepspeed.engine import open_engine

Groups = list[dict[str, Any]]


def _matrices(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.ndim > 1}


def param_groups(config: Config, module: nn.Module, matrices: set[str]) -> Groups:
    """The param groups of a model: parameters with weight decay and without, and for Muon by who steps them.

    Args:
        config: the options.
        module: the wrapped model.
        matrices: names of the bare model's matrices; not all shards have the dimensions of their parameters.
    """
    names = parameter_names(module)
    if issubclass(shardopt.optim.OPTIMIZERS[config.optimizer], shardopt.Muon):
        return shardopt.muon_groups(module, lr=config.lr, adamw_lr=config.adamw_lr, no_decay="auto")
    return [
        {"params": [parameter for name, parameter in names.items() if name in matrices]},
        {"params": [parameter for name, parameter in names.items() if name not in matrices], "weight_decay": 0.0},
    ]


def _wrap_ddp(model: Transformer, ranks: Ranks, config: Config) -> nn.Module:
    devices = [ranks.device] if ranks.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


def _wrap_fsdp1(model: Transformer, ranks: Ranks, config: Config) -> nn.Module:
    policy = None
    if config.precision == "bf16-mixed":
        policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrap = partial(FullyShardedDataParallel, device_id=ranks.device, use_orig_params=True, mixed_precision=policy)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")  # on a single rank
        for index, block in enumerate(model.blocks):
            model.blocks[index] = wrap(block)
        return wrap(model)


def _wrap_fsdp2(model: Transformer, ranks: Ranks, config: Config) -> nn.Module:
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    policy = MixedPrecisionPolicy()
    if config.precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # By default the outermost module keeps its parameters gathered after a forward pass, until the backward pass;
    # evaluation has no backward pass.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return model


WRAPS: dict[str, Callable[[Transformer, Ranks, Config], nn.Module]] = {
    "fsdp2": _wrap_fsdp2,
    "fsdp1": _wrap_fsdp1,
    "ddp": _wrap_ddp,
    "single": lambda model, ranks, config: model,
}


class Learner:
    """A model and its optimizer on PyTorch's backends.

    Args:
        model: the bare model, on the CPU.
        ranks: this rank.
        config: the options.

    Attributes:
        module: the wrapped model, to call for a forward pass.
        optimizer: the optimizer, whose param groups have the learning rates.
    """

    module: Any
    optimizer: Any

    def __init__(self, model: Transformer, ranks: Ranks, config: Config) -> None:
        self._config = config
        self._device = ranks.device
        matrices = _matrices(model)
        self.module = WRAPS[config.backend](model.to(ranks.device), ranks, config)
        if config.ordered:
            shardopt.comm.ordered_gradients(self.module, micro_batches=config.micro_batches)
        groups, kind = param_groups(config, self.module, matrices), shardopt.optim.OPTIMIZERS[config.optimizer]
        try:
            self.optimizer = kind(groups, lr=config.lr, **config.options)  # type: ignore[call-arg]
        except (TypeError, ValueError) as error:
            raise UserError(f"optimizer {config.optimizer}: {error}") from error
        if config.backend == "fsdp1":
            self.optimizer.attach(self.module)  # parameters of FSDP1 do not refer to their modules

    def held(self) -> AbstractContextManager[tuple[nn.Module, Optimizer]]:
        """Yields the model and the optimizer, with all parameters and state that this rank holds."""
        return nullcontext((self.module, self.optimizer))

    def autocast(self) -> AbstractContextManager[None]:
        """A context for forward passes in the compute dtype, for backends that do not convert parameters."""
        mixed = self._config.precision == "bf16-mixed" and self._config.backend in ("ddp", "single")
        return torch.autocast(self._device.type, torch.bfloat16, enabled=mixed)

    def micro_step(self, last: bool) -> AbstractContextManager[Any]:
        """A context for one accumulation step's forward and backward pass; :meth:`step` follows the `last` one.

        Only the last backward pass exchanges gradients, unless they are ordered.
        """
        exchange = last or self._config.ordered
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(exchange)
        no_sync = getattr(self.module, "no_sync", nullcontext)  # DDP's and FSDP1's modules have it
        context: AbstractContextManager[Any] = nullcontext() if exchange else no_sync()
        return context

    def backward(self, loss: Tensor) -> None:
        """Accumulates the gradients of this rank's part of a step's loss."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> tuple[float | None, float]:
        """Clips the gradients, takes the optimizer's step, and frees the gradients.

        Returns:
            The gradients' norm before clipping, or None if no norm was computed; and the optimizer's seconds.
        """
        limit = self._config.clip
        norm = shardopt.clip_grad_norm_(self.module.parameters(), limit).item() if limit else None
        seconds = runtime.timed(self._device, self.optimizer.step)
        self.optimizer.zero_grad()
        return norm, seconds


class Engine(Learner):
    """DeepSpeed, whose engine is model and optimizer in one."""

    def __init__(self, model: Transformer, ranks: Ranks, config: Config) -> None:
        """Makes the engine. Raises UserError if DeepSpeed refuses its config."""
        self._config = config
        self._device = ranks.device
        settings = engine_settings(config, ranks.world_size)
        deepspeed = _import_deepspeed(ranks)
        tables = {name: buffer.clone() for name, buffer in model.named_buffers()}
        groups = param_groups(config, model, _matrices(model))
        try:
            self.module, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=settings)
        except ValueError as error:
            raise UserError(f"{config.deepspeed}: {error}") from error
        for name, buffer in model.named_buffers():  # cast to bfloat16 with the parameters
            buffer.data = tables[name].to(buffer.device)
        self.optimizer = self.module.basic_optimizer

    def held(self) -> AbstractContextManager[tuple[nn.Module, Optimizer]]:
        return open_engine(self.module)

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


def engine_settings(config: Config, world_size: int) -> dict[str, Any]:
    """DeepSpeed's config: the file's settings, such as ZeRO's stage, and the job's options.

    Raises:
        UserError: DeepSpeed is not installed, or the file is no config, or has a setting that the job's options decide.
    """
    path = config.deepspeed
    assert path is not None
    if find_spec("deepspeed") is None:
        raise UserError("backend deepspeed: DeepSpeed is not installed: pip install 'shardopt[deepspeed]'")
    settings = read(path, json.loads)
    name, params = shardopt.optim.OPTIMIZERS[config.optimizer].__name__, {"lr": config.lr, **config.options}
    if not name.endswith("bit"):  # DeepSpeed has that name itself
        name += "8bit"
        params.setdefault("codec", "fp32")
    bf16: dict[str, bool] = {"enabled": config.precision != "fp32"}
    if config.precision == "bf16":
        bf16.update(bf16_master_weights_and_grads=True, bf16_optimizer_states=True)
    given = {
        "train_batch_size": config.batch,
        "train_micro_batch_size_per_gpu": config.batch // (config.accumulate * world_size),
        "gradient_accumulation_steps": config.accumulate,
        "gradient_clipping": config.clip,
        "optimizer": {"type": name, "params": params},
        "bf16": bf16,
    }
    for place in sorted(settings.keys() & {*given, "scheduler", "fp16", "amp"}):
        raise UserError(f"{path}: got {place}, which the job's options decide; leave it out, see train.py --help")
    return {**settings, **given}


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
