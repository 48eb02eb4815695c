"""Gradients summed in the order of micro-batches: one set of bits on any number of ranks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

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
from message_problem import assert_same_bits, bytes_sent
from ordered_problem import (
    MICRO_BATCHES,
    WAYS,
    backward,
    can_replace_reduce_scatter,
    gradients,
    loss_of,
    make_model,
    needs_custom_reduce_scatter,
    wanted_gradients,
    weights,
)
from ranks.layouts import mesh_of
from ranks.models import loss_of as net_loss_of
from ranks.models import make_batch, make_net
from ranks.pool import Pool, RankFailure
from shardopt.comm.wire import WIRES


def cases() -> list[tuple[str, int]]:
    """Ways to wrap a model and numbers of ranks."""
    found = [("plain", 1), ("hsdp", 4), ("hsdp of 3", 6), ("hsdp of 1", 1), ("hsdp of 1", 2)]
    found += [(way, ranks) for way in ("ddp", "fsdp") for ranks in (1, 2, 3, 4)]
    found += [(way, 2) for way in ("ddp views", "ddp unused", "ddp static", "fsdp kept", "fsdp whole", "fsdp offload")]
    return [case for case in found if can_replace_reduce_scatter or not needs_custom_reduce_scatter(case[0])]


def ordered(way: str, wire: str = "fp32") -> nn.Module:
    model = WAYS[way](make_model())
    shardopt.comm.ordered_gradients(model, micro_batches=MICRO_BATCHES, wire=wire)  # type: ignore[arg-type]
    return model


def assert_same(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        if tensor is None or wanted[name] is None:
            assert tensor is wanted[name], name
        else:
            assert_same_bits(tensor, wanted[name])


def _sums(way: str, wire: str, steps: int = 3, leaves_out: tuple[int, ...] = (), **options: Any) -> None:
    model = ordered(way, wire)
    for step in range(steps):  # DDP arranges its buckets anew after the first pass
        backward(model, step, leaves_out=leaves_out, **options)
        assert_same(gradients(model), wanted_gradients(wire, step, leaves_out=leaves_out))  # type: ignore[arg-type]
        model.zero_grad()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("way", "world_size"), cases())
def test_gradients_are_as_defined(ranks: Pool, way: str, world_size: int, wire: str) -> None:
    ranks.run(world_size, _sums, way, wire)


needs_fsdp2 = pytest.mark.skipif(not can_replace_reduce_scatter, reason="PyTorch's FSDP2 cannot be hooked before 2.9")


@needs_fsdp2
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_shards_of_columns(ranks: Pool, wire: str) -> None:
    ranks.run(2, _sums, "fsdp columns", wire)


@pytest.mark.parametrize(("way", "world_size"), [("plain", 1), ("ddp", 2), pytest.param("fsdp", 2, marks=needs_fsdp2)])
def test_gradient_checkpointing(ranks: Pool, way: str, world_size: int) -> None:
    ranks.run(world_size, partial(_sums, is_checkpointed=True), way, "fp32", 1)


LAST, MIXED = (8, 9, 10, 11), (1, 4, 6, 7, 8, 11)
NEVER = tuple(range(MICRO_BATCHES))


@pytest.mark.parametrize(
    ("way", "world_size", "leaves_out"),
    [
        ("plain", 1, MIXED),
        ("plain", 1, NEVER),
        *(("ddp unused", n, out) for n in (1, 2, 3, 4) for out in (LAST, MIXED)),
        ("ddp unused", 2, NEVER),
        *(pytest.param("fsdp", n, LAST, marks=needs_fsdp2) for n in (1, 2, 4)),
        pytest.param("hsdp", 4, LAST, marks=needs_fsdp2),
    ],
)
def test_parameters_that_a_micro_batch_leaves_out(
    ranks: Pool, way: str, world_size: int, leaves_out: tuple[int, ...]
) -> None:
    for wire in ("fp32", "e4m3"):
        ranks.run(world_size, _sums, way, wire, 2, leaves_out)


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="FSDP2 leaves such parameters out before 2.13"
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameters_that_one_rank_leaves_out(ranks: Pool, world_size: int) -> None:
    ranks.run(world_size, _sums, "fsdp whole", "e4m3", 2, MIXED)


def _train(way: str, wire: str, folder: str, steps: Sequence[int]) -> dict[str, Tensor]:
    """Weights after some more steps of a run, which goes on where its last checkpoint ends."""
    model = ordered(way, wire)
    optimizer = shardopt.AdamW8bit(model.parameters(), lr=1e-2, min_quantized_numel=1024)
    bare = getattr(model, "module", model)
    if steps[0]:
        shardopt.checkpoint.load(f"{folder}/{steps[0]}", bare, optimizer)
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    shardopt.checkpoint.save(f"{folder}/{steps[-1] + 1}", bare, optimizer)
    return weights(model)


@needs_fsdp2
@pytest.mark.parametrize("wire", WIRES)
def test_a_run_that_changes_its_number_of_ranks(ranks: Pool, tmp_path: Path, wire: str) -> None:
    wanted = ranks.run(1, _train, "plain", wire, str(tmp_path / "plain"), range(6))[0]
    for parts in ([("fsdp", 3, range(2)), ("ddp", 2, range(2, 4)), ("hsdp", 4, range(4, 6))], [("ddp", 4, range(6))]):
        folder = str(tmp_path / parts[0][0])
        for way, world_size, steps in parts:
            actual = ranks.run(world_size, _train, way, wire, folder, steps)
        for weights_of_rank in actual:
            assert_same(weights_of_rank, wanted)


def _tensor_parallel(size: int, wire: str) -> dict[str, Tensor | None]:
    mesh = mesh_of((dist.get_world_size() // size, size), "data", "tensor")
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(make_net(), mesh["tensor"], plan)
    for module in (model.up, model):
        fully_shard(module, mesh=mesh["data"])
    shardopt.comm.ordered_gradients(model, micro_batches=4, wire=wire)  # type: ignore[arg-type]
    data = mesh["data"].size()
    for index in range(4 // data):
        net_loss_of(model, make_batch(0, index * data + mesh["data"].get_local_rank())).backward()
    return gradients(model)


@needs_fsdp2
@pytest.mark.parametrize("wire", WIRES)
def test_tensor_parallelism_beside_it(ranks: Pool, wire: str) -> None:
    assert_same(ranks.run(4, _tensor_parallel, 2, wire)[0], ranks.run(2, _tensor_parallel, 2, wire)[0])


def _sends(way: str, wire: str) -> tuple[int, int, int]:
    """Bytes of a pass, the elements of each owner, and its bytes in E4M3."""
    model = ordered(way, wire)
    backward(model, passes=1)
    sent = bytes_sent(lambda: loss_of(model, 0).backward())
    shapes = [param.shape for param in make_model().parameters()]
    size = dist.get_world_size()
    rows = [(-(-shape[0] // size), shape[1:].numel()) for shape in shapes]  # of each owner
    coded = sum(n * (k + -(-k // 128) if k >= 128 else 4 * k) for n, k in rows)
    return sent // (size - 1), sum(n * row_numel for n, row_numel in rows), coded


@pytest.mark.parametrize("way", ["ddp", pytest.param("fsdp", marks=needs_fsdp2)])
def test_bytes_on_the_wire(ranks: Pool, way: str) -> None:
    """As many bytes as a reduce-scatter in the format sends."""
    sent = {wire: ranks.run(3, _sends, way, wire)[0] for wire in WIRES}
    for wire, itemsize in (("fp32", 4), ("bf16", 2)):
        nbytes, elements, _ = sent[wire]
        assert nbytes == itemsize * elements
    nbytes, _, coded = sent["e4m3"]
    assert nbytes == coded


def _precision(way: str) -> dict[str, Tensor | None]:
    model = ordered(way, "e4m3")
    backward(model)
    return gradients(model)


@needs_fsdp2
@pytest.mark.parametrize("way", ["fsdp bf16", "fsdp bf16 sums", "fsdp fp16"])
def test_mixed_precision(ranks: Pool, way: str) -> None:
    wanted = ranks.run(1, _precision, way)[0]
    for world_size in (2, 3):
        assert_same(ranks.run(world_size, _precision, way)[0], wanted)


def _reset(model: nn.Module) -> None:
    if isinstance(model, FSDPModule):
        model.reset_iter_state()


def _thrown_away(way: str, when: str) -> None:
    """Some passes, perhaps one that raises, then zero_grad() and a whole step."""
    model = ordered(way)
    backward(model, 1, passes=2)
    if when == "raised":
        loss = loss_of(model, dist.get_rank())
        handle = model.norm.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        _reset(model)
        with pytest.raises(RuntimeError, match="got a backward pass after one that raised"):
            loss_of(model, dist.get_rank()).backward()
        _reset(model)
    model.zero_grad()
    backward(model)
    assert_same(gradients(model), wanted_gradients("fp32"))


@pytest.mark.parametrize(
    ("way", "world_size"),
    [("plain", 1), ("ddp", 2), ("ddp views", 2), pytest.param("fsdp", 2, marks=needs_fsdp2)],
)
def test_zero_grad_begins_anew(ranks: Pool, way: str, world_size: int) -> None:
    ranks.run(world_size, _thrown_away, way, "after two")


needs_reset = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="FSDP2 cannot go on after a pass that raised before 2.13"
)


@pytest.mark.parametrize(("way", "world_size"), [("plain", 1), pytest.param("fsdp", 2, marks=needs_reset)])
def test_zero_grad_after_a_pass_that_raised(ranks: Pool, way: str, world_size: int) -> None:
    """DDP itself takes no pass after one that raised."""
    ranks.run(world_size, _thrown_away, way, "raised")


def _not_finite(way: str) -> float:
    """One rank's loss overflows: gradients of all are not finite, and GradScaler leaves the step out."""
    model = ordered(way, "e4m3")
    optimizer = shardopt.SGD8bit(model.parameters(), lr=1.0, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = weights(model)
    for number in range(dist.get_rank(), MICRO_BATCHES, dist.get_world_size()):
        loss = loss_of(model, number) * (float("inf") if number == 5 else 1.0)
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_same(weights(model), before)  # type: ignore[arg-type]
    optimizer.zero_grad()
    backward(model)
    assert_same(gradients(model), wanted_gradients("e4m3"))
    return scaler.get_scale()


@pytest.mark.parametrize(("way", "world_size"), [("plain", 1), ("ddp", 2), pytest.param("fsdp", 2, marks=needs_fsdp2)])
def test_numbers_that_are_not_finite_arrive(ranks: Pool, way: str, world_size: int) -> None:
    assert ranks.run(world_size, _not_finite, way) == [2.0] * world_size


class _Engine(nn.Linear):
    """Stands for DeepSpeed's."""


_Engine.__module__ = "deepspeed.runtime.engine"


def _refused(what: str) -> None:
    order = partial(shardopt.comm.ordered_gradients, micro_batches=MICRO_BATCHES)
    ddp, fsdp = WAYS["ddp"], WAYS["fsdp"]
    acts: dict[str, Callable[[], object]] = {
        "bare": lambda: order(make_model()),
        "fsdp1": lambda: order(FullyShardedDataParallel(make_net(), device_id=torch.device("cpu"))),
        "deepspeed": lambda: order(_Engine(2, 2)),
        "sparse": lambda: order(DistributedDataParallel(nn.Sequential(nn.Embedding(3, 2, sparse=True)))),
        "wire": lambda: order(ddp(make_model()), wire="fp8"),
        "micro-batches": lambda: order(ddp(make_model()), micro_batches=9),
        "arguments": lambda: order(ddp(make_model()), micro_batches=4 + 2 * dist.get_rank()),
        "ddp twice": lambda: order(ordered("ddp")),
        "fsdp twice": lambda: order(ordered("fsdp")),
        "outside": lambda: (fully_shard((model := make_model()).up), order(model)),
        "factor": lambda: ((model := fsdp(make_model())).set_gradient_divide_factor(2.0), order(model)),
        "late factor": lambda: ((model := ordered("fsdp")).set_gradient_divide_factor(2.0), backward(model)),
        "no sync": lambda: ((model := ordered("fsdp")).set_requires_gradient_sync(False), backward(model)),
        "no sync before": lambda: ((model := fsdp(make_model())).set_requires_gradient_sync(False), order(model)),
        "no all-reduce": lambda: ((model := ordered("fsdp")).set_requires_all_reduce(False), backward(model)),
        "meshes": lambda: (
            fully_shard((model := make_model()).up, mesh=mesh_of((2, 1), "a", "b")["b"]),
            order(fsdp(model, layers=())),
        ),
        "hsdp": lambda: order(fsdp(make_model(), shape=(2, 1))),
        "released": lambda: (
            shardopt.release_gradients(model := fsdp(make_model()), shardopt.AdamW8bit(model.parameters())),
            order(model),
            backward(model),
        ),
        "ddp released": lambda: shardopt.release_gradients(
            model := ordered("ddp"), shardopt.AdamW8bit(model.parameters())
        ),
    }
    if what in acts:
        acts[what]()
        return
    model = ordered("fsdp" if "fsdp" in what else "ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if "step" in what:
        backward(model, passes=2)
        optimizer.step()
    elif "many" in what:
        backward(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none="zeros" not in what)
        backward(model)
        if "zeros" not in what:
            backward(model, 1)
    elif "module alone" in what:
        loss_of(model.module, 0).backward()
    elif "forward in no_sync" in what:
        with model.no_sync():
            loss = loss_of(model, 0)
        loss.backward()
    elif "no_sync" in what:
        with model.no_sync():
            backward(model)
    elif "twice in" in what:
        layer = nn.Linear(8, 8)
        model = fully_shard(nn.Sequential(fully_shard(layer), layer))
        order(model)
        model(torch.ones(8)).sum().backward()
    elif "columns" in what:
        model = make_model()
        fully_shard(model.up, shard_placement_fn=lambda p: Shard(p.ndim - 1))
        fully_shard(model)
        order(model, wire="e4m3")
        backward(model)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("bare", "TypeError: got Blocks without FSDP2 and without DistributedDataParallel on 2 ranks"),
        ("fsdp1", "TypeError: got FSDP1"),
        ("deepspeed", 'TypeError: got a DeepSpeed engine.*"communication_data_type"'),
        ("sparse", "ValueError: module.0: got Embedding with sparse=True, expected dense gradients"),
        ("wire", "ValueError: got wire='fp8', expected one of 'fp32', 'bf16', 'e4m3'"),
        ("micro-batches", "ValueError: got micro_batches=9 on 2 ranks, expected a multiple of 2"),
        ("arguments", "ValueError: got {'micro_batches': 4, .*} here and {'micro_batches': 6, .*} on rank 1"),
        ("ddp twice", "RuntimeError: got DistributedDataParallel with a communication hook"),
        ("ddp released", "RuntimeError: got a model with ordered_gradients.* pass overlap_forward=True"),
        ("ddp step", r"RuntimeError: got step\(\) after 2 of 6 backward passes"),
        ("ddp too many", "RuntimeError: got more than 6 backward passes"),
        ("ddp no_sync", r"RuntimeError: got a backward pass within no_sync\(\)"),
        ("ddp forward in no_sync", "RuntimeError: got a backward pass that DistributedDataParallel does not reduce"),
        ("ddp module alone", "RuntimeError: got a backward pass that DistributedDataParallel does not reduce"),
        *(
            pytest.param(what, message, marks=needs_fsdp2)
            for what, message in (
                ("fsdp twice", "RuntimeError: .*got a module whose reduction has been replaced"),
                ("outside", "ValueError: norm.weight: got a parameter outside of all modules"),
                ("factor", r"RuntimeError: .*got set_gradient_divide_factor\(2.0\)"),
                ("late factor", r"RuntimeError: .*got set_gradient_divide_factor\(2.0\)"),
                ("no sync", r"RuntimeError: .*got set_requires_gradient_sync\(False\) or set_requires_all_reduce"),
                ("no sync before", r"RuntimeError: .*got set_requires_gradient_sync\(False\)"),
                ("no all-reduce", r"RuntimeError: .*or set_requires_all_reduce\(False\), expected True"),
                ("meshes", "ValueError: got '' on 2 ranks and 'up' on 1, expected one mesh"),
                ("hsdp", "ValueError: got HSDP on a mesh of 2 replicas with 1 shard"),
                ("released", "RuntimeError: .*hook after its gradient's accumulation"),
                ("fsdp step", r"RuntimeError: got step\(\) after 2 of 6 backward passes"),
                ("fsdp too many", "RuntimeError: got more than 6 backward passes"),
                ("fsdp too many, zeros", "RuntimeError: got more than 6 backward passes"),
                ("fsdp twice in a pass", "RuntimeError: '0': got two gradients in one backward pass"),
                ("fsdp columns", "ValueError: 'up': got a parameter sharded along dim 1 and wire='e4m3'"),
            )
        ),
    ],
)
def test_refused(ranks: Pool, what: str, message: str) -> None:
    with pytest.raises(RankFailure, match=f"(?s){message}"):
        ranks.run(2, _refused, what)


def _takes_gradients(way: str) -> None:
    """Asks for gradients without accumulating them, before each pass of a step."""
    model = ordered(way)
    for step in range(2):
        for done in range(MICRO_BATCHES // dist.get_world_size()):
            number = done * dist.get_world_size() + dist.get_rank()
            for _ in range(2):
                torch.autograd.grad(loss_of(getattr(model, "module", model), number, step), list(model.parameters()))
            loss_of(model, number, step).backward()
        assert_same(gradients(model), wanted_gradients("fp32", step))
        model.zero_grad()


@pytest.mark.parametrize(("way", "world_size"), [("plain", 1), ("ddp", 2)])
def test_autograd_grad_is_no_pass(ranks: Pool, way: str, world_size: int) -> None:
    ranks.run(world_size, _takes_gradients, way)


class _Recomputed(torch.autograd.Function):
    """A layer that its backward pass runs again, by a backward pass within."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.tanh(x @ weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            out = torch.tanh(x @ weight)
        return torch.autograd.grad(out, (x, weight), gradient)


class _Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.middle = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor, is_plain: bool) -> Tensor:
        x = self.first(x) if is_plain else checkpoint(self.first, x, use_reentrant=True)
        x = torch.tanh(x @ self.middle) if is_plain else _Recomputed.apply(x, self.middle)  # type: ignore[no-untyped-call]
        return self.last(x)


def _nests() -> None:
    """Passes within a pass count as one with it."""
    found = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = _Reentrant()
        shardopt.comm.ordered_gradients(model, micro_batches=2)
        for _ in range(2):
            model(torch.randn(3, 4, requires_grad=True), is_plain).sum().backward()
        found.append(gradients(model))
    assert_same(found[1], found[0])


def test_a_pass_within_a_pass(ranks: Pool) -> None:
    ranks.run(1, _nests)


def _refused_at_its_end() -> None:
    model = ordered("ddp")
    with pytest.raises(RuntimeError, match="got a backward pass that DistributedDataParallel does not reduce"):
        loss_of(model.module, 0).backward()  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="got a backward pass after one that raised"):
        backward(model, passes=1)


def test_a_refused_pass_is_thrown_away(ranks: Pool) -> None:
    ranks.run(2, _refused_at_its_end)


def _written(way: str) -> None:
    model = ordered(way)
    backward(model, passes=2)
    model.zero_grad(set_to_none=False)
    with pytest.raises(RuntimeError, match=r"got gradients that were written after 2 of \d+ backward passes"):
        backward(model, passes=1)
    model.zero_grad()
    if way == "plain":
        backward(model)
        assert_same(gradients(model), wanted_gradients("fp32"))


@pytest.mark.parametrize("way", ["plain", "ddp", "ddp views", pytest.param("fsdp", marks=needs_fsdp2)])
def test_gradients_written_between_passes_are_refused(ranks: Pool, way: str) -> None:
    ranks.run(2 - (way == "plain"), _written, way)


def _is_freed(way: str) -> None:
    model = ordered(way)
    backward(model)
    alive = [weakref.ref(model), *map(weakref.ref, model.parameters())]
    del model
    gc.collect()
    assert [each() for each in alive] == [None] * len(alive)


@pytest.mark.parametrize(("way", "world_size"), [("plain", 1), ("ddp", 2)])
def test_models_are_freed(ranks: Pool, way: str, world_size: int) -> None:
    ranks.run(world_size, _is_freed, way)


def _thaws() -> None:
    model = make_model()
    model.up.requires_grad_(False)
    shardopt.comm.ordered_gradients(model, micro_batches=MICRO_BATCHES)
    for module, is_trained in ((model.up, True), (model.extra, False), (model.down, False), (model.head, False)):
        module.requires_grad_(is_trained)
    model.norm.requires_grad_(False)
    backward(model)
    wanted = wanted_gradients("fp32")
    assert_same(gradients(model), {name: each if name.startswith("up") else None for name, each in wanted.items()})
    with pytest.raises(RuntimeError, match="got a model whose gradients are ordered already"):
        shardopt.comm.ordered_gradients(model, micro_batches=2)


def test_parameters_that_are_no_longer_frozen(ranks: Pool) -> None:
    ranks.run(1, _thaws)


def test_refused_in_one_process(ranks: Pool) -> None:
    ranks.run(1, _refused_in_one_process)


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def _refused_in_one_process() -> None:
    nested = _Nested()
    shardopt.comm.ordered_gradients(nested, micro_batches=2)
    nested(torch.randn(4, requires_grad=True)).sum().backward()  # of two passes within, each of which counts
    with pytest.raises(RuntimeError, match=r"got more than 2 backward passes.*use_reentrant=False"):
        nested(torch.randn(4, requires_grad=True)).sum().backward()
    model = ordered("plain")
    optimizer = shardopt.AdamW8bit(model.parameters())
    loss = loss_of(model, 0)
    handle = model.norm.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()  # the first pass of all
    handle.remove()
    with pytest.raises(RuntimeError, match=r"got step\(\) after 0 of 12 backward passes"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="got a backward pass after one that raised"):
        backward(model, passes=1)
    optimizer.zero_grad()
    backward(model, passes=2)
    with pytest.raises(RuntimeError, match=r"got step\(\) after 2 of 12 backward passes"):
        optimizer.step()
    shardopt.AdamW8bit([nn.Parameter(torch.zeros(3))]).step()  # of other parameters
    backward(model, passes=10)
    optimizer.step()
    with pytest.raises(RuntimeError, match="got more than 12 backward passes"):
        backward(model, passes=1)
    model = ordered("plain")
    for parts in (False, True):  # whole, or modules one by one, past the model's own hooks
        x = torch.ones(2, 128)
        handle = model.up.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            (model.norm(model.up(x)) if parts else model(x)).sum().backward()
        handle.remove()
        with pytest.raises(RuntimeError, match="got a backward pass after one that raised"):
            (model.norm(model.up(x)) if parts else model(x)).sum().backward()
        model.zero_grad()
    backward(model)
    assert_same(gradients(model), wanted_gradients("fp32"))
