"""Names and shards of the optimizer's parameters, for imports and single files."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from shardopt.layout import BlockGrid, FlatBuffer, FlatShard, Shard, shard_of
from shardopt.layout.names import parameter_names
from shardopt.optim import ShardedOptimizer
from shardopt.state.names import listed_name


def check_not_flat(optimizer: ShardedOptimizer) -> None:
    """Checks that the parameters are whole or DTensors.

    Raises:
        ValueError: a parameter is flat, as FSDP1's are.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(
        hasattr(param, "_fsdp_flattened") or isinstance(shard_of(param), FlatShard | FlatBuffer) for param in params
    ):
        raise ValueError(
            "got flat parameters, as those of FullyShardedDataParallel, expected whole ones or DTensors; do this with "
            "an optimizer of the bare model, and go on from there with shardopt.checkpoint.save and load"
        )


def names_of(model: Module, optimizer: ShardedOptimizer) -> dict[int, str]:
    """The names of a model's parameters by their ``id``.

    Raises:
        ValueError: the optimizer has parameters that the model does not have, or flat parameters.
    """
    check_not_flat(optimizer)
    names = {id(param): name for name, param in parameter_names(model).items()}
    for index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) not in names:
                raise ValueError(
                    f"got {listed_name(group, index, position)}, {tuple(param.shape)}, expected parameters of the "
                    "model only; pass the model that the optimizer was made for"
                )
    return names


def sharded(shard: Shard, whole: Tensor, scales_of: BlockGrid | None = None) -> Tensor:
    """This rank's part of a whole tensor, in the form of a state entry: wrapped as the parameter is.

    Args:
        shard: the shard of the parameter.
        whole: a tensor of the parameter's shape, possibly with trailing dimensions; the same on all ranks.
        scales_of: the block grid, if `whole` has the scales of a grid's blocks instead.
    """
    if scales_of is None:
        return shard.like_parameter(part_of(shard, whole))
    return shard.like_scales(_apart(shard.scales_part(whole, scales_of)), scales_of)


def part_of(shard: Shard, whole: Tensor) -> Tensor:
    """This rank's part of a whole tensor of the parameter's shape."""
    return _apart(shard.part(whole))


def _apart(part: Tensor) -> Tensor:
    """A part as a tensor that does not keep the memory of anything larger."""
    part = part.contiguous()
    return part.clone() if part.untyped_storage().nbytes() > part.nbytes else part
