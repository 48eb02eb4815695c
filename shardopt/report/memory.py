"""``memory_report``: sums the bytes of an optimizer's parameters, gradients and state, by kind, on device and host."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields

from torch import Tensor
from torch.nn import Module
from torch.optim.optimizer import Optimizer

from shardopt.layout import UnknownShardError, engines_of, shard_of
from shardopt.optim.base import ShardedOptimizer
from shardopt.state.slice_spec import LOW_BITS


@dataclass
class MemoryUse:
    """Bytes allocated on accelerators, or in the host's memory, by what they are used for."""

    parameters: int = 0
    gradients: int = 0
    gradient_sums: int = 0  # partial sums over a step's micro-batches (shardopt.comm.ordered_gradients)
    state: int = 0  # codes, unquantized moments, step counts
    scales: int = 0
    master_weights: int = 0  # the bits of master weights that the parameters themselves do not have
    offload_buffers: int = 0

    @property
    def total(self) -> int:
        """Bytes of all uses together."""
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass
class MemoryReport:
    """Result of :func:`memory_report` on this rank.

    Attributes:
        numel: parameter elements that this rank holds.
        device: bytes on accelerators.
        host: bytes in the CPU's memory.
    """

    numel: int = 0
    device: MemoryUse = field(default_factory=MemoryUse)
    host: MemoryUse = field(default_factory=MemoryUse)

    def bytes_per_parameter(self) -> dict[str, float]:
        """Bytes per local parameter element on device and host together, by kind, and their "total"."""
        count = max(self.numel, 1)
        kinds = [f.name for f in fields(MemoryUse)]
        by_kind = {kind: (getattr(self.device, kind) + getattr(self.host, kind)) / count for kind in kinds}
        return {**by_kind, "total": (self.device.total + self.host.total) / count}

    def __str__(self) -> str:
        lines = [
            f"{self.numel:,} parameters on this rank",
            f"{'':16}{'device':>16}{'host':>16}{'bytes/param':>13}",
        ]
        for kind, per_parameter in self.bytes_per_parameter().items():
            device, host = getattr(self.device, kind), getattr(self.host, kind)
            lines.append(f"{kind:16}{device:16,}{host:16,}{per_parameter:13.3f}")
        return "\n".join(lines)


def memory_report(optimizer: Optimizer | Module) -> MemoryReport:
    """Adds up the allocated memory of an optimizer's parameters, gradients and state on this rank.

    State exists from the first step on.

    Args:
        optimizer: any torch optimizer; or a DeepSpeed engine, for which all ranks must call this.

    Raises:
        TypeError: the argument has no param groups, so it is no optimizer.
    """
    if isinstance(optimizer, Module) and (engines := engines_of(optimizer)) is not None:
        with engines.open(optimizer) as (_, inner):
            return memory_report(inner)
    if isinstance(optimizer, Module) or not hasattr(optimizer, "param_groups"):
        raise TypeError(f"got {type(optimizer).__name__}, expected an optimizer or a DeepSpeed engine")
    report = MemoryReport()
    seen: set[int] = set()

    def add(kind: str, tensor: Tensor) -> None:
        """Adds a tensor's whole storage to the report, once even if several tensors share it."""
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if address in seen or nbytes == 0:
            return
        seen.add(address)
        use = report.host if tensor.device.type == "cpu" else report.device
        setattr(use, kind, getattr(use, kind) + nbytes)

    owner = owner_of(optimizer)
    for group in optimizer.param_groups:
        for param in group["params"]:
            local = _local(param)
            report.numel += local.numel()
            add("parameters", local.detach())
            if param.grad is not None:
                add("gradients", _local(param.grad))
            for key, value in owner.state.get(param, {}).items():
                if isinstance(value, Tensor):
                    add(kind_of(key), _local(value))
    progress_module = sys.modules.get("shardopt.comm.progress")  # if nobody has imported it, no gradients are ordered
    if progress_module is not None:
        params = (param for group in optimizer.param_groups for param in group["params"])
        for progress in progress_module.progresses_of(params):
            for pairwise in progress.sums:
                for tensor in pairwise.tensors:
                    add("gradient_sums", tensor)
    if isinstance(owner, ShardedOptimizer):
        for device, nbytes in owner._internals.residency.buffer_bytes.items():
            (report.host if device.type == "cpu" else report.device).offload_buffers += nbytes
        if owner._internals.held_release is not None:
            report.host.gradients += owner._internals.held_release.host_bytes
    return report


def owner_of(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside of wrappers, whose ``state`` has the moments.

    Unwraps ZeroRedundancyOptimizer, and Accelerate's wrapper, which Trainer passes to callbacks.
    """
    for attribute in ("optimizer", "optim"):
        inner = getattr(optimizer, attribute, None)
        if isinstance(optimizer, Optimizer) and isinstance(inner, Optimizer):
            optimizer = inner
    return optimizer


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, as an ordinary tensor; the tensor itself if it is not sharded."""
    try:
        return shard_of(tensor).local(tensor)
    except UnknownShardError:  # without attach(), such tensors are themselves this rank's part
        return tensor


def kind_of(entry: str) -> str:
    """The field of :class:`MemoryUse` to which the bytes of a state entry of this name are added."""
    if entry == LOW_BITS:
        return "master_weights"
    return "scales" if entry.endswith("_scales") else "state"
