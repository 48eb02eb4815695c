"""Runs of Lightning's Trainer on ranks of a pool: a small model on the CPU."""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import shardopt
from checkpoint_folder import contents

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "min_quantized_numel": 64}


def make_module(max_norm: float | None = None) -> Any:
    """A LightningModule that shards itself where it is given a device mesh, and clips by a norm where it is given."""
    from lightning.pytorch import LightningModule

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 48))

        def configure_model(self) -> None:
            if self.device_mesh is not None:
                for layer in (*self.layers, self.layers):
                    if list(layer.parameters()):
                        fully_shard(layer, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return (self.layers(batch) - batch * self.current_epoch).square().mean()

        def configure_gradient_clipping(self, optimizer: Any, *limits: Any, **named_limits: Any) -> None:
            if max_norm is not None:
                shardopt.clip_grad_norm_(self.parameters(), max_norm, optimizer=optimizer)

        def validation_step(self, batch: Tensor, index: int) -> None:
            self.log("loss", (self.layers(batch) - batch).square().mean())

        def configure_optimizers(self) -> Any:
            optimizer = shardopt.AdamW8bit(self.parameters(), **OPTIONS)
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)]

    return Net()


def one_batch() -> Any:
    """Batches that are equal on every rank: a mean over 2 or 4 of them is exact. A resumed epoch would begin anew."""
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.DataLoader(torch.randn(2, 48, generator=generator), batch_size=2)


def strategy_of(mode: str) -> Any:
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    if mode == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    if mode.startswith("fsdp1"):
        return fsdp1_on_the_cpu(mode)
    if mode.startswith("fsdp2"):
        return ModelParallelStrategy(
            data_parallel_size=dist.get_world_size(),
            tensor_parallel_size=1,
            save_distributed_checkpoint=mode == "fsdp2",
            process_group_backend="gloo",
        )
    return "auto"


def fsdp1_on_the_cpu(mode: str) -> Any:
    """FSDPStrategy, which would ask for an accelerator by its index."""
    from lightning.pytorch.strategies import FSDPStrategy

    FlatParamHandle.to_cpu = nullcontext  # parameters that are on the CPU would be freed there

    class OnTheCpu(FSDPStrategy):
        def _setup_model(self, model: nn.Module) -> nn.Module:
            return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)

    return OnTheCpu(
        process_group_backend="gloo",
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        state_dict_type="sharded" if mode == "fsdp1 sharded" else "full",
    )


def make_trainer(mode: str, folder: Path) -> Any:
    """A Trainer of 6 steps that saves after the third."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    return Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy_of(mode),
        plugins=[TorchElasticEnvironment()],
        max_epochs=6,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_epochs=3, save_top_k=-1)],
    )


def trained(mode: str, folder: Path, resume: Path | None = None, *, max_norm: float | None = None) -> dict[str, Any]:
    """Trains 6 steps, of which another run's folder may have the first 3, and returns the tensors of the end."""
    trainer = make_trainer(mode, folder)
    module = make_module(max_norm)
    trainer.fit(module, one_batch(), ckpt_path=None if resume is None else resume / "step=3.ckpt")
    assert trainer.global_step == 6
    return contents(trainer.strategy.model, trainer.optimizers[0])
