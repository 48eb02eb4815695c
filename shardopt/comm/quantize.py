"""One call that has a wrapped model's gradients reduced in 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from shardopt.comm.all_reduce import all_reduce_8bit
from shardopt.comm.reduce_scatter import ReduceScatter8bit

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def quantize_gradients(model: Module) -> None:
    """Has the gradients of a model reduced in 8 bits: half of the bytes that bfloat16 takes on the wire.

    To be called once, after ``fully_shard(model)`` or ``DistributedDataParallel(model)``, on all ranks. Gradients then
    differ from those of other numbers of ranks by more than their order of summation (2 to 4% of their mean
    magnitude), and results have the same bits on any number of ranks no more. HSDP: the reduce-scatter within the
    shard group has 8 bits, the all-reduce between replicas stays PyTorch's. Optimizer, clipping and gradient scaling
    see float gradients, as before.

    Args:
        model: FSDP2's (PyTorch >= 2.9), also within other modules, or DistributedDataParallel.

    Raises:
        TypeError: FSDP1, DeepSpeed, ``replicate``, or a model that is not wrapped at all.
        RuntimeError: PyTorch is too old to replace FSDP2's reduce-scatter, or the DistributedDataParallel has a
            communication hook.
        ValueError: a module has parameters on several meshes, for which FSDP2 takes no reduce-scatter, or an embedding
            has sparse gradients.
    """
    sharded, replicas = _wrapped(model)
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ValueError(
                f"{name}: got {type(module).__name__} with sparse=True, expected dense gradients, for 8 bits; "
                "make it with sparse=False"
            )
    for replica in replicas:
        _check_hook(replica)
    for module in sharded:
        module.set_custom_reduce_scatter(ReduceScatter8bit())  # type: ignore[arg-type]  # has what FSDP2 calls
    for replica in replicas:
        replica.register_comm_hook(replica.process_group, all_reduce_8bit)


def _wrapped(model: Module) -> tuple[list[FSDPModule], list[DistributedDataParallel]]:
    """The modules of FSDP2 and of DDP."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if any(base.__module__.partition(".")[0] == "deepspeed" for base in type(model).__mro__):
        raise TypeError(
            "got a DeepSpeed engine, expected FSDP2 or DistributedDataParallel: ZeRO reduces gradients itself; set "
            '"zero_quantized_gradients" in its config, or "communication_data_type"'
        )
    modules = list(model.modules())
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        raise TypeError(
            "got FSDP1 (FullyShardedDataParallel), expected FSDP2 or DistributedDataParallel: PyTorch gives "
            "FSDP1 up for FSDP2, so that 8 bits are built for the latter alone; use fully_shard(model)"
        )
    sharded: list[FSDPModule] = [module for module in modules if isinstance(module, FSDPModule)]
    if any(base.__name__ == "ReplicateModule" for module in sharded for base in type(module).__mro__):
        raise TypeError(
            "got replicate(), expected fully_shard() or DistributedDataParallel: replicate() all-reduces, and PyTorch "
            "has no way to replace that; use DistributedDataParallel(model)"
        )
    if sharded and not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise RuntimeError(
            f"got PyTorch {torch.__version__}, expected 2.9 or newer, whose FSDP2 lets its reduce-scatter be replaced; "
            "install one, or use DistributedDataParallel(model)"
        )
    replicas = [module for module in modules if isinstance(module, DistributedDataParallel)]
    if not sharded and not replicas:
        raise TypeError(
            f"got {type(model).__name__} without FSDP2 and without DistributedDataParallel, expected one of them; call "
            "this after fully_shard(model) or DistributedDataParallel(model)"
        )
    return sharded, replicas


def _check_hook(replica: DistributedDataParallel) -> None:
    if replica._comm_hooks:
        raise RuntimeError(
            "got DistributedDataParallel with a communication hook (release_gradients and mixed_precision register "
            "one), expected none: it can have no second; make it without"
        )
