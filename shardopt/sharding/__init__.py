"""Support for DTensor, FSDP1, DDP and DeepSpeed, which importing this package registers with shardopt.layout.

torch.distributed.tensor, whose import takes more than half a second, is imported only after a DTensor has been made.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torch import Tensor
from torch.nn import Module

from shardopt.layout import Engines, Kind, RankGroup, Shard, UnknownShardError, register
from shardopt.sharding.hooks import hooked_packages, install_hooks


class _DTensors(Kind):
    def shard_of(self, param: Tensor) -> Shard | None:
        module = sys.modules.get("torch.distributed.tensor")  # without this module no tensor is a DTensor
        if module is None or not isinstance(param, module.DTensor):
            return None
        from shardopt.sharding.dtensor import shard_of_dtensor

        return shard_of_dtensor(param)


class _FSDP1(Kind):
    def shard_of(self, param: Tensor) -> Shard | None:
        if getattr(param, "_fsdp_flattened", False):  # no shard was assigned, else layout.shard_of had returned it
            raise UnknownShardError(
                "got a parameter of FullyShardedDataParallel that does not say which elements it holds, expected one "
                "that does; import shardopt before wrapping the model, or call optimizer.attach(model) once after "
                "wrapping the model, before the first step and before loading state"
            )
        return None

    def read_model(self, model: Module) -> None:
        if "torch.distributed.fsdp" in sys.modules:  # without this module no model is FSDP1's
            from shardopt.sharding.fsdp1 import read_fsdp1

            read_fsdp1(model)


class _DDP(Kind):
    def copies_in(self, model: Module) -> Mapping[Tensor, RankGroup]:
        from torch.nn.parallel import DistributedDataParallel

        from shardopt.sharding.rank_group import TorchRankGroup

        copies: dict[Tensor, RankGroup] = {}
        for module in model.modules():
            if isinstance(module, DistributedDataParallel) and module.process_group.size() > 1:
                for name, param in module.module.named_parameters():
                    if name not in module.parameters_to_ignore:
                        copies[param] = TorchRankGroup((module.process_group,), param.device)
        return copies


class _DeepSpeed(Kind):
    def engines_of(self, model: Module) -> Engines | None:
        if "deepspeed.runtime.engine" not in sys.modules:  # without this module no model is in an engine
            return None
        from shardopt.sharding.deepspeed.engine import copy_masters, engine_of, has_optimizer, open_engine

        return None if engine_of(model) is None else Engines("DeepSpeed", has_optimizer, open_engine, copy_masters)


class _Checkpointable(Kind):
    def shard_of(self, param: Tensor) -> Shard | None:
        whole = tuple(getattr(param, "global_shape", param.shape))
        if hasattr(param, "global_offsets") and whole != param.shape:
            raise UnknownShardError(
                f"got a shard of a tensor of shape {whole}, as its attributes say (torch's CheckpointableTensor), "
                "expected a DTensor, which also says which ranks have the rest; make one by DTensor.from_local"
            )
        return None


for _kind in (_DTensors(), _FSDP1(), _DDP(), _DeepSpeed(), _Checkpointable()):
    register(_kind)

install_hooks(hooked_packages())
