"""DistributedDataParallel: every rank holds all parameters, and the ranks can share the work of matrices."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.distributed_c10d import get_world_size
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from shardopt.layout import Copies
from shardopt.sharding.exchange import RanksExchange


def copies_in_ddp(model: Module) -> dict[Tensor, Copies]:
    """The parameters of each DistributedDataParallel in a model, with the ranks that hold them."""
    copies: dict[Tensor, Copies] = {}
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            size = get_world_size(module.process_group)
            for name, param in module.module.named_parameters():
                if name not in module.parameters_to_ignore and size > 1:
                    copies[param] = Copies(RanksExchange((module.process_group,), param.device), size)
    return copies
