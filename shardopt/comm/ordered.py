"""The function ``ordered_gradients``: makes a model's gradients independent of the number of ranks, bit for bit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from shardopt.comm.ddp import DdpReducer, PlainReducer
from shardopt.comm.fsdp2 import FsdpReducer, checked_mesh
from shardopt.comm.progress import Progress, progresses_of
from shardopt.comm.wire import WIRES, WireFormat
from shardopt.kernels.autograd import without_autograd
from shardopt.layout import meet
from shardopt.release.fsdp_groups import torch_groups
from shardopt.sharding.rank_group import TorchRankGroup, device_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

#: Names of wrapper classes that reduce gradients; only the last two let their reduction be replaced.
_WRAPPERS = {"DeepSpeedEngine", "FullyShardedDataParallel", "ReplicateModule", "DistributedDataParallel", "FSDPModule"}


@without_autograd
def ordered_gradients(model: Module, *, micro_batches: int, wire: WireFormat = "fp32") -> None:
    """Makes a model's gradients sums over micro-batches in an order that does not depend on the number of ranks.

    Call it once, after ``fully_shard(model)`` or ``DistributedDataParallel(model)``, on all ranks. Each rank then has
    ``micro_batches / ranks`` backward passes per step, each of one micro-batch's mean loss, which must not be divided
    by the number of micro-batches. Pass j of rank r is micro-batch ``j * ranks + r``, as ``DistributedSampler`` deals
    them out. Gradients are zeros until the step's last pass, which sets them to the mean over all micro-batches, with
    the same bits on any number of ranks that divides ``micro_batches``.

    Args:
        model: a model of FSDP2 (PyTorch >= 2.9) on a 1-D or HSDP mesh, also within other modules; a
            DistributedDataParallel module; or, in one process, any module.
        micro_batches: the number of micro-batches in a step, over all ranks.
        wire: the format to which each micro-batch's gradient is rounded before the sum: ``"fp32"``, ``"bf16"``, or
            ``"e4m3"`` with a scale per 128 elements of a row.

    Raises:
        ValueError: the number of ranks does not divide ``micro_batches``; the wire is unknown; ranks passed different
            arguments; modules are on different meshes; an embedding has sparse gradients; a parameter is not sharded.
        TypeError: FSDP1, DeepSpeed, ``replicate``, or a bare module on several ranks.
        RuntimeError: PyTorch is too old to replace FSDP2's reduce-scatter, or the model has a communication hook.
    """
    if wire not in WIRES:
        raise ValueError(f"got wire={wire!r}, expected one of {', '.join(map(repr, WIRES))}")
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ValueError(
                f"{name}: got {type(module).__name__} with sparse=True, expected dense gradients; make it with "
                "sparse=False"
            )
    sharded, replica = _wrapped(model)
    mesh = [] if replica is None else [replica.process_group]
    if sharded:
        mesh = checked_mesh(model, sharded, wire)
    ranks = math.prod(group.size() for group in mesh)
    if mesh:  # compared before micro_batches is checked: a rank that raised would leave the others waiting here
        settings = f"micro_batches={micro_batches}, wire={wire!r}"
        group = TorchRankGroup(tuple(mesh), device_of(mesh[0]))
        meet([group], "ordered_gradients")
        for rank, other in group.all_gather(settings.encode()).items():
            if other.decode() != settings:
                raise ValueError(
                    f"got {settings} here and {other.decode()} on rank {rank}, expected the same on all ranks; call "
                    "ordered_gradients with the same arguments everywhere"
                )
    if micro_batches < 1 or micro_batches % ranks:
        raise ValueError(
            f"got micro_batches={micro_batches} on {ranks} ranks, expected a multiple of {ranks}, as all ranks take "
            "equally many; change one of the numbers"
        )
    if any(progresses_of(model.parameters())):
        raise RuntimeError(
            "got a model whose gradients are ordered already, expected one call of ordered_gradients; leave the second "
            "call out"
        )
    progress = Progress(model, micro_batches, ranks)
    for name, module in sharded.items():
        FsdpReducer(name, module, progress, wire)
    if replica is not None:
        DdpReducer(replica, progress, wire)
    elif not sharded:
        PlainReducer(model, progress, wire)


def _wrapped(model: Module) -> tuple[dict[str, FSDPModule], DistributedDataParallel | None]:
    """The FSDP2 modules that have parameters, by name, or the DDP module; raises for any other way of training."""
    from torch.distributed.fsdp import FSDPModule

    modules = dict(model.named_modules())
    sharded = {name: module for name, module in modules.items() if isinstance(module, FSDPModule)}
    replicas = [module for module in modules.values() if isinstance(module, DistributedDataParallel)]
    classes = {base.__name__ for module in modules.values() for base in type(module).__mro__}
    wrappers = sorted(_WRAPPERS & classes)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    is_known = wrappers in (["DistributedDataParallel"], ["FSDPModule"]) or (not wrappers and ranks == 1)
    if not is_known or len(replicas) > 1:
        raise TypeError(
            f"got {type(model).__name__} with {' and '.join(wrappers) or 'no wrapper'} on {ranks} ranks, expected "
            "either FSDP2, or one DistributedDataParallel, or one process: others reduce gradients themselves, or not; "
            "use fully_shard(model) or DistributedDataParallel(model)"
        )
    if sharded and not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise RuntimeError(
            f"got PyTorch {torch.__version__}, expected 2.9 or newer, whose FSDP2 lets its reduce-scatter be replaced; "
            "install it, or use DistributedDataParallel(model)"
        )
    return {name: module for name, module in sharded.items() if torch_groups(module)}, next(iter(replicas), None)
