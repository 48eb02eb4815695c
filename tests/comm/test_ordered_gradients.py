"""Gradients summed in the order of micro-batches: one set of bits on any number of ranks."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import shardopt
from message_problem import DTYPES, assert_same_bits, numbers
from ordered_problem import (
    MICRO_BATCHES,
    WAYS,
    WIRES,
    backward,
    can_replace_reduce_scatter,
    gradients,
    loss_of,
    make_model,
    rounded,
    wanted_gradients,
    weights,
)
from ranks.layouts import mesh_of
from ranks.models import loss_of as net_loss_of
from ranks.models import make_batch, make_net
from ranks.pool import Pool


def possible(cases: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The cases whose way of wrapping this PyTorch allows: FSDP2 can be hooked from 2.9 on."""
    return [case for case in cases if can_replace_reduce_scatter or "sdp" not in case[0]]


needs_fsdp2 = pytest.mark.skipif(not can_replace_reduce_scatter, reason="PyTorch's FSDP2 cannot be hooked before 2.9")
takes_unused = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
is_finalized = hasattr(FSDPModule, "finalize_backward")  # PyTorch 2.15, which also has the other options of these tests
ON_TWO = possible([("plain", 1), ("ddp", 2), ("fsdp", 2)])


def ordered(way: str, wire: str = "fp32", micro_batches: int = MICRO_BATCHES) -> nn.Module:
    model = WAYS[way](make_model())
    shardopt.comm.ordered_gradients(model, micro_batches=micro_batches, wire=wire)  # type: ignore[arg-type]
    return model


def assert_same(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        if tensor is None or wanted[name] is None:
            assert tensor is wanted[name], name
        else:
            assert_same_bits(tensor, wanted[name])


# Gradients ---------------------------------------------------------------------------------------------------

LAST, MIXED = (8, 9, 10, 11), (1, 4, 6, 7, 8, 11)
NEVER = tuple(range(MICRO_BATCHES))

#: Ways to wrap a model, ranks, a wire, and options: micro-batches per step, and those that leave parameters out.
SUMS: list[tuple[str, int, str, dict[str, Any]]] = [
    *(("plain", 1, wire, {}) for wire in WIRES),
    *(("plain", 1, "fp32", {"micro_batches": count}) for count in (1, 2, 7)),
    *(("ddp", count, WIRES[count % 3], {}) for count in (2, 3)),
    *(("fsdp", count, WIRES[(count + 1) % 3], {}) for count in (1, 4)),
    ("ddp", 2, "bf16", {"micro_batches": 14}),
    *(("ddp views", 2, "bf16", {}), ("ddp static", 2, "e4m3", {})),
    *(("fsdp kept", 2, "bf16", {}), ("fsdp offload", 2, "fp32", {})),
    *(("fsdp columns", 2, "bf16", {}), ("hsdp", 4, "e4m3", {}), ("hsdp of 3", 6, "fp32", {})),
    ("hsdp of 1", 2, "e4m3", {}),
    ("plain", 1, "e4m3", {"leaves_out": MIXED}),
    *(("ddp unused", 3, "fp32", {"leaves_out": MIXED}), ("ddp unused", 4, "e4m3", {"leaves_out": LAST})),
    ("ddp unused", 2, "fp32", {"leaves_out": NEVER}),
    *(("ddp lazy", 2, "bf16", {"leaves_out": LAST}) for _ in range(is_finalized)),
    *(("fsdp", 4, "e4m3", {"leaves_out": LAST}), ("hsdp", 4, "e4m3", {"leaves_out": LAST})),
    *(("fsdp whole", count, "e4m3", {"leaves_out": MIXED}) for count in (1, 3) if takes_unused),
    *((way, count, "fp32", {"is_checkpointed": True}) for way, count in ON_TWO),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("way", "world_size", "wire", "options"), possible(SUMS), ids=str)
def test_gradients_are_as_defined(way: str, world_size: int, wire: str, options: dict[str, Any]) -> None:
    options = dict(options)
    micro_batches = options.pop("micro_batches", MICRO_BATCHES)
    model = ordered(way, wire, micro_batches)
    left_out = options.get("leaves_out", ())
    for step in range(2):  # DDP arranges its buckets anew after the first pass
        backward(model, step, passes=micro_batches // world_size, **options)
        wanted = wanted_gradients(wire, step, micro_batches=micro_batches, leaves_out=left_out)
        assert_same(gradients(model), wanted)
        model.zero_grad()


def round_trip(floats: Tensor, wire: str) -> Tensor:
    """Rows of floats as the gradient of one micro-batch, in the dtype of the gradient."""
    model = nn.ParameterList([torch.zeros_like(floats)])
    shardopt.comm.ordered_gradients(model, micro_batches=1, wire=wire)  # type: ignore[arg-type]
    model[0].backward(floats)
    found = model[0].grad
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire", WIRES)
def test_all_kinds_of_numbers(wire: str, dtype: torch.dtype) -> None:
    for rows, row_numel in ((1, 384), (3, 130), (7, 33), (5, 4096)):
        for _, floats in numbers(dtype, rows * row_numel, rows):
            whole = floats.view(rows, row_numel)
            assert_same_bits(round_trip(whole, wire), (rounded(whole, wire) + 0.0).to(dtype))


def _tensor_parallel() -> dict[str, Tensor | None]:
    mesh = mesh_of((dist.get_world_size() // 2, 2), "data", "tensor")
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(make_net(), mesh["tensor"], plan)
    for module in (model.up, model):
        fully_shard(module, mesh=mesh["data"])
    shardopt.comm.ordered_gradients(model, micro_batches=4, wire="e4m3")
    data = mesh["data"].size()
    for index in range(4 // data):
        net_loss_of(model, make_batch(0, index * data + mesh["data"].get_local_rank())).backward()
    return gradients(model)


@needs_fsdp2
def test_tensor_parallelism_beside_it(ranks: Pool) -> None:
    assert_same(ranks.run(4, _tensor_parallel)[0], ranks.run(2, _tensor_parallel)[0])


def _precision(way: str) -> dict[str, Tensor | None]:
    model = ordered(way, "e4m3")
    backward(model)
    return gradients(model)


PRECISIONS = [("fsdp bf16", 2), ("fsdp bf16 sums", 3), ("fsdp fp16", 2), ("fsdp mixed", 3)]


@needs_fsdp2
@pytest.mark.parametrize(("way", "world_size"), PRECISIONS[: 3 + is_finalized])
def test_mixed_precision(ranks: Pool, way: str, world_size: int) -> None:
    assert_same(ranks.run(world_size, _precision, way)[0], ranks.run(1, _precision, way)[0])


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("way", "wire"), [("ddp", "fp32"), ("ddp", "e4m3"), pytest.param("fsdp", "bf16", marks=needs_fsdp2)]
)
def test_bytes_on_the_wire(way: str, wire: str) -> None:
    """As many bytes as a reduce-scatter in the format sends."""
    model = ordered(way, wire)
    backward(model, passes=1)
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
        loss_of(model, 0).backward()
    shapes = [param.shape for param in make_model().parameters()]
    rows = [(-(-shape[0] // 3), shape[1:].numel()) for shape in shapes]  # of each owner
    nbytes = sum(call.args[1].nbytes for call in exchange.call_args_list) // 3
    if wire == "e4m3":
        assert nbytes == sum(n * (k + -(-k // 128) if k >= 128 else 4 * k) for n, k in rows)
    else:
        assert nbytes == {"fp32": 4, "bf16": 2}[wire] * sum(n * k for n, k in rows)


@pytest.mark.ranks
@pytest.mark.parametrize(("way", "world_size"), ON_TWO)
def test_numbers_that_are_not_finite_arrive(way: str, world_size: int) -> None:
    """One rank's loss overflows: gradients of all are not finite, and GradScaler leaves the step out."""
    model = ordered(way, "e4m3")
    optimizer = shardopt.SGD8bit(model.parameters(), lr=1.0, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = weights(model)
    for number in range(dist.get_rank(), MICRO_BATCHES, world_size):
        loss = loss_of(model, number) * (float("inf") if number == 5 else 1.0)
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert_same(weights(model), before)  # type: ignore[arg-type]
    optimizer.zero_grad()
    backward(model)
    assert_same(gradients(model), wanted_gradients("e4m3"))


# Passes that are thrown away, refused or no passes --------------------------------------------------------------------


HAPPENED = [(*case, what) for case in (*ON_TWO, ("ddp views", 2)) for what in ("nothing", "written")]
HAPPENED += [("plain", 1, "raised")]  # DDP itself takes no pass after one that raised
HAPPENED += [("fsdp", 2, "raised")] if hasattr(FSDPModule, "reset_iter_state") else []


@pytest.mark.ranks
@pytest.mark.parametrize(("way", "world_size", "what"), possible(HAPPENED))
def test_zero_grad_begins_anew(way: str, world_size: int, what: str) -> None:
    """After two passes, and after one that raised; gradients written between passes are refused."""
    model = ordered(way)
    reset = getattr(model, "reset_iter_state", lambda: None)
    backward(model, 1, passes=2)
    if what == "raised":
        loss = loss_of(model, dist.get_rank())
        handle = model.norm.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        reset()
        if model.head.weight.grad is not None:  # PyTorch 2.15 drops gradients when it resets
            with pytest.raises(RuntimeError, match="got a backward pass after one that raised"):
                backward(model, passes=1)
            reset()
    if what == "written":
        model.zero_grad(set_to_none=False)
        with pytest.raises(RuntimeError, match=r"got gradients that were written after 2 of \d+ backward passes"):
            backward(model, passes=1)
        if way != "plain":
            return
    model.zero_grad()
    backward(model)
    assert_same(gradients(model), wanted_gradients("fp32"))


@pytest.mark.ranks
@pytest.mark.parametrize(("way", "world_size"), [("plain", 1), ("ddp", 2)])
def test_autograd_grad_is_no_pass(way: str, world_size: int) -> None:
    """Gradients are asked for without accumulating them, before each pass of a step. Nothing keeps the model."""
    model = ordered(way)
    for step in range(2):
        for number in range(dist.get_rank(), MICRO_BATCHES, world_size):
            bare = getattr(model, "module", model)
            torch.autograd.grad(loss_of(bare, number, step), list(model.parameters()))
            loss_of(model, number, step).backward()
        assert_same(gradients(model), wanted_gradients("fp32", step))
        model.zero_grad()
    alive = [weakref.ref(model), *map(weakref.ref, model.parameters())]
    del model, bare
    gc.collect()
    assert [each() for each in alive] == [None] * len(alive)


class _Nested(nn.Module):
    """Two layers, of which the first ones are in a reentrant checkpoint each: a backward pass within the pass."""

    def __init__(self, checkpointed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=True) if index < self.checkpointed else layer(x)
        return x


def test_a_pass_within_a_pass() -> None:
    """The inner pass counts as one with the pass around it."""
    found = []
    for checkpointed in (0, 1):
        model = _Nested(checkpointed)
        shardopt.comm.ordered_gradients(model, micro_batches=2)
        for _ in range(2):
            model(torch.randn(3, 4, requires_grad=True)).sum().backward()
        found.append(gradients(model))
    assert_same(*found)


class DeepSpeedEngine(nn.Linear):
    """Stands for DeepSpeed's."""


order = partial(shardopt.comm.ordered_gradients, micro_batches=MICRO_BATCHES)
ddp, fsdp = WAYS["ddp"], WAYS["fsdp"]


def _without_sync() -> None:
    model = ordered("ddp")
    with model.no_sync():
        loss_of(model, 0).backward()


def _module_alone() -> None:
    """The pass that is refused is thrown away."""
    model = ordered("ddp")
    with pytest.raises(RuntimeError, match="got a backward pass that DistributedDataParallel does not reduce"):
        loss_of(model.module, 0).backward()  # type: ignore[arg-type]
    backward(model, passes=1)


def _joined() -> None:
    model = ordered("ddp")
    with model.join():
        backward(model, passes=1)


def _finalized_by_hand() -> None:
    model = ordered("ddp")
    model.require_manual_backward_finalization = True
    backward(model, passes=1)


def _twice_in_a_pass() -> None:
    layer = nn.Linear(8, 8)
    model = fully_shard(nn.Sequential(fully_shard(layer), layer))
    order(model)
    model(torch.ones(8)).sum().backward()


def _columns() -> None:
    model = make_model()
    fully_shard(model.up, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    fully_shard(model)
    order(model, wire="e4m3")


def _released() -> None:
    model = fsdp(make_model())
    shardopt.release_gradients(model, shardopt.AdamW8bit(model.parameters()))
    order(model)
    backward(model)


def _on_other_meshes() -> None:
    model = make_model()
    fully_shard(model.up, mesh=mesh_of((2, 1), "a", "b")["b"])
    order(fsdp(model, layers=()))


def _with_one_module() -> None:
    model = make_model()
    fully_shard(model.up)
    order(model)


def _changed(method: str, value: object) -> None:
    model = ordered("fsdp")
    getattr(model, method)(value)
    backward(model)


#: Refusals, by the beginning of their errors.
REFUSED: dict[str, Callable[[], object]] = {
    "TypeError: got Blocks with no wrapper on 2 ranks": lambda: order(make_model()),
    "TypeError: got FullyShardedDataParallel with FullyShardedDataParallel on 2 ranks": lambda: order(
        FullyShardedDataParallel(make_net(), device_id=torch.device("cpu"))
    ),
    "TypeError: got DeepSpeedEngine with DeepSpeedEngine on 2 ranks": lambda: order(DeepSpeedEngine(2, 2)),
    "ValueError: module.0: got Embedding with sparse=True, expected dense gradients": lambda: order(
        DistributedDataParallel(nn.Sequential(nn.Embedding(3, 2, sparse=True)))
    ),
    "ValueError: got wire='fp8', expected one of 'fp32', 'bf16', 'e4m3'": lambda: order(ddp(make_model()), wire="fp8"),
    "ValueError: got micro_batches=9 on 2 ranks": lambda: order(ddp(make_model()), micro_batches=9),
    r"ValueError: got micro_batches=\d, wire='fp32' here and micro_batches=\d, .* on rank": lambda: order(
        ddp(make_model()), micro_batches=4 + 2 * dist.get_rank()
    ),
    "RuntimeError: got a model whose gradients are ordered already": lambda: order(ordered("ddp")),
    r"RuntimeError: got a backward pass that .* does not reduce.* outside of no_sync\(\)": _without_sync,
    "RuntimeError: got a backward pass after one that raised": _module_alone,
    r"RuntimeError: got DistributedDataParallel with join\(\)": _joined,
}
REFUSED_FSDP2: dict[str, Callable[[], object]] = {
    "RuntimeError: .*got a module whose reduction has been replaced": lambda: order(ordered("fsdp")),
    "ValueError: norm.weight: got a parameter outside of all modules": _with_one_module,
    r"RuntimeError: .*got set_gradient_divide_factor\(2.0\)": partial(_changed, "set_gradient_divide_factor", 2.0),
    r"RuntimeError: .*set_requires_all_reduce\(False\) and .*, expected 1.0, True, True and False": partial(
        _changed, "set_requires_all_reduce", False
    ),
    r"ValueError: 'up': got a mesh of ranks \[\[\d\]\], expected that of '', \[\[0, 1\]\]": _on_other_meshes,
    r"ValueError: '': got a mesh of ranks \[\[\d\], \[0, 1\]\], .* several shards if there are replicas": lambda: order(
        fsdp(make_model(), shape=(2, 1))
    ),
    "RuntimeError: .*hook after its gradient's accumulation": _released,
    "RuntimeError: '0': got two gradients in one backward pass": _twice_in_a_pass,
    "ValueError: 'up': got a parameter sharded along another dim than 0 and wire='e4m3'": _columns,
}


if is_finalized:
    REFUSED["RuntimeError: got DistributedDataParallel with require_manual_backward_finalization"] = _finalized_by_hand
    REFUSED_FSDP2[r"RuntimeError: .*set_manual_backward_finalization\(True\)"] = partial(
        _changed, "set_manual_backward_finalization", True
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("error", [*REFUSED, *(pytest.param(error, marks=needs_fsdp2) for error in REFUSED_FSDP2)])
def test_refused(error: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        {**REFUSED, **REFUSED_FSDP2}[error]()
    assert re.match(error, f"{caught.type.__name__}: {caught.value}")


def test_refused_in_one_process() -> None:
    nested = _Nested(2)
    shardopt.comm.ordered_gradients(nested, micro_batches=2)
    with pytest.raises(RuntimeError, match="got a model whose gradients are ordered already"):
        shardopt.comm.ordered_gradients(nested, micro_batches=2)
    nested(torch.randn(4, requires_grad=True)).sum().backward()  # of two passes within, each of which counts
    with pytest.raises(RuntimeError, match=r"got more than 2 backward passes.*use_reentrant=False"):
        nested(torch.randn(4, requires_grad=True)).sum().backward()
    with pytest.raises(TypeError, match=r"got a gradient of torch.float64, expected float32, bfloat16 or float16"):
        round_trip(torch.zeros(1, 8, dtype=torch.float64), "fp32")
    model = ordered("plain")
    optimizer = shardopt.AdamW8bit(model.parameters())
    x = torch.ones(2, 128)
    for parts in (False, True):  # whole, or modules one by one, past the model's own hooks
        handle = model.up.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            (model.norm(model.up(x)) if parts else model(x)).sum().backward()  # at first the first pass of all
        handle.remove()
        with pytest.raises(RuntimeError, match="got a backward pass after one that raised"):
            (model.norm(model.up(x)) if parts else model(x)).sum().backward()
        with pytest.raises(RuntimeError, match=r"got step\(\) after 0 of 12 backward passes"):
            optimizer.step()
        optimizer.zero_grad()
    for number in range(MICRO_BATCHES):
        loss_of(model, number).backward()
        if number == 1:
            with pytest.raises(RuntimeError, match=r"got step\(\) after 2 of 12 backward passes"):
                optimizer.step()
            numel = sum(param.numel() for param in model.parameters())
            assert shardopt.memory_report(optimizer).host.gradient_sums == 4 * numel
            shardopt.AdamW8bit([nn.Parameter(torch.zeros(3))]).step()  # of other parameters
    assert_same(gradients(model), wanted_gradients("fp32"))
    optimizer.step()
    with pytest.raises(RuntimeError, match="got more than 12 backward passes"):
        loss_of(model, 0).backward()


# Models whose trained parameters change, other threads -----------------------------------------------------------


class Mlp(nn.Module):
    """Two matrices of as many elements, whose rows differ; gradients of more magnitudes than a scale has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(128, 260, bias=False), nn.Linear(260, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scales = torch.logspace(-8, 2, 128)
        return self.down(torch.tanh(self.up(x * scales))) * scales


def _loss(model: nn.Module, number: int) -> Tensor:
    return model(torch.randn(4, 128, generator=torch.Generator().manual_seed(number))).square().mean()


def _trains_in_turn(wrap: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
    model, found = Mlp(), []
    model.down.requires_grad_(False)
    wrap(model)
    shardopt.comm.ordered_gradients(model, micro_batches=2, wire="e4m3")
    for trained, frozen in ((model.up, model.down), (model.down, model.up)):
        trained.requires_grad_(True)
        frozen.requires_grad_(False)
        for number in range(2):
            _loss(model, number).backward()
        grad = trained.weight.grad
        found.append(grad.full_tensor() if hasattr(grad, "full_tensor") else grad)
        model.zero_grad()
    if wrap is fully_shard:
        _loss(model, 0).backward()
        frozen.requires_grad_(True)
        trained.requires_grad_(False)
        with pytest.raises(RuntimeError, match="requires_grad was changed within a step"):
            _loss(model, 1).backward()
    return found


@needs_fsdp2
@pytest.mark.ranks(1)
def test_matrices_of_as_many_elements_are_trained_in_turn() -> None:
    """Codes have the blocks of the rows that are trained now, of parameters that were frozen at first, too."""
    for wanted, found in zip(*map(_trains_in_turn, (nn.Module.train, fully_shard)), strict=True):
        assert_same_bits(found, wanted)


@pytest.mark.ranks(1)
def test_other_threads_do_not_end_a_pass() -> None:
    """Steps and forward passes that run within a backward pass, after its first gradient."""
    other = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    model = ordered("plain")

    def step() -> None:
        optimizer.step()
        with torch.no_grad():
            loss_of(model, 0)

    def in_a_thread(_: Tensor) -> None:
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()

    model.up.weight.register_hook(in_a_thread)
    backward(model)
    assert_same(gradients(model), wanted_gradients("fp32"))


class _Empty(nn.Module):
    """Three parameters, of which one has no elements and one is used in every second pass only."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.seldom, self.empty = (nn.Parameter(torch.ones(n)) for n in (8, 8, 0))

    def forward(self, passes: int) -> Tensor:
        used = self.used.sin().sum() + (self.seldom.cos().sum() if passes % 2 else 0.0)
        return used + self.empty.sum()  # whose gradient comes first


@pytest.mark.ranks(2)
def test_ddp_reduces_first_what_has_no_elements() -> None:
    model = DistributedDataParallel(_Empty(), find_unused_parameters=True, gradient_as_bucket_view=True)
    shardopt.comm.ordered_gradients(model, micro_batches=8)
    for passes in range(4):
        model(passes).backward()
    assert torch.equal(model.module.used.grad, model.module.used.detach().cos())
    assert torch.equal(model.module.seldom.grad, -model.module.seldom.detach().sin() / 2)
