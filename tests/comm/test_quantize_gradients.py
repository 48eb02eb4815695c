"""Models whose gradients are reduced in 8 bits: FSDP2, HSDP, DDP; and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardopt
from message_problem import bytes_sent
from ranks.layouts import mesh_of
from ranks.models import loss_of, make_batch, make_net
from ranks.pool import Pool, RankFailure

needs_custom_reduce_scatter = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_reduce_scatter"),
    reason="PyTorch's FSDP2 has a reduce-scatter that cannot be replaced before 2.9",
)


def sharded(way: str) -> nn.Module:
    """The network in two units of FSDP2, or in DDP."""
    net = make_net()
    if way == "ddp":
        return DistributedDataParallel(net, bucket_cap_mb=0.05)
    half = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if way == "bf16" else torch.float32)
    size = dist.get_world_size()
    mesh = mesh_of((2, size // 2), "replicas", "shards") if way == "hsdp" else mesh_of((size,))
    fully_shard(net.up, mesh=mesh, mp_policy=half)
    fully_shard(net, mesh=mesh, mp_policy=half)
    for module in net.modules():
        if isinstance(module, FSDPModule) and way == "factor":
            module.set_gradient_divide_factor(7.0)
        if isinstance(module, FSDPModule) and way == "sum":
            module.set_force_sum_reduction_for_comms(True)
    return net


def gradients(model: nn.Module, factor: float = 1.0) -> list[Tensor]:
    """Gradients in full, of a batch of this rank's own."""
    model.zero_grad()
    (loss_of(model, make_batch(0, dist.get_rank())) * factor).backward()
    found = [param.grad for param in model.parameters()]
    return [(g.full_tensor() if hasattr(g, "full_tensor") else g).detach().clone() for g in found if g is not None]


def own_gradients() -> list[Tensor]:
    return gradients(make_net())


def _trains(way: str) -> tuple[list[Tensor], list[Tensor], list[Tensor], int]:
    """Gradients with PyTorch's reduction, in 8 bits, and the ranks' mean magnitudes; the bytes of the second."""
    # Gloo has no PREMUL_SUM, by which FSDP2 divides by a factor of its user's.
    plain, model = sharded("fsdp" if way == "factor" else way), sharded(way)
    shardopt.comm.quantize_gradients(model)
    exact = gradients(plain, dist.get_world_size() / 7 if way == "factor" else 1.0)
    found: list[Tensor] = []
    gradients(model)  # DDP arranges its buckets anew after the first backward pass
    sent = bytes_sent(lambda: found.extend(gradients(model)))
    magnitudes = [g.abs() for g in own_gradients()]
    for magnitude in magnitudes:
        dist.all_reduce(magnitude)
    for first, second in zip(found, gradients(model), strict=True):
        assert torch.equal(first, second)
    return exact, found, magnitudes, sent


@needs_custom_reduce_scatter
@pytest.mark.parametrize(
    ("world_size", "way", "divisor"),
    [(2, "fsdp", 2), (3, "bf16", 3), (3, "factor", 7), (2, "sum", 2), (4, "hsdp", 4)],
)
def test_fsdp2(ranks: Pool, world_size: int, way: str, divisor: int) -> None:
    _check(ranks, world_size, way, divisor)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ddp(ranks: Pool, world_size: int) -> None:
    _check(ranks, world_size, "ddp", world_size)


def _check(ranks: Pool, world_size: int, way: str, divisor: int) -> None:
    """Errors are within half a unit of a code for each rank's gradient, and once more for DDP's mean."""
    results = ranks.run(world_size, _trains, way)
    exact, found, magnitudes, sent = results[0]
    assert (sent > 0) == (world_size > 1)
    for _, other, _, _ in results[1:]:
        for a, b in zip(found, other, strict=True):
            assert torch.equal(a, b)
    # Of a block's largest element, which may be any parameter's: what is below its smallest normal code.
    least = 2.0**-16 * max(float(g.max()) for g in magnitudes)
    unit = 2.0**-4 + (2.0**-7 if way == "bf16" else 0.0)  # and its own rounding, before and after
    for wanted, got, magnitude in zip(exact, found, magnitudes, strict=True):
        bound = (unit + (1.1 * unit if way == "ddp" else 0.0)) * magnitude / divisor + least
        assert ((got - wanted).abs() <= bound).all()
        if world_size > 1 and wanted.numel() > 1000:
            assert not torch.equal(got, wanted)  # it was coded at all


def _not_finite(way: str) -> tuple[bool, float]:
    """One rank's loss overflows: gradients of all are not finite, and GradScaler leaves the step out."""
    model = sharded(way)
    shardopt.comm.quantize_gradients(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in model.parameters()]
    loss = loss_of(model, make_batch(0, dist.get_rank())) * (float("inf") if dist.get_rank() == 1 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    kept = all(torch.equal(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True))
    return kept, scaler.get_scale()


@pytest.mark.parametrize("way", [pytest.param("fsdp", marks=needs_custom_reduce_scatter), "ddp"])
def test_what_is_not_finite_arrives(ranks: Pool, way: str) -> None:
    assert ranks.run(2, _not_finite, way) == [(True, 2.0)] * 2


class _Engine(nn.Linear):
    """Stands for DeepSpeed's."""


_Engine.__module__ = "deepspeed.runtime.engine"


def _refused(what: str) -> None:
    if what == "plain":
        shardopt.comm.quantize_gradients(make_net())
    elif what == "fsdp1":
        shardopt.comm.quantize_gradients(FullyShardedDataParallel(make_net(), device_id=torch.device("cpu")))
    elif what == "deepspeed":
        shardopt.comm.quantize_gradients(_Engine(2, 2))
    elif what == "twice":
        model = sharded("ddp")
        shardopt.comm.quantize_gradients(model)
        shardopt.comm.quantize_gradients(model)
    elif what == "released":
        model = sharded("ddp")
        shardopt.comm.quantize_gradients(model)
        shardopt.release_gradients(model, shardopt.AdamW(model.parameters()))
    elif what == "sparse":
        shardopt.comm.quantize_gradients(DistributedDataParallel(nn.Sequential(nn.Embedding(3, 2, sparse=True))))
    elif what == "replicate":
        from torch.distributed._composable.replicate_with_fsdp import replicate

        shardopt.comm.quantize_gradients(replicate(make_net(), mesh=mesh_of((2,))))
    elif what == "old":
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.delattr(FSDPModule, "set_custom_reduce_scatter", raising=False)
            shardopt.comm.quantize_gradients(sharded("fsdp"))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("plain", "TypeError: got Net without FSDP2 and without DistributedDataParallel"),
        ("fsdp1", "TypeError: got FSDP1"),
        ("deepspeed", 'TypeError: got a DeepSpeed engine.*"zero_quantized_gradients"'),
        ("twice", "RuntimeError: got DistributedDataParallel with a communication hook"),
        ("released", "RuntimeError: .*communication hook"),
        ("sparse", "ValueError: module.0: got Embedding with sparse=True, expected dense gradients"),
        pytest.param("replicate", r"TypeError: got replicate\(\)", marks=needs_custom_reduce_scatter),
        ("old", "RuntimeError: got PyTorch .*, expected 2.9 or newer"),
    ],
)
def test_refused(ranks: Pool, what: str, message: str) -> None:
    with pytest.raises(RankFailure, match=f"(?s){message}"):
        ranks.run(2, _refused, what)
