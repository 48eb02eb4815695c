"""Plans of saves: who writes what, and how little the ranks tell each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import checkpoint_folder
import shardopt
from checkpoint_folder import index_of
from ranks.pool import Pool
from shardopt.checkpoint import CheckpointError, copies
from shardopt.checkpoint.items import Chunks
from shardopt.checkpoint.ranks import Ranks
from shardopt.layout.partition import Cut, GridPartition, Placed


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


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes that this rank sends by each collective of a save, and no pickling."""
    sent: list[int] = []
    gather, broadcast, pickler = Ranks._all_gathered, Ranks._broadcast, distributed_c10d._pickler

    def counting(self: Ranks, tensor: Tensor) -> Any:
        sent.append(tensor.nbytes)
        return gather(self, tensor)

    def counting_broadcast(self: Ranks, tensor: Tensor, source: int) -> Tensor:
        sent.append(tensor.nbytes)
        return broadcast(self, tensor, source)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was pickled")

    Ranks._all_gathered, Ranks._broadcast = counting, counting_broadcast  # type: ignore[method-assign]
    distributed_c10d._pickler = refuse
    try:
        with pytest.raises(AssertionError, match="something was pickled"):
            dist.all_gather_object([None] * dist.get_world_size(), 1)
        yield sent
    finally:
        Ranks._all_gathered, Ranks._broadcast = gather, broadcast  # type: ignore[method-assign]
        distributed_c10d._pickler = pickler


def _bytes_sent(path: Path, layers: int) -> list[int]:
    model = Layers(layers)
    fully_shard(model)
    optimizer = _stepped(model)
    with counted() as sent:
        shardopt.checkpoint.save(path, model, optimizer, epoch=1)
    return sent


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


def _save_and_load(path: Path, stepped: int) -> None:
    """Parameters of so many layers have state."""
    model, other = _fsdp1(), _fsdp1()
    optimizer = _stepped(model)
    for param in list(model.parameters())[2 * stepped :]:
        optimizer.state.pop(param, None)
    shardopt.checkpoint.save(path, model, optimizer)
    loaded = shardopt.AdamW8bit(other.parameters())
    shardopt.checkpoint.load(path, other, loaded)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert optimizer.state.get(mine, {}).keys() == loaded.state.get(theirs, {}).keys()


@pytest.mark.parametrize("stepped", [0, 2, 3])
def test_ranks_without_elements(ranks: Pool, tmp_path: Path, stepped: int) -> None:
    """Ranks do not know of which parameters other ranks have state."""
    ranks.run(4, _save_and_load, tmp_path, stepped)
    tensors = index_of(tmp_path).tensors
    for layer in range(3):
        has_state = any(name.startswith(f"optimizer.layers.{layer}.") for name in tensors)
        assert has_state == (layer < stepped)
    assert all(stored.partition is not None for stored in tensors.values())


def _save_without_one_rank(path: Path) -> str:
    """Rank 1 of 3 lacks a tensor that is cut into rows."""
    placed = Placed(GridPartition((Cut(0, 3, 1),)), dist.get_rank())
    rows = Chunks((6, 4), torch.float32, [((2 * dist.get_rank(), 0), torch.ones(2, 4))], placed=placed)
    whole = Chunks.whole(torch.ones(3))
    with pytest.raises(CheckpointError) as caught:
        checkpoint_folder.save(path, {"whole": whole} if dist.get_rank() == 1 else {"rows": rows, "whole": whole})
    return str(caught.value)


def test_tensors_that_ranks_describe_otherwise(ranks: Pool, tmp_path: Path) -> None:
    for message in ranks.run(3, _save_without_one_rank, tmp_path):
        assert message.startswith("got chunks of rows to save that do not fill its shape (6, 4)")


def _save_on_uneven_meshes(path: Path, kind: str) -> None:
    """Ranks whose copies are on ranks in other steps: 0 and 3, 1 and 2."""
    mesh = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("copies", "shards"))
    torch.manual_seed(0)
    model: nn.Module = Layers(2)
    expected = [param.detach().clone() for param in model.parameters()]
    if kind == "tensor parallel":
        for layer in model.layers:
            for name, param in list(layer.named_parameters()):
                shard = distribute_tensor(param.detach(), mesh["shards"], [Shard(0)])
                setattr(layer, name, nn.Parameter(shard))
        shardopt.checkpoint.save(path, model)
    else:
        groups = [dist.new_group([0, 3]), dist.new_group([1, 2])], [dist.new_group([0, 1]), dist.new_group([3, 2])]
        own = [next(g for g in of if dist.get_rank() in dist.get_process_group_ranks(g)) for of in groups]
        strategy = ShardingStrategy.HYBRID_SHARD
        cpu = torch.device("cpu")
        wrapped = FullyShardedDataParallel(
            model, process_group=(own[0], own[1]), sharding_strategy=strategy, use_orig_params=True, device_id=cpu
        )
        shardopt.checkpoint.save(path, wrapped, _stepped(wrapped))
        return
    plain = Layers(2)
    shardopt.checkpoint.load(path, plain)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), expected, strict=True))


@pytest.mark.parametrize("kind", ["tensor parallel", "fsdp1"])
def test_copies_on_ranks_in_other_steps(ranks: Pool, tmp_path: Path, kind: str) -> None:
    """Such tensors are listed part by part, and load."""
    ranks.run(4, _save_on_uneven_meshes, tmp_path, kind)
    tensors = index_of(tmp_path).tensors
    assert any(stored.partition is None for stored in tensors.values())
    model = Layers(2)
    has_state = any(name.startswith("optimizer.") for name in tensors)
    shardopt.checkpoint.load(tmp_path, model, shardopt.AdamW8bit(model.parameters()) if has_state else None)


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
