"""quantize_state on shards: the bits of one rank, for optimizers that are element by element; others are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ranks.models import WAYS, make_net, named_parameters, set_gradients
from ranks.pool import Pool
from ranks.snapshot import assert_same, assert_shards_of, entries, snapshot
from shardopt import quantize_state
from shardopt.wrapper import QuantizedState
from wrapped import ELEMENTWISE, train_mode

#: Not fused: torch's fused kernels for CPUs round the last elements of a tensor otherwise.
NAMES = [name for name in ELEMENTWISE if "fused" not in name]
#: Optimizers without state, or with copies of weights alone.
NOTHING_QUANTIZED = ("torch SGD", "torch ASGD", "pytorch_optimizer ScheduleFreeSGD", "schedulefree SGD")
FAST = ("torch AdamW foreach", "torch NAdam", "torch Adagrad", "torch SGD momentum", "schedulefree AdamW")
SMALL: dict[str, Any] = {"min_quantized_numel": 64}


def _make(name: str, model: nn.Module, **options: Any) -> QuantizedState:
    optimizer = quantize_state(ELEMENTWISE[name](list(model.parameters())), **SMALL, **options)
    train_mode(optimizer)
    return optimizer


def _dtensors(name: str, way: str, codec: str, block_size: int = 128) -> None:
    whole, sharded = make_net(), WAYS[way](make_net())
    params, sharded_params = named_parameters(whole), named_parameters(sharded)
    optimizers = [(model, _make(name, model, codec=codec, block_size=block_size)) for model in (whole, sharded)]
    for step in range(3):
        for model, optimizer in optimizers:
            set_gradients(model, step)
            optimizer.step()
    expected = entries(params, optimizers[0][1])
    assert any(key.endswith("_codes") for key in expected) or name in NOTHING_QUANTIZED
    assert_shards_of(entries(sharded_params, optimizers[1][1]), expected)
    assert_same(snapshot(sharded_params, optimizers[1][1]), expected)
    # through floats, and back
    for _, optimizer in optimizers:
        optimizer.load_state_dict(optimizer.state_dict(dequantize=True))
    assert_same(snapshot(sharded_params, optimizers[1][1]), entries(params, optimizers[0][1]))


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_fsdp2(ranks: Pool, name: str) -> None:
    pytest.importorskip({"timm": "timm.optim"}.get(name.split()[0], name.split()[0]))
    ranks.run(2, _dtensors, name, "fsdp", "log8")


@pytest.mark.parametrize(
    ("world_size", "way", "codec"),
    [(2, "hsdp of one", "dynamic8"), (2, "ddp", "log8"), (3, "fsdp", "companded8"), (4, "hsdp", "log8")],
)
def test_other_layouts(ranks: Pool, world_size: int, way: str, codec: str) -> None:
    ranks.run(world_size, _dtensors, "torch AdamW foreach", way, codec)


class Untested(torch.optim.Optimizer):
    """An optimizer of somebody's own, which steps DTensors as they are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["average"] = torch.zeros_like(param)
            state["average"].mul_(0.9).add_(param.grad, alpha=0.1)
            param.sub_(state["average"], alpha=0.1)


@pytest.mark.ranks(2)
def test_untested_optimizers_step_dtensors() -> None:
    results = []
    for model in (make_net(), WAYS["fsdp"](make_net())):
        with pytest.warns(UserWarning, match="untested"):
            optimizer = quantize_state(Untested(list(model.parameters())), **SMALL)
        for step in range(3):
            set_gradients(model, step)
            optimizer.step()
        results.append(snapshot(named_parameters(model), optimizer))
    assert any(key.endswith("average_codes") for key in results[0])
    assert_same(results[1], results[0])


@pytest.mark.ranks(2)
def test_state_dict_of_torch() -> None:
    """torch's way to save and load sharded state, which calls step() on an optimizer that has none yet."""
    results = []
    for reload in (False, True):
        model = WAYS["fsdp"](make_net())
        optimizer = _make("torch AdamW foreach", model)
        for step in range(4):
            if step == 2 and reload:
                saved = get_optimizer_state_dict(model, optimizer)
                optimizer = _make("torch AdamW foreach", model)
                set_optimizer_state_dict(model, optimizer, saved)
            set_gradients(model, step)
            optimizer.step()
        results.append(snapshot(named_parameters(model), optimizer))
    assert_same(*results)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("way", "make", "message"),
    [
        ("fsdp", torch.optim.Adafactor, "depends on all of the parameter"),
        ("fsdp columns", torch.optim.AdamW, "columns that end within blocks of 128"),
        ("fsdp1", torch.optim.AdamW, r"a flat shard .*; use fully_shard \(FSDP2\)"),
        ("fsdp1 flat", torch.optim.AdamW, r"a flat shard .*; use fully_shard \(FSDP2\)"),
    ],
)
def test_refusals(way: str, make: Any, message: str) -> None:
    sharded = WAYS[way](make_net())
    with pytest.raises(RuntimeError, match=message):
        quantize_state(make(list(sharded.parameters())), **SMALL)
    added = quantize_state(make([nn.Parameter(torch.zeros(64, 128))]), **SMALL)
    with pytest.raises(RuntimeError, match=message):
        added.add_param_group({"params": list(sharded.parameters())})
    assert len(added.param_groups) == 1


@pytest.mark.ranks(2)
def test_zero_redundancy() -> None:
    def make(params: Any, **options: Any) -> QuantizedState:
        return quantize_state(torch.optim.AdamW(params, **options), **SMALL)

    whole, model = make_net(), DistributedDataParallel(make_net())
    expected = make(whole.parameters(), lr=1e-3)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=make, lr=1e-3)  # type: ignore[arg-type]
    for step in range(3):
        for each, stepped in ((whole, expected), (model, optimizer)):
            set_gradients(each, step)
            stepped.step()
    assert all(map(torch.equal, model.parameters(), whole.parameters()))
    assert 0 < len(optimizer.optim.state) < len(expected.state)
    assert dist.is_initialized()
