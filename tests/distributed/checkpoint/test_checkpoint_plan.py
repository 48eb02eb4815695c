"""Plans of saves: who writes what, how little the ranks tell each other, and ranks that hold different modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import shardopt
from attack.index_file import ITEMSIZES, read_index
from ranks.collectives import counted_collectives
from ranks.layouts import values
from ranks.models import Tied, make_net, set_gradients
from ranks.pool import Pool
from ranks.runs import SMALL, make_optimizer, single, snapshot_of, step_with, trained
from ranks.snapshot import Snapshot, assert_same, snapshot
from shardopt.checkpoint import CheckpointError

WIDTH = 66


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
    model: nn.Module = Layers(8, width=33 * 64)
    if kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    shardopt.checkpoint.save(path, model, _stepped(model, 33 * 64))


@pytest.mark.parametrize("kind", ["copies", "hsdp"])
def test_copies_are_written_by_all_ranks_in_turn(ranks: Pool, tmp_path: Path, kind: str) -> None:
    """Large ones; small ones by the first rank, or by the first that hold them."""
    ranks.run(4, _save_copies, tmp_path, kind)
    index = read_index(tmp_path)
    sizes = [stored[0] for stored in index["files"] if stored]
    assert len(sizes) == 4
    lines = [(math.prod(line["shape"]) * ITEMSIZES[line["dtype"]], line["start"]) for line in index["tensors"].values()]
    assert sum(sizes) < sum(nbytes for nbytes, _ in lines) + 64 * len(lines)
    assert max(sizes) < 1.3 * min(sizes)
    assert {start for nbytes, start in lines if nbytes < 1 << 16} == {0}


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
    assert any("parts" in line for line in read_index(tmp_path)["tensors"].values())
    loaded, expected = Layers(2), Layers(2)
    for param in loaded.parameters():
        nn.init.zeros_(param)
    shardopt.checkpoint.load(tmp_path, loaded)
    assert_same(loaded.state_dict(), expected.state_dict())


def _save_and_load_on_an_uneven_group(path: Path) -> None:
    """Parameters of two of three layers have state; some ranks hold no element of a parameter."""
    group = dist.new_group([0, 1, 3])
    if dist.get_rank() == 2:
        shardopt.checkpoint.save(path, nn.Module())
        shardopt.checkpoint.load(path, nn.Module())
        return
    model, other = (
        FullyShardedDataParallel(Layers(3), process_group=group, use_orig_params=True, device_id=torch.device("cpu"))
        for _ in range(2)
    )
    optimizer, loaded = _stepped(model), shardopt.AdamW8bit(other.parameters())
    for param in list(model.parameters())[4:]:
        optimizer.state.pop(param, None)
    shardopt.checkpoint.save(path, model, optimizer)
    shardopt.checkpoint.load(path, other, loaded)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert optimizer.state.get(mine, {}).keys() == loaded.state.get(theirs, {}).keys()


def test_a_group_of_unevenly_numbered_ranks(ranks: Pool, tmp_path: Path) -> None:
    """Ranks do not know of which parameters other ranks have state."""
    ranks.run(4, _save_and_load_on_an_uneven_group, tmp_path)
    model = Layers(3)
    optimizer = shardopt.AdamW8bit(model.parameters())
    shardopt.checkpoint.load(tmp_path, model, optimizer)
    assert [optimizer.state.get(param, {}).get("step") for param in model.parameters()] == [1, 1, 1, 1, None, None]


#: The layers of a pipeline's stages, under the names that they have in the whole model, and their first parameters.
STAGES = ((("embed", "up", "down"), 0), (("norm", "conv", "gate", "head"), 5))


class Stage:
    """One of two stages of two ranks each: FSDP2 within them; gradients as those of the whole model."""

    def __init__(self, seed: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))
        names, self._first = STAGES[mesh["stages"].get_local_rank()]
        self.model = only(make_net(seed=seed), *names)
        fully_shard(self.model, mesh=mesh["shards"])
        params = list(self.model.parameters())
        groups = [{"params": [p for p in params if (p.ndim > 1) == is_matrix]} for is_matrix in (True, False)]
        self.optimizer = make_optimizer("fsdp", self.model, params=groups)

    def step(self, number: int) -> None:
        place = 100 * number + self._first
        set_gradients(self.model, number, lambda index, whole: values(tuple(whole.shape), place + index))
        self.optimizer.step()

    def assert_is(self, whole: Snapshot) -> None:
        found = snapshot(dict(self.model.named_parameters()), self.optimizer)
        assert_same(found, {name: whole[name] for name in found})


def only(model: nn.Module, *names: str) -> nn.Module:
    """The model with these modules alone."""
    for name in [name for name, _ in model.named_children() if name not in names]:
        delattr(model, name)
    return model


def _save_stage(path: Path) -> None:
    stage = Stage(seed=0)
    for number in range(2):
        stage.step(number)
    shardopt.checkpoint.save(path, stage.model, stage.optimizer, step=2)


def _load_stage(path: Path) -> None:
    stage = Stage(seed=1)
    stage.step(7)
    assert shardopt.checkpoint.load(path, stage.model, stage.optimizer).extra == {"step": 2}
    stage.assert_is(single(2))
    stage.step(2)
    stage.assert_is(single(3))


def test_stages_load_whole_and_into_stages(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(4, _save_stage, tmp_path)
    model, optimizer = trained("single", 1, seed=1)
    shardopt.checkpoint.load(tmp_path, model, optimizer)
    assert_same(snapshot_of(model, optimizer), single(2))
    ranks.run(4, _load_stage, tmp_path)


def _tied(seed: int, *names: str) -> tuple[nn.Module, Any]:
    """An embedding and a head of one weight, or one of the two; the gradients are the same, as after an all-reduce."""
    torch.manual_seed(seed)
    model = only(Tied(), *(names or ("embed", "head")))
    optimizer = shardopt.AdamW8bit(model.parameters(), **SMALL)
    step_with(model, optimizer, seed)
    return model, optimizer


def _tied_snapshot(model: nn.Module, optimizer: Any) -> Snapshot:
    return snapshot({"weight": next(model.parameters())}, optimizer)


def _save_tied(path: Path, seeds: tuple[int, int]) -> Snapshot:
    rank = dist.get_rank()
    run = _tied(seeds[rank], ("embed", "head")[rank])
    shardopt.checkpoint.save(path, *run)
    return _tied_snapshot(*run)


def _load_tied(path: Path) -> Snapshot:
    run = _tied(5, ("embed", "head")[dist.get_rank()])
    shardopt.checkpoint.load(path, *run)
    return _tied_snapshot(*run)


def test_tied_stages_load_whole_and_back(ranks: Pool, tmp_path: Path) -> None:
    """If they are tied no more, they do not load whole."""
    saved, _ = ranks.run(2, _save_tied, tmp_path / "stages", (0, 0))
    whole = _tied(3)
    shardopt.checkpoint.load(tmp_path / "stages", *whole)
    assert_same(_tied_snapshot(*whole), saved)
    shardopt.checkpoint.save(tmp_path / "whole", *whole)
    for path in (tmp_path / "whole", tmp_path / "stages"):
        for found in ranks.run(2, _load_tied, path):
            assert_same(found, saved)
    ranks.run(2, _save_tied, tmp_path / "stages", (0, 1))
    with pytest.raises(CheckpointError, match=r"embed\.weight and head\.weight with different values"):
        shardopt.checkpoint.load(tmp_path / "stages", *whole)
    assert_same(_tied_snapshot(*whole), saved)


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
    "lr": "got bias with different lr on different ranks",
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


@pytest.mark.ranks(2)
def test_a_tensor_that_no_rank_has_is_an_error(tmp_path: Path) -> None:
    shardopt.checkpoint.save(tmp_path, make_net())
    model = only(make_net(), *({"embed", "up", "down"}, {"norm", "conv", "head"})[dist.get_rank()])
    with pytest.raises(CheckpointError, match=r"the model does not have model\.gate\.bias, model\.gate\.weight; exp"):
        shardopt.checkpoint.load(tmp_path, model)
