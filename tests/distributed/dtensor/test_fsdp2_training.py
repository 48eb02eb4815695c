"""Training sharded models: real backward passes, accumulation, clipping, mixed precision, offload, loss scaling."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils import clip_grad_norm_

import shardopt
from ranks.layouts import values
from ranks.models import WAYS, loss_of, make_batch, make_net, named_parameters
from ranks.pool import Pool
from ranks.snapshot import Snapshot, assert_same, in_full, snapshot

#: Quantizes the model's small matrices, too.
SMALL = {"lr": 1e-2, "min_quantized_numel": 64}


def _backward(model: nn.Module, step: int, *, batches: int = 1, same_on_all: bool = False) -> list[float]:
    """Gradients of so many batches, summed up by FSDP before it shares them out."""
    losses = []
    for batch in range(batches):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(batch == batches - 1)
        rank = 0 if same_on_all else dist.get_rank()
        loss = loss_of(model, make_batch(10 * step + batch, rank))
        loss.backward()
        losses.append(float(loss))
    return losses


def _step_on_full_gradients(way: str, batches: int, clip: float | None) -> None:
    """Steps the sharded model, and a whole one on the gathered gradients."""
    sharded, whole = WAYS[way](make_net()), make_net()
    sharded_params, params = named_parameters(sharded), named_parameters(whole)
    sharded_optimizer, optimizer = (shardopt.AdamW8bit(model.parameters(), **SMALL) for model in (sharded, whole))
    for step in range(3):
        _backward(sharded, step, batches=batches, same_on_all="tp" in way)
        if clip is not None:
            clip_grad_norm_(sharded.parameters(), clip)
        for name, param in params.items():
            gradient = sharded_params[name].grad
            assert gradient is not None
            param.grad = in_full(gradient).clone()
        sharded_optimizer.step()
        optimizer.step()
        sharded_optimizer.zero_grad()
    assert_same(snapshot(sharded_params, sharded_optimizer), snapshot(params, optimizer))


@pytest.mark.parametrize(
    ("world_size", "way"),
    [
        (2, "fsdp columns"),
        (2, "fsdp bf16"),
        (3, "fsdp"),
        (3, "fsdp offload"),
        (3, "tp"),
        (4, "fsdp"),
        (4, "fsdp tp"),
        (4, "hsdp"),
        (4, "ddp"),
    ],
)
def test_steps_on_real_gradients(ranks: Pool, world_size: int, way: str) -> None:
    ranks.run(world_size, _step_on_full_gradients, way, 1, None)


@pytest.mark.parametrize("way", ["fsdp", "fsdp columns"])
def test_accumulation_and_clipping(ranks: Pool, way: str) -> None:
    ranks.run(3, _step_on_full_gradients, way, 2, 0.05)


def _train(way: str, same_on_all: bool = True) -> tuple[list[float], Snapshot]:
    model = WAYS[way](make_net())
    optimizer = shardopt.AdamW8bit(model.parameters(), **SMALL)
    losses = []
    for step in range(5):
        losses += _backward(model, step, same_on_all=same_on_all)
        optimizer.step()
        optimizer.zero_grad()
    return losses, snapshot(named_parameters(model), optimizer)


@pytest.mark.parametrize(("world_size", "way"), [(2, "ddp"), (2, "fsdp"), (4, "ddp"), (4, "fsdp"), (4, "hsdp")])
def test_ranks_with_the_same_batch_train_as_one(ranks: Pool, world_size: int, way: str) -> None:
    """The mean of 2 or 4 equal gradients is exact."""
    ((losses, expected),) = ranks.run(1, _train, "single")
    assert losses[-1] < losses[0]
    for rank_losses, got in ranks.run(world_size, _train, way):
        assert rank_losses == losses
        assert_same(got, expected)


def _embedding(codec: str) -> None:
    shape = (50257, 96)
    whole, sharded = nn.Embedding(*shape), nn.Embedding(*shape)
    for module in (whole, sharded):
        module.weight.data = values(shape, 0)
    fully_shard(sharded)
    optimizer, sharded_optimizer = (shardopt.AdamW(module.parameters(), codec=codec) for module in (whole, sharded))
    tokens = torch.randint(shape[0], (4096,), generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        sharded(tokens).square().sum().backward()
        whole.weight.grad = in_full(sharded.weight.grad).clone()
        sharded_optimizer.step()
        optimizer.step()
    assert_same(
        snapshot({"weight": sharded.weight}, sharded_optimizer),
        snapshot({"weight": whole.weight}, optimizer),
    )


def test_embedding(ranks: Pool) -> None:
    ranks.run(3, _embedding, "log8")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("codec", ["companded8", "dynamic8", "log8"])
def test_embedding_sweep(ranks: Pool, world_size: int, codec: str) -> None:
    ranks.run(world_size, _embedding, codec)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("overflow", [False, True])
def test_loss_scaling(overflow: bool) -> None:
    """Trains with a scaled loss, and without; with an overflow, the last gradient of one rank is infinite."""
    scaled, plain = (WAYS["fsdp columns"](make_net()) for _ in range(2))
    optimizers = [shardopt.AdamW8bit(model.parameters(), **SMALL) for model in (scaled, plain)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        for model, scale in ((scaled, scaler.scale), (plain, torch.clone)):
            scale(loss_of(model, make_batch(step, dist.get_rank()))).backward()
        overflows = overflow and step == 2
        if overflows and dist.get_rank() == 1:
            scaled.down.weight.grad.to_local()[3, 5] = torch.inf
        scaler.step(optimizers[0])
        scaler.update()
        if not overflows:
            optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    got, expected = (
        snapshot(named_parameters(model), optimizer)
        for model, optimizer in zip((scaled, plain), optimizers, strict=True)
    )
    assert_same(got, expected)
    assert scaler.get_scale() == (2.0**9 if overflow else 2.0**10)
    assert optimizers[0].nonfinite_count == 0
