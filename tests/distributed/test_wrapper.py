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

from ranks.flat import piece_state, pieces
from ranks.models import WAYS, Odds, fsdp1, make_net, named_parameters, set_gradients
from ranks.pool import Pool
from ranks.snapshot import assert_same, assert_shards_of, entries, snapshot
from shardopt import quantize_state
from shardopt.layout import BlockGrid, FlatBuffer, FlatShard, shard_of
from shardopt.wrapper import QuantizedState
from wrapped import ELEMENTWISE, of

#: Not fused: torch's fused kernels for CPUs round the last elements of a tensor otherwise.
TORCH_NAMES = [name for name in ELEMENTWISE if name.startswith("torch") and "fused" not in name]
FAST = ("torch AdamW foreach", "torch NAdam", "torch Adagrad", "torch SGD momentum")
SMALL: dict[str, Any] = {"min_quantized_numel": 64}
#: Two of the net's parameters at a time.
FEW = 32 * 20000


def _make(name: str, model: nn.Module, **options: Any) -> QuantizedState:
    return quantize_state(ELEMENTWISE[name](list(model.parameters())), **SMALL, **options)


def _dtensors(name: str, way: str, codec: str, working_memory: int) -> None:
    whole, sharded = make_net(), WAYS[way](make_net())
    params, sharded_params = named_parameters(whole), named_parameters(sharded)
    optimizer = _make(name, whole, codec=codec, working_memory=None)
    sharded_optimizer = _make(name, sharded, codec=codec, working_memory=working_memory)
    for step in range(3):
        for model, stepped in ((whole, optimizer), (sharded, sharded_optimizer)):
            set_gradients(model, step)
            stepped.step()
    expected = entries(params, optimizer)
    assert any(key.endswith("_codes") for key in expected) or name in ("torch SGD", "torch ASGD")
    assert_shards_of(entries(sharded_params, sharded_optimizer), expected)
    assert_same(snapshot(sharded_params, sharded_optimizer), expected)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in TORCH_NAMES]
)
def test_fsdp2(ranks: Pool, name: str) -> None:
    ranks.run(2, _dtensors, name, "fsdp", "log8", FEW)


@pytest.mark.parametrize(
    ("world_size", "way", "codec"),
    [
        *((2, way, codec) for way in ("fsdp columns", "tp", "hsdp of one", "ddp") for codec in ("log8", "dynamic8")),
        *((4, way, codec) for way in ("fsdp", "fsdp tp", "fsdp columns tp") for codec in ("log8", "dynamic8")),
    ],
)
def test_other_dtensors(ranks: Pool, world_size: int, way: str, codec: str) -> None:
    ranks.run(world_size, _dtensors, "torch AdamW foreach", way, codec, 0)


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
@pytest.mark.parametrize("way", ["fsdp", "fsdp columns"])
def test_untested_optimizers_step_dtensors(way: str) -> None:
    whole, sharded = make_net(), WAYS[way](make_net())
    results = []
    for model in (whole, sharded):
        inner = Untested(list(model.parameters()))
        with pytest.warns(UserWarning, match="untested"):
            optimizer = quantize_state(inner, working_memory=0, **SMALL)
        for step in range(3):
            set_gradients(model, step)
            optimizer.step()
        results.append(snapshot(named_parameters(model), optimizer))
    assert any(key.endswith("average_codes") for key in results[0])
    assert_same(results[1], results[0])


class _Rows(nn.Module):
    """Parameters with fewer rows than ranks, or an uneven number."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for index, shape in enumerate(((1, 4099), (3, 257), (97, 130), (5,))):
            self.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape, generator=generator)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["torch AdamW foreach", "torch NAdam", "torch Adagrad"])
def test_uneven_rows_and_an_empty_rank(name: str) -> None:
    from torch.distributed.fsdp import fully_shard

    whole, sharded = _Rows(), _Rows()
    fully_shard(sharded)
    if dist.get_rank() == 1:
        assert sharded.p0.to_local().numel() == 0  # type: ignore[operator, union-attr]
    optimizers = [(model, _make(name, model, working_memory=0)) for model in (whole, sharded)]
    for step in range(3):
        for model, optimizer in optimizers:
            set_gradients(model, step)
            optimizer.step()
    (_, expected), (_, got) = optimizers
    assert_same(snapshot(named_parameters(sharded), got), entries(named_parameters(whole), expected))
    floats = got.state_dict(dequantize=True)["state"]
    bare = ELEMENTWISE[name](list(sharded.parameters()))
    bare.load_state_dict(got.state_dict(dequantize=True))
    for index, param in enumerate(sharded.parameters()):
        for key, value in expected.state_dict(dequantize=True)["state"][index].items():
            at = floats[index][key]
            assert torch.equal(at.full_tensor() if hasattr(at, "full_tensor") else at, value)
            assert type(bare.state[param][key]) is type(at)


@pytest.mark.ranks(2)
def test_fsdp2_state_dict() -> None:
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


def _assert_pieces(whole: nn.Module, expected: QuantizedState, model: nn.Module, got: QuantizedState) -> None:
    params = dict(whole.named_parameters())
    compared = 0
    for piece in pieces(model):
        param = params[piece.name]
        assert torch.equal(piece.of(piece.tensor), piece.cut(param))
        if not piece.numel:
            continue
        state = piece_state(got, piece)
        assert state.keys() == expected.state[param].keys()
        shard, grid = shard_of(piece.tensor), BlockGrid(piece.shape, 128)
        if isinstance(shard, FlatBuffer):
            shard = next(segment.shard for segment in shard.segments if segment.name == piece.name)
        first, end = shard.blocks(grid) if isinstance(shard, FlatShard) else (0, None)
        for key, value in expected.state[param].items():
            if value.dim() == 0:
                assert torch.equal(state[key], value)
            elif key.endswith("_scales"):
                local = state[key] if isinstance(shard, FlatShard) else state[key].flatten(0, 1)
                assert torch.equal(local, value.flatten(0, 1)[first:end]), f"{piece.name} {key}"
                compared += 1
            else:
                own = state[key] if piece.segment is not None else piece.of(state[key])
                assert torch.equal(own, piece.cut(value)), f"{piece.name} {key}"
    assert compared or dist.get_world_size() > 2


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "name", "codec", "make", "working_memory"),
    [
        (2, "torch AdamW foreach", "log8", "odds", 0),
        (2, "torch AdamW foreach", "dynamic8", "fsdp1", FEW),
        (3, "torch RMSprop", "log8", "odds", None),
        (4, "torch Adagrad", "log8", "odds", FEW),
        (2, "torch SGD momentum", "companded8", "fsdp1 none", 0),
        (2, "torch AdamW foreach", "log8", "odds flat", 0),
        (3, "torch NAdam", "log8", "fsdp1 flat", FEW),
        (3, "torch RMSprop centered momentum", "dynamic8", "odds flat", None),
        (4, "torch Adagrad", "log8", "odds flat", FEW),
        (4, "torch AdamW amsgrad", "companded8", "fsdp1 hybrid flat", 0),
        (2, "torch SGD momentum", "log8", "fsdp1 none flat", 0),
    ],
)
def test_fsdp1(world_size: int, name: str, codec: str, make: str, working_memory: int | None) -> None:
    if make.startswith("odds"):
        whole: nn.Module = Odds()
        units = [f"units.{index}" for index in range(len(Odds.UNITS) - 1)]
        model = fsdp1(Odds(), units, use_orig_params=make == "odds")
    else:
        whole, model = make_net(), WAYS[make](make_net())
    optimizers = [(each, _make(name, each, codec=codec, working_memory=working_memory)) for each in (whole, model)]
    for step in range(3):
        for each, optimizer in optimizers:
            set_gradients(each, step)
            optimizer.step()
    expected, got = optimizers[0][1], optimizers[1][1]
    _assert_pieces(whole, expected, model, got)
    # float state of the bare optimizer, encoded anew
    for _, optimizer in optimizers:
        optimizer.load_state_dict(optimizer.state_dict(dequantize=True))
    _assert_pieces(whole, expected, model, got)


@pytest.mark.ranks(2)
def test_a_rank_that_fails() -> None:
    """A step that fails on a rank fails on those that share blocks with it, and none of them waits for ever."""
    model = fsdp1(Odds(), ["units.0"])
    optimizer = _make("torch AdamW foreach", model)
    set_gradients(model, 0)
    optimizer.step()
    if dist.get_rank() == 1:
        param = next(p for p in model.parameters() if p in optimizer.state and "exp_avg_codes" in optimizer.state[p])
        del optimizer.state[param]["step"]
    with pytest.raises((KeyError, RuntimeError)) as raised:
        optimizer.step()
    assert isinstance(raised.value, KeyError) == (dist.get_rank() == 1)
    assert isinstance(raised.value, KeyError) or "another rank" in str(raised.value)


@pytest.mark.ranks(2)
def test_ranks_with_other_entries() -> None:
    model = fsdp1(Odds(), ["units.0"])
    optimizer = _make("torch AdamW foreach", model)
    optimizer._entries.kept |= {"exp_avg"} if dist.get_rank() else set()
    set_gradients(model, 0)
    with pytest.raises(ValueError, match="expected the same state entries on all ranks"):
        optimizer.step()


@pytest.mark.ranks(2)
def test_refusals() -> None:
    sharded = WAYS["fsdp"](make_net())
    ways = [of("torch.optim", "Adafactor")]
    if hasattr(torch.optim, "Muon"):
        ways.append(of("torch.optim", "Muon", lr=0.1))
    for make in ways:
        with pytest.raises(RuntimeError, match="depends on others of the parameter"):
            quantize_state(make([p for p in sharded.parameters() if p.dim() == 2]))
    flat = WAYS["fsdp1 flat"](make_net())
    for inner in (torch.optim.Adafactor, Untested):
        with pytest.raises(RuntimeError, match=r"flat tensor of several parameters.*; wrap the model with fully_shard"):
            quantize_state(inner(flat.parameters()))


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
