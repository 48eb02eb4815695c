"""Plans of saves: who writes what, how little the ranks tell each other, and ranks that hold different modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import shardopt
from checkpoint_folder import index_of
from ranks.collectives import counted_collectives
from ranks.pool import Pool
from ranks.snapshot import Snapshot, assert_same, snapshot
from shardopt.checkpoint import CheckpointError, copies
from versions import needs_pipelines_over_gloo


class Layers(nn.Module):
    """Layers of 33 x 130."""

    def __init__(self, count: int, width: int = 130) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, 33) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).square().mean()


def _stepped(model: nn.Module, width: int = 130) -> shardopt.AdamW8bit:
    optimizer = shardopt.AdamW8bit(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    model(torch.randn(4, width)).backward()
    optimizer.step()
    return optimizer


def _bytes_sent(path: Path, layers: int) -> list[int]:
    model = Layers(layers)
    fully_shard(model)
    optimizer = _stepped(model)
    with counted_collectives() as sent:
        shardopt.checkpoint.save(path, model, optimizer, epoch=1)
    return [nbytes for _, nbytes in sent]


def test_messages_do_not_grow_with_the_model(ranks: Pool, tmp_path: Path) -> None:
    few = ranks.run(3, _bytes_sent, tmp_path / "few", 1)
    many = ranks.run(3, _bytes_sent, tmp_path / "many", 20)
    assert few == many
    assert all(sum(sent) < 500 for sent in few)


def _save_copies(path: Path, kind: str) -> None:
    model: nn.Module = Layers(8, width=33 * 256)
    if kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    shardopt.checkpoint.save(path, model, _stepped(model, 33 * 256))


@pytest.mark.parametrize("kind", ["copies", "hsdp"])
def test_copies_are_written_by_all_ranks_in_turn(ranks: Pool, tmp_path: Path, kind: str) -> None:
    """Large ones; small ones by the first rank, or by the first that hold them."""
    ranks.run(4, _save_copies, tmp_path, kind)
    index = index_of(tmp_path)
    sizes = [stored.data for stored in index.files if stored]
    assert len(sizes) == 4
    assert sum(sizes) < sum(stored.nbytes for stored in index.tensors.values()) + 64 * len(index.tensors)
    assert max(sizes) < 1.3 * min(sizes)
    small = [stored for stored in index.tensors.values() if stored.nbytes < 1 << 16]
    assert small
    assert {stored.start for stored in small} == {0}


def _fsdp1() -> nn.Module:
    return FullyShardedDataParallel(Layers(3), use_orig_params=True, device_id=torch.device("cpu"))


def _save_and_load(path: Path) -> None:
    """Parameters of two of three layers have state."""
    model, other = _fsdp1(), _fsdp1()
    optimizer = _stepped(model)
    for param in list(model.parameters())[4:]:
        optimizer.state.pop(param, None)
    shardopt.checkpoint.save(path, model, optimizer)
    loaded = shardopt.AdamW8bit(other.parameters())
    shardopt.checkpoint.load(path, other, loaded)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert optimizer.state.get(mine, {}).keys() == loaded.state.get(theirs, {}).keys()


def test_ranks_without_elements(ranks: Pool, tmp_path: Path) -> None:
    """Ranks do not know of which parameters other ranks have state."""
    ranks.run(4, _save_and_load, tmp_path)
    tensors = index_of(tmp_path).tensors
    for layer in range(3):
        has_state = any(name.startswith(f"optimizer.layers.{layer}.") for name in tensors)
        assert has_state == (layer < 2)
    assert all(stored.partition is not None for stored in tensors.values())


def _save_on_an_uneven_mesh(path: Path) -> None:
    """Ranks whose copies are on ranks in other steps: 0 and 3, 1 and 2."""
    mesh = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("copies", "shards"))
    model = Layers(2)
    for layer in model.layers:
        for name, param in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(distribute_tensor(param.detach(), mesh["shards"], [Shard(0)])))
    shardopt.checkpoint.save(path, model)


def test_copies_on_ranks_in_other_steps(ranks: Pool, tmp_path: Path) -> None:
    """Such tensors are listed part by part, and load."""
    ranks.run(4, _save_on_an_uneven_mesh, tmp_path)
    assert any(stored.partition is None for stored in index_of(tmp_path).tensors.values())
    loaded, expected = Layers(2), Layers(2)
    for param in loaded.parameters():
        nn.init.zeros_(param)
    shardopt.checkpoint.load(tmp_path, loaded)
    assert_same(loaded.state_dict(), expected.state_dict())


def _save_on_an_uneven_group(path: Path) -> None:
    group = dist.new_group([0, 1, 3])
    if dist.get_rank() == 2:
        shardopt.checkpoint.save(path, nn.Module())
        return
    model = FullyShardedDataParallel(
        Layers(1), process_group=group, use_orig_params=True, device_id=torch.device("cpu")
    )
    shardopt.checkpoint.save(path, model, _stepped(model))


def test_a_group_of_unevenly_numbered_ranks(ranks: Pool, tmp_path: Path) -> None:
    """Some of them hold no element of a parameter, and say nothing of its state."""
    ranks.run(4, _save_on_an_uneven_group, tmp_path)
    model = Layers(1)
    optimizer = shardopt.AdamW8bit(model.parameters())
    shardopt.checkpoint.load(tmp_path, model, optimizer)
    assert [float(optimizer.state[param]["step"]) for param in model.parameters()] == [1, 1]


def _fail_in_a_digest(path: Path) -> str:
    """One rank has no memory to compare copies."""
    original = copies.digest
    if dist.get_rank() == 1:
        copies.digest = lambda tensor: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory"))
    try:
        shardopt.checkpoint.save(path, Layers(1))
    except (CheckpointError, RuntimeError) as error:
        return str(error)
    finally:
        copies.digest = original
    raise AssertionError("nothing was raised")


def test_an_error_in_a_digest_reaches_all_ranks(ranks: Pool, tmp_path: Path) -> None:
    own, other = sorted(ranks.run(2, _fail_in_a_digest, tmp_path), key=len)
    assert own == "no memory"
    assert other.startswith("got an error on rank 1 and 0 others, nothing was done: OutOfMemoryError: no memory")


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
    model = Stack(seed=1)
    optimizer = _optimizer(model)
    shardopt.checkpoint.load(tmp_path, model, optimizer)
    saved = {**of_ranks[0], **of_ranks[2]}
    assert_same(snapshot(dict(model.named_parameters()), optimizer), saved)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    ranks.run(4, _load_pipelined, tmp_path, saved)


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


def _stepped_once(model: nn.Module, seed: int) -> shardopt.AdamW8bit:
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
    optimizer = _stepped_once(model, 1)
    shardopt.checkpoint.save(path, model, optimizer)
    return _tied_snapshot(model, optimizer)


def _load_stages(path: Path) -> Snapshot:
    model = Tied(_stage(), seed=5)
    optimizer = _stepped_once(model, 6)
    shardopt.checkpoint.load(path, model, optimizer)
    return _tied_snapshot(model, optimizer)


def test_tied_stages_load_whole_and_back(ranks: Pool, tmp_path: Path) -> None:
    saved, _ = ranks.run(2, _save_stages, tmp_path / "stages", (0, 0))
    whole = Tied(seed=3)
    optimizer = _stepped_once(whole, 4)
    shardopt.checkpoint.load(tmp_path / "stages", whole, optimizer)
    assert_same(_tied_snapshot(whole, optimizer), saved)
    shardopt.checkpoint.save(tmp_path / "whole", whole, optimizer)
    for path in (tmp_path / "whole", tmp_path / "stages"):
        for found in ranks.run(2, _load_stages, path):
            assert_same(found, saved)


def test_stages_that_are_tied_no_more_are_refused(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(2, _save_stages, tmp_path, (0, 1))
    whole = Tied(seed=3)
    optimizer = _stepped_once(whole, 4)
    before = _tied_snapshot(whole, optimizer)
    with pytest.raises(CheckpointError, match=r"embed\.weight and head\.weight with different values"):
        shardopt.checkpoint.load(tmp_path, whole, optimizer)
    assert_same(_tied_snapshot(whole, optimizer), before)


def _error_of(function: Callable[[], object]) -> str:
    try:
        function()
    except CheckpointError as error:
        return str(error)
    return ""


def _change(model: nn.Module, optimizer: shardopt.AdamW8bit, what: str) -> shardopt.AdamW8bit:
    if what == "weight":
        model.weight.data[-1, -1] += 1e-6
    elif what == "signs":
        model.weight.data[:, 1::2] *= -1
    elif what == "shape":
        model.weight = nn.Parameter(torch.ones(WIDTH, 2 * WIDTH))
        return shardopt.AdamW8bit(model.parameters())
    elif what == "lr":
        optimizer.param_groups[0]["lr"] *= 2
    else:  # an entry of the state
        optimizer.state[model.weight][what].view(torch.uint8).view(-1)[3] ^= 1
    return optimizer


#: The difference on one of two ranks, and the error.
DIFFERENCES = {
    "weight": "got different values of model.weight on different ranks",
    "signs": "got different values of model.weight on different ranks",
    "shape": "got different shapes or dtypes of model.weight",
    "exp_avg_codes": "got different values of optimizer.weight.exp_avg_codes on different ranks",
    "exp_avg_sq_scales": "got different values of optimizer.weight.exp_avg_sq_scales on different ranks",
    "lr": "got bias with different options on different ranks",
}


@pytest.mark.ranks(2)
def test_what_one_name_stands_for_must_be_one_thing(tmp_path: Path) -> None:
    """Two ranks, each with a Linear of its own: nothing is saved, and an earlier checkpoint stays."""
    saved: Any = None
    for what, message in {"": "", **DIFFERENCES}.items():
        model = nn.Linear(WIDTH, WIDTH)
        for param in model.parameters():
            nn.init.ones_(param)
            param.grad = torch.ones_like(param)
        optimizer = shardopt.AdamW8bit(model.parameters(), min_quantized_numel=64)
        optimizer.step()
        if what and dist.get_rank() == 1:
            optimizer = _change(model, optimizer, what)
        error = _error_of(lambda m=model, o=optimizer: shardopt.checkpoint.save(tmp_path, m, o))
        assert message in error
        assert bool(error) == bool(what)
        errors = [""] * 2
        dist.all_gather_object(errors, error)
        assert errors[0] == errors[1]
        found = (tmp_path / "checkpoint.json").read_bytes(), sorted(path.name for path in tmp_path.glob("*.bin"))
        saved = saved if what else found
        assert found == saved


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
    model = Stack(range(dist.get_rank(), dist.get_rank() + 1))
    return _error_of(lambda: shardopt.checkpoint.load(path, model))


def test_a_tensor_that_no_rank_has_is_an_error(ranks: Pool, tmp_path: Path) -> None:
    shardopt.checkpoint.save(tmp_path, Stack(range(3)))
    for error in ranks.run(2, _load_too_little, tmp_path):
        assert "the model does not have model.layers.2.bias, model.layers.2.weight; expected" in error
