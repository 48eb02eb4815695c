"""Ordered sums under FSDP2: its reduce-scatter is replaced (PyTorch >= 2.9)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from shardopt.comm.progress import Progress, is_in_backward
from shardopt.comm.reduction import Reduction
from shardopt.comm.wire import Wire, WireFormat, rows_of
from shardopt.kernels.autograd import without_autograd
from shardopt.release.fsdp_groups import groups_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def mesh_of(group: Any) -> list[ProcessGroup]:
    """The ranks that own a shard each, and HSDP's ranks that hold copies of one shard."""
    groups = group.mesh_info.shard_process_group, getattr(group.mesh_info, "replicate_process_group", None)
    return [each for each in groups if each is not None]


class FsdpReducer:
    """The reduce-scatter of a module of fully_shard, which adds gradients up in the order of micro-batches."""

    def __init__(self, name: str, module: FSDPModule, progress: Progress, wire: WireFormat) -> None:
        self._name, self._progress, self._format = name, progress, wire
        (self._group,) = groups_of(module)
        assert isinstance(module, Module)
        self._shards, *replicas = mesh_of(self._group)
        self._replicas = replicas[0] if replicas else None
        self._sums: Reduction | None = None
        self._summed: list[Any] = []  # the parameters in the sums
        module.set_custom_reduce_scatter(self)  # type: ignore[arg-type]  # has what FSDP2 calls
        if self._shards.size() == 1:  # FSDP2 leaves the reduce-scatter out
            module.set_all_reduce_hook(lambda gradient: self(gradient, gradient, self._shards, None))
        module.set_gradient_divide_factor(1.0)  # the mean is taken here
        if hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True, recurse=False)
        module.register_forward_pre_hook(lambda *_: self._begin_forward())
        progress.at_end.append(self._end)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the reduction's input or output: from PyTorch's allocator, as without this object."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Adds a micro-batch of each rank, in the current stream, as FSDP2 would call its own reduce-scatter.

        The output becomes the mean over the step's micro-batches in its last backward pass, zeros before.
        """
        self._progress.begin()
        chunks = input_tensor.view(group.size(), -1)
        params = [param for param in self._group.fsdp_params if param.sharded_param.requires_grad]
        if self._sums is None or self._sums.wire.numel != chunks.shape[1] or params != self._summed:
            self._sums, self._summed = self._new_sums(params, chunks.shape[1]), params
        if not self._progress.is_behind(self._sums.counter):
            raise RuntimeError(
                f"{self._name!r}: got two gradients in one backward pass, expected one: FSDP2 reduces one for each use "
                "of a module; call fully_shard on the module that uses this one several times, not on this one"
            )
        self._sums.push(chunks, output_tensor)
        self._like = output_tensor.new_empty(0)  # for its dtype and device

    def _begin_forward(self) -> None:
        """A backward pass that raised leaves gradients behind, to which FSDP2 would add the next pass's."""
        if is_in_backward():
            return
        _check_reduction(self._name, self._group, 1.0)
        for param in self._group.fsdp_params:
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None

    def _new_sums(self, params: list[Any], numel: int) -> Reduction:
        """Sums of the gradients of FSDP2's parameters, of which a rank's chunk has so many elements."""
        is_late = self._sums is not None and self._progress.first > 0
        if is_late and params != self._summed:
            raise RuntimeError(
                f"{self._name!r}: got other trained parameters than in the step's first backward pass, expected the "
                "same ones in all of its passes; change requires_grad between steps only"
            )
        parts = []
        for param in params:
            shape, dim = list(param._orig_size), param.fsdp_placement.dim
            if dim != 0 and self._format == "e4m3":
                raise ValueError(
                    f"{self._name!r}: got a parameter sharded along dim {dim} and wire='e4m3', expected dim 0: its "
                    "blocks of 128 would be others on each number of ranks; use wire='bf16'"
                )
            shape[dim] = -(-shape[dim] // self._shards.size())
            parts.append(rows_of(shape))
        wire = Wire(self._format, parts)
        if wire.numel != numel or is_late:
            raise RuntimeError(
                f"{self._name!r}: got gradients of {numel} elements per rank, expected {wire.numel}: a parameter had "
                "none in this micro-batch, which needs a PyTorch whose FSDPModule has set_reduce_scatter_unused_params "
                "(2.13); use all of a module's parameters, or DistributedDataParallel"
            )
        return Reduction(self._progress, wire, self._shards, self._replicas)

    @without_autograd
    def _end(self) -> None:
        """Writes the mean where the last pass had no gradient here."""
        sums, progress = self._sums, self._progress
        if sums is None or not (progress.is_last and progress.is_behind(sums.counter) and sums.counter.tensors):
            return
        out = self._like.new_empty(sums.wire.numel)
        sums.finish(out)
        if self._replicas is not None:
            dist.all_reduce(out, group=self._replicas)
        start = 0
        for param, (rows, row_numel) in zip(self._summed, sums.wire.parts, strict=True):
            mean = torch.as_strided(out, param.sharded_size, param.contiguous_sharded_stride, start)
            start += rows * row_numel
            if param.sharded_param.grad is not None:  # zeros since an earlier pass
                param.sharded_param.grad._local_tensor.copy_(mean)


def _check_reduction(name: str, group: Any, factor: float | None) -> None:
    """Checks that FSDP2 reduces each pass's gradients, and does not divide them."""
    if group.gradient_divide_factor != factor:
        raise RuntimeError(
            f"{name!r}: got set_gradient_divide_factor({group.gradient_divide_factor}), expected no such call, as "
            "ordered gradients are means over the micro-batches; leave it out"
        )
    if not (group.reduce_grads and group.all_reduce_grads):
        raise RuntimeError(
            f"{name!r}: got set_requires_gradient_sync(False) or set_requires_all_reduce(False), expected True, as "
            "False adds gradients before they are sent; leave the call out, sums wait on their owners"
        )


def checked_meshes(model: Module, sharded: dict[str, FSDPModule]) -> dict[str, list[ProcessGroup]]:
    """The meshes of a model's modules; raises if FSDP2 does not reduce all of its gradients, or not in its own way."""
    meshes, managed = {}, set[int]()
    for name, module in sharded.items():
        groups = groups_of(module)
        if len(groups) > 1:
            raise ValueError(f"{name!r}: got parameters on {len(groups)} meshes, expected one; shard its modules apart")
        group = groups[0]
        comm = type(group._reduce_scatter_comm).__name__
        if comm != "DefaultReduceScatter" or group._all_reduce_hook is not None:
            raise RuntimeError(
                f"{name!r}: got a module whose reduction has been replaced ({comm}), expected FSDP2's own; call "
                "ordered_gradients once, and set no other communication hook"
            )
        _check_reduction(name, group, None)
        meshes[name] = mesh_of(group)
        managed.update(id(param.sharded_param) for param in group.fsdp_params)
    for name, param in model.named_parameters():
        if param.requires_grad and id(param) not in managed:
            raise ValueError(
                f"{name}: got a parameter outside of all modules that fully_shard made, expected all parameters within "
                "such modules, as others' gradients are not reduced; call fully_shard on the module that has it"
            )
    return meshes
