"""One call that has a model's gradients summed in the order of micro-batches, on any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from shardopt.comm.ddp import DdpReducer
from shardopt.comm.fsdp2 import FsdpReducer, checked_meshes
from shardopt.comm.progress import Progress, progresses_of
from shardopt.comm.reduction import PlainReducer
from shardopt.comm.wire import WIRES, WireFormat
from shardopt.kernels.autograd import without_autograd
from shardopt.release.fsdp_groups import groups_of
from shardopt.sharding.rank_group import TorchRankGroup, device_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


@without_autograd
def ordered_gradients(model: Module, *, micro_batches: int, wire: WireFormat = "fp32") -> None:
    """Has a model's gradients summed in an order that does not depend on the number of ranks.

    To be called once, after ``fully_shard(model)`` or ``DistributedDataParallel(model)``, on all ranks. Then a step has
    ``micro_batches / ranks`` backward passes, each of a micro-batch's mean loss, undivided. Pass j of rank r has
    micro-batch ``j * ranks + r``, as ``DistributedSampler`` deals them out. Gradients are zeros until the
    step's last pass, then the mean over its micro-batches, with the same bits on any number of ranks that divides
    ``micro_batches``.

    Args:
        model: FSDP2's (PyTorch >= 2.9), on 1-D meshes and HSDP, also within other modules;
            DistributedDataParallel; or, in one process, any module.
        micro_batches: of a step, over all ranks.
        wire: the format that a micro-batch's gradient is rounded to before anything is added: ``"fp32"``, ``"bf16"``
            or ``"e4m3"`` with a scale per 128 elements of a row.

    Raises:
        ValueError: the number of ranks does not divide ``micro_batches``; the wire is unknown; ranks passed different
            arguments; modules are on meshes of different sizes; an embedding has sparse gradients; a parameter is
            outside of all modules that fully_shard made.
        TypeError: FSDP1, DeepSpeed, ``replicate``, or a bare module on several ranks.
        RuntimeError: PyTorch is too old to replace FSDP2's reduce-scatter, or the model has a communication hook
            already.
    """
    if wire not in WIRES:
        raise ValueError(f"got wire={wire!r}, expected one of {', '.join(map(repr, WIRES))}")
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ValueError(
                f"{name}: got {type(module).__name__} with sparse=True, expected dense gradients; make it with "
                "sparse=False"
            )
    sharded, replicas = _wrapped(model)
    ranks, groups = _ranks_of(model, sharded, replicas)
    if groups:
        _check_agreement(groups, micro_batches, wire)
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
    if sharded:
        for name, module in sharded.items():
            FsdpReducer(name, module, progress, wire)
    elif replicas:
        for replica in replicas:
            DdpReducer(replica, progress, wire)
    else:
        PlainReducer(model, progress, wire)


def _wrapped(model: Module) -> tuple[dict[str, FSDPModule], list[DistributedDataParallel]]:
    """The modules of FSDP2 that have parameters, by name, and those of DDP."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if any(base.__module__.partition(".")[0] == "deepspeed" for base in type(model).__mro__):
        raise TypeError(
            "got a DeepSpeed engine, which reduces gradients itself, expected FSDP2, DistributedDataParallel or one "
            'process; set "communication_data_type" in its config, for the same bits on one number of ranks alone'
        )
    modules = list(model.modules())
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        raise TypeError(
            "got FSDP1 (FullyShardedDataParallel), expected FSDP2, DistributedDataParallel or one process; use "
            "fully_shard(model)"
        )
    sharded = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    if any(base.__name__ == "ReplicateModule" for module in sharded.values() for base in type(module).__mro__):
        raise TypeError(
            "got replicate(), whose all-reduce cannot be replaced, expected fully_shard() or DistributedDataParallel; "
            "use DistributedDataParallel(model)"
        )
    if sharded and not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise RuntimeError(
            f"got PyTorch {torch.__version__}, expected 2.9 or newer, whose FSDP2 lets its reduce-scatter be replaced; "
            "install it, or use DistributedDataParallel(model)"
        )
    replicas = [module for module in modules if isinstance(module, DistributedDataParallel)]
    for replica in replicas:
        if replica._comm_hooks:
            raise RuntimeError(
                "got DistributedDataParallel with a communication hook (release_gradients, mixed_precision and "
                "ordered_gradients register one), expected one without a hook, as it can have only one; make it "
                "without a hook"
            )
    if sharded and replicas:
        raise TypeError("got both FSDP2 and DistributedDataParallel, expected only one; wrap the model by one of them")
    if not sharded and not replicas and dist.is_initialized() and dist.get_world_size() > 1:
        raise TypeError(
            f"got {type(model).__name__} without FSDP2 and without DistributedDataParallel on {dist.get_world_size()} "
            "ranks, expected a model wrapped by one of the two; call this after fully_shard(model) or "
            "DistributedDataParallel(model)"
        )
    return {name: module for name, module in sharded.items() if groups_of(module)}, replicas


def _ranks_of(
    model: Module, sharded: dict[str, FSDPModule], replicas: Sequence[DistributedDataParallel]
) -> tuple[int, list[ProcessGroup]]:
    """How many ranks there are, and their groups."""
    if replicas:
        group = replicas[0].process_group
        if any(replica.process_group is not group for replica in replicas):
            raise ValueError("got DistributedDataParallel on several process groups, expected one; wrap the model once")
        return group.size(), [group]
    if not sharded:
        return 1, []
    (first, mesh), *others = checked_meshes(model, sharded).items()
    ranks, rank = _place_in(mesh)
    for name, other in others:
        if _place_in(other) != (ranks, rank):
            raise ValueError(
                f"got {first!r} on {ranks} ranks and {name!r} on {_place_in(other)[0]}, expected one mesh for all "
                "modules: gradients of a smaller mesh (experts under expert parallelism) are sums over several "
                "micro-batches already; shard all modules over one mesh"
            )
    if len(mesh) == 2 and mesh[0].size() == 1 < ranks:
        raise ValueError(
            f"got HSDP on a mesh of {ranks} replicas with 1 shard, expected several shards: FSDP2 calls no "
            "reduce-scatter there; use DistributedDataParallel, or a mesh of one dim"
        )
    return ranks, mesh


def _place_in(mesh: Sequence[ProcessGroup]) -> tuple[int, int]:
    """The number of ranks, and that of this rank in the order in which DistributedSampler deals micro-batches out."""
    ranks, rank = 1, 0
    for group in mesh:
        rank += ranks * group.rank()
        ranks *= group.size()
    return ranks, rank


def _check_agreement(groups: Sequence[ProcessGroup], micro_batches: int, wire: str) -> None:
    settings = {"micro_batches": micro_batches, "wire": wire}
    of_ranks = TorchRankGroup(tuple(groups), device_of(groups[0])).gathered(json.dumps(settings, default=int).encode())
    for rank, message in of_ranks.items():
        if (other := json.loads(message)) != settings:
            raise ValueError(
                f"got {settings} here and {other} on rank {rank}, expected one for all ranks; call ordered_gradients "
                "with the same arguments everywhere"
            )
