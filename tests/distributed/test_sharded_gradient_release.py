"""Steps during the backward pass, and held gradients, beside ``test_layouts.py``: what is alive, what is refused."""

from __future__ import annotations

import copy
import gc
import re
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard, register_fsdp_forward_method
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import shardopt
from helpers import RULES
from ordered_problem import WAYS as ORDERED
from ordered_problem import loss_of as ordered_loss_of
from ordered_problem import make_model
from ranks.layered import Layers, batch
from ranks.layouts import mesh_of
from ranks.models import Net, loss_of, make_batch, make_net, named_parameters
from ranks.offload import before_steps, offload_from_cpu, slow_steps
from ranks.pool import Pool
from ranks.runs import snapshot_of
from ranks.snapshot import assert_same, entries, local
from shardopt.optim import ShardedOptimizer
from shardopt.release import host_gradients
from shardopt.release.ddp_buckets import BucketHook, bucket_hook
from shardopt.release.forward_overlap import ForwardOverlap
from shardopt.sharding.exchange import RanksExchange
from slow_cases import slow
from versions import needs_fsdp2_on_the_cpu

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


def _zero_redundancy(model: nn.Module) -> None:
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=shardopt.AdamW8bit, lr=1e-3)
    shardopt.release_gradients(model, optimizer)  # type: ignore[arg-type]


DDP_ERRORS: list[tuple[Callable[[nn.Module], None], type[Exception], str]] = [
    (_backward_twice, RuntimeError, "got gradient 2 since the last optimizer.step()"),
    (_join, RuntimeError, "got join() of DistributedDataParallel"),
    (_inner, RuntimeError, "got a model that runs within DistributedDataParallel"),
    (_hooked, RuntimeError, "got DistributedDataParallel with a communication hook"),
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


class Recurrent(nn.Module):
    """A layer that is called twice, or once more with an input that has no gradient, and one that is called once.

    Args:
        recompute: whether layers are computed again by reentrant checkpoints, or by others; None for none.
        constant: whether the layer is called once more.
    """

    def __init__(self, recompute: bool | None = None, constant: bool = False) -> None:
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
        called: Tensor = layer(x) if self.recompute is None else checkpoint(layer, x, use_reentrant=self.recompute)
        return called


def _sharded(model: Recurrent, layers: bool) -> nn.Module:
    mesh = mesh_of((dist.get_world_size(),))
    if layers:
        for layer in (model.mix, model.once):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _steps(recompute: bool | None, constant: bool, layers: bool, passes: int) -> list[tuple[str, ...]]:
    """Trains with released gradients and without; returns the gradients that were left for ``step()`` in each step."""
    models = [_sharded(Recurrent(recompute, constant), layers) for _ in range(2)]
    optimizers = [shardopt.AdamW8bit(model.parameters(), min_quantized_numel=64) for model in models]
    shardopt.release_gradients(models[0], optimizers[0])
    left = []
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            for number in range(passes):
                model.set_requires_gradient_sync(number == passes - 1)  # type: ignore[operator]
                tokens = batch(100 * step + 10 * number + dist.get_rank())
                model(tokens).square().mean().backward()
            if model is models[0]:
                left.append(tuple(name for name, param in model.named_parameters() if param.grad is not None))
            optimizer.step()
            optimizer.zero_grad()
        assert_same(*(snapshot_of(*each) for each in zip(models, optimizers, strict=True)))
    return left


MIX = ("mix.weight", "mix.bias")
#: How layers are called, and which gradients are left; passes and the number of ranks.
CASES = [
    ((None, False, True, ()), 2, 3),
    *(((None, True, True, MIX), *on) for on in [(1, 1), (1, 3)]),  # no reduction says that it is the last
    ((None, True, False, ()), 1, 3),
    ((False, False, True, ()), 2, 3),
    ((False, True, True, MIX), 1, 3),
    *(((True, True, True, MIX), *on) for on in [(1, 1), (2, 3)]),
]
ALL_CASES = product(dict.fromkeys(case for case, *_ in CASES), (1, 2), (1, 2, 3))


@pytest.mark.parametrize(("case", "passes", "world_size"), [*CASES, *slow(ALL_CASES, besides=CASES)])
def test_modules_that_are_used_several_times(ranks: Pool, case: Any, passes: int, world_size: int) -> None:
    """Each use is reduced; with several passes, which are not reduced but for the last, too."""
    recompute, constant, layers, left = case
    found = ranks.run(world_size, _steps, recompute, constant, layers, passes)
    assert all(of_rank[1:] == [left] * (STEPS - 1) for of_rank in found)
    assert recompute is True or all(of_rank[0] == left for of_rank in found)


class Checkpointed(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, torch.tanh(x), use_reentrant=True)
        return x


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket_view", [False, True])
def test_ddp_with_reentrant_checkpoints(bucket_view: bool) -> None:
    """DDP's last bucket, and its end, come in the backward pass of a checkpoint: others may not have been reduced."""
    models = []
    for _ in range(2):
        layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        for index, layer in enumerate(layers):
            nn.init.constant_(layer.weight, 0.01 * (index + 1))
            nn.init.zeros_(layer.bias)
        models.append(
            DistributedDataParallel(
                Checkpointed(layers), static_graph=True, bucket_cap_mb=0.02, gradient_as_bucket_view=bucket_view
            )
        )
    optimizers = [shardopt.AdamW8bit(model.parameters(), min_quantized_numel=64) for model in models]
    shardopt.release_gradients(models[0], optimizers[0])
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(10 * step + dist.get_rank())
            model(torch.randn(4, 64, requires_grad=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(models[0].state_dict(), models[1].state_dict())


def _wrapped(way: str) -> nn.Module:
    if way == "ddp":
        return DistributedDataParallel(Layers())
    model, mesh = Layers(), mesh_of((dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _released(way: str, overlap_forward: bool) -> list[weakref.ref[Any]]:
    model = _wrapped(way)
    optimizer = shardopt.AdamW8bit(model.parameters(), min_quantized_numel=64)
    shardopt.release_gradients(model, optimizer, overlap_forward=overlap_forward)
    for step in range(2):
        model(batch(step)).square().mean().backward()
        optimizer.step()
    state = [x for entries in optimizer.state.values() for x in entries.values() if isinstance(x, Tensor)]
    return [weakref.ref(x) for x in (model, optimizer, *model.parameters(), *state)]


def _outlives(way: str, overlap_forward: bool) -> int:
    refs = _released(way, overlap_forward)
    gc.collect()
    return sum(ref() is not None for ref in refs)


@pytest.mark.parametrize("overlap_forward", [False, True])
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_nothing_outlives_model_and_optimizer(ranks: Pool, way: str, overlap_forward: bool) -> None:
    assert ranks.run(2, _outlives, way, overlap_forward) == [0, 0]


@pytest.mark.ranks(2)
def test_two_optimizers_that_overlap_the_forward_pass() -> None:
    """Both wait where fully_shard gathers; one release ends before the other."""
    models, optimizers = [_wrapped("fsdp") for _ in range(2)], []
    with offload_from_cpu(), slow_steps(0.01):
        for model in models:
            params = list(model.parameters())
            optimizers.append([shardopt.AdamW8bit(own, offload="step") for own in (params[::2], params[1::2])])
        releases = [shardopt.release_gradients(models[0], own, overlap_forward=True) for own in optimizers[0]]
        for step in range(STEPS):
            for model, own in zip(models, optimizers, strict=True):
                model(batch(10 * step + dist.get_rank())).square().mean().backward()
                for optimizer in own:
                    optimizer.step()
                    optimizer.zero_grad()
            if step:
                releases.pop(0).remove()
        for optimizer in optimizers[0]:
            optimizer.synchronize()
        assert_same(*(snapshot_of(model, own[0]) for model, own in zip(models, optimizers, strict=True)))


def _fsdp(model: Any, prefetch: int = 0) -> nn.Module:
    mesh = mesh_of((dist.get_world_size(),))
    fully_shard([model.embed, model.head], mesh=mesh)  # they share a weight
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    for index, layer in enumerate(model.layers):
        layer.set_modules_to_forward_prefetch(list(model.layers[index + 1 : index + 1 + prefetch]))
    return fully_shard(model, mesh=mesh)


WAYS: dict[str, Callable[[Any], nn.Module]] = {
    "fsdp": _fsdp,
    "fsdp that prefetches": partial(_fsdp, prefetch=2),
    "fsdp of layers": lambda model: [fully_shard(layer) for layer in model.layers] and model,
    "ddp": lambda model: DistributedDataParallel(model, bucket_cap_mb=0.02),
    "ddp, views": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
}


def _run(
    model: nn.Module,
    held: bool,
    rank: int,
    micro_batches: int = 2,
    kind: str = "AdamW8bit",
    unreduced: bool = False,
    scale: float | None = None,
    sums: bool = False,
    between: Callable[[], Any] = bool,
    call: nn.Module | None = None,
) -> dict[str, Any]:
    """All that a run ends with, and its norms.

    Args:
        model: the wrapped model.
        held: whether gradients are held in the host's memory.
        rank: the number of this rank's data.
        micro_batches: backward passes per step.
        kind: the optimizer's class.
        unreduced: whether only the last pass is reduced.
        scale: the first loss scale.
        sums: whether reduced gradients are added up by hand.
        between: called after each step; what it returns is compared, too.
        call: the part that is called, by default the model.
    """
    options = {"lr": 1e-2, "min_quantized_numel": 64, "offload": "step" if held else None}
    optimizer = getattr(shardopt, kind)(model.parameters(), **options)
    brought = 1 if unreduced else micro_batches
    if held:
        shardopt.release_gradients(model, optimizer, overlap_forward=True, waiting_gradients=3, micro_batches=brought)
    scaler = None if scale is None else GradScaler("cpu", init_scale=scale, growth_interval=2)
    norms = []
    for step in range(4):
        added: dict[Any, Any] = {}
        for micro in range(micro_batches):
            is_last = micro == micro_batches - 1
            if unreduced and hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(is_last)
            no_sync = unreduced and not is_last and isinstance(model, DistributedDataParallel)
            with model.no_sync() if no_sync else nullcontext():  # type: ignore[operator]
                loss = (call or model)(batch(100 * step + 10 * micro + rank)).square().mean()
                (loss if scaler is None else scaler.scale(loss)).backward()
            for param in model.parameters() if sums else ():
                if param.grad is not None:
                    added[param] = added[param] + param.grad if param in added else param.grad.clone()
                    param.grad = None
        for param, gradient in added.items():
            param.grad = gradient
        if scaler is not None:
            scaler.unscale_(optimizer)
        norms.append(shardopt.clip_grad_norm_(model.parameters(), 1e-3, optimizer=optimizer))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        with torch.no_grad():
            found = between()
        norms += [found] if isinstance(found, Tensor) else []
    optimizer.synchronize()
    scales = [] if scaler is None else [torch.tensor(scaler.get_scale())]
    return {**{f"norm {i}": x for i, x in enumerate([*norms, *scales])}, **snapshot_of(model, optimizer)}


def _compare(way: str, recompute: bool = False, **options: Any) -> None:
    rank = 0 if way == "fsdp of layers" else dist.get_rank()  # there the ranks are to agree by themselves
    with offload_from_cpu(), slow_steps(0.002):
        actual = _run(WAYS[way](Layers(recompute)), True, rank, **options)
    # DDP reduces the sum of what it has reduced before and a new gradient, in other roundings than ours.
    by_hand = way.startswith("ddp") and not options.get("unreduced", False)
    assert_same(actual, _run(WAYS[way](Layers(recompute)), False, rank, **options, sums=by_hand))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("fsdp", {"unreduced": True, "recompute": True}),
        ("fsdp", {"scale": 1024.0}),
        ("fsdp that prefetches", {"micro_batches": 1}),
        ("fsdp of layers", {}),
        ("ddp", {"unreduced": True}),
        ("ddp", {"scale": 1e38}),  # all ranks find the same infinities
        ("ddp, views", {}),
    ],
    ids=str,
)
def test_same_bits(way: str, options: dict[str, Any]) -> None:
    _compare(way, **options)


@pytest.mark.ranks(2)
def test_steps_with_collectives() -> None:
    """Sharded steps are taken in the thread of the backward pass, since their collectives must not meet its own."""
    threads, all_reduce = [], RanksExchange._all_reduce

    def recorded(self: RanksExchange, tensor: Tensor, op: Any) -> None:
        threads.append(threading.current_thread())
        all_reduce(self, tensor, op)

    with patch.object(RanksExchange, "_all_reduce", recorded):
        _compare("fsdp", kind="LAMB8bit")
    assert set(threads) == {threading.current_thread()}


def _gathered(between: str) -> None:
    """Reads that are no forward pass of the model: what FSDP2 gathers is of after the step."""
    runs = []
    for held in (False, True):
        model: Any = _fsdp(Layers())
        register_fsdp_forward_method(model, "embedded")
        reads = {
            "a method": lambda model=model: model.embedded(batch(9)).clone(),
            "a layer": model.layers[1].unshard,
            "the model": lambda model=model: model.unshard(async_op=True),
        }
        with offload_from_cpu(), slow_steps(0.02):
            runs.append(_run(model, held, 0, micro_batches=1, between=reads[between]))
    assert_same(runs[1], runs[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("between", ["a method", "a layer", "the model"])
def test_what_is_gathered_by_hand(between: str) -> None:
    _gathered(between)


@pytest.mark.ranks(2)
def test_gathering_without_waiting_has_other_bits() -> None:
    """The test above can fail."""
    wrong = pytest.raises((AssertionError, RuntimeError))
    with patch.object(ForwardOverlap, "_wait_for", lambda self, params: None), wrong:
        _gathered("the model")
    dist.barrier()


@pytest.mark.ranks(2)
def test_evaluations_of_the_module_within() -> None:
    """The module inside of DDP waits as DDP does."""
    model = DistributedDataParallel(Layers())
    go_on = threading.Event()
    with offload_from_cpu(), before_steps(lambda place: go_on.wait(30)):
        optimizer = shardopt.AdamW8bit(model.parameters(), lr=1e-2, min_quantized_numel=64, offload="step")
        shardopt.release_gradients(model, optimizer, overlap_forward=True, waiting_gradients=100)
        model(batch(dist.get_rank())).square().mean().backward()
        optimizer.step()
        threading.Timer(0.2, go_on.set).start()
        with torch.no_grad():
            early = model.module(batch(0))
            optimizer.synchronize()
            assert torch.equal(early, model.module(batch(0)))


@needs_fsdp2_on_the_cpu
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["AdamW8bit", "LAMB8bit"])
def test_state_that_fits_into_the_budget_of_one_rank(kind: str) -> None:
    """The state of a parameter's part stays on the device of the rank that has fewer rows."""
    results, budget = [], 600
    for held in (True, False):
        with offload_from_cpu():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 3), nn.Linear(3, 3), nn.Linear(3, 64))
            for layer in model:
                fully_shard(layer, mesh=mesh_of((2,)))
            fully_shard(model, mesh=mesh_of((2,)))
            options = {"offload": "step", "device_state_budget": budget} if held else {}
            optimizer = getattr(shardopt, kind)(model.parameters(), lr=1e-2, min_quantized_numel=64, **options)
            if held:
                last = list(model.parameters())[-1]
                is_offloaded = optimizer._internals.residency.of(last).offload is not None
                assert is_offloaded == (dist.get_rank() == 0), "the budget does not tell the ranks apart"
                shardopt.release_gradients(model, optimizer, overlap_forward=True)
            for step in range(3):
                torch.manual_seed(10 * step + dist.get_rank())
                model(torch.randn(4, 64)).square().mean().backward()
                shardopt.clip_grad_norm_(model.parameters(), 1e-2, optimizer=optimizer)
                optimizer.step()
                optimizer.zero_grad()
            optimizer.synchronize()
            results.append(snapshot_of(model, optimizer))
    assert_same(*results)


def _ordered(way: str) -> None:
    results = []
    for held in (True, False):
        with offload_from_cpu(), slow_steps(0.002):
            model = ORDERED[way](make_model())
            shardopt.comm.ordered_gradients(model, micro_batches=4)
            optimizer = shardopt.AdamW8bit(
                model.parameters(), lr=1e-2, min_quantized_numel=64, offload="step" if held else None
            )
            if held:
                shardopt.release_gradients(model, optimizer, overlap_forward=True)
            norms = []
            for step in range(3):
                for number in range(dist.get_rank(), 4, dist.get_world_size()):
                    ordered_loss_of(model, number, step).backward()
                assert held == all(param.grad is None for param in model.parameters())
                norms.append(shardopt.clip_grad_norm_(model.parameters(), 0.5, optimizer=optimizer))
                optimizer.step()
                optimizer.zero_grad()
            optimizer.synchronize()
            results.append({**snapshot_of(model, optimizer), **{f"norm {i}": norm for i, norm in enumerate(norms)}})
    assert_same(*results)


@needs_fsdp2_on_the_cpu
@pytest.mark.parametrize(("way", "world_size"), [("plain", 1), ("ddp", 2), ("fsdp", 2)])
def test_ordered_gradients(ranks: Pool, way: str, world_size: int) -> None:
    """Gradients go to the host once they are the mean over all micro-batches."""
    ranks.run(world_size, _ordered, way)


@pytest.mark.ranks(1)
def test_ordered_gradients_without_overlap_are_refused() -> None:
    model = make_model()
    shardopt.comm.ordered_gradients(model, micro_batches=2)
    with pytest.raises(RuntimeError, match=r"got a model with ordered_gradients.* pass overlap_forward=True"):
        shardopt.release_gradients(model, shardopt.AdamW8bit(model.parameters()))


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

    results = []
    for held in (True, False):
        with offload_from_cpu(), patch.object(host_gradients, "begin_copy", late):
            model = _Outer(WAYS["ddp, views"](Layers()))
            results.append(_run(model, held, dist.get_rank(), sums=not held, call=model.inner))
    assert_same(*results)
