"""Ways in which the ranks of muon.py share a model, and counters of what they send and keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from decoder import Decoder
from exchange import shard as fsdp1

Wrap = Callable[[Decoder], nn.Module]
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("first", "second")[: len(sizes)])


def fsdp2(model: Decoder, over: DeviceMesh | None = None) -> Decoder:
    """Each layer is a unit."""
    for layer in model.layers:
        fully_shard(layer, mesh=over)
    fully_shard(model, mesh=over)
    return model


def tensor_parallel(model: Decoder, over: DeviceMesh) -> Decoder:
    plan: dict[str, Any] = {f"layers.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "gate", "up")}
    plan |= {f"layers.*.{name}": RowwiseParallel() for name in ("out", "down")}
    parallelize_module(model, over, plan)
    return model


def fsdp2_tensor_parallel(model: Decoder) -> Decoder:
    both = mesh(2, dist.get_world_size() // 2)
    return fsdp2(tensor_parallel(model, both["second"]), both["first"])


#: How a model is wrapped, and the numbers of ranks.
WAYS: dict[str, tuple[Wrap, tuple[int, ...]]] = {
    "plain": (lambda model: model, (1,)),
    "DDP": (DistributedDataParallel, (1, 2, 3, 4)),
    "FSDP2": (fsdp2, (1, 2, 3, 4)),
    "HSDP": (lambda model: fsdp2(model, mesh(2, dist.get_world_size() // 2)), (2, 4)),
    "TP": (lambda model: tensor_parallel(model, mesh(dist.get_world_size())), (1, 2, 3, 4)),
    "FSDP2 x TP": (fsdp2_tensor_parallel, (2, 4)),
    "FSDP1": (fsdp1, (1, 2, 3, 4)),
    "ZeroRedundancy": (DistributedDataParallel, (1, 2, 3, 4)),
}


def set_gradients(params: Iterable[Tensor], values: Iterable[Tensor], step: int = 0) -> None:
    """Gives each parameter a gradient whose elements depend on the elements of another tensor alone."""
    for param, value in zip(params, values, strict=True):
        param.grad = torch.remainder(value * 1021.0 + 0.618 * step, 1.0) - 0.5 if param.numel() else None


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The weights by name, gathered."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return _copies(model)
    return _copies(model)


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {
        name.removeprefix("module.").replace("_fsdp_wrapped_module.", ""): (
            param.full_tensor().detach() if isinstance(param, DTensor) else param.detach().clone()
        )
        for name, param in model.named_parameters()
    }


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives of all ranks that this rank issues, from Python or from PyTorch's C++.

    Attributes:
        calls: how many.
        sent: bytes that leave this rank: of an all-to-all, what is for others; of an all-gather of n bytes to R ranks,
            (R - 1) n; of a reduce-scatter of n bytes (R - 1) / R n; of an all-reduce twice that.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls, self.sent = 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensors call their collectives, and come here with plain tensors
        space, _, name = func.name().partition("::")
        if space in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.calls += 1
            self.sent += _sent(name, args)
        if func in _PRODUCTS:
            left, right = args[-2:]
            return left.new_zeros(left.shape[0], right.shape[1])
        return func(*args, **(kwargs or {}))


def _sent(name: str, args: Any) -> float:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if name == "alltoall_base_":
        _, x, _, _, splits, *_ = args
        own = splits[rank] * x.stride(0) * x.itemsize if splits else x.nbytes / ranks
        return float(x.nbytes - own)
    if name in ("_allgather_base_", "all_gather_into_tensor"):
        return float((ranks - 1) * args[name.startswith("_")].nbytes)
    if name in ("allreduce_", "all_reduce", "all_reduce_"):
        x = args[0][0] if isinstance(args[0], list) else args[0]
        return float(2 * (ranks - 1) / ranks * x.nbytes)
    if name in ("_reduce_scatter_base_", "reduce_scatter_tensor"):
        return float((ranks - 1) / ranks * args[name.startswith("_")].nbytes)
    raise RuntimeError(f"{name}: got a collective whose bytes are not counted, expected one of FSDP2's Muons")
