"""DistributedDataParallel: every rank holds all parameters, and the ranks can share the work of matrices."""

from __future__ import annotations

from torch.distributed.distributed_c10d import get_world_size
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from shardopt.layout import CopiedShard, assign, assigned
from shardopt.sharding.exchange import RanksExchange


def read_ddp(model: Module) -> None:
    """Says of the parameters of each DistributedDataParallel in a model which ranks hold copies."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            size = get_world_size(module.process_group)
            for name, param in module.module.named_parameters():
                if assigned(param) is None and name not in module.parameters_to_ignore and size > 1:
                    ranks = RanksExchange((module.process_group,), param.device.type)
                    assign(param, CopiedShard(tuple(param.shape), ranks, size))
