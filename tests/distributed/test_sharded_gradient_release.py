"""Steps during the backward pass beside ``test_layouts.py``: DDP's buckets, what is alive, and what is refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import shardopt
from helpers import RULES
from ranks.layouts import mesh_of
from ranks.models import WAYS, Net, loss_of, make_batch, make_net, named_parameters
from ranks.pool import Pool
from ranks.snapshot import assert_same, entries, local
from shardopt.optim import ShardedOptimizer
from shardopt.release.ddp_buckets import BucketHook, bucket_hook

STEPS = 3
BF16 = torch.bfloat16


class Pair:
    """One model wrapped twice, with released gradients and with ordinary steps."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module], model: nn.Module, rule: str, **options: Any) -> None:
        self.models = tuple(wrap(m) for m in (model, copy.deepcopy(model)))
        self.released, self.ordinary = (
            RULES[rule].make(m.parameters(), **{"min_quantized_numel": 64, **options}) for m in self.models
        )
        self.release = shardopt.release_gradients(self.models[0], self.released)

    def both(self) -> zip[tuple[nn.Module, ShardedOptimizer]]:
        return zip(self.models, (self.released, self.ordinary), strict=True)

    def run(self, steps: int = STEPS, freed: bool = True) -> None:
        for step in range(steps):
            tokens = make_batch(step, dist.get_rank())
            for model, optimizer in self.both():
                loss_of(model, tokens).backward()
                if optimizer is self.released:
                    assert all((param.grad is None) == freed for param in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
            self.compare()

    def compare(self) -> None:
        """Both are sharded alike: each rank compares its own."""
        got, expected = (entries(named_parameters(model), optimizer) for model, optimizer in self.both())
        assert_same({name: local(x) for name, x in got.items()}, {name: local(x) for name, x in expected.items()})


@pytest.mark.ranks(2)
def test_few_gradients_live_at_once() -> None:
    model = WAYS["fsdp"](make_net())
    params = list(model.parameters())
    live: list[int] = []
    for param in params:
        param.register_post_accumulate_grad_hook(lambda _: live.append(sum(p.grad is not None for p in params)))
    optimizer = shardopt.AdamW8bit(params)
    shardopt.release_gradients(model, optimizer)
    loss_of(model, make_batch(0, dist.get_rank())).backward()
    assert live == [1] * len(params)


@pytest.mark.ranks(2)
def test_nonfinite_gradients() -> None:
    """After the reduction NaN is in the gradients of all ranks."""
    pair = Pair(WAYS["fsdp"], make_net(), "adamw")
    for model, optimizer in pair.both():
        loss = loss_of(model, make_batch(0, dist.get_rank()))
        (loss * torch.nan if dist.get_rank() == 1 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    pair.compare()
    assert pair.released.nonfinite_count == pair.ordinary.nonfinite_count > 20_000


@pytest.mark.ranks(2)
def test_values_that_the_backward_pass_still_needs() -> None:
    mesh = mesh_of((dist.get_world_size(),))
    model = nn.ParameterDict({"weight": distribute_tensor(torch.randn(64, 64), mesh, (Shard(0),))})
    x = distribute_tensor(torch.randn(2, 64), mesh, (Replicate(),)).requires_grad_(True)
    weight = model["weight"]
    optimizer = shardopt.AdamW8bit([weight])
    shardopt.release_gradients(model, optimizer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (torch.tanh(x @ weight.detach()) @ weight).sum().backward()


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


def _ddp(model: str, options: dict[str, Any], rule: str, dtype: torch.dtype, own: dict[str, Any]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = {"net": Net, "branches": Branches}[model]().to(dtype)
    pair = Pair(lambda m: DistributedDataParallel(m, bucket_cap_mb=0.05, **options), net, rule, **own)
    pair.run()
    pair.release.remove()
    loss_of(pair.models[0], make_batch(9)).backward()
    assert any(param.grad is not None for param in pair.models[0].parameters())
    pair.released.zero_grad()
    pair.run(freed=False, steps=2) if model == "net" else None
    pair.release = shardopt.release_gradients(pair.models[0], pair.released)
    pair.run(steps=2)


@pytest.mark.parametrize(
    ("model", "options", "bucket_view", "rule", "dtype", "own"),
    [
        ("net", {}, True, "adamw", torch.float32, {}),
        ("net", {"static_graph": True}, False, "lion", BF16, {"stochastic_rounding": True}),
        ("net", {"find_unused_parameters": True}, True, "lion", BF16, {"master_weight_bits": 24}),
        # One used by some ranks is stepped by all, with the same gradient; one that none uses is not stepped.
        *(("branches", {"find_unused_parameters": True}, view, "adamw", torch.float32, {}) for view in (False, True)),
    ],
    ids=str,
)
def test_ddp(
    ranks: Pool,
    model: str,
    options: dict[str, Any],
    bucket_view: bool,
    rule: str,
    dtype: torch.dtype,
    own: dict[str, Any],
) -> None:
    ranks.run(3, _ddp, model, {**options, "gradient_as_bucket_view": bucket_view}, rule, dtype, own)


@pytest.mark.ranks(2)
def test_ddp_with_two_optimizers() -> None:
    """And parameters that none of them has: their gradients stay."""
    models = [DistributedDataParallel(make_net(), bucket_cap_mb=0.05) for _ in range(2)]
    optimizers = []
    for model in models:
        params = list(model.parameters())
        optimizers.append([RULES["adamw"].make(params[::3]), RULES["lion"].make(params[1::3])])
    for optimizer in optimizers[0]:
        shardopt.release_gradients(models[0], optimizer)
    for step in range(STEPS):
        for model, own in zip(models, optimizers, strict=True):
            loss_of(model, make_batch(step, dist.get_rank())).backward()
            kept = [param.grad is not None for param in model.parameters()]
            assert kept == ([False, False, True] * 5)[: len(kept)] or model is models[1]
            for optimizer in own:
                optimizer.step()
            model.zero_grad()
    assert_same(models[0].state_dict(), models[1].state_dict())


def _live_under_ddp(bucket_view: bool) -> list[int]:
    """Per complete gradient, and at the end, how many gradients lie apart from DDP's buckets."""
    layers = 8
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(layers)))
    replica = DistributedDataParallel(model, bucket_cap_mb=0.06, gradient_as_bucket_view=bucket_view)
    params = list(model.parameters())
    optimizer = shardopt.AdamW8bit(params)
    shardopt.release_gradients(replica, optimizer)
    replica(torch.randn(2, 128)).sum().backward()  # after the first one DDP makes smaller buckets
    optimizer.step()
    buckets: set[int] = set()
    apart: list[int] = []

    def reduce(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buckets.add(bucket.buffer().untyped_storage().data_ptr())
        return BucketHook.reduce(hook, bucket)

    def look(_: Tensor) -> None:
        gradients = [param.grad for param in params if param.grad is not None]
        apart.append(sum(g.untyped_storage().data_ptr() not in buckets for g in gradients))

    hook = bucket_hook(replica)
    step = hook._step
    hook.reduce = reduce  # type: ignore[method-assign]
    hook._step = lambda: (look(params[0]), step())[1]  # type: ignore[method-assign]
    for param in params:
        param.register_post_accumulate_grad_hook(look)
    replica(torch.randn(2, 128)).sum().backward()
    assert len(apart) - 1 == len(buckets) == layers
    return apart


@pytest.mark.parametrize("bucket_view", [False, True])
def test_ddp_keeps_no_gradients_beside_its_buckets(ranks: Pool, bucket_view: bool) -> None:
    """Beside that of which a hook of the user's, before DDP's, has just been told."""
    for apart in ranks.run(2, _live_under_ddp, bucket_view):
        assert max(apart) <= 1
        assert apart[-1] == 0


def _raises(error: type[Exception], text: str, function: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(error, match=re.escape(text)):
        function(*args)


def _release(model: nn.Module) -> shardopt.GradientRelease:
    return shardopt.release_gradients(model, shardopt.AdamW8bit(model.parameters()))


def _backward_twice(model: nn.Module) -> None:
    _release(model)
    for _ in range(2):
        loss_of(model, make_batch(0)).backward()


def _join(model: nn.Module) -> None:
    _release(model)
    assert isinstance(model, DistributedDataParallel)
    with model.join():
        loss_of(model, make_batch(0)).backward()


def _inner(model: nn.Module) -> None:
    release = _release(model.module)  # ends once nobody has the optimizer
    loss_of(model.module, make_batch(0))
    loss_of(model, make_batch(0))
    release.remove()


def _hooked(model: nn.Module) -> None:
    assert isinstance(model, DistributedDataParallel)
    model.register_comm_hook(None, allreduce_hook)
    _release(model)


def _built_in_hook(model: nn.Module) -> None:
    assert isinstance(model, DistributedDataParallel)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    _release(model)


def _zero_redundancy(model: nn.Module) -> None:
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=shardopt.AdamW8bit, lr=1e-3)
    shardopt.release_gradients(model, optimizer)  # type: ignore[arg-type]


DDP_ERRORS: list[tuple[Callable[[nn.Module], None], type[Exception], str]] = [
    (_backward_twice, RuntimeError, "got gradient 2 since the last optimizer.step()"),
    (_join, RuntimeError, "got join() of DistributedDataParallel"),
    (_inner, RuntimeError, "got a model that runs within DistributedDataParallel"),
    (_hooked, RuntimeError, "got DistributedDataParallel with a communication hook"),
    (_built_in_hook, RuntimeError, "got DistributedDataParallel with a communication hook"),
    (_zero_redundancy, TypeError, "got ZeroRedundancyOptimizer, expected an optimizer of shardopt"),
]


@pytest.mark.ranks(2)
def test_what_ddp_excludes() -> None:
    for function, error, text in DDP_ERRORS:
        _raises(error, text, function, DistributedDataParallel(make_net(), bucket_cap_mb=0.05))


@pytest.mark.ranks(2)
def test_delayed_reduction_is_refused() -> None:
    net = make_net()
    model = DistributedDataParallel(
        net, delay_all_reduce_named_params=[("head.weight", net.head.weight)], param_to_hook_all_reduce=net.embed.weight
    )
    _raises(RuntimeError, "got DistributedDataParallel with delay_all_reduce_named_params", _release, model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("use_orig_params", "first"), [(False, True), (True, False)])
def test_fsdp1_is_refused(use_orig_params: bool, first: bool) -> None:
    model = FullyShardedDataParallel(make_net(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    optimizer = shardopt.AdamW8bit(model.parameters())
    if first:
        optimizer.attach(model)
    _raises(
        RuntimeError, "got a model of FullyShardedDataParallel (FSDP1)", shardopt.release_gradients, model, optimizer
    )
    if first:
        inner = model.module
        _raises(RuntimeError, "got parameters of flat shards", shardopt.release_gradients, inner, optimizer)
