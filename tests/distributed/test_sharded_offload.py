"""State in the host's memory under every kind of shard: the bits of a run without offload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import shardopt
from ranks.flat import forget_shards
from ranks.layouts import mesh_of
from ranks.models import WAYS, loss_of, make_batch, make_net
from ranks.offload import late_transfers, offload_from_cpu, slow_steps
from ranks.pool import Pool
from ranks.runs import make_optimizer, snapshot_of, step_with, trained
from ranks.snapshot import assert_same, snapshot
from shardopt.optim import ShardedOptimizer
from shardopt.state import host_memory

STEPS = 3
OFFLOADS = ("state", "step")


def _offloads(optimizer: ShardedOptimizer) -> dict[tuple[int, ...], str | None]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {tuple(param.shape): optimizer._internals.residency.of(param).offload for param in params}


def _as_without(way: str, rule: str, offload: str, options: dict[str, Any]) -> None:
    expected = snapshot_of(*trained(way, STEPS, rule, **options))
    with offload_from_cpu(transfers=late_transfers(offload)):
        model, optimizer = trained(way, STEPS, rule, offload=offload, **options)
        optimizer.synchronize()
        assert_same(snapshot_of(model, optimizer), expected)
        assert offload in _offloads(optimizer).values()


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize(
    ("way", "world_size"),
    [
        ("ddp", 2),
        ("fsdp", 2),
        ("fsdp", 3),
        ("fsdp offload", 2),
        ("fsdp columns", 3),
        ("tp", 2),
        ("hsdp", 4),
        pytest.param("fsdp tp", 4, marks=pytest.mark.slow),
        pytest.param("fsdp columns tp", 4, marks=pytest.mark.slow),
    ],
)
def test_offload(ranks: Pool, way: str, world_size: int, offload: str) -> None:
    ranks.run(world_size, _as_without, way, "adamw", offload, {})


@pytest.mark.parametrize(("way", "world_size"), [("fsdp1", 2), ("fsdp1 flat", 3), ("fsdp1 hybrid", 4)])
def test_flat_shards(ranks: Pool, way: str, world_size: int) -> None:
    """Chunks with cut blocks come once per phase."""
    ranks.run(world_size, _as_without, way, "adamw", "state", {})


@pytest.mark.parametrize("options", [{"codec": "companded8"}, {"codec": "fp32"}, {"device_state_budget": "20KiB"}])
def test_options(ranks: Pool, options: dict[str, Any]) -> None:
    for way in ("fsdp", "fsdp1"):
        ranks.run(2, _as_without, way, "adamw", "state", options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("offload", OFFLOADS)
def test_cut_columns_stay(offload: str) -> None:
    """Where column shards cut blocks, the scales belong to several ranks: that state stays."""
    with offload_from_cpu():
        model, optimizer = trained("tp", 1, offload=offload)
        found = {name: optimizer._internals.residency.of(param).offload for name, param in model.named_parameters()}
        assert found["embed.weight"] is None
        assert found["up.weight"] == offload


@pytest.mark.ranks(2)
@pytest.mark.parametrize("late", [False, True])
def test_flat_shards_that_cannot_be_offloaded(late: bool) -> None:
    """The error comes when the optimizer is made; for a model wrapped before the import of shardopt, from attach()."""
    model = WAYS["fsdp1"](make_net())
    if late:
        forget_shards(model)

    def tell(**options: Any) -> None:
        optimizer = shardopt.AdamW8bit(model.parameters(), **options)
        if late:
            optimizer.attach(model)

    with offload_from_cpu():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host_memory, "_available_host_bytes", lambda: 1000)
            with pytest.raises(MemoryError, match="got 1000 bytes of available host memory"):
                tell(offload="state")
        if late:
            forget_shards(model)
        with pytest.raises(RuntimeError, match="offload='step': got parameters of flat shards"):
            tell(offload="step")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("offload", OFFLOADS)
def test_gradient_release(offload: str) -> None:
    runs = []
    with offload_from_cpu(transfers=late_transfers(offload)):
        for how in (None, offload):
            model = WAYS["fsdp"](make_net())
            optimizer = make_optimizer("fsdp", model, offload=how)
            if how is not None:
                shardopt.release_gradients(model, optimizer)
            for step in range(STEPS):
                loss_of(model, make_batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.synchronize()
            runs.append(snapshot_of(model, optimizer))
    assert_same(runs[1], runs[0])


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


@pytest.mark.ranks(2)
def test_collectives_stay_in_the_thread_of_the_backward_pass() -> None:
    """Gradients that are reduced here come in another thread's way if that reduces them; one rank's is slow."""
    runs = []
    for how in (None, "step"):
        torch.manual_seed(0)
        model = nn.Sequential(_Block(), _Block(), _Block())
        for block in model:
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
            parallelize_module(block, mesh_of((dist.get_world_size(),)), plan)
        with offload_from_cpu(), slow_steps(0.02 * dist.get_rank()):
            optimizer = shardopt.AdamW8bit(model.parameters(), lr=1e-2, min_quantized_numel=64, offload=how)
            if how is not None:
                shardopt.release_gradients(model, optimizer)
            for step in range(STEPS):
                x = torch.randn((4, 8, 64), generator=torch.Generator().manual_seed(step))
                model(x.chunk(dist.get_world_size(), 1)[dist.get_rank()]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        runs.append(snapshot(dict(model.named_parameters()), optimizer))
    assert_same(runs[1], runs[0])


def _save(path: Path, way: str, offload: str | None) -> None:
    with offload_from_cpu():
        shardopt.checkpoint.save(path, *trained(way, STEPS, offload=offload))


def _load(path: Path, way: str, offload: str | None) -> None:
    with offload_from_cpu():
        model = WAYS[way](make_net(seed=1))
        optimizer = make_optimizer(way, model, offload=offload)
        step_with(model, optimizer, 99)
        shardopt.checkpoint.load(path, model, optimizer)
        _continue(model, optimizer)
        expected = snapshot_of(*trained(way, STEPS + 1))
        assert_same(snapshot_of(model, optimizer), expected)


def _continue(model: nn.Module, optimizer: ShardedOptimizer) -> None:
    step_with(model, optimizer, STEPS)
    optimizer.synchronize()
    assert all(torch.isfinite(param).all() for param in model.parameters())


@pytest.mark.parametrize(
    ("way", "size", "before", "other", "other_size", "after"),
    [
        ("fsdp", 2, "state", "fsdp1", 3, "state"),
        ("fsdp1", 3, None, "fsdp", 2, "step"),
        ("fsdp", 2, "step", "ddp", 2, None),
    ],
)
def test_checkpoints_between(
    ranks: Pool, tmp_path: Path, way: str, size: int, before: str | None, other: str, other_size: int, after: str | None
) -> None:
    ranks.run(size, _save, tmp_path, way, before)
    ranks.run(other_size, _load, tmp_path, other, after)
