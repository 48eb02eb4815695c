"""Ordered gradient sums under FSDP2, in a custom reduce-scatter that replaces FSDP2's own (PyTorch >= 2.9)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from shardopt.comm.progress import Progress
from shardopt.comm.reduction import Reduction
from shardopt.comm.wire import WireFormat
from shardopt.release.fsdp_groups import torch_groups

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def _mesh_of(group: Any) -> list[ProcessGroup]:
    """The process group over which a parameter group is sharded, and with HSDP that of the replicas of a shard."""
    groups = [group.mesh_info.shard_process_group, getattr(group.mesh_info, "replicate_process_group", None)]
    return list(filter(None, groups))


class FsdpReducer:
    """The custom reduce-scatter of one FSDP2 module, which sums gradients in the order of micro-batches."""

    def __init__(self, name: str, module: FSDPModule, progress: Progress, wire: WireFormat) -> None:
        self._name, self._progress, self._format = name, progress, wire
        (self._group,) = torch_groups(module)
        assert isinstance(module, Module)
        self._mesh = _mesh_of(self._group)
        self._reduction: Reduction | None = None  # of this step, or of the last one before this step's first pass
        self._trained: list[Any] = []  # the trained parameters of this step's first pass, and so of all its passes
        module.set_custom_reduce_scatter(self)  # type: ignore[arg-type]  # has what FSDP2 calls
        if self._mesh[0].size() == 1:  # then FSDP2 calls no reduce-scatter, but this hook
            module.set_all_reduce_hook(lambda gradient: self(gradient, gradient, self._mesh[0], None))
        module.set_gradient_divide_factor(1.0)  # Reduction divides, once, after the last micro-batch
        if hasattr(module, "set_reduce_scatter_unused_params"):  # PyTorch 2.13: zeros for unused parameters
            module.set_reduce_scatter_unused_params(True, recurse=False)
        module.register_forward_pre_hook(lambda *_: self._begin_forward())

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates an ordinary tensor for the reduce-scatter's input or output, as FSDP2 asks of custom ones."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Replaces FSDP2's reduce-scatter by :meth:`Reduction.reduce_scatter`; ignores ``op`` and ``async_op``."""
        self._progress.begin_pass()
        chunks = input_tensor.view(group.size(), -1)
        params = self._group.fsdp_params
        order = getattr(self._group, "_reduce_scatter_param_indices", range(len(params)))  # PyTorch 2.15: by grad_dtype
        trained = [params[index] for index in order if params[index].sharded_param.requires_grad]
        if self._reduction is None or self._reduction.sum.next_term == 0:  # the first pass of a step
            cuts = ((param._orig_size, param.fsdp_placement.dim) for param in trained)
            shapes = [(size[dim], size.numel() // max(size[dim], 1)) for size, dim in cuts]  # a row per index in dim
            self._reduction, self._trained = Reduction(self._progress, self._format, shapes, self._mesh), trained
        if trained != self._trained or self._reduction.wire.numel != chunks.shape[1]:  # the latter: one is missing
            raise RuntimeError(
                f"{self._name!r}: got gradients of {chunks.shape[1]} elements per rank, expected "
                f"{self._reduction.wire.numel}: requires_grad was changed within a step, or a parameter had no "
                "gradient in this micro-batch, which needs a PyTorch whose FSDPModule has "
                "set_reduce_scatter_unused_params (2.13); use all of a module's parameters, or DistributedDataParallel"
            )
        if not self._progress.is_missing_in(self._reduction.sum):
            raise RuntimeError(
                f"{self._name!r}: got two gradients in one backward pass, expected one: FSDP2 reduces one for each use "
                "of a module; call fully_shard on the module that uses this one several times, not on this one"
            )
        self._reduction.reduce_scatter(chunks, output_tensor)

    def _begin_forward(self) -> None:
        """Checks that FSDP2's options are unchanged, and drops gradients that a failed pass has left unreduced."""
        if torch._C._current_graph_task_id() != -1:  # within a backward pass: activation checkpointing recomputes
            return
        _check_options(self._name, self._group, 1.0)
        for param in self._group.fsdp_params:  # FSDP2 would add the next gradients to the failed pass's
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None


def _check_options(name: str, group: Any, factor: float | None) -> None:
    """Checks that FSDP2 reduces gradients in each backward pass, and divides by ``factor`` (None: its default)."""
    context = group.modules[0]._get_fsdp_state()._state_ctx
    is_manual = getattr(context, "manual_backward_finalization", False)  # PyTorch 2.15
    if group.gradient_divide_factor != factor or not (group.reduce_grads and group.all_reduce_grads) or is_manual:
        raise RuntimeError(
            f"{name!r}: got set_gradient_divide_factor({group.gradient_divide_factor}), set_requires_gradient_sync("
            f"{group.reduce_grads}), set_requires_all_reduce({group.all_reduce_grads}) and "
            f"set_manual_backward_finalization({is_manual}), expected {factor}, True, True and False: sums wait on "
            "their owners, and are divided once, within the last backward pass; leave such calls out"
        )


def checked_mesh(model: Module, sharded: dict[str, FSDPModule], wire: WireFormat) -> list[ProcessGroup]:
    """The mesh of all FSDP2 modules; raises if meshes differ, reductions are customized, or parameters unsharded."""
    groups = {name: _checked_group(name, module, wire) for name, module in sharded.items()}
    managed = {id(param.sharded_param) for group in groups.values() for param in group.fsdp_params}
    for name, param in model.named_parameters():
        if param.requires_grad and id(param) not in managed:
            raise ValueError(
                f"{name}: got a parameter outside of all modules that fully_shard made, expected all parameters within "
                "such modules, as others' gradients are not reduced; call fully_shard on the module that has it"
            )
    first, mesh = next((name, _mesh_of(group)) for name, group in groups.items())
    expected = [dist.get_process_group_ranks(group) for group in mesh]
    for name, group in groups.items():
        ranks = [dist.get_process_group_ranks(each) for each in _mesh_of(group)]
        only_replicates = len(ranks[0]) == 1 and len(ranks[-1]) > 1
        if ranks != expected or only_replicates:
            raise ValueError(
                f"{name!r}: got a mesh of ranks {ranks}, expected that of {first!r}, {expected}, and several shards if "
                "there are replicas: gradients of a smaller mesh (experts under expert parallelism) are sums over "
                "several micro-batches already, and FSDP2 calls no reduce-scatter for a single shard; shard all "
                "modules over one mesh, or use DistributedDataParallel"
            )
    return mesh


def _checked_group(name: str, module: FSDPModule, wire: WireFormat) -> Any:
    """An FSDP2 module's only parameter group; raises if :class:`FsdpReducer` cannot replace its reduction."""
    group, *others = torch_groups(module)
    if others:
        raise ValueError(f"{name!r}: got parameters on {1 + len(others)} meshes, expected one; shard its modules apart")
    comm = type(group._reduce_scatter_comm).__name__
    if comm != "DefaultReduceScatter" or group._all_reduce_hook is not None:
        raise RuntimeError(
            f"{name!r}: got a module whose reduction has been replaced ({comm}), expected FSDP2's own; call "
            "ordered_gradients once, and set no other communication hook"
        )
    _check_options(name, group, None)
    if wire == "e4m3" and any(param.fsdp_placement.dim for param in group.fsdp_params):
        raise ValueError(
            f"{name!r}: got a parameter sharded along another dim than 0 and wire='e4m3', expected dim 0: its "
            "blocks of 128 would be others on each number of ranks; use wire='bf16'"
        )
    return group
