"""Training under FSDP1: real backward passes, evaluation between them, loss scaling, optimizers made early and late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

import shardopt
from ranks.flat import gathered, gathered_parameters, pieces
from ranks.models import FSDP1_WAYS, WAYS, Tied, fsdp1, loss_of, make_batch, make_net
from ranks.pickling import from_all_ranks
from ranks.pool import Pool
from ranks.runs import make_optimizer, snapshot_of, step_with, trained
from ranks.snapshot import Snapshot, assert_same
from shardopt.optim import ShardedOptimizer

SMALL = {"lr": 1e-2, "min_quantized_numel": 64}


def _gathered_gradients(model: nn.Module) -> Snapshot:
    """The gradients of all parameters in full."""
    own = []
    for piece in pieces(model):
        gradient = piece.tensor.grad
        assert gradient is not None or piece.numel == 0
        own.append((piece.start, None if gradient is None else piece.of(gradient).clone()))
    everyone = from_all_ranks(own)
    found = {}
    for index, (name, shape) in enumerate(model.bare_shapes.items()):
        whole = torch.full((torch.Size(shape).numel(),), torch.nan)
        for start, part in (pieces_of[index] for pieces_of in everyone):
            if part is not None:
                whole[start : start + part.numel()] = part
        found[name] = whole.reshape(shape)
    return found


def _backward(model: nn.Module, step: int, *, same_on_all: bool = False) -> float:
    loss = loss_of(model, make_batch(step, 0 if same_on_all else dist.get_rank()))
    loss.backward()
    return float(loss)


def _evaluate(model: nn.Module, step: int) -> float:
    """A forward pass that nothing follows: FSDP shows the whole parameters, and takes them away again."""
    model.eval()
    with torch.no_grad():
        loss = float(loss_of(model, make_batch(100 + step)))
    model.train()
    return loss


def _on_real_gradients(way: str, set_to_none: bool) -> None:
    """Steps the sharded model, and a whole one on the gathered gradients; the loss falls, and is the same."""
    model, whole = WAYS[way](make_net()), make_net()
    optimizer = make_optimizer(way, model, lr=1e-2)
    expected = make_optimizer("single", whole, lr=1e-2)
    losses = []
    for step in range(4):
        if step < 3:
            losses.append(_evaluate(model, 0))
            assert "bf16" in way or losses[-1] == pytest.approx(_evaluate(whole, 0))
        _backward(model, step)
        for name, gradient in _gathered_gradients(model).items():
            whole.get_parameter(name).grad = gradient
        if step > 1:
            _evaluate(model, step)  # then FSDP1 itself goes on with the outermost unit's weights from before the step
        optimizer.step()
        expected.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        _evaluate(model, step)
        assert_same(gathered(model, optimizer), snapshot_of(whole, expected))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("world_size", "way", "set_to_none"),
    [
        (2, "fsdp1", True),
        (2, "fsdp1 grad", False),
        (3, "fsdp1 flat", False),
        (3, "fsdp1 bf16", False),
        (3, "fsdp1 nested flat", True),
        (4, "fsdp1 hybrid flat", True),
        (4, "fsdp1 none", True),
        (4, "fsdp1 nested", False),
    ],
)
def test_steps_on_real_gradients(ranks: Pool, world_size: int, way: str, set_to_none: bool) -> None:
    ranks.run(world_size, _on_real_gradients, way, set_to_none)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("way", FSDP1_WAYS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_real_gradients_sweep(ranks: Pool, world_size: int, way: str, set_to_none: bool) -> None:
    if world_size == 4 or "hybrid" not in way:
        ranks.run(world_size, _on_real_gradients, way, set_to_none)


def _train(way: str) -> tuple[list[float], Snapshot]:
    model = WAYS[way](make_net())
    optimizer = make_optimizer(way, model, lr=1e-2)
    losses = []
    for step in range(5):
        losses.append(_backward(model, step, same_on_all=True))
        optimizer.step()
        optimizer.zero_grad()
    return losses, snapshot_of(model, optimizer)


@pytest.mark.parametrize(("world_size", "way"), [(2, "fsdp1"), (2, "fsdp1 flat"), (4, "fsdp1 grad flat")])
def test_ranks_with_the_same_batch_train_as_one(ranks: Pool, world_size: int, way: str) -> None:
    """The mean of 2 or 4 equal gradients is exact."""
    ((losses, expected),) = ranks.run(1, _train, "single")
    assert losses[-1] < losses[0]
    for rank_losses, got in ranks.run(world_size, _train, way):
        assert rank_losses == losses
        assert_same(got, expected)


def _step_both(model: nn.Module, optimizer: Optimizer, whole: nn.Module, expected: Optimizer) -> None:
    """Steps the model, and the whole one with the gradients that the ranks have of it together."""
    for name, gradient in _gathered_gradients(model).items():
        whole.get_parameter(name).grad = gradient
    optimizer.step()
    expected.step()
    optimizer.zero_grad()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("orig", [True, False])
def test_accumulation_and_clipping(orig: bool) -> None:
    """Gradients of two batches are added up before they are shared out; stepping too early is an error on all ranks."""
    model, whole = fsdp1(make_net(), use_orig_params=orig), make_net()
    optimizer, expected = (make_optimizer(way, m) for way, m in (("fsdp1", model), ("single", whole)))
    for step in range(2):
        with model.no_sync():
            _backward(model, 10 * step)
        with pytest.raises(RuntimeError, match=r"got a gradient of shape .* expected"):
            optimizer.step()
        _backward(model, 10 * step + 1)
        model.clip_grad_norm_(0.05)
        _step_both(model, optimizer, whole, expected)
    assert_same(gathered(model, optimizer), snapshot_of(whole, expected))


def _largest(model: nn.Module) -> torch.Tensor:
    found = [piece.tensor for piece in pieces(model) if piece.tensor.grad is not None]
    return max(found, key=torch.Tensor.numel)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize(("way", "unscale"), [("fsdp1", False), ("fsdp1", True), ("fsdp1 flat", False)])
def test_loss_scaling(way: str, unscale: bool, overflow: bool) -> None:
    """Trains with a scaled loss, and without; with an overflow, the last gradient of one rank alone is infinite."""
    models = [WAYS[way](make_net()) for _ in range(2)]
    optimizers = [make_optimizer(way, model) for model in models]
    scaler = ShardedGradScaler("cpu", init_scale=2.0**10, process_group=dist.group.WORLD)
    for step in range(3):
        for model, scale in ((models[0], scaler.scale), (models[1], torch.clone)):
            scale(loss_of(model, make_batch(step, dist.get_rank()))).backward()
        overflows = overflow and step == 2
        if overflows and dist.get_rank() == 1:
            _largest(models[0]).grad[5] = torch.inf
        if unscale:
            scaler.unscale_(optimizers[0])
        scaler.step(optimizers[0])
        scaler.update()
        if not overflows:
            optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    got, expected = (gathered(m, o) for m, o in zip(models, optimizers, strict=True))
    assert_same(got, expected)
    assert scaler.get_scale() == (2.0**9 if overflow else 2.0**10)
    assert optimizers[0].nonfinite_count == 0


@pytest.mark.ranks(3)
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_found_inf(value: float) -> None:
    """torch's protocol by hand: a step that found_inf calls off changes nothing, and the ranks go on together."""
    model, optimizer = trained("fsdp1", 2)
    before = gathered(model, optimizer)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(value)
    step_with(model, optimizer, 2)
    if value:
        assert_same(gathered(model, optimizer), before)
    else:
        stepped = gathered(model, optimizer)
        assert not any(torch.equal(stepped[name], before[name]) for name in model.bare_shapes)
    optimizer.grad_scale, optimizer.found_inf = None, None
    if value:
        for step in (2, 3):
            step_with(model, optimizer, step)
        assert_same(gathered(model, optimizer), snapshot_of(*trained("single", 4)))


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


@pytest.mark.ranks(3)
@pytest.mark.parametrize("orig", [True, False])
def test_tied_weights(orig: bool) -> None:
    torch.manual_seed(0)
    whole = Tied()
    torch.manual_seed(0)
    model = fsdp1(Tied(), ["mix"], use_orig_params=orig)
    optimizer = shardopt.AdamW8bit(model.parameters(), block_size=16, **SMALL)
    expected = shardopt.AdamW8bit(whole.parameters(), block_size=16, **SMALL)
    for step in range(3):
        _backward(model, step)
        _step_both(model, optimizer, whole, expected)
    assert_same(gathered(model, optimizer), snapshot_of(whole, expected))


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
