"""Steps during the backward pass, and held gradients, beside ``test_layouts.py``: what is alive, what is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import shardopt
from live_bytes import LiveBytes
from ranks.layouts import mesh_of
from ranks.loop import OFFLOADED, RELEASED, STEPS, Layers, Loop, batch, compare, mean_square
from ranks.models import Net, loss_of, make_batch, make_net
from ranks.offload import slow_steps
from ranks.pool import Pool
from shardopt.release import host_gradients


def _of_rank(model: Any, number: int) -> Tensor:
    """The loss of this rank's batch for a backward pass."""
    return mean_square(model, 10 * number + dist.get_rank())


def _of_all(model: Any, number: int) -> Tensor:
    return mean_square(model, 10 * number)


#: Whether the caller may finalize backward passes, in PyTorch 2.15, which also has the other options of these tests.
is_finalized = hasattr(FSDPModule, "finalize_backward")

# Steps during the backward pass ---------------------------------------------------------------------------------------


class Branches(Net):
    """A branch that only some ranks take, and a layer that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(66, 66)
        self.some = nn.Linear(66, 66)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if dist.get_rank() % 2:
            x = x + self.some(x)
        return super().forward(tokens) + x.mean()


def _net_loss(model: Any, number: int) -> Tensor:
    return loss_of(model, make_batch(number, dist.get_rank()))


def _without_gradients(loop: Loop) -> None:
    for step in range(STEPS):
        loop.backward(step)
        gradients = [param.grad for param in loop.model.parameters() if loop.held and param.grad is not None]
        assert not any(gradient.any() for gradient in gradients)
        loop.update()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Net, {"static_graph": True}),
        (Branches, {"find_unused_parameters": True}),
        *((Net, {"lazy_bucket_allocation": True, "batched_grad_copy": True}) for _ in range(is_finalized)),
    ],
)
def test_ddp(make: Callable[[], nn.Module], options: dict[str, Any], bucket_view: bool) -> None:
    """A parameter used by some ranks is stepped by all, with the same gradient; one that none uses is not stepped."""

    def make_replica() -> nn.Module:
        torch.manual_seed(0)
        return DistributedDataParallel(make(), bucket_cap_mb=0.05, gradient_as_bucket_view=bucket_view, **options)

    compare(_without_gradients, make_replica, loss=_net_loss, **RELEASED)


def _live_under_ddp(bucket_view: bool) -> int:
    """The most bytes that a backward pass takes at a time, beside DDP's buckets."""
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(LAYERS)))
    replica = DistributedDataParallel(model, bucket_cap_mb=0.06, gradient_as_bucket_view=bucket_view)
    optimizer = shardopt.AdamW8bit(model.parameters())
    shardopt.release_gradients(replica, optimizer)
    for _ in range(2):  # after the first pass DDP makes smaller buckets
        loss = replica(torch.randn(2, 128)).sum()
        with LiveBytes() as live:
            loss.backward()
        optimizer.step()
    return live.most


LAYERS = 8


@pytest.mark.parametrize("bucket_view", [False, True])
def test_ddp_keeps_no_gradients_beside_its_buckets(ranks: Pool, bucket_view: bool) -> None:
    """Beside that which is made just now."""
    gradient = 4 * 128 * 128
    assert all(gradient <= most < 3 * gradient for most in ranks.run(2, _live_under_ddp, bucket_view))


def _release(model: nn.Module) -> shardopt.GradientRelease:
    return shardopt.release_gradients(model, shardopt.AdamW8bit(model.parameters()))


def _ddp(net: nn.Module | None = None, **options: Any) -> Any:
    return DistributedDataParallel(net or make_net(), bucket_cap_mb=0.05, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket_view", [False, True])
def test_clipping_of_torch_is_refused_by_the_step(bucket_view: bool) -> None:
    model = _ddp(gradient_as_bucket_view=bucket_view)
    optimizer = shardopt.AdamW8bit(model.parameters())
    shardopt.release_gradients(model, optimizer)
    for clips in (False, True, False):
        loss_of(model, make_batch(0)).backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with pytest.raises(RuntimeError, match="got clipping while gradients are released"):
                optimizer.step()
        optimizer.step()
    assert all(param.grad is None for param in model.parameters())
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


def _backward_twice() -> None:
    model = _ddp()
    release = _release(model)  # ends once nobody has the optimizer
    for _ in range(2):
        loss_of(model, make_batch(0)).backward()
    release.remove()


def _join() -> None:
    model = _ddp()
    release = _release(model)
    with model.join():
        loss_of(model, make_batch(0)).backward()
    release.remove()


def _finalized_by_hand() -> None:
    model = _ddp()
    release = _release(model)
    model.require_manual_backward_finalization = True
    loss_of(model, make_batch(0)).backward()
    release.remove()


def _inner() -> None:
    model = _ddp()
    release = _release(model.module)
    loss_of(model.module, make_batch(0))
    loss_of(model, make_batch(0))
    release.remove()


def _hooked() -> None:
    model = _ddp()
    model.register_comm_hook(None, allreduce_hook)
    _release(model)


def _delayed() -> None:
    net = make_net()
    named = [("head.weight", net.head.weight)]
    _release(_ddp(net, delay_all_reduce_named_params=named, param_to_hook_all_reduce=net.embed.weight))


def _ordered() -> None:
    model = _ddp()
    shardopt.comm.ordered_gradients(model, micro_batches=2)
    _release(model)


def _fsdp1(inner: bool = False) -> None:
    model = FullyShardedDataParallel(make_net(), device_id=torch.device("cpu"))
    optimizer = shardopt.AdamW8bit(model.parameters())
    optimizer.attach(model)
    shardopt.release_gradients(model.module if inner else model, optimizer)


REFUSED: dict[str, Callable[[], None]] = {
    r"got gradient 2 since the last optimizer\.step\(\)": _backward_twice,
    r"got DistributedDataParallel with join\(\)": _join,
    "got a model that runs within DistributedDataParallel": _inner,
    "got DistributedDataParallel with a communication hook": _hooked,
    "got DistributedDataParallel with delay_all_reduce_named_params": _delayed,
    r"got a model with ordered_gradients": _ordered,
    "got a model of FSDP1": _fsdp1,
    "got parameters of flat shards": partial(_fsdp1, inner=True),
}
if is_finalized:
    REFUSED["got DistributedDataParallel with require_manual_backward_finalization"] = _finalized_by_hand


@pytest.mark.ranks(2)
def test_refused() -> None:
    for message, call in REFUSED.items():
        with pytest.raises(RuntimeError, match=message):
            call()


class Recurrent(nn.Module):
    """A layer that is called twice, or once more with an input that has no gradient, and one that is called once.

    Args:
        recompute: whether layers are computed again by checkpoints.
        constant: whether the layer is called once more.
    """

    def __init__(self, recompute: bool = False, constant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 64)
        self.mix, self.once = nn.Linear(64, 64), nn.Linear(64, 64)
        self.recompute, self.constant = recompute, constant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.constant:
            x = x + self.mix(torch.ones(64))
        for _ in range(2):
            x = x + self._call(self.mix, torch.tanh(x))
        return self._call(self.once, x)

    def _call(self, layer: nn.Module, x: Tensor) -> Tensor:
        called: Tensor = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return called


def _sharded(model: Recurrent, layers: bool) -> nn.Module:
    mesh = mesh_of((dist.get_world_size(),))
    if layers:
        for layer in (model.mix, model.once):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _steps(recompute: bool, constant: bool, layers: bool, passes: int) -> list[tuple[str, ...]]:
    """Trains with released gradients and without; returns the gradients that were left for ``step()`` in each step."""

    left: list[tuple[str, ...]] = []

    def loss(model: Any, number: int) -> Tensor:
        model.set_requires_gradient_sync(number % 10 == passes - 1)
        return _of_rank(model, number)

    def drive(loop: Loop) -> None:
        for step in range(STEPS):
            loop.backward(step)
            if loop.held:
                left.append(tuple(name for name, param in loop.model.named_parameters() if param.grad is not None))
            loop.update()

    def make() -> nn.Module:
        return _sharded(Recurrent(recompute, constant), layers)

    compare(drive, make, loss=loss, micro_batches=passes, brought=1, **RELEASED)
    return left


MIX = ("mix.weight", "mix.bias")
#: How layers are called, and which gradients are left; passes and the number of ranks.
CASES = [
    ((False, False, True, ()), 2, 3),
    ((False, True, True, MIX), 1, 1),  # no reduction says that it is the last
    ((False, True, False, ()), 1, 3),
    ((True, False, True, ()), 2, 3),
]


@pytest.mark.parametrize(("case", "passes", "world_size"), CASES)
def test_modules_that_are_used_several_times(ranks: Pool, case: Any, passes: int, world_size: int) -> None:
    """Each use is reduced; with several passes, which are not reduced but for the last, too."""
    recompute, constant, layers, left = case
    found = ranks.run(world_size, _steps, recompute, constant, layers, passes)
    assert found == [[left] * STEPS] * world_size


class Checkpointed(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, torch.tanh(x), use_reentrant=True)
        return x


@pytest.mark.ranks(2)
def test_ddp_with_reentrant_checkpoints() -> None:
    """DDP's last bucket, and its end, come in the backward pass of a checkpoint: others may not have been reduced."""

    def make() -> nn.Module:
        layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        for index, layer in enumerate(layers):
            nn.init.constant_(layer.weight, 0.01 * (index + 1))
            nn.init.zeros_(layer.bias)
        return DistributedDataParallel(Checkpointed(layers), static_graph=True, bucket_cap_mb=0.02)

    def loss(model: Any, number: int) -> Tensor:
        torch.manual_seed(10 * number + dist.get_rank())
        return model(torch.randn(4, 64, requires_grad=True)).square().mean()

    compare(make=make, loss=loss, **RELEASED)


# Held gradients -------------------------------------------------------------------------------------------------------


def _fsdp(model: Any, dtype: torch.dtype | None = None, prefetch: int = 0) -> nn.Module:
    options = {"mesh": mesh_of((dist.get_world_size(),)), "mp_policy": MixedPrecisionPolicy(dtype)}
    fully_shard([model.embed, model.head], **options)  # they share a weight
    for layer in model.layers:
        fully_shard(layer, **options)
    for index, layer in enumerate(model.layers):
        layer.set_modules_to_forward_prefetch(list(model.layers[index + 1 : index + 1 + prefetch]))
    return fully_shard(model, **options)


WAYS: dict[str, Callable[[Any], nn.Module]] = {
    "fsdp": _fsdp,
    "fsdp that prefetches": partial(_fsdp, prefetch=2),
    "fsdp of layers": lambda model: [fully_shard(layer) for layer in model.layers] and model,
    "ddp": lambda model: DistributedDataParallel(model, bucket_cap_mb=0.02),
    "ddp, views": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("fsdp", {"micro_batches": 2, "scale": 1024.0}),
        ("fsdp that prefetches", {}),
        ("fsdp of layers", {"micro_batches": 2, "loss": _of_all}),  # there the ranks are to agree by themselves
        # DDP reduces the sum of what it has reduced before and a new gradient, in other roundings than ours.
        ("ddp", {"micro_batches": 2, "scale": 1e38, "sums": True}),  # all ranks find the same infinities
        ("ddp, views", {"micro_batches": 2, "sums": True}),
    ],
)
def test_same_bits(way: str, options: dict[str, Any]) -> None:
    """Each pass is reduced; where the last one alone is, ``test_layouts.py`` shows it."""
    compare(make=lambda: WAYS[way](Layers()), **{"loss": _of_rank, "max_norm": 1e-3, **options})


@pytest.mark.ranks(2)
@pytest.mark.skipif(not is_finalized, reason="PyTorch finalizes by hand, and casts gradients, from 2.15 on")
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, RELEASED),
        (torch.float32, {"max_norm": 1e-3, "micro_batches": 2, "brought": 1}),
        (torch.bfloat16, {"max_norm": 1e-3}),
    ],
)
def test_passes_finalized_by_hand(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Only the last one of several is reduced; gradients are narrower than weights, if they are computed so."""
    micro_batches = options.get("micro_batches", 1)

    def make() -> nn.Module:
        model = _fsdp(Layers(), dtype)
        for param in model.parameters():
            param.grad_dtype = None
        return model

    def drive(loop: Loop) -> None:
        loop.model.set_manual_backward_finalization(True)
        for step in range(STEPS):
            for number in range(micro_batches):
                loop.model.set_requires_gradient_sync(number == micro_batches - 1)
                loop.loss(10 * step + number).backward()
            loop.model.finalize_backward(async_op=True).wait()
            assert {param.grad.dtype for param in loop.model.parameters() if param.grad is not None} <= {dtype}
            if loop.max_norm is not None:
                loop.clip()
            loop.update()

    compare(drive, make, loss=_of_rank, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("between", ["a method", "a layer", "the model"])
def test_what_is_gathered_by_hand(between: str) -> None:
    """Reads that are no forward pass of the model: what FSDP2 gathers is of after the step."""

    def make() -> nn.Module:
        model: Any = _fsdp(Layers())
        register_fsdp_forward_method(model, "embedded")
        return model

    def drive(loop: Loop) -> None:
        model: Any = loop.model
        for step in range(STEPS):
            loop.step(step)
            with torch.no_grad():
                if between == "a method":
                    loop.norms.append(model.embedded(batch(9)).clone())
                elif between == "a layer":
                    model.layers[1].unshard()
                else:
                    model.unshard(async_op=True)

    compare(drive, make, loss=_of_all, max_norm=1e-3)


class _Outer(nn.Module):
    """A model that is called by its part, so that no hook of its own forward pass waits for anything."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


@pytest.mark.ranks(2)
def test_buckets_are_not_overwritten_while_gradients_leave_them() -> None:
    begin_copy = host_gradients.begin_copy

    def late(to: Tensor, source: Tensor) -> Any:
        time.sleep(0.02)
        return begin_copy(to, source)

    def loss(model: Any, number: int) -> Tensor:
        return _of_rank(model.inner, number)

    with patch.object(host_gradients, "begin_copy", late):
        compare(make=lambda: _Outer(WAYS["ddp, views"](Layers())), loss=loss, micro_batches=2, sums=True, max_norm=1e-3)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


@pytest.mark.ranks(2)
def test_collectives_stay_in_the_thread_of_the_backward_pass() -> None:
    """Gradients that are reduced here come in another thread's way if that reduces them; one rank's is slow."""
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(_Block(), _Block(), _Block())
        for block in model:
            parallelize_module(block, mesh_of((2,)), plan)
        return model

    def loss(model: Any, number: int) -> Tensor:
        x = torch.randn((4, 8, 64), generator=torch.Generator().manual_seed(number))
        return model(x.chunk(2, 1)[dist.get_rank()]).square().mean()

    with slow_steps(0.02 * dist.get_rank()):
        compare(make=make, loss=loss, **OFFLOADED)
