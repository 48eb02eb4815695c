"""Muon on ranks beside ``test_layouts.py``: matrices within parameters, who works, and the bytes that travel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import shardopt
import shardopt.checkpoint
import shardopt.sharding.exchange
from helpers import Shape, limited
from live_bytes import LiveBytes
from ranks.collectives import counted_collectives
from ranks.flat import gathered
from ranks.layouts import COLUMN, ROW, WHOLE, Layout, distribute, shard, values
from ranks.models import WAYS, fsdp1, make_net, set_gradients
from ranks.pool import Pool
from ranks.runs import SMALL, single, snapshot_of, step_with, trained
from ranks.snapshot import assert_same, snapshot
from shardopt.kernels.newton_schulz import NewtonSchulz
from shardopt.optim import ShardedOptimizer
from shardopt.step.muon.matrices import padded
from versions import cuts_uneven_strided_shards

STEPS = 3
#: The matrices of the small model, and how many there are of each shape.
MATRICES: Counter[Shape] = Counter([(192, 66), (66, 192), (70, 198), (1, 70)])


def of_groups(model: nn.Module, memory: int | None = None, **options: Any) -> ShardedOptimizer:
    """Muon with the groups of :func:`shardopt.muon_groups`, in waves of so much memory."""
    return limited(shardopt.Muon8bit(shardopt.muon_groups(model), **{**SMALL, **options}), memory)


@contextmanager
def orthogonalized() -> Iterator[list[Shape]]:
    """The shapes of the matrices that this rank computes inside."""
    found: list[Shape] = []
    original = NewtonSchulz.__call__

    def call(newton_schulz: NewtonSchulz, matrix: Tensor) -> Tensor:
        found.append(tuple(matrix.shape))
        return original(newton_schulz, matrix)

    with patch.object(NewtonSchulz, "__call__", call):
        yield found


#: Shapes and how they are divided: matrices that no rank holds whole, of one row, and fewer than ranks.
SPLITS: tuple[tuple[Shape, Any], ...] = (
    ((97, 130), (30, 1, 5, 61)),
    ((40, 7, 3, 3), (3, 37)),
    ((3, 33, 64), "each"),
    ((6, 5, 40), "each"),
    ((2, 4, 9, 8), "each"),
)


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "normalize"), [(2, "rows"), (3, None), (4, "rows"), (4, None)])
def test_splits(world_size: int, normalize: Any) -> None:
    size = world_size
    mesh = {2: (2, 1), 3: (1, 3), 4: (2, 2)}[size]
    ways = [((size,), (ROW,)), ((size,), (COLUMN,)), (mesh, (ROW, COLUMN)), (mesh, (WHOLE, ROW)), (mesh, (ROW, ROW))]
    whole, sharded = [], []
    cases = [*product(ways, SPLITS)]
    for placements in ((Shard(2), WHOLE), (ROW, Shard(2)), (COLUMN, Shard(2))):  # of a matrix its columns
        cases += [((mesh, placements), split) for split in SPLITS if split[1] == "each"]
    for index, ((on, placements), (shape, split)) in enumerate(cases):
        params = values(shape, index), shard(values(shape, index), Layout(shape, on, placements, torch.float32))
        for groups, param in zip((whole, sharded), params, strict=True):
            groups.append({"params": [nn.Parameter(param)], "split": split})
    options = {"adjust_lr_fn": "spectral_norm", "lr": 0.02, **SMALL}
    options["normalize"] = normalize
    optimizers = [limited(shardopt.Muon8bit(groups, **options), 100_000) for groups in (whole, sharded)]
    for step, (optimizer, groups) in product(range(2), zip(optimizers, (whole, sharded), strict=True)):
        for index, group in enumerate(groups):
            (param,) = group["params"]
            gradient = values(tuple(param.shape), 100 * (step + 1) + index)
            like = isinstance(param, DTensor)
            param.grad = distribute(gradient, param.device_mesh, param.placements) if like else gradient
        optimizer.step()
    named = [{str(i): group["params"][0] for i, group in enumerate(groups)} for groups in (whole, sharded)]
    expected, got = (snapshot(params, optimizer) for params, optimizer in zip(named, optimizers, strict=True))
    assert_same(got, expected)


@pytest.mark.ranks(3)
def test_a_rank_without_columns() -> None:
    """The third rank has no column of a matrix, and yet second moments of its rows, as they are replicated."""
    shape, ways = (33, 2), (((3,), (COLUMN,)), ((3,), (ROW,)))
    for on, placements in ways:
        whole, sharded = (nn.Parameter(values(shape, 0)) for _ in range(2))
        sharded = nn.Parameter(shard(sharded.detach(), Layout(shape, on, placements, torch.float32)))
        optimizers = [shardopt.NorMuon8bit([param], lr=0.02, **SMALL) for param in (whole, sharded)]
        for step in range(STEPS):
            gradient = values(shape, 100 * (step + 1))
            whole.grad, sharded.grad = gradient, distribute(gradient, sharded.device_mesh, sharded.placements)
            for optimizer in optimizers:
                optimizer.step()
        expected, got = (snapshot({"x": p}, o) for p, o in zip((whole, sharded), optimizers, strict=True))
        assert_same(got, expected)
        moments = optimizers[1].state[sharded]["second_momentum_buffer"].to_local()
        if placements == (COLUMN,):
            assert moments.shape == (33, 1)
            assert torch.equal(moments, optimizers[0].state[whole]["second_momentum_buffer"])


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "normalize"), [(2, None), (3, "rows")])
def test_splits_of_flat_shards(world_size: int, normalize: Any) -> None:
    """FSDP1 and FSDP2 cut matrices of a fused parameter anywhere."""
    split = {"0.weight": (33, 1, 36), "1.weight": (20, 20)}
    models = [fsdp1(_matrices(), ["1"]), _matrices()]
    options = {**SMALL, "normalize": normalize}
    optimizers = [shardopt.Muon8bit(shardopt.muon_groups(model, split=split), **options) for model in models]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            step_with(model, optimizer, step)
    got, expected = (snapshot_of(m, o) for m, o in zip(models, optimizers, strict=True))
    assert_same(got, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("split", [None, "each"])
def test_several_ranges_of_a_dim(split: Any) -> None:
    """Nothing is changed, and nothing travels."""
    placements = (_StridedShard(1, split_factor=2),)
    columns = 5 if cuts_uneven_strided_shards else 8
    layout = Layout((6, columns, 40), (dist.get_world_size(),), placements, torch.float32)
    param = nn.Parameter(shard(values(layout.shape, 0), layout))
    optimizer = shardopt.Muon8bit([param], split=split, **SMALL)
    param.grad = shard(values(layout.shape, 1), layout)
    with (
        counted_collectives() as found,
        pytest.raises(RuntimeError, match=r"got a parameter of shape .* with placements .* for Muon, expected"),
    ):
        optimizer.step()
    assert not found
    assert not optimizer.state
    assert torch.equal(param.to_local(), shard(values(layout.shape, 0), layout).to_local())


def _matrices(width: int = 40) -> nn.Sequential:
    """Layers without biases: a wide one, a tall one and a square one."""
    shapes = ((width, 70), (70, width), (width, width))
    model = nn.Sequential(*(nn.Linear(inputs, outputs, bias=False) for inputs, outputs in shapes))
    for index, param in enumerate(model.parameters()):
        with torch.no_grad():
            param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(index)))
    return model


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "strategy"), [(2, "NO_SHARD"), (2, "FULL_SHARD"), (3, "SHARD_GRAD_OP")])
def test_flat_parameters(world_size: int, strategy: str) -> None:
    """FSDP1 with ``use_orig_params=False``: an optimizer's parameter is several matrices."""
    got, whole = (
        fsdp1(_matrices(), ["1"], use_orig_params=False, sharding_strategy=ShardingStrategy[strategy]),
        _matrices(),
    )
    optimizers = [shardopt.Muon8bit(model.parameters(), **SMALL) for model in (got, whole)]
    for step in range(STEPS):
        for model, optimizer in zip((got, whole), optimizers, strict=True):
            step_with(model, optimizer, step)
    assert_same(gathered(got, optimizers[0]), snapshot_of(whole, optimizers[1]))


@pytest.mark.ranks(2)
def test_flat_parameters_for_both_rules() -> None:
    model = fsdp1(make_net(), ["up"], use_orig_params=False)
    with pytest.raises(ValueError, match=r"got a parameter of shape .* in a param group for Muon"):
        shardopt.Muon8bit(model.parameters(), **SMALL)
    with pytest.raises(
        ValueError, match=r"got .* in one flat parameter, expected the same options for all of its parts"
    ):
        shardopt.muon_groups(model)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> list[torch.Tensor]:
    set_gradients(model, seed)
    optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def _stepped_alone(seeds: list[int]) -> list[torch.Tensor]:
    model = make_net()
    optimizer = shardopt.Muon8bit(shardopt.muon_groups(model))
    return [_step(model, optimizer, seed) for seed in seeds][-1]


def _assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def _counted_broadcasts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sources of broadcasts of directions, as they come."""
    sources: list[int] = []
    broadcast = shardopt.sharding.exchange.RanksExchange.broadcast

    def counted(self: Any, tensor: torch.Tensor, source: int) -> Any:
        sources.append(source)
        return broadcast(self, tensor, source)

    monkeypatch.setattr(shardopt.sharding.exchange.RanksExchange, "broadcast", counted)
    return sources


@pytest.mark.ranks(2)
def test_replicas_share_work() -> None:
    """If the groups are of the wrapped model, or after attach()."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        sources = _counted_broadcasts(monkeypatch)
        model = DistributedDataParallel(make_net())
        optimizer = shardopt.Muon8bit(shardopt.muon_groups(model))
        _step(model, optimizer)
        assert set(sources) == set(range(dist.get_world_size()))
        optimizer.attach(model.module)
        _step(model, optimizer, 1)  # begins by saying that the plan is another
        sources.clear()
        _step(model, optimizer, 2)
        assert not sources
        optimizer.attach(model)
        _assert_equal(_step(model, optimizer, 3), _stepped_alone([0, 1, 2, 3]))
        assert sources


@pytest.mark.ranks(2)
def test_one_rank_may_go_on_alone() -> None:
    """An optimizer of the bare model waits for nobody, whatever was read of the wrapped one."""
    model = DistributedDataParallel(make_net())
    shardopt.muon_groups(model)
    if dist.get_rank() == 0:
        shardopt.muon_groups(model).table()
        optimizer = shardopt.Muon8bit(shardopt.muon_groups(model.module))
        _assert_equal(_step(model, optimizer), _stepped_alone([0]))


@pytest.mark.ranks(4)
def test_wrapped_again_over_other_ranks() -> None:
    whole, halves = make_net(), [dist.new_group([0, 1]), dist.new_group([2, 3])]
    shardopt.muon_groups(DistributedDataParallel(whole))
    half = dist.get_rank() // 2
    model = DistributedDataParallel(whole, process_group=halves[half])
    optimizer = shardopt.Muon8bit(shardopt.muon_groups(model))
    if half == 0:  # those of the first wrapping would wait for the other half
        _assert_equal(_step(model, optimizer), _stepped_alone([0]))


@pytest.mark.ranks(2)
def test_zero_redundancy_shares_nothing(tmp_path: Path) -> None:
    """Each rank has parameters of its own, also once the wrapped model was read: by attach() or a checkpoint."""
    model = DistributedDataParallel(make_net())
    optimizer = ZeroRedundancyOptimizer(shardopt.muon_groups(model), optimizer_class=shardopt.Muon8bit)
    shardopt.muon_groups(model)
    optimizer.optim.attach(model)
    _assert_equal(_step(model, optimizer), _stepped_alone([0]))
    shardopt.checkpoint.save(tmp_path / "checkpoint", model, optimizer)
    shardopt.checkpoint.load(tmp_path / "checkpoint", model, optimizer)
    _assert_equal(_step(model, optimizer, 1), _stepped_alone([0, 1]))


def _whole(**options: Any) -> tuple[nn.Module, ShardedOptimizer]:
    model = make_net()
    optimizer = of_groups(model, **options)
    for step in range(STEPS):
        step_with(model, optimizer, step)
    return model, optimizer


def _ddp(options: dict[str, Any]) -> list[Shape]:
    model = DistributedDataParallel(make_net())
    optimizer = of_groups(model, **options)
    with orthogonalized() as computed:
        for step in range(STEPS):
            step_with(model, optimizer, step)
    assert_same(snapshot_of(model, optimizer), snapshot_of(*_whole(**options)))
    return computed


@pytest.mark.parametrize(("world_size", "options"), [(1, {}), (2, {"memory": 1}), (3, {"normalize": "rows"})])
def test_ddp_shares_the_work(ranks: Pool, world_size: int, options: dict[str, Any]) -> None:
    computed = ranks.run(world_size, _ddp, options)
    assert sum(map(Counter, computed), Counter()) == Counter({shape: STEPS * n for shape, n in MATRICES.items()})
    assert all(computed)


def _of_step(model: nn.Module, optimizer: ShardedOptimizer) -> tuple[Counter[str], dict[str, int]]:
    """The collectives of a second step by name, and their bytes."""
    for step in range(2):
        set_gradients(model, step)
        with counted_collectives() as found:
            optimizer.step()
    counts, nbytes = Counter(name for name, _ in found), dict.fromkeys({name for name, _ in found}, 0)
    for name, size in found:
        nbytes[name] += size
    return counts, nbytes


def _equal_matrices(memory: int | None, mesh: bool) -> tuple[Counter[str], dict[str, int], int]:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    size = dist.get_world_size()
    names = ("replicas", "shards")
    fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=names) if mesh else None)
    optimizer = limited(shardopt.Muon8bit(model.parameters(), **SMALL), memory)
    return *_of_step(model, optimizer), 8 * 64 * 64


@pytest.mark.parametrize(
    ("world_size", "hybrid", "memory", "waves"), [(2, False, None, 1), (2, False, 1, 8), (4, True, None, 1)]
)
def test_each_element_travels_twice(ranks: Pool, world_size: int, hybrid: bool, memory: int | None, waves: int) -> None:
    """By two exchanges per wave, 4 bytes in all: also where other ranks have copies of the shards.

    Before that the ranks exchange three answers of 4 bytes, and two for each matrix.
    """
    shards = world_size // 2 if hybrid else world_size
    for counts, nbytes, numel in ranks.run(world_size, _equal_matrices, memory, hybrid):
        assert counts == {"allreduce": 1, "alltoall_base": 2 * waves}
        assert nbytes == {"allreduce": 4 * (3 + 2 * 8), "alltoall_base": 4 * numel // shards}


def _net(way: str) -> tuple[Counter[str], dict[str, int]]:
    model = WAYS[way](make_net())
    return _of_step(model, of_groups(model))


def _padded_bytes(ranks_of: int, shapes: Counter[Shape]) -> int:
    """Of all directions if rows are divided among ranks, each one's in units of 16 bytes."""
    total = 0
    for (rows, cols), count in shapes.items():
        each = -(-rows // ranks_of)
        held = [max(min(each, rows - rank * each), 0) * cols for rank in range(ranks_of)]
        total += count * 2 * sum(map(padded, held))
    return total


def test_bytes_of_a_model(ranks: Pool) -> None:
    """Uneven and empty shards: there and back over all ranks, rounded up; AdamW's parameters take no part."""
    found = ranks.run(3, _net, "fsdp")
    assert all(counts == {"allreduce": 1, "alltoall_base": 2} for counts, _ in found)
    assert sum(nbytes["alltoall_base"] for _, nbytes in found) == 2 * _padded_bytes(3, MATRICES)


def test_bytes_of_ddp(ranks: Pool) -> None:
    """Each owner sends its matrices to the others once."""
    for counts, nbytes in ranks.run(2, _net, "ddp"):
        assert counts == {"allreduce": 1, "broadcast": 2}
        assert nbytes["broadcast"] == _padded_bytes(1, MATRICES)


def test_a_rank_alone_sends_nothing(ranks: Pool) -> None:
    for way in ("ddp", "single"):
        ((counts, _),) = ranks.run(1, _net, way)
        assert not counts


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "most"), [(3, 1), (4, 2)])
def test_messages_to_few_ranks_at_a_time(world_size: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shardopt.sharding.exchange, "MOST_PEERS", most)
        for way in ("fsdp", "fsdp1"):
            assert_same(snapshot_of(*trained(way, 2, "normuon")), single(2, "normuon"))


def _most_bytes(way: str, pairs: int, memory: int) -> int:
    """The most bytes of new tensors that live at a time during the second step."""
    shapes = [(260, 100), (100, 130)] * pairs
    model = nn.Sequential(*(nn.Linear(inputs, outputs, bias=False) for outputs, inputs in shapes))
    if way == "fsdp":
        fully_shard(model)
    optimizer = of_groups(DistributedDataParallel(model) if way == "ddp" else model, memory)
    for step in range(2):
        set_gradients(model, step)
        with LiveBytes() as live:
            optimizer.step()
    return live.most


@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_memory_is_kept_to(ranks: Pool, way: str) -> None:
    """On each rank, with what it gathers; a thread of gloo may hold a wave a moment longer, which is a third of it."""
    least = max(ranks.run(2, _most_bytes, way, 1, 1))
    for more in (200_000, 300_000):
        found = ranks.run(2, _most_bytes, way, 12, least + more)
        assert all(least <= most <= least + more * 4 / 3 for most in found), f"{found}, {least} at least"
