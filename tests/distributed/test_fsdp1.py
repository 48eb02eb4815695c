"""FSDP1 beside ``test_layouts.py``: other models, attach(), exchanges, errors on all ranks, and state dicts.

torch's own functions carry our state bit for bit, to any number of ranks. State that they cannot carry, and that of
other elements, is refused at once, on all ranks, and nothing changes.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    fully_shard,
)
from torch.distributed.fsdp import StateDictType as Type

import shardopt
from ranks.collectives import counted_collectives
from ranks.flat import (
    bare_shapes,
    forget_shards,
    gathered,
    is_flat,
    pieces,
    remember_bare,
)
from ranks.models import (
    Odds,
    Tied,
    copy_weights,
    fsdp1,
    loss_of,
    make_batch,
    make_frozen,
    make_net,
    make_odds,
)
from ranks.offload import offload_from_cpu
from ranks.runs import snapshot_of, step_with, trained
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer
from shardopt.state import host_memory
from versions import needs_fsdp1_on_some_ranks

SMALL = {"min_quantized_numel": 32}
STOCHASTIC = {"stochastic_rounding": True, "stochastic_rounding_seed": 7}
BF16 = torch.bfloat16


def _wrap(model: nn.Module, **options: Any) -> nn.Module:
    bare = bare_shapes(model)
    return remember_bare(FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options), bare)


def _in_pieces(model: nn.Module, **options: Any) -> nn.Module:
    """Only some layers are units, no unit has all, and the other layers are whole on every rank."""
    bare = bare_shapes(model)
    for index in (0, 3):
        model.units[index] = fsdp1(model.units[index], [], **options)
    return remember_bare(model, bare)


#: Makes a model, and wraps it.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., nn.Module]]] = {
    "tied": (Tied, lambda model, **options: fsdp1(model, ["mix"], **options)),
    "ignoring": (make_net, lambda model, **options: _wrap(model, ignored_modules=[model.down], **options)),
    "in pieces": (Odds, _in_pieces),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    """With noise, which depends on a parameter's place in the model: wrapping says it, and attach() says the same."""
    make, wrap = MODELS[name]
    for late in (False, True):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(make().to(BF16))
        whole, model = models[0], wrap(models[1], use_orig_params=False)
        unknown = name in ("in pieces", "ignoring") and not late  # places in the model
        options = SMALL if unknown else {**SMALL, **STOCHASTIC}
        if late:
            forget_shards(model)
        optimizer, expected = (shardopt.AdamW8bit(m.parameters(), **options) for m in (model, whole))
        if late:
            optimizer.attach(model)
        for step in range(2):
            step_with(model, optimizer, step)
            step_with(whole, expected, step)
        assert_same(gathered(model, optimizer), snapshot_of(whole, expected))


@pytest.mark.ranks(2)
def test_units_of_their_own() -> None:
    """An optimizer that has no other parameters than a unit's needs to know of none."""
    wholes, models = [make_net(BF16) for _ in range(2)], [_wrap(make_net(BF16)) for _ in range(2)]
    for whole, model in zip(wholes, nn.ModuleList([nn.Linear(2, 2), *models])[1:], strict=True):
        optimizer, expected = (shardopt.AdamW8bit(m.parameters(), **SMALL, **STOCHASTIC) for m in (model, whole))
        step_with(model, optimizer, 0)
        step_with(whole, expected, 0)
        assert_same(gathered(model, optimizer), snapshot_of(whole, expected))


def _tiny() -> nn.Module:
    """With four ranks, two of them hold nothing at all."""
    return fsdp1(nn.Sequential(nn.Linear(1, 1)), [])


@pytest.mark.ranks(4)
def test_ranks_with_nothing() -> None:
    """A rank that holds nothing takes part, has no state, and saves and loads that."""
    model, whole = _tiny(), nn.Sequential(nn.Linear(1, 1))
    with FullyShardedDataParallel.summon_full_params(model):
        whole.load_state_dict({name: x.detach().clone() for name, x in model.module.named_parameters()})
    optimizer, expected = (shardopt.AdamW8bit(m.parameters(), nonfinite="raise") for m in (model, whole))
    for step in range(3):
        step_with(model, optimizer, step)
        step_with(whole, expected, step)
        optimizer.load_state_dict(optimizer.state_dict())
    held = sum(piece.numel for piece in pieces(model))
    assert bool(optimizer.state_dict()["state"]) is bool(held)
    assert held or dist.get_rank() > 0
    assert_same(gathered(model, optimizer), snapshot_of(whole, expected))


def _forgotten(model: nn.Module) -> nn.Module:
    forget_shards(model)
    return model


def _strided() -> nn.Module:
    """FSDP1 flattens such weights in the order of memory: nobody's business until one of our optimizers steps them."""
    wrapped = _wrap(nn.Sequential(nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)), use_orig_params=False)
    theirs = torch.optim.AdamW(wrapped.parameters())
    assert shardopt.memory_report(theirs).numel == sum(param.numel() for param in wrapped.parameters())
    return wrapped


def _not_reduced() -> nn.Module:
    model: Any = fsdp1(make_net())
    with model.no_sync():
        loss_of(model, make_batch(0, dist.get_rank())).backward()
    return model


LATE = r"FullyShardedDataParallel.*import shardopt before wrapping the model, or call optimizer\.attach\(model\) once"
#: Models whose steps are refused, options, and the error.
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    # Noise depends on which of all parameters each is; a unit does not know what stands beside it.
    "in pieces": (
        lambda: _in_pieces(Odds().to(BF16), use_orig_params=False),
        STOCHASTIC,
        r"call optimizer\.attach\(model\) with the whole model",
    ),
    "let go": (lambda: make_odds()[1], {}, "that does not say which elements it holds"),
    "wrapped before the import": (lambda: _forgotten(make_odds(use_orig_params=False)[1]), {}, LATE),
    "on few ranks": (lambda: _forgotten(_tiny()), {}, LATE),  # those without any gradient say so, too
    "strided": (_strided, {}, r"0\.weight.*contiguous"),
    "not reduced yet": (_not_reduced, {}, r"got a gradient of shape .* expected"),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", REFUSED)
def test_steps_are_refused(name: str) -> None:
    make, options, message = REFUSED[name]
    model = make()
    optimizer = shardopt.AdamW8bit(model.parameters(), **SMALL, **options)
    params = list(model.parameters())
    if name == "let go":
        del model
        gc.collect()
    before = [param.detach().clone() for param in params]
    for param in params:
        if param.grad is None and param.numel():
            param.grad = torch.ones_like(param)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
    assert not any(optimizer.state.values())
    assert all(map(torch.equal, params, before))


#: A number of ranks, a layout, a rule and options, and how many collectives there are in each step.
EXCHANGES: list[tuple[int, str, str, dict[str, Any], int]] = [
    (3, "fsdp1 flat", "adamw", {}, 2),
    (3, "fsdp1", "momentum", {"codec": "dynamic8", "block_size": 16}, 1),
    (3, "fsdp1", "adamw", {"nonfinite": "raise"}, 3),  # one to agree that gradients are finite
    (3, "fsdp1", "adamw", {"codec": "fp32"}, 0),
    (3, "fsdp1 none flat", "adamw", {}, 0),
    (4, "fsdp1 nested", "adamw", {"codec": "companded8"}, 1),
]


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [3, 4])
def test_one_collective_per_round(world_size: int) -> None:
    """However many parameters there are, and whether or not anything has a gradient; one of a check, one to agree."""
    for _, way, rule, options, rounds in (case for case in EXCHANGES if case[0] == world_size):
        model, optimizer = trained(way, 0, rule, **options)
        names = []
        for step in range(3):
            with counted_collectives() as collectives:
                step_with(model, optimizer, step) if step < 2 else optimizer.step()
            names.append([name for name, _ in collectives])
        agreed = "none" not in way
        expected = [rounds + 2 * agreed, rounds + agreed, rounds + agreed]
        assert names == [["allreduce"] * count for count in expected], (way, rule, options)


def _made(orig: bool, steps: int, group: Any = None, **options: Any) -> tuple[nn.Module, ShardedOptimizer]:
    model = fsdp1(make_net(), use_orig_params=orig, process_group=group)
    optimizer = shardopt.AdamW8bit(model.parameters(), **SMALL, **options)
    for step in range(steps):
        step_with(model, optimizer, step)
    return model, optimizer


REMEDY = "shardopt.checkpoint.load(path, model, optimizer)"


def _refused(optimizer: ShardedOptimizer, remedy: str, call: Callable[[], object]) -> None:
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(RuntimeError) as caught:
        call()
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)
    assert_unchanged(optimizer, before)


def assert_unchanged(optimizer: Any, before: dict[str, Any]) -> None:
    """The optimizer's state has the bits that its state dict had before."""
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys()
    for index, entries in before["state"].items():
        assert_same(after["state"][index], entries)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("orig", [True, False])
def test_all_ways_of_torch(orig: bool) -> None:
    model, optimizer = _made(orig, 1)
    expected, fsdp = gathered(model, optimizer), FullyShardedDataParallel
    to_load = fsdp.optim_state_dict_to_load

    def loads(state: Any) -> None:
        theirs = shardopt.AdamW8bit(model.parameters(), **SMALL)
        theirs.load_state_dict(state)
        assert_same(gathered(model, theirs), expected)

    loads(to_load(model, optimizer, fsdp.optim_state_dict(model, optimizer, optimizer.state_dict())))
    full = fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)
    loads(fsdp.shard_full_optim_state_dict(full, model, optim=optimizer))
    loads(fsdp.scatter_full_optim_state_dict(full if dist.get_rank() == 0 else None, model, optim=optimizer))
    named = fsdp.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, make_net())
    loads(to_load(model, optimizer, fsdp.rekey_optim_state_dict(named, OptimStateKeyType.PARAM_NAME, make_net())))
    sharded = fsdp.sharded_optim_state_dict(model, optimizer)
    loads(fsdp.flatten_sharded_optim_state_dict(sharded, model, optimizer))
    only = FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=True)
    with fsdp.state_dict_type(model, Type.FULL_STATE_DICT, FullStateDictConfig(), only):
        on_first = fsdp.optim_state_dict(model, optimizer)
        assert bool(on_first) is (dist.get_rank() == 0)
        loads(to_load(model, optimizer, on_first or None))
    with fsdp.state_dict_type(model, Type.SHARDED_STATE_DICT):
        loads(to_load(model, optimizer, fsdp.optim_state_dict(model, optimizer)))


@pytest.mark.ranks(2)
def test_subnormal_moments() -> None:
    """As in an embedding's rare rows."""
    model, optimizer = _made(True, 1)
    state = optimizer.state_dict(dequantize=True)
    for entries in state["state"].values():
        entries["exp_avg_sq"].mul_(0).add_(torch.linspace(1, 1.001, len(entries["exp_avg_sq"])) * 1e-42)
    optimizer.load_state_dict(state)
    before = copy.deepcopy(optimizer.state_dict())
    saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved))
    assert_unchanged(optimizer, before)


@pytest.mark.ranks(2)
def test_dequantized_second_moments_of_rows_are_refused() -> None:
    """Torch would take them for state of the parameter's shape."""
    model, optimizer = trained("fsdp1", 1, "normuon")
    state = optimizer.state_dict(dequantize=True)
    with pytest.raises(RuntimeError, match="got dequantized state with second_momentum_buffer"):
        FullyShardedDataParallel.optim_state_dict(model, optimizer, state)


def _damage(saved: dict[str, Any], what: str) -> None:
    if what == "options":
        saved["param_groups"][0]["block_size"] = 64
    for name, entries in saved["state"].items():
        for key, value in [*entries.items()]:
            if what == "float16":
                entries[key] = value.half().to(value.dtype)
            elif what == "dtype" and value.dim():
                entries[key] = value.double()
            elif what == "missing" and key == "packed_1":
                del entries[key]
            elif what == "values" and name == "up.weight" and value.dim():
                value.fill_(float("nan"))


#: Damages, and the error.
DAMAGES = {
    "dtype": "got packed state of torch.float64 with packed_exact 1.0000001192092896, expected torch.float32",
    "float16": "packed_exact 1.0, expected torch.float32 with 1.0000001192092896: it was converted",
    "missing": "expected step, packed_exact, packed_0, packed_1; was",
    "options": "got state saved with block_size=64, expected 128",
    "values": "that stands for NaN or Inf|NaN, Inf or numbers below zero",
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("orig", [True, False])
def test_damaged_state_is_refused(orig: bool) -> None:
    """Before anything changes. Of state on one rank, the blocks that both have elements of lack the other's scales."""
    model, optimizer = _made(orig, 1)
    saved, before = FullyShardedDataParallel.optim_state_dict(model, optimizer), copy.deepcopy(optimizer.state_dict())
    for what, message in DAMAGES.items():
        damaged = copy.deepcopy(saved)
        _damage(damaged, what)
        loaded = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, damaged)
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(loaded)
    loaded = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved)
    message = "bytes of the scales of block"
    if dist.get_rank() == 0:
        message = f"got an error on rank 1: ValueError: .*{message}"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(loaded if dist.get_rank() == 1 else {**loaded, "state": {}})
    assert_unchanged(optimizer, before)


@pytest.mark.ranks(2)
def test_state_of_another_rule_is_refused() -> None:
    """Packed entries have no names, and float32 moments of any rule are finite numbers."""
    model = fsdp1(make_net(), use_orig_params=False)
    optimizer = shardopt.Lion(model.parameters(), codec="fp32")
    step_with(model, optimizer, 0)
    other = shardopt.SGD(model.parameters(), codec="fp32", momentum=0.9)
    step_with(model, other, 1)
    unchanged = copy.deepcopy(other.state_dict())
    saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    loaded = FullyShardedDataParallel.optim_state_dict_to_load(model, other, saved)
    with pytest.raises(ValueError, match=r"param group 0: got packed state of the moments \['exp_avg'"):
        other.load_state_dict(loaded)
    assert_unchanged(other, unchanged)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("way", "dequantize"), [("orig", True), ("flat", False), ("fsdp2", True), ("fsdp2", False)])
def test_state_of_another_rank_is_refused(tmp_path: Path, way: str, dequantize: bool) -> None:
    """Rank 0's file on every rank: the shapes of this model's shards happen to agree. DTensors are rank 0's."""
    net, is_first = nn.Sequential(nn.Linear(64, 64, bias=False)), dist.get_rank() == 0
    model = fully_shard(net) if way == "fsdp2" else fsdp1(net, [], use_orig_params=way == "orig")
    optimizer = shardopt.AdamW8bit(model.parameters(), **SMALL)
    step_with(model, optimizer, 0)
    before = copy.deepcopy(optimizer.state_dict())
    if is_first:
        torch.save(optimizer.state_dict(dequantize=dequantize), tmp_path / "saved")
    dist.barrier()
    loaded = torch.load(tmp_path / "saved", weights_only=True)
    if way != "fsdp2" or not is_first:
        with pytest.raises(ValueError, match=f"elements than {'another' if is_first else 'this'} rank's"):
            optimizer.load_state_dict(loaded)
    assert_unchanged(optimizer, before)
    if way == "fsdp2" and is_first:
        optimizer.load_state_dict(loaded)


@pytest.mark.ranks(3)
def test_attached_late() -> None:
    """Loading has to know the shards, unless there is no state: it says so, changes nothing, and works once it does."""
    model, optimizer = _made(True, 1)
    loaded = fsdp1(make_net())
    forget_shards(loaded)
    copy_weights(model, loaded)
    late = shardopt.AdamW8bit(loaded.parameters(), **SMALL)
    late.load_state_dict(late.state_dict())
    with pytest.raises(RuntimeError, match=r"call optimizer\.attach\(model\)"):
        late.load_state_dict(optimizer.state_dict())
    assert not late.state
    late.attach(loaded)
    late.load_state_dict(optimizer.state_dict())
    late.attach(loaded)
    for each in (model, optimizer), (loaded, late):
        step_with(*each, 1)
    assert_same(gathered(loaded, late), gathered(model, optimizer))


@pytest.mark.ranks(4)
def test_only_some_parameters_have_state() -> None:
    """State of one unit, on the ranks that hold a part of it; the exchange of cut blocks takes place on all."""
    runs = []
    for model in make_odds(use_orig_params=False):
        theirs = torch.optim.AdamW(model.parameters())
        named = {p.name: p.tensor for p in pieces(model)} if is_flat(model) else dict(model.named_parameters())
        for name, param in named.items():
            if name.startswith("units.3.") and param.numel():
                param.grad = torch.ones_like(param)
        theirs.step()
        ours = shardopt.AdamW8bit(model.parameters(), **SMALL)
        ours.load_state_dict(theirs.state_dict())
        step_with(model, ours, 0)
        runs.append((model, ours))
    assert_same(gathered(*runs[1]), snapshot_of(*runs[0]))


@pytest.mark.ranks(2)
def test_flattened_state_is_refused() -> None:
    model, optimizer = _made(False, 0)
    flatten = StateDictOptions(flatten_optimizer_state_dict=True)
    with counted_collectives() as collectives:
        _refused(optimizer, "leave the option out", lambda: get_optimizer_state_dict(model, optimizer, options=flatten))
    assert collectives == []
    assert not optimizer.state


#: Neighbours in a unit have moments of different numbers and codecs.
CODECS: dict[str, dict[str, Any]] = {
    "up.*": {"codec": "fp32"},
    "down.*": {"codec": "companded16"},
    "norm.*": {"codec": "bf16"},
    "conv.*": {"codec": "dynamic8", "block_size": 16, "amsgrad": True},
    "head.*": {"codec": "log4"},
}


@pytest.mark.ranks(3)
def test_groups_frozen_and_ignored_parameters() -> None:
    bare = make_frozen(0)
    model = fsdp1(bare, ["conv"], ignored_modules=[bare.up, bare.norm])
    optimizer, theirs = (shardopt.AdamW8bit(shardopt.param_groups(model, CODECS), **SMALL) for _ in range(2))
    for step in range(2):
        step_with(model, optimizer, step)
    expected = gathered(model, optimizer)
    saved = copy.deepcopy(FullyShardedDataParallel.optim_state_dict(model, optimizer))
    theirs.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, theirs, saved))
    assert_same(gathered(model, theirs), expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("orig", "steps"), [(True, 0), (False, 1)])
def test_loading_is_refused(orig: bool, steps: int) -> None:
    """On all ranks, even if only one has the state: codes and scales that torch gathered of our optimizer elsewhere."""
    whole = make_net()
    their_optimizer = shardopt.AdamW8bit(whole.parameters(), **SMALL)
    step_with(whole, their_optimizer, 0)
    saved = get_optimizer_state_dict(whole, their_optimizer)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    flattened = get_optimizer_state_dict(whole, their_optimizer, options=flat)
    model, optimizer = _made(orig, steps)
    fsdp = FullyShardedDataParallel
    first = saved if dist.get_rank() == 0 else {}
    on_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    calls: list[Callable[[], object]] = [
        lambda: fsdp.optim_state_dict_to_load(model, optimizer, saved),
        lambda: set_optimizer_state_dict(model, optimizer, saved),
        lambda: set_optimizer_state_dict(model, optimizer, flattened, options=flat),
        lambda: set_optimizer_state_dict(model, optimizer, first, options=on_first),
        lambda: fsdp.shard_full_optim_state_dict(saved, model),
        lambda: fsdp.scatter_full_optim_state_dict(first or None, model, optim=optimizer),
        lambda: fsdp.flatten_sharded_optim_state_dict(saved, model, optimizer),
    ]
    for call in calls:
        _refused(optimizer, REMEDY, call)
    only = FullOptimStateDictConfig(rank0_only=True)
    with fsdp.state_dict_type(model, Type.FULL_STATE_DICT, FullStateDictConfig(), only):
        mine = saved if dist.get_rank() == 0 else None
        _refused(optimizer, REMEDY, lambda: fsdp.optim_state_dict_to_load(model, optimizer, mine))
    assert bool(optimizer.state) is bool(steps)


@pytest.mark.ranks(3, timeout=40)
@needs_fsdp1_on_some_ranks
def test_a_model_on_some_ranks() -> None:
    """The model is sharded over two of three ranks, which do not wait for the third."""
    own = [1, 2]
    group = dist.new_group(own)
    if dist.get_rank() not in own:
        return
    whole = make_net()
    theirs = shardopt.AdamW8bit(whole.parameters(), **SMALL)
    step_with(whole, theirs, 0)
    saved = get_optimizer_state_dict(whole, theirs)
    model, optimizer = _made(True, 1, group)
    on_first = saved if dist.get_rank(group) == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    _refused(optimizer, REMEDY, lambda: set_optimizer_state_dict(model, optimizer, on_first, options=options))
    scatter = FullyShardedDataParallel.scatter_full_optim_state_dict
    _refused(optimizer, REMEDY, lambda: scatter(on_first or None, model, optim=optimizer, group=group))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("late", [False, True])
def test_offload_is_refused(late: bool) -> None:
    """The error comes when the optimizer is made; for a model wrapped before the import of shardopt, from attach()."""
    model = fsdp1(make_net())

    def tell(**options: object) -> None:
        if late:
            forget_shards(model)
        optimizer = shardopt.AdamW8bit(model.parameters(), **options)
        if late:
            optimizer.attach(model)

    with offload_from_cpu():
        with (
            patch.object(host_memory, "_available_host_bytes", lambda: 1000),
            pytest.raises(MemoryError, match="got 0 MiB of available host memory"),
        ):
            tell(offload="state")
        with pytest.raises(RuntimeError, match="offload='step': got parameters of flat shards"):
            tell(offload="step")
