"""StableEmbedding under every sharding: the state of its weight is float32, bit for bit that of the unsharded run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import shardopt
from ranks.deepspeed import (
    HYPER,
    config,
    engine_snapshot,
    import_deepspeed,
    make_engine,
    step_engine,
    step_whole,
    taking_gradients,
    whole_snapshot,
)
from ranks.models import TOKENS, WAYS, Net, fsdp1, loss_of, make_batch, make_net
from ranks.pool import Pool
from ranks.runs import make_optimizer, snapshot_of, step_with
from ranks.snapshot import Snapshot, assert_same

STEPS = 2
#: Layouts and numbers of ranks: FSDP1 and ZeRO cut the embedding within rows.
LAYOUTS = {
    "ddp": 2,
    "fsdp": 3,
    "fsdp columns": 2,
    "fsdp offload": 2,
    "hsdp": 4,
    "fsdp1": 3,
    "fsdp1 flat": 3,
    "fsdp1 grad flat": 2,
    "fsdp1 none": 2,
    "fsdp1 none flat": 2,
    "fsdp1 hybrid flat": 4,
    "fsdp1 nested flat": 2,
    "zero": 3,
}


def _net(seed: int = 0, dtype: torch.dtype = torch.float32) -> Net:
    net = make_net(seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net.embed = shardopt.StableEmbedding(TOKENS, 66)
    return net.to(dtype)


def _trained(way: str, **options: Any) -> tuple[nn.Module, Any]:
    model = WAYS[way](_net())
    optimizer = make_optimizer(way, model, **options)
    for step in range(STEPS):
        step_with(model, optimizer, step)
    return model, optimizer


def _check_formats(found: Snapshot) -> None:
    """Demands float32 moments of the embedding, and codes of its neighbour."""
    for moment in ("exp_avg", "exp_avg_sq"):
        assert found[f"embed.weight/{moment}"].dtype == torch.float32
        assert found[f"up.weight/{moment}_codes"].dtype == torch.uint8
    assert not [key for key in found if key.startswith("embed.weight/") and "_codes" in key]


def _as_whole(way: str) -> None:
    found = snapshot_of(*_trained(way))
    _check_formats(found)
    assert_same(found, snapshot_of(*_trained("single")))


@pytest.mark.parametrize("way", LAYOUTS)
def test_as_unsharded(ranks: Pool, way: str) -> None:
    ranks.run(LAYOUTS[way], _as_whole, way)


def _save(way: str, path: Path) -> None:
    shardopt.checkpoint.save(path, *_trained(way))


def _load(way: str, path: Path) -> None:
    model = WAYS[way](_net(seed=1))
    optimizer = make_optimizer(way, model)
    step_with(model, optimizer, 99)
    shardopt.checkpoint.load(path, model, optimizer)
    expected = _trained("single")
    assert_same(snapshot_of(model, optimizer), snapshot_of(*expected))
    step_with(model, optimizer, STEPS)
    step_with(*expected, STEPS)
    assert_same(snapshot_of(model, optimizer), snapshot_of(*expected))


@pytest.mark.parametrize(("saved", "loaded"), [("fsdp", "fsdp1 flat"), ("fsdp1 flat", "ddp"), ("ddp", "fsdp")])
def test_portable_checkpoints(ranks: Pool, tmp_path: Path, saved: str, loaded: str) -> None:
    ranks.run(3, _save, saved, tmp_path / "saved")
    ranks.run(2, _load, loaded, tmp_path / "saved")


def _is_float32(optimizer: Any, param: torch.Tensor) -> bool:
    return set(optimizer.state[param]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("reshard", "release"), [(True, False), (False, False), (True, True)])
def test_fsdp2_training(reshard: bool, release: bool) -> None:
    """Forward and backward passes, in which FSDP2 puts gathered parameters in the module."""
    model = _net()
    for layer in (model.embed, model.up, model):
        fully_shard(layer, reshard_after_forward=reshard)
    model.set_reshard_after_backward(reshard)
    optimizer = shardopt.AdamW8bit(model.parameters(), min_quantized_numel=64)
    embedding = model.embed.weight
    if release:
        shardopt.release_gradients(model, optimizer)
    for step in range(2):
        loss_of(model, make_batch(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert embedding in optimizer.state
    assert _is_float32(optimizer, embedding)


@pytest.mark.ranks(2)
def test_fsdp2_of_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Net()
        model.embed = shardopt.StableEmbedding(TOKENS, 66)
    for layer in (model.embed, model):
        fully_shard(layer)
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    optimizer = shardopt.AdamW8bit(model.parameters(), min_quantized_numel=64)
    loss_of(model, make_batch(0)).backward()
    optimizer.step()
    assert _is_float32(optimizer, model.embed.weight)
    assert not _is_float32(optimizer, model.up.weight)


@pytest.mark.ranks(2)
def test_tensor_parallel() -> None:
    module = shardopt.StableEmbedding(TOKENS, 66)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
    module.register_parameter("weight", weight)
    optimizer = shardopt.AdamW8bit([weight], min_quantized_numel=64)
    weight.grad = distribute_tensor(torch.ones(TOKENS, 66), mesh, [Shard(0)])
    optimizer.step()
    assert _is_float32(optimizer, weight)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("flat", [False, True])
def test_tied_under_fsdp1(flat: bool) -> None:
    """The head comes first in the model, so that FSDP1 takes its name for the flat parameter's part."""
    embedding = shardopt.StableEmbedding(TOKENS, 66)
    model = nn.ModuleDict({"a_head": nn.Linear(66, TOKENS), "embed": embedding})
    model["a_head"].weight = embedding.weight
    wrapped = fsdp1(model, [], use_orig_params=not flat)
    optimizer = shardopt.AdamW8bit(wrapped.parameters(), min_quantized_numel=64)
    for param in wrapped.parameters():
        param.grad = torch.ones_like(param) if param.numel() else None
    optimizer.step()
    assert all("_codes" not in key for state in optimizer.state.values() for key in state)
    groups = shardopt.param_groups(wrapped, {"embed.weight": {"codec": "fp32"}}) if not flat else None
    if groups is not None:
        assert groups[0]["param_names"] == ["a_head.weight"]
    names = {part.names for part in shardopt.param_groups(wrapped).parameters}
    assert ("a_head.weight", "embed.weight") in names


BF16 = {"bf16": {"enabled": True}}


def _deepspeed(stage: int, zero: dict[str, Any], options: dict[str, Any]) -> None:
    dtype = torch.bfloat16 if options else torch.float32
    net = _net()
    model = taking_gradients(copy.deepcopy(net))
    engine = make_engine(model, config(stage, zero=zero, **options))
    whole = net.to(dtype).float()
    optimizer = shardopt.AdamW8bit(whole.parameters(), **HYPER)
    for step in range(STEPS):
        step_engine(engine, step)
        step_whole(whole, optimizer, step)
    found = engine_snapshot(engine)
    _check_formats(found)
    assert_same(found, whole_snapshot(whole, optimizer))


@pytest.mark.parametrize("options", [{}, BF16], ids=["float32", "bf16"])
@pytest.mark.parametrize(
    ("stage", "zero"),
    [(0, {}), (1, {}), (2, {"round_robin_gradients": True}), (3, {}), (3, {"sub_group_size": 20000})],
)
def test_deepspeed(deepspeed_ranks: Pool, stage: int, zero: dict[str, Any], options: dict[str, Any]) -> None:
    deepspeed_ranks.run(2 if options else 3, _deepspeed, stage, zero, options)  # a third is not exact in bf16


@pytest.mark.deepspeed_ranks(2)
def test_deepspeed_zero_init() -> None:
    deepspeed = import_deepspeed()
    settings = config(3)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        net = _net()
    groups = shardopt.param_groups(net, no_decay=["*.bias"])
    assert {p.shape for p in groups.parameters if p.names == ("embed.weight",)} == {(TOKENS, 66)}
    engine = make_engine(taking_gradients(net), settings, model_parameters=groups)
    step_engine(engine, 0)
    _check_formats(engine_snapshot(engine))
