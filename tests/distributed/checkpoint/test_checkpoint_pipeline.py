"""The portable checkpoint where ranks hold different modules: pipeline stages, experts; and different values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import shardopt
from ranks.pool import Pool
from ranks.snapshot import Snapshot, assert_same, snapshot
from shardopt.checkpoint import CheckpointError
from versions import needs_pipelines_over_gloo

LAYERS, WIDTH = 4, 66


class Stack(nn.Module):
    """Some layers of a model of four, under the names that they have in the whole."""

    def __init__(self, layers: range = range(LAYERS), seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): nn.Linear(WIDTH, WIDTH) for layer in layers})
        for name, param in self.named_parameters():
            generator = torch.Generator().manual_seed(hash_of(name) + seed)
            param.data.copy_(torch.randn(param.shape, generator=generator) / 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.nn.functional.silu(layer(x))
        return x


def hash_of(name: str) -> int:
    return sum(map(ord, name))


def _optimizer(model: nn.Module) -> shardopt.AdamW8bit:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return shardopt.AdamW8bit(groups, lr=1e-2, min_quantized_numel=64)


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


class Pipelined:
    """Two stages of two ranks each: 1F1B between the stages, FSDP2 within them."""

    def __init__(self, seed: int = 0) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        number = mesh["pp"].get_local_rank()
        per_stage = LAYERS // 2
        self.model = Stack(range(number * per_stage, (number + 1) * per_stage), seed)
        for module in (*self.model.layers.values(), self.model):
            fully_shard(module, mesh=mesh["dp"])
        self.optimizer = _optimizer(self.model)
        stage = PipelineStage(self.model, number, 2, torch.device("cpu"), group=mesh["pp"].get_group())
        self._schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=mse_loss)
        self._first = number == 0

    def step(self, number: int) -> None:
        x, target = _batch(number)
        if self._first:
            self._schedule.step(x)
        else:
            self._schedule.step(target=target)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def snapshot(self) -> Snapshot:
        return snapshot(dict(self.model.named_parameters()), self.optimizer)


def _single(seed: int, steps: int) -> tuple[Stack, shardopt.AdamW8bit]:
    model = Stack(seed=seed)
    optimizer = _optimizer(model)
    for step in range(steps):
        x, target = _batch(step)
        mse_loss(model(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _save_pipelined(path: Path) -> Snapshot:
    run = Pipelined()
    for step in range(2):
        run.step(step)
    shardopt.checkpoint.save(path, run.model, run.optimizer, step=2)
    return run.snapshot()


def _load_pipelined(path: Path, whole: Snapshot) -> None:
    run = Pipelined(seed=1)
    run.step(7)
    assert shardopt.checkpoint.load(path, run.model, run.optimizer).extra == {"step": 2}
    found = run.snapshot()
    assert_same(found, {name: whole[name] for name in found})
    run.step(2)


@needs_pipelines_over_gloo
def test_stages_load_whole_and_into_stages(ranks: Pool, tmp_path: Path) -> None:
    of_ranks = ranks.run(4, _save_pipelined, tmp_path)
    model, optimizer = _single(seed=1, steps=1)
    shardopt.checkpoint.load(tmp_path, model, optimizer)
    saved = {**of_ranks[0], **of_ranks[2]}
    assert_same(snapshot(dict(model.named_parameters()), optimizer), saved)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    ranks.run(4, _load_pipelined, tmp_path, saved)


@needs_pipelines_over_gloo
def test_whole_loads_into_stages(ranks: Pool, tmp_path: Path) -> None:
    model, optimizer = _single(seed=0, steps=2)
    shardopt.checkpoint.save(tmp_path, model, optimizer, step=2)
    ranks.run(4, _load_pipelined, tmp_path, snapshot(dict(model.named_parameters()), optimizer))


class Tied(nn.Module):
    """An embedding and a head of one weight: both share it, or a stage has one of them."""

    def __init__(self, names: tuple[str, ...] = ("embed", "head"), seed: int = 0) -> None:
        super().__init__()
        values = torch.randn(33, WIDTH, generator=torch.Generator().manual_seed(seed))
        weight = nn.Parameter(values)
        for name in names:
            module = nn.Linear(WIDTH, 33, bias=False) if name == "head" else nn.Embedding(33, WIDTH)
            module.weight = weight
            self.add_module(name, module)


def _stepped(model: nn.Module, seed: int) -> shardopt.AdamW8bit:
    """The stages' gradients are the same, as after the all-reduce of a tied weight."""
    optimizer = shardopt.AdamW8bit(model.parameters(), min_quantized_numel=64)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
    optimizer.step()
    return optimizer


def _stage() -> tuple[str, ...]:
    return (("embed",), ("head",))[dist.get_rank()]


def _tied_snapshot(model: nn.Module, optimizer: shardopt.AdamW8bit) -> Snapshot:
    return snapshot({"weight": next(model.parameters())}, optimizer)


def _save_stages(path: Path, seeds: tuple[int, int]) -> Snapshot:
    model = Tied(_stage(), seeds[dist.get_rank()])
    optimizer = _stepped(model, 1)
    shardopt.checkpoint.save(path, model, optimizer)
    return _tied_snapshot(model, optimizer)


def _load_stages(path: Path) -> Snapshot:
    model = Tied(_stage(), seed=5)
    optimizer = _stepped(model, 6)
    shardopt.checkpoint.load(path, model, optimizer)
    return _tied_snapshot(model, optimizer)


def test_tied_stages_load_whole_and_back(ranks: Pool, tmp_path: Path) -> None:
    saved, _ = ranks.run(2, _save_stages, tmp_path / "stages", (0, 0))
    whole = Tied(seed=3)
    optimizer = _stepped(whole, 4)
    shardopt.checkpoint.load(tmp_path / "stages", whole, optimizer)
    assert_same(_tied_snapshot(whole, optimizer), saved)
    shardopt.checkpoint.save(tmp_path / "whole", whole, optimizer)
    for path in (tmp_path / "whole", tmp_path / "stages"):
        for found in ranks.run(2, _load_stages, path):
            assert_same(found, saved)


def test_stages_that_are_tied_no_more_are_refused(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(2, _save_stages, tmp_path, (0, 1))
    whole = Tied(seed=3)
    optimizer = _stepped(whole, 4)
    before = _tied_snapshot(whole, optimizer)
    with pytest.raises(CheckpointError, match=r"embed\.weight and head\.weight with different values"):
        shardopt.checkpoint.load(tmp_path, whole, optimizer)
    assert_same(_tied_snapshot(whole, optimizer), before)


class Experts(nn.Module):
    """A router on all ranks, and some of four experts."""

    def __init__(self, experts: range) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleDict({str(expert): nn.Linear(WIDTH, WIDTH) for expert in experts})
        for name, param in self.named_parameters():
            param.data.fill_(hash_of(name) / 1000)
            param.grad = torch.full_like(param, hash_of(name))


def _save_experts(path: Path) -> None:
    share = 4 // dist.get_world_size()
    model = Experts(range(dist.get_rank() * share, (dist.get_rank() + 1) * share))
    optimizer = _optimizer(model)
    optimizer.step()
    shardopt.checkpoint.save(path, model, optimizer)


def test_experts_of_their_own_names(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(4, _save_experts, tmp_path)
    expected = Experts(range(4))
    optimizer = _optimizer(expected)
    optimizer.step()
    model = Experts(range(4))
    for param in model.parameters():
        param.data.zero_()
    loaded = _optimizer(model)
    shardopt.checkpoint.load(tmp_path, model, loaded)
    of = [snapshot(dict(m.named_parameters()), o) for m, o in ((model, loaded), (expected, optimizer))]
    assert_same(*of)


def _error_of(function: Callable[[], object]) -> str:
    try:
        function()
    except CheckpointError as error:
        return str(error)
    return ""


def _save_stages_of_one_name(path: Path, change: str) -> str:
    """Two ranks, each with a Linear of its own."""
    model = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    optimizer = shardopt.AdamW8bit(model.parameters(), min_quantized_numel=64)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    if dist.get_rank() == 1:
        if change == "weight":
            model.weight.data[-1, -1] += 1e-6
        elif change == "signs":
            model.weight.data[:, 1::2] *= -1
        elif change == "shape":
            model.weight = nn.Parameter(torch.ones(WIDTH, 2 * WIDTH))
            optimizer = shardopt.AdamW8bit(model.parameters())
        elif change == "options":
            optimizer.param_groups[0]["lr"] *= 2
        elif change != "nothing":  # an entry of the state
            optimizer.state[model.weight][change].view(torch.uint8).view(-1)[3] ^= 1
    return _error_of(lambda: shardopt.checkpoint.save(path, model, optimizer))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("weight", "got different values of model.weight on different ranks"),
        ("signs", "got different values of model.weight on different ranks"),
        ("shape", "got different shapes or dtypes of model.weight"),
        ("exp_avg_codes", "got different values of optimizer.weight.exp_avg_codes on different ranks"),
        ("exp_avg_sq_scales", "got different values of optimizer.weight.exp_avg_sq_scales on different ranks"),
        ("options", "got bias with different options on different ranks"),
    ],
)
def test_what_one_name_stands_for_must_be_one_thing(ranks: Pool, tmp_path: Path, change: str, message: str) -> None:
    assert ranks.run(2, _save_stages_of_one_name, tmp_path, "nothing") == [""] * 2
    index = (tmp_path / "checkpoint.json").read_bytes()
    error, same = ranks.run(2, _save_stages_of_one_name, tmp_path, change)
    assert error == same
    assert message in error
    assert (tmp_path / "checkpoint.json").read_bytes() == index
    assert len(list(tmp_path.glob("*.bin"))) <= 2


def _save_with_running_statistics(path: Path) -> list[list[float]]:
    """A DDP model whose ranks have seen different batches."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    optimizer = shardopt.AdamW8bit(model.parameters())
    model(torch.randn(8, WIDTH) + dist.get_rank()).square().sum().backward()
    optimizer.step()
    shardopt.checkpoint.save(path, model, optimizer)
    return [buffer.reshape(-1).tolist() for buffer in model.buffers()]


def test_buffers_may_differ_and_are_the_first_ranks(ranks: Pool, tmp_path: Path) -> None:
    of_ranks = ranks.run(2, _save_with_running_statistics, tmp_path)
    assert of_ranks[0] != of_ranks[1]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    shardopt.checkpoint.load(tmp_path, model)
    assert [buffer.reshape(-1).tolist() for buffer in model.buffers()] == of_ranks[0]


def _load_too_little(path: Path) -> str:
    model = Experts(range(dist.get_rank(), dist.get_rank() + 1))
    return _error_of(lambda: shardopt.checkpoint.load(path, model))


def test_a_tensor_that_no_rank_has_is_an_error(ranks: Pool, tmp_path: Path) -> None:
    shardopt.checkpoint.save(tmp_path, Experts(range(3)))
    for error in ranks.run(2, _load_too_little, tmp_path):
        assert "the model does not have model.experts.2.bias, model.experts.2.weight; expected" in error
