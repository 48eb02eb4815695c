"""Muon under everything that shards: the bits of one rank, with little travelling."""

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
from torch.nn.parallel import DistributedDataParallel

import shardopt
import shardopt.checkpoint
import shardopt.sharding.exchange
from helpers import Shape
from live_bytes import LiveBytes
from pairs import slow
from ranks.collectives import counted_collectives
from ranks.flat import bare_shapes, gathered, remember_bare
from ranks.layouts import COLUMN, ROW, WHOLE, Layout, distribute, layouts, shard, values
from ranks.models import WAYS, fsdp1, loss_of, make_batch, make_net, named_parameters, set_gradients
from ranks.pool import Pool
from ranks.runs import SMALL, make_optimizer, snapshot_of, step_with, trained
from ranks.snapshot import assert_same, snapshot
from shardopt.kernels.newton_schulz import NewtonSchulz
from shardopt.layout import Region, shard_of
from shardopt.optim import ShardedOptimizer
from shardopt.step.matrices import padded
from test_dtensor_step import SCATTERED

STEPS = 3
IN_PAIRS = ("hsdp", "hsdp columns", "fsdp1 hybrid")
NOT_FLAT = [way for way in WAYS if "flat" not in way and way not in ("single", "zero")]
FEW = {
    2: ("fsdp", "fsdp bf16", "fsdp offload", "fsdp1"),
    3: ("fsdp columns", "hsdp of one", "tp", "fsdp1 grad"),
    4: ("fsdp", "hsdp", "hsdp columns", "fsdp tp", "fsdp columns tp", "fsdp1 hybrid", "fsdp1 nested"),
}


def _as_single(way: str, rule: str, options: dict[str, Any]) -> None:
    got = snapshot_of(*trained(way, STEPS, rule, **options))
    if dist.get_rank() == 0:
        assert_same(got, snapshot_of(*trained("single", STEPS, rule, **options)))


@pytest.mark.parametrize(
    ("world_size", "way"),
    [
        *((world_size, way) for world_size, ways in FEW.items() for way in ways),
        *slow(
            (world_size, way)
            for world_size in (1, 2, 3, 4)
            for way in NOT_FLAT
            if "tp" not in way and not (world_size % 2 and way in IN_PAIRS)
        ),
    ],
)
def test_as_single(ranks: Pool, world_size: int, way: str) -> None:
    ranks.run(world_size, _as_single, way, "muon_in_waves", {})


def test_gram_as_single(ranks: Pool) -> None:
    for way in ("fsdp columns", "fsdp1"):
        ranks.run(3, _as_single, way, "muon_in_waves", {"ns_method": "gram"})


# Which ranks share the work -------------------------------------------------------------------------------------------


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


def _replicas_share() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        sources = _counted_broadcasts(monkeypatch)
        model = DistributedDataParallel(make_net())
        optimizer = shardopt.Muon8bit(shardopt.muon_groups(model))
        _assert_equal(_step(model, optimizer), _stepped_alone([0]))
        assert set(sources) == set(range(dist.get_world_size()))
        optimizer.attach(model.module)
        sources.clear()
        _assert_equal(_step(model, optimizer, 1), _stepped_alone([0, 1]))
        assert not sources
        optimizer.attach(model)
        _assert_equal(_step(model, optimizer, 2), _stepped_alone([0, 1, 2]))
        assert sources


def test_replicas_share_work(ranks: Pool) -> None:
    """If the groups are of the wrapped model, or after attach()."""
    ranks.run(2, _replicas_share)


def _share_nothing_alone() -> None:
    model = DistributedDataParallel(make_net())
    shardopt.muon_groups(model)
    if dist.get_rank() == 0:
        shardopt.muon_groups(model).table()
        optimizer = shardopt.Muon8bit(shardopt.muon_groups(model.module))
        _assert_equal(_step(model, optimizer), _stepped_alone([0]))


def test_one_rank_may_go_on_alone(ranks: Pool) -> None:
    """An optimizer of the bare model waits for nobody, whatever was read of the wrapped one."""
    ranks.run(2, _share_nothing_alone)


def _wrapped_again() -> None:
    whole, halves = make_net(), [dist.new_group([0, 1]), dist.new_group([2, 3])]
    shardopt.muon_groups(DistributedDataParallel(whole))
    half = dist.get_rank() // 2
    model = DistributedDataParallel(whole, process_group=halves[half])
    optimizer = shardopt.Muon8bit(shardopt.muon_groups(model))
    if half == 0:  # those of the first wrapping would wait for the other half
        _assert_equal(_step(model, optimizer), _stepped_alone([0]))


def test_wrapped_again_over_other_ranks(ranks: Pool) -> None:
    ranks.run(4, _wrapped_again)


def _zero_redundancy(path: str) -> None:
    model = DistributedDataParallel(make_net())
    optimizer = ZeroRedundancyOptimizer(shardopt.muon_groups(model), optimizer_class=shardopt.Muon8bit)
    shardopt.muon_groups(model)
    optimizer.optim.attach(model)
    _assert_equal(_step(model, optimizer), _stepped_alone([0]))
    shardopt.checkpoint.save(path, model, optimizer)
    shardopt.checkpoint.load(path, model, optimizer)
    _assert_equal(_step(model, optimizer, 1), _stepped_alone([0, 1]))


def test_zero_redundancy_shares_nothing(ranks: Pool, tmp_path: Path) -> None:
    """Each rank has parameters of its own, also once the wrapped model was read: by attach() or a checkpoint."""
    ranks.run(2, _zero_redundancy, str(tmp_path / "checkpoint"))


# Who holds what -------------------------------------------------------------------------------------------------------


def _elements(region: Region) -> list[int]:
    return [region.first + row * region.stride + col for row in range(region.rows) for col in range(region.cols)]


def _covers(layout: Layout) -> None:
    numel = torch.Size(layout.shape).numel()
    numbers = torch.arange(numel).view(layout.shape)
    found = shard(numbers, layout)
    division = shard_of(found).division
    local = found.to_local().flatten().tolist()
    if all(placement == WHOLE for placement in layout.placements):
        assert division is None
        return
    assert division is not None
    held = [_elements(region) for region in division.regions]
    assert held[division.ranks.rank] == local, str(layout)
    assert sorted(element for of_rank in held for element in of_rank) == list(range(numel)), str(layout)


def _all_cover() -> None:
    for layout in layouts(dist.get_world_size()):
        if layout.placements != SCATTERED:
            _covers(layout)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_divisions_cover_each_parameter_once(ranks: Pool, world_size: int) -> None:
    ranks.run(world_size, _all_cover)


# Matrices in a parameter ----------------------------------------------------------------------------------------------

#: Shapes and how they are divided: matrices that no rank holds whole, of one row, and fewer than ranks.
SPLITS: tuple[tuple[Shape, Any], ...] = (
    ((97, 130), (30, 1, 5, 61)),
    ((40, 7, 3, 3), (3, 37)),
    ((3, 33, 64), "each"),
    ((6, 5, 40), "each"),
    ((2, 4, 9, 8), "each"),
)


def _splits() -> None:
    size = dist.get_world_size()
    mesh = {2: (2, 1), 3: (1, 3), 4: (2, 2)}[size]
    ways = [((size,), (ROW,)), ((size,), (COLUMN,)), (mesh, (ROW, COLUMN)), (mesh, (WHOLE, ROW)), (mesh, (ROW, ROW))]
    whole, sharded = [], []
    for index, ((on, placements), (shape, split)) in enumerate(product(ways, SPLITS)):
        params = values(shape, index), shard(values(shape, index), Layout(shape, on, placements, torch.float32))
        for groups, param in zip((whole, sharded), params, strict=True):
            groups.append({"params": [nn.Parameter(param)], "split": split})
    options = {"adjust_lr_fn": "spectral_norm", "orthogonalize_memory": 100_000, "lr": 0.02, **SMALL}
    optimizers = [shardopt.Muon(groups, **options) for groups in (whole, sharded)]
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


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_splits(ranks: Pool, world_size: int) -> None:
    ranks.run(world_size, _splits)


def _split_flat() -> None:
    """FSDP1 and FSDP2 cut matrices of a fused parameter anywhere."""
    split = {"0.weight": (33, 1, 36), "1.weight": (20, 20)}
    models = [fsdp1(_matrices(), ["1"]), _matrices()]
    optimizers = [shardopt.Muon(shardopt.muon_groups(model, split=split), **SMALL) for model in models]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            step_with(model, optimizer, step)
    got, expected = (snapshot_of(m, o) for m, o in zip(models, optimizers, strict=True))
    assert_same(got, expected)


@pytest.mark.parametrize("world_size", [2, 3])
def test_splits_of_flat_shards(ranks: Pool, world_size: int) -> None:
    ranks.run(world_size, _split_flat)


def _no_ranges(split: Any) -> None:
    """Nothing is changed, and nothing travels."""
    layout = Layout((6, 5, 40), (dist.get_world_size(),), (Shard(2),), torch.float32)
    param = nn.Parameter(shard(values(layout.shape, 0), layout))
    optimizer = shardopt.Muon([param], split=split, **SMALL)
    param.grad = shard(values(layout.shape, 1), layout)
    with (
        counted_collectives() as found,
        pytest.raises(RuntimeError, match=r"got a parameter of shape .* with placements .* for Muon, expected"),
    ):
        optimizer.step()
    assert not found
    assert not optimizer.state
    assert torch.equal(param.to_local(), shard(values(layout.shape, 0), layout).to_local())


@pytest.mark.parametrize("split", [None, "each"])
def test_neither_rows_nor_columns(ranks: Pool, split: Any) -> None:
    ranks.run(2, _no_ranges, split)


# Flat parameters of matrices only -------------------------------------------------------------------------------------


def _matrices(width: int = 40) -> nn.Sequential:
    """Layers without biases: a wide one, a tall one and a square one."""
    shapes = ((width, 70), (70, width), (width, width))
    model = nn.Sequential(*(nn.Linear(inputs, outputs, bias=False) for inputs, outputs in shapes))
    for index, param in enumerate(model.parameters()):
        with torch.no_grad():
            param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(index)))
    return model


def _flat(strategy: ShardingStrategy) -> None:
    got, whole = fsdp1(_matrices(), ["1"], use_orig_params=False, sharding_strategy=strategy), _matrices()
    optimizers = [shardopt.Muon(model.parameters(), **SMALL) for model in (got, whole)]
    for step in range(STEPS):
        for model, optimizer in zip((got, whole), optimizers, strict=True):
            step_with(model, optimizer, step)
    assert_same(gathered(got, optimizers[0]), snapshot_of(whole, optimizers[1]))


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [(1, "FULL_SHARD"), (2, "NO_SHARD"), (2, "FULL_SHARD"), (3, "SHARD_GRAD_OP")],
)
def test_flat_parameters(ranks: Pool, world_size: int, strategy: str) -> None:
    """FSDP1 with ``use_orig_params=False``: an optimizer's parameter is several matrices."""
    ranks.run(world_size, _flat, ShardingStrategy[strategy])


def _flat_of_both() -> None:
    model = fsdp1(make_net(), ["up"], use_orig_params=False)
    with pytest.raises(ValueError, match=r"got a parameter of shape .* in a param group for Muon"):
        shardopt.Muon(model.parameters(), **SMALL)
    with pytest.raises(
        ValueError, match=r"got .* in one flat parameter, expected the same options for all of its parts"
    ):
        shardopt.muon_groups(model)


def test_flat_parameters_for_both_rules(ranks: Pool) -> None:
    ranks.run(2, _flat_of_both)


# Ranks with copies ----------------------------------------------------------------------------------------------------


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


def _of_groups(model: nn.Module, **options: Any) -> ShardedOptimizer:
    return shardopt.Muon(shardopt.muon_groups(model), **{**SMALL, **options})


def _whole(**options: Any) -> tuple[nn.Module, ShardedOptimizer]:
    model = make_net()
    optimizer = _of_groups(model, **options)
    for step in range(STEPS):
        step_with(model, optimizer, step)
    return model, optimizer


MATRICES: Counter[Shape] = Counter([(192, 66), (66, 192), (70, 198), (1, 70)])


def _ddp(how: str, options: dict[str, Any]) -> list[Shape]:
    bare = make_net()
    model = DistributedDataParallel(bare)
    optimizer = _of_groups(model if how == "groups" else bare, **options)
    if how == "attach":
        optimizer.attach(model)
    with orthogonalized() as computed:
        for step in range(STEPS):
            step_with(model, optimizer, step)
    got = snapshot_of(model, optimizer)
    assert_same(got, snapshot_of(*_whole(**options)))
    return computed


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"orthogonalize_memory": 1}], ids=str)
def test_ddp_shares_the_work(ranks: Pool, world_size: int, options: dict[str, Any]) -> None:
    computed = ranks.run(world_size, _ddp, "groups", options)
    assert sum(map(Counter, computed), Counter()) == Counter({shape: STEPS * n for shape, n in MATRICES.items()})
    assert all(computed)


@pytest.mark.parametrize("how", ["attach", "bare"])
def test_ddp_attached_or_unknown(ranks: Pool, how: str) -> None:
    """Where nothing tells of the other ranks, each computes everything."""
    computed = ranks.run(2, _ddp, how, {})
    times = 1 if how == "attach" else 2
    assert sum(map(Counter, computed), Counter()) == Counter({s: times * STEPS * n for s, n in MATRICES.items()})


def _zero(options: dict[str, Any]) -> list[Shape]:
    model = make_net()
    model = remember_bare(DistributedDataParallel(model), bare_shapes(model))
    groups = [dict(group) for group in shardopt.muon_groups(model)]
    optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=shardopt.Muon, **SMALL, **options)
    with orthogonalized() as computed:
        for step in range(STEPS):
            step_with(model, optimizer, step)
    got = gathered(model, optimizer)
    if dist.get_rank() == 0:
        assert_same(got, snapshot_of(*_whole(**options)))
    return computed


@pytest.mark.parametrize("world_size", [2, 3])
def test_zero_redundancy(ranks: Pool, world_size: int) -> None:
    """Each rank computes the matrices whose state it has."""
    computed = ranks.run(world_size, _zero, {})
    assert sum(map(Counter, computed), Counter()) == Counter({shape: STEPS * n for shape, n in MATRICES.items()})


# What travels ---------------------------------------------------------------------------------------------------------


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


def _equal_matrices(memory: str | int, mesh: bool) -> tuple[Counter[str], dict[str, int], int]:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    size = dist.get_world_size()
    names = ("replicas", "shards")
    fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=names) if mesh else None)
    optimizer = shardopt.Muon(model.parameters(), orthogonalize_memory=memory, **SMALL)
    return *_of_step(model, optimizer), 8 * 64 * 64


@pytest.mark.parametrize(("world_size", "hybrid"), [(2, False), (4, False), (4, True)])
def test_each_element_travels_twice(ranks: Pool, world_size: int, hybrid: bool) -> None:
    """By two exchanges, 4 bytes in all, and nothing else: also where other ranks have copies of the shards."""
    shards = world_size // 2 if hybrid else world_size
    for counts, nbytes, numel in ranks.run(world_size, _equal_matrices, "1GiB", hybrid):
        assert counts == {"alltoall_base": 2}
        assert nbytes == {"alltoall_base": 4 * numel // shards}


def test_two_exchanges_per_wave(ranks: Pool) -> None:
    for counts, nbytes, numel in ranks.run(2, _equal_matrices, 1, False):
        assert counts == {"alltoall_base": 2 * 8}
        assert nbytes == {"alltoall_base": 4 * numel // 2}


def _net(way: str) -> tuple[Counter[str], dict[str, int]]:
    model = WAYS[way](make_net())
    return _of_step(model, _of_groups(model))


def _padded_bytes(ranks_of: int, shapes: Counter[Shape]) -> int:
    """Of all directions if rows are divided among ranks, each one's in units of 16 bytes."""
    total = 0
    for (rows, cols), count in shapes.items():
        each = -(-rows // ranks_of)
        held = [max(min(each, rows - rank * each), 0) * cols for rank in range(ranks_of)]
        total += count * 2 * sum(map(padded, held))
    return total


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_of_a_model(ranks: Pool, world_size: int) -> None:
    """Uneven and empty shards: there and back over all ranks, rounded up; AdamW's parameters take no part."""
    found = ranks.run(world_size, _net, "fsdp")
    assert all(counts == {"alltoall_base": 2} for counts, _ in found)
    assert sum(nbytes["alltoall_base"] for _, nbytes in found) == 2 * _padded_bytes(world_size, MATRICES)


def test_bytes_of_ddp(ranks: Pool) -> None:
    """Each owner sends its matrices to the others once."""
    for counts, nbytes in ranks.run(2, _net, "ddp"):
        assert counts == {"broadcast": 2}
        assert nbytes == {"broadcast": _padded_bytes(1, MATRICES)}


def test_a_rank_alone_sends_nothing(ranks: Pool) -> None:
    for way in ("ddp", "single"):
        ((counts, _),) = ranks.run(1, _net, way)
        assert not counts


def _most_bytes(way: str, pairs: int, memory: int) -> int:
    """What a second step allocates at a time."""
    shapes = [(260, 100), (100, 130)] * pairs
    model = nn.Sequential(*(nn.Linear(inputs, outputs, bias=False) for outputs, inputs in shapes))
    if way == "fsdp":
        fully_shard(model)
    optimizer = shardopt.Muon(
        shardopt.muon_groups(DistributedDataParallel(model) if way == "ddp" else model),
        orthogonalize_memory=memory, **SMALL,
    )  # fmt: skip
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


# Steps that lack something --------------------------------------------------------------------------------------------


def _without(way: str, names: tuple[str, ...], steps: tuple[int, ...]) -> None:
    """In some steps some parameters have no gradient anywhere."""
    models = [WAYS[way](make_net()), make_net()]
    optimizers = [_of_groups(model, orthogonalize_memory=100_000) for model in models]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            set_gradients(model, step)
            for name, param in named_parameters(model).items():
                if step in steps and name in names:
                    param.grad = None
            optimizer.step()
            optimizer.zero_grad()
    got, expected = (snapshot_of(m, o) for m, o in zip(models, optimizers, strict=True))
    assert_same(got, expected)


@pytest.mark.parametrize("way", ["fsdp", "fsdp columns", "ddp", "fsdp1"])
def test_parameters_without_gradient(ranks: Pool, way: str) -> None:
    everything = tuple(name for name, _ in make_net().named_parameters())
    matrices = ("up.weight", "down.weight", "conv.weight", "gate.weight")
    for names in (("down.weight",), matrices, everything):
        for steps in ((0,), (1,)):
            ranks.run(2, _without, way, names, steps)


def _released(way: str) -> list[Shape]:
    models = [WAYS[way](make_net()) for _ in range(2)]
    released, ordinary = (_of_groups(model) for model in models)
    shardopt.release_gradients(models[0], released)
    computed: list[Shape] = []
    for step in range(STEPS):
        for model, optimizer in zip(models, (released, ordinary), strict=True):
            with orthogonalized() as found:
                loss_of(model, make_batch(step, dist.get_rank())).backward()
                optimizer.step()
            computed += found if optimizer is released else []
            optimizer.zero_grad()
        got, expected = (snapshot_of(m, o) for m, o in zip(models, (released, ordinary), strict=True))
        assert_same(got, expected)
    return computed


@pytest.mark.parametrize("way", ["fsdp", "fsdp columns", "ddp"])
def test_released_gradients(ranks: Pool, way: str) -> None:
    """Where each step has one matrix, its owner is not always the first rank."""
    computed = ranks.run(2, _released, way)
    assert sum(map(Counter, computed), Counter()) == Counter({shape: STEPS * n for shape, n in MATRICES.items()})
    assert all(computed)


def _nan(way: str, policy: str) -> None:
    """In the part of one rank."""
    models = [WAYS[way](make_net()), make_net()]
    optimizers = [_of_groups(model, nonfinite=policy) for model in models]
    before = snapshot_of(models[0], optimizers[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        set_gradients(model, 0)
        grad = model.get_parameter("up.weight").grad
        last = dist.get_rank() == dist.get_world_size() - 1
        if model is models[1]:
            grad[-1, -1] = float("nan")
        elif last:
            grad.to_local()[-1, -1] = float("nan")
        if policy == "raise":
            with pytest.raises(FloatingPointError, match="NaN or Inf"):
                optimizer.step()
        else:
            optimizer.step()
    got, expected = (snapshot_of(m, o) for m, o in zip(models, optimizers, strict=True))
    assert_same(got, before if policy == "raise" else expected)


@pytest.mark.parametrize("policy", ["skip", "raise", "propagate"])
@pytest.mark.parametrize("way", ["fsdp", "fsdp columns"])
@pytest.mark.filterwarnings("ignore:skipped .* gradient elements")
def test_nonfinite_gradients(ranks: Pool, way: str, policy: str) -> None:
    ranks.run(2, _nan, way, policy)


# Going on elsewhere ---------------------------------------------------------------------------------------------------


def _save(way: str, path: Path) -> None:
    model, optimizer = trained(way, 2, "muon_in_waves")
    shardopt.checkpoint.save(path, model, optimizer)


def _resume(way: str, path: Path) -> None:
    """In another model and optimizer, which have taken a step; then beside a run that was never saved."""
    model = WAYS[way](make_net(seed=1))
    optimizer = make_optimizer(way, model, "muon_in_waves")
    step_with(model, optimizer, 99)
    shardopt.checkpoint.load(path, model, optimizer)
    for step in (2, 3):
        step_with(model, optimizer, step)
    got = snapshot_of(model, optimizer)
    if dist.get_rank() == 0:
        assert_same(got, snapshot_of(*trained("single", 4, "muon_in_waves")))


@pytest.mark.parametrize(
    ("saved_on", "saved_way", "world_size", "way"),
    [
        (2, "fsdp", 3, "fsdp"),
        (3, "fsdp1", 2, "fsdp columns"),
        (1, "single", 3, "fsdp1"),
        (2, "fsdp columns", 1, "single"),
    ],
)
def test_resume(ranks: Pool, tmp_path: Path, saved_on: int, saved_way: str, world_size: int, way: str) -> None:
    ranks.run(saved_on, _save, saved_way, tmp_path / "checkpoint")
    ranks.run(world_size, _resume, way, tmp_path / "checkpoint")
