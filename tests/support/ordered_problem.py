"""A model to train by micro-batches, and the sums of their gradients as docs/gradients.md defines them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ranks.layouts import mesh_of

MICRO_BATCHES = 12
WIRES = ("fp32", "bf16", "e4m3")
BLOCK = 128


class Blocks(nn.Module):
    """Rows of whole blocks, of short ones, and too short for one; an odd dim 0; a layer that some batches leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 97)
        self.norm = nn.LayerNorm(97)
        self.down = nn.Linear(97, 130)
        self.extra = nn.Linear(130, 130)
        self.head = nn.Linear(130, 3, bias=False)

    def forward(self, x: Tensor, with_extra: bool = True, is_checkpointed: bool = False) -> Tensor:
        x = checkpoint(self._body, x, use_reentrant=False) if is_checkpointed else self._body(x)
        if with_extra:
            x = x + self.extra(x)
        return self.head(x)

    def _body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(self.norm(self.up(x))))


def make_model(seed: int = 0) -> Blocks:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Blocks()


def loss_of(
    model: nn.Module, number: int, step: int = 0, *, leaves_out: Sequence[int] = (), is_checkpointed: bool = False
) -> Tensor:
    """The mean loss of a numbered micro-batch; gradients of several orders of magnitude. Some leave a layer out."""
    generator = torch.Generator().manual_seed(100 * step + number)
    x = torch.randn(5, 128, generator=generator) * 10.0 ** (number % 3)
    return model(x, number not in leaves_out, is_checkpointed).square().mean()


def _fsdp(
    model: nn.Module, shape: tuple[int, ...] | None = None, layers: Sequence[str] = ("up", "extra"), **options: object
) -> nn.Module:
    mesh = mesh_of(shape, "replicas", "shards") if shape else mesh_of((dist.get_world_size(),))
    for module in (*map(model.get_submodule, layers), model):
        fully_shard(module, mesh=mesh, **options)
    return model


def _fsdp_mixed(model: Blocks) -> nn.Module:
    """FSDP2 in bfloat16, but for the norm, in one group; matrices have bfloat16 gradients, too (PyTorch 2.15)."""
    norm = {id(param) for param in model.norm.parameters()}
    policy = MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=lambda x: x.dtype if id(x) in norm else None)
    _fsdp(model, layers=(), mp_policy=policy)
    for param in model.parameters():
        if param.dim() > 1:
            param.grad_dtype = torch.bfloat16
    return model


#: Ways to wrap a model, by name.
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": partial(DistributedDataParallel, bucket_cap_mb=0.05),
    "ddp views": partial(DistributedDataParallel, bucket_cap_mb=0.05, gradient_as_bucket_view=True),
    "ddp static": partial(DistributedDataParallel, bucket_cap_mb=0.05, static_graph=True),
    "ddp unused": partial(DistributedDataParallel, bucket_cap_mb=0.05, find_unused_parameters=True),
    "ddp lazy": lambda model: DistributedDataParallel(
        model, bucket_cap_mb=0.05, find_unused_parameters=True, lazy_bucket_allocation=True, batched_grad_copy=True
    ),
    "fsdp": _fsdp,
    "fsdp kept": partial(_fsdp, reshard_after_forward=False),
    "fsdp whole": partial(_fsdp, layers=()),
    "fsdp offload": partial(_fsdp, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fsdp columns": partial(_fsdp, shard_placement_fn=lambda p: Shard(1) if p.shape[1:] == (128,) else None),
    "fsdp bf16": partial(_fsdp, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "fsdp bf16 sums": partial(_fsdp, mp_policy=MixedPrecisionPolicy(torch.bfloat16)),
    "fsdp fp16": partial(_fsdp, mp_policy=MixedPrecisionPolicy(torch.float16, torch.float16)),
    "fsdp mixed": _fsdp_mixed,
    "hsdp": lambda model: _fsdp(model, (2, dist.get_world_size() // 2)),
    "hsdp of 3": lambda model: _fsdp(model, (dist.get_world_size() // 3, 3)),
    "hsdp of 1": lambda model: _fsdp(model, (1, dist.get_world_size())),
}


can_replace_reduce_scatter = hasattr(FSDPModule, "set_custom_reduce_scatter")


def backward(model: nn.Module, step: int = 0, *, passes: int | None = None, **options: Any) -> None:
    """A step's backward passes, or the first few."""
    ranks = dist.get_world_size()
    for index in range(MICRO_BATCHES // ranks if passes is None else passes):
        loss_of(model, index * ranks + dist.get_rank(), step, **options).backward()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Gradients in full, by the names of the bare model."""
    return {name.removeprefix("module."): _full(param.grad) for name, param in model.named_parameters()}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): _full(param.detach()) for name, param in model.named_parameters()}


def _full(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def rounded(gradient: Tensor, wire: str) -> Tensor:
    """A gradient as it arrives, in float32: written another way than in the package."""
    rows = gradient.reshape(len(gradient), -1)
    count, row_numel = rows.shape
    if wire == "fp32" or (wire == "e4m3" and row_numel < BLOCK):
        return gradient.float()
    if wire == "bf16":
        return gradient.bfloat16().float()
    x = pad(rows.float(), (0, -row_numel % BLOCK)).view(count, -(-row_numel // BLOCK), BLOCK)
    finite = x.isfinite()
    largest = torch.where(finite, x.abs(), 0.0).amax(2, keepdim=True)
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent, mantissa in [.5, 1); 448 = .875 * 2^9
    exponent = (exponent - 9 + (mantissa > 0.875).int()).clamp(-124, 119)
    scale = torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64), exponent)
    codes = (x.double() / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn)  # exact, or far below the least code
    found = torch.where(finite, codes.double() * scale, torch.nan).float().flatten(1)[:, :row_numel]
    return found.reshape(gradient.shape)


@cache
def wanted_gradients(
    wire: str, step: int = 0, *, micro_batches: int = MICRO_BATCHES, leaves_out: tuple[int, ...] = ()
) -> dict[str, Tensor | None]:
    """The mean over a step's micro-batches, of a bare model's gradients."""
    terms: dict[str, list[Tensor]] = {}
    used: set[str] = set()
    for number in range(micro_batches):
        model = make_model()
        loss_of(model, number, step, leaves_out=leaves_out).backward()
        for name, param in model.named_parameters():
            used |= {name} if param.grad is not None else set()
            gradient = torch.zeros_like(param) if param.grad is None else param.grad
            terms.setdefault(name, []).append(rounded(gradient, wire))
    return {name: mean_of(each) if name in used else None for name, each in terms.items()}


def mean_of(terms: Sequence[Tensor]) -> Tensor:
    """Sums of 2^k terms that begin at multiples of 2^k, added from the latest to the oldest; no zero is negative."""
    total, end = None, len(terms)
    while end:
        size = end & -end  # the last run
        run = _sum_over(terms[end - size : end])
        total, end = run if total is None else run + total, end - size
    assert total is not None
    return total / len(terms) + 0.0


def _sum_over(terms: Sequence[Tensor]) -> Tensor:
    half = len(terms) // 2
    return _sum_over(terms[:half]) + _sum_over(terms[half:]) if half else terms[0]
