"""FSDP1 beside ``test_layouts.py``: models in part, optimizers made early and late, exchanges and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import shardopt
from helpers import RULES
from ranks.collectives import counted_collectives
from ranks.flat import (
    bare_shapes,
    gathered,
    gathered_parameters,
    gathered_tensors,
    pieces,
    remember_bare,
    shared_blocks,
)
from ranks.layouts import Shape
from ranks.models import Odds, Tied, fsdp1, loss_of, make_batch, make_net, make_odds
from ranks.pickling import from_all_ranks
from ranks.pool import Pool
from ranks.runs import make_optimizer, snapshot_of, step_with, trained
from ranks.snapshot import assert_same, assert_same_on_rank_0
from shardopt.optim import ShardedOptimizer

SMALL = {"lr": 1e-2, "min_quantized_numel": 64}


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [3, 4])
def test_odd_shapes_are_odd(world_size: int) -> None:
    """Assumptions of the tests about the model of odd shapes: cut blocks of many owners, and ranks with nothing."""
    for orig in (True, False):
        _, model = make_odds(use_orig_params=orig)
        everyone = from_all_ranks({p.name: p.numel for p in pieces(model)})
        owners = {name: sum(1 for own in everyone if own[name]) for name in everyone[0]}
        assert owners["units.4.weight0"] == owners["units.5.weight0"] == world_size  # one block of 128 each
        assert owners["units.1.weight0"] < world_size or world_size < 4
        assert any(count < world_size for count in owners.values())


@pytest.mark.ranks(3)
def test_the_tests_put_parameters_together() -> None:
    """The pieces of which the tests put a whole together are where FSDP itself says."""
    for orig in (True, False):
        whole, model = make_odds(use_orig_params=orig)
        found = gathered_parameters(model)
        assert_same(found, {name: param.detach() for name, param in whole.named_parameters()})
        for piece in pieces(model):
            assert torch.equal(piece.of(piece.tensor), piece.cut(found[piece.name]))


@pytest.mark.ranks(3)
def test_parameters_beside_units() -> None:
    """Only some layers are FSDP1 units; the others are whole on every rank."""
    whole, model = Odds(), Odds()
    bare = bare_shapes(model)
    model.units[0] = fsdp1(model.units[0], [])
    model.units[3] = fsdp1(model.units[3], [], use_orig_params=False)
    remember_bare(model, bare)
    optimizer, expected = (RULES["adamw"].make(m.parameters(), min_quantized_numel=32) for m in (model, whole))
    for step in range(3):
        step_with(model, optimizer, step)
        step_with(whole, expected, step)
    assert_same_on_rank_0(gathered(model, optimizer), lambda: snapshot_of(whole, expected))


def _backward(model: nn.Module, step: int) -> None:
    loss_of(model, make_batch(step, dist.get_rank())).backward()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("orig", [True, False])
def test_gradients_that_are_not_shared_out_yet_are_refused(orig: bool) -> None:
    model = fsdp1(make_net(), use_orig_params=orig)
    optimizer = make_optimizer("fsdp1", model)
    with model.no_sync():
        _backward(model, 0)
    with pytest.raises(RuntimeError, match=r"got a gradient of shape .* expected"):
        optimizer.step()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("orig", [True, False])
def test_tied_weights(orig: bool) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Tied())
    whole, model = models[0], fsdp1(models[1], ["mix"], use_orig_params=orig)
    optimizer, expected = (shardopt.AdamW8bit(m.parameters(), block_size=16, **SMALL) for m in (model, whole))
    for step in range(3):
        _backward(model, step)
        gradients = {param: param.grad for param in model.parameters() if param.grad is not None}
        for name, gradient in gathered_tensors(model, gradients).items():
            whole.get_parameter(name).grad = gradient
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
    assert_same(gathered(model, optimizer), snapshot_of(whole, expected))


@pytest.mark.ranks(3)
def test_a_step_that_found_inf_calls_off() -> None:
    """torch's protocol by hand: nothing changes, and the ranks go on together."""
    model, optimizer = trained("fsdp1", 2)
    before = gathered(model, optimizer)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(1.0)
    step_with(model, optimizer, 2)
    assert_same(gathered(model, optimizer), before)
    optimizer.grad_scale, optimizer.found_inf = None, None
    step_with(model, optimizer, 2)
    assert_same(gathered(model, optimizer), snapshot_of(*trained("single", 3)))


@pytest.mark.ranks(2)
def test_made_before_wrapping() -> None:
    """``use_orig_params=True`` keeps the parameters."""
    model = make_net()
    optimizer = make_optimizer("single", model)
    optimizer.attach(model)  # no FSDP1 unit yet: nothing to learn
    model = fsdp1(model)
    for step in range(3):
        step_with(model, optimizer, step)
    assert_same(gathered(model, optimizer), snapshot_of(*trained("single", 3)))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("way", ["fsdp1", "fsdp1 flat"])
def test_attached_again(way: str) -> None:
    """Between steps, by this optimizer and by another one."""
    model, optimizer = trained(way, 1)
    optimizer.attach(model)
    optimizer.attach(model)
    step_with(model, optimizer, 1)
    shardopt.SGD8bit(model.parameters()).attach(model)
    step_with(model, optimizer, 2)
    assert_same(gathered(model, optimizer), snapshot_of(*trained("single", 3)))


@pytest.mark.ranks(3)
def test_two_optimizers() -> None:
    """Each has some of the parameters; every rank steps them in the same order."""
    model, whole = fsdp1(make_net()), make_net()
    names = list(model.bare_shapes)

    def of(params: dict[str, Any]) -> list[ShardedOptimizer]:
        odd, even = ([params[name] for name in names[k::2]] for k in (1, 0))
        return [shardopt.AdamW8bit(odd, **SMALL), shardopt.Lion8bit(even, **SMALL)]

    sharded = of({piece.name: piece.tensor for piece in pieces(model)})
    plain = of(dict(whole.named_parameters()))
    for step in range(3):
        for each, optimizers in ((model, sharded), (whole, plain)):
            for optimizer in optimizers:
                step_with(each, optimizer, step)
    assert_same(gathered_parameters(model), {n: p.detach() for n, p in whole.named_parameters()})


#: A layout, a rule and options, and how many collectives there are in each step.
EXCHANGES: list[tuple[int, str, str, dict[str, Any], int | None]] = [
    (3, "fsdp1", "adamw", {}, 2),
    (3, "fsdp1 flat", "adamw", {}, 2),
    (3, "fsdp1", "momentum", {"codec": "dynamic8", "block_size": 16}, 1),
    (3, "fsdp1", "adamw", {"nonfinite": "raise"}, 3),  # one to agree that gradients are finite
    (3, "fsdp1", "adamw", {"codec": "fp32"}, 0),
    (3, "fsdp1 none", "adamw", {}, 0),
    (3, "fsdp1 none flat", "adamw", {}, 0),
    (3, "zero", "adamw", {}, None),
    (4, "fsdp1 nested", "adamw", {"codec": "companded8"}, 1),
    (4, "fsdp1 nested", "lion", {}, 1),
    (1, "fsdp1", "adamw", {}, 0),
]


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_one_collective_per_round(world_size: int) -> None:
    """However many parameters there are, and whether or not anything has a gradient; before the first, one to agree."""
    for _, way, rule, options, rounds in (case for case in EXCHANGES if case[0] == world_size):
        model, optimizer = trained(way, 0, rule, **options)
        names = []
        for step in range(3):
            with counted_collectives() as collectives:
                step_with(model, optimizer, step) if step < 2 else optimizer.step()
            names.append([name for name, _ in collectives])
        if rounds is None:  # ZeRO's own
            assert all(name.startswith("broadcast") for step in names for name in step)
        else:
            agreed = world_size > 1 and "none" not in way
            assert names == [["allreduce"] * (rounds + agreed), *[["allreduce"] * rounds] * 2], (way, rule, options)


@pytest.mark.ranks(4)
def test_bytes_of_a_round() -> None:
    """Two extremes of four bytes, per cut block and moment, on all ranks."""
    model, optimizer = trained("fsdp1", 0)
    with counted_collectives() as collectives:
        step_with(model, optimizer, 0)
    shared = shared_blocks(model, 128)
    roll = 8 * (1 + sum(1 for blocks in shared.values() if blocks))
    cut = sum(len(shared[name]) for name, shape in model.bare_shapes.items() if _is_coded(shape))
    assert cut > 0
    assert collectives[1][1] - roll == cut * 2 * 2 * 4


def _is_coded(shape: Shape) -> bool:
    """Whether the tests' options quantize a parameter: rows of 32 elements do."""
    return len(shape) > 1 and torch.Size(shape[1:]).numel() >= 32


def _memory(way: str) -> tuple[int, int, int]:
    model, optimizer = trained(way, 1)
    report = shardopt.memory_report(optimizer)
    moments = sum(piece.numel * 2 for piece in pieces(model))
    return report.numel, report.host.state, moments


@pytest.mark.parametrize("way", ["fsdp1", "fsdp1 flat"])
def test_memory_report(ranks: Pool, way: str) -> None:
    """Each rank has its share of the state: a byte per element and moment, four where it is not quantized."""
    for numel, state, moments in ranks.run(4, _memory, way):
        assert numel >= moments // 2
        assert moments < state < 1.1 * moments


@pytest.mark.ranks(2)
def test_memory_report_of_another_optimizer() -> None:
    """torch's optimizer has no attach(), and needs none."""
    model = fsdp1(make_net())
    assert isinstance(model, FullyShardedDataParallel)
    optimizer = torch.optim.AdamW(model.parameters())
    expected = sum(piece.numel for piece in pieces(model))
    assert shardopt.memory_report(optimizer).numel == expected
