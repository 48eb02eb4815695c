"""ZeroRedundancyOptimizer around ours, a parameter's state on one rank only: the bits of one rank, also reloaded."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from helpers import RULES
from ranks.flat import bare_shapes, gathered, gathered_parameters, remember_bare
from ranks.models import loss_of, make_batch, make_net, set_gradients
from ranks.pool import Pool
from ranks.runs import snapshot_of, step_with, trained
from ranks.snapshot import assert_same, assert_same_on_rank_0
from shardopt.optim import ShardedOptimizer

STEPS = 3
BF16 = torch.bfloat16
SMALL = {"min_quantized_numel": 64}


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = make_net(dtype)
    return remember_bare(DistributedDataParallel(model), bare_shapes(model))


def _optimizer(params: Any, rule: str, views: bool = False, **options: Any) -> ZeroRedundancyOptimizer:
    case = RULES[rule]
    hyper = {**case.hyper, **SMALL, **options}
    return ZeroRedundancyOptimizer(params, optimizer_class=case.optimizer, parameters_as_bucket_view=views, **hyper)


def _whole(steps: int, rule: str, dtype: torch.dtype, **options: Any) -> tuple[nn.Module, ShardedOptimizer]:
    model = make_net(dtype)
    optimizer = RULES[rule].make(model.parameters(), **SMALL, **options)
    for step in range(steps):
        step_with(model, optimizer, step)
    return model, optimizer


def _as_single(rule: str, views: bool, dtype: torch.dtype, options: dict[str, Any]) -> None:
    model = _model(dtype)
    optimizer = _optimizer(model.parameters(), rule, views, **options)
    owned = [param for group in optimizer.optim.param_groups for param in group["params"]]
    assert dist.get_world_size() == 1 or len(owned) < len(model.bare_shapes)
    for step in range(STEPS):
        step_with(model, optimizer, step)
    assert set(optimizer.optim.state) == set(owned)
    assert_same_on_rank_0(gathered(model, optimizer), lambda: snapshot_of(*_whole(STEPS, rule, dtype, **options)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("views", [False, True])
def test_given_gradients(ranks: Pool, world_size: int, views: bool) -> None:
    ranks.run(world_size, _as_single, "adamw", views, torch.float32, {})


@pytest.mark.parametrize(
    ("rule", "dtype", "options"),
    [
        ("lion", torch.float32, {"codec": "companded8"}),
        ("momentum", torch.float32, {"codec": "dynamic8", "block_size": 16}),
        ("ademamix", torch.float32, {}),
        ("prodigy", torch.float32, {}),
        ("adan", BF16, {"master_weight_bits": 24, "block_size": 32}),
        ("adamw", BF16, {"master_weight_bits": 24}),
        ("adamw", BF16, {"master_weight_bits": 32, "codec": "fp32"}),
    ],
)
def test_rules_and_options(ranks: Pool, rule: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    ranks.run(3, _as_single, rule, True, dtype, options)


def _consolidated(optimizer: ZeroRedundancyOptimizer, path: Path) -> None:
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        torch.save(optimizer.state_dict(), path)
    dist.barrier()


def _save(path: Path, rule: str, views: bool, dtype: torch.dtype, options: dict[str, Any]) -> None:
    model = _model(dtype)
    optimizer = _optimizer(model.parameters(), rule, views, **options)
    for step in range(STEPS):
        step_with(model, optimizer, step)
    weights = gathered_parameters(model)
    _consolidated(optimizer, path / "optimizer")
    if dist.get_rank() == 0:
        torch.save(weights, path / "weights")
    dist.barrier()


def _load_weights(model: nn.Module, path: Path) -> None:
    for name, value in torch.load(path / "weights", weights_only=True).items():
        model.get_parameter(name).detach().copy_(value)


def _resume(path: Path, rule: str, views: bool, dtype: torch.dtype, options: dict[str, Any]) -> None:
    model = _model(dtype)
    _load_weights(model.module, path)
    optimizer = _optimizer(model.parameters(), rule, views, **options)
    optimizer.load_state_dict(torch.load(path / "optimizer", weights_only=True))
    assert_same_on_rank_0(gathered(model, optimizer), lambda: snapshot_of(*_whole(STEPS, rule, dtype, **options)))
    for step in range(STEPS, STEPS + 2):
        step_with(model, optimizer, step)
    assert_same_on_rank_0(gathered(model, optimizer), lambda: snapshot_of(*_whole(STEPS + 2, rule, dtype, **options)))


def _resume_whole(path: Path, rule: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """A consolidated state is that of the optimizer without ZeRO."""
    model = make_net(dtype)
    _load_weights(model, path)
    optimizer = RULES[rule].make(model.parameters(), **SMALL, **options)
    optimizer.load_state_dict(torch.load(path / "optimizer", weights_only=True))
    for step in range(STEPS, STEPS + 2):
        step_with(model, optimizer, step)
    assert_same(snapshot_of(model, optimizer), snapshot_of(*_whole(STEPS + 2, rule, dtype, **options)))


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize(
    ("rule", "dtype", "options"),
    [
        ("adamw", torch.float32, {}),
        ("lion", torch.float32, {"codec": "dynamic8", "block_size": 32}),
        ("adamw", BF16, {"master_weight_bits": 24}),
        ("momentum", BF16, {"codec": "bf16"}),
    ],
)
def test_consolidate_and_reload(
    ranks: Pool, tmp_path: Path, rule: str, dtype: torch.dtype, options: dict[str, Any], views: bool
) -> None:
    """On as many ranks, on more, on fewer, and without ZeRO: the next steps are those of never having stopped."""
    ranks.run(3, _save, tmp_path, rule, views, dtype, options)
    for world_size in (3, 4, 2):
        ranks.run(world_size, _resume, tmp_path, rule, not views, dtype, options)
    ranks.run(1, _resume_whole, tmp_path, rule, dtype, options)


def _from_whole(path: Path) -> None:
    """A state of one rank is loaded into a ZeroRedundancyOptimizer."""
    model = _model()
    _load_weights(model.module, path)
    optimizer = _optimizer(model.parameters(), "adamw")
    optimizer.load_state_dict(torch.load(path / "optimizer", weights_only=True))
    step_with(model, optimizer, STEPS)
    expected = _whole(STEPS + 1, "adamw", torch.float32)
    assert_same_on_rank_0(gathered(model, optimizer), lambda: snapshot_of(*expected))


def test_reload_from_one_rank(ranks: Pool, tmp_path: Path) -> None:
    whole, optimizer = _whole(STEPS, "adamw", torch.float32)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer")
    torch.save({name: param.detach() for name, param in whole.named_parameters()}, tmp_path / "weights")
    ranks.run(2, _from_whole, tmp_path)


def _of_torch(path: Path) -> None:
    """Loading puts torch.optim's state past our load_state_dict: the next step says so, and changes nothing."""
    model = _model()
    optimizer = _optimizer(model.parameters(), "adamw")
    optimizer.load_state_dict(torch.load(path, weights_only=True))
    set_gradients(model, 0)
    before = copy.deepcopy(dict(model.named_parameters()))
    with pytest.raises(RuntimeError, match=r"got state without exp_avg.*_codes"):
        optimizer.step()
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())


def test_state_of_torch_is_refused(ranks: Pool, tmp_path: Path) -> None:
    model = make_net()
    theirs = torch.optim.AdamW(model.parameters())
    step_with(model, theirs, 0)
    torch.save(theirs.state_dict(), tmp_path / "optimizer")
    ranks.run(2, _of_torch, tmp_path / "optimizer")


def _damaged(path: Path, key: str, value: float) -> None:
    """Every rank refuses it, whoever owns the parameter, and keeps what it had."""
    model = _model()
    optimizer = _optimizer(model.parameters(), "adamw")
    step_with(model, optimizer, 0)
    inner = optimizer.optim
    before = {param: dict(state) for param, state in inner.state.items()}
    state_dict = torch.load(path, weights_only=True)
    entry = state_dict["state"][0][key]
    entry.view(-1)[0] = value
    with pytest.raises(ValueError, match="parameter 0 of param group 0: got"):
        optimizer.load_state_dict(state_dict)
    assert inner.state.keys() == before.keys()
    assert all(inner.state[param][k] is x for param, state in before.items() for k, x in state.items())


@pytest.mark.parametrize(("key", "value"), [("exp_avg_scales", math.nan), ("step", -5.0), ("exp_avg_sq_scales", -1.0)])
def test_damaged_state_is_refused(ranks: Pool, tmp_path: Path, key: str, value: float) -> None:
    _, optimizer = _whole(STEPS, "adamw", torch.float32)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer")
    ranks.run(2, _damaged, tmp_path / "optimizer", key, value)


def _refused(path: Path, option: str, value: Any, message: str) -> None:
    """Options that the optimizer cannot have; it keeps its own."""
    model = _model()
    optimizer = _optimizer(model.parameters(), "adamw")
    step_with(model, optimizer, 0)
    before = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    state_dict = torch.load(path, weights_only=True)
    if option == "entries":
        state_dict["state"][0] = value
    else:
        state_dict["param_groups"][0][option] = value
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state_dict)
    for groups in (optimizer.param_groups, optimizer.optim.param_groups):
        assert [{k: v for k, v in group.items() if k != "params"} for group in groups] == before


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("lr", math.nan, "param group 0: lr: got nan"),
        ("block_size", 64, "param group 0: got state saved with block_size=64, expected 128"),
        ("params", None, "param group 0: got params as None"),
        ("params", [0], r"got a state dict with \[1\] parameters per param group"),
        ("entries", [1], "parameter 0 of param group 0: got its state as"),
    ],
)
def test_param_groups_for_another_optimizer_are_refused(
    ranks: Pool, tmp_path: Path, option: str, value: Any, message: str
) -> None:
    _, optimizer = _whole(STEPS, "adamw", torch.float32)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer")
    ranks.run(2, _refused, tmp_path / "optimizer", option, value, message)


def _with_momentum(path: Path) -> None:
    """State follows from the options that are loaded."""
    model = _model()
    _load_weights(model.module, path)
    optimizer = _optimizer(model.parameters(), "sgd")
    optimizer.load_state_dict(torch.load(path / "optimizer", weights_only=True))
    step_with(model, optimizer, STEPS)
    expected = _whole(STEPS + 1, "momentum", torch.float32)
    assert_same_on_rank_0(gathered(model, optimizer), lambda: snapshot_of(*expected))


def test_options_say_what_state_there_is(ranks: Pool, tmp_path: Path) -> None:
    whole, optimizer = _whole(STEPS, "momentum", torch.float32)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer")
    torch.save({name: param.detach() for name, param in whole.named_parameters()}, tmp_path / "weights")
    ranks.run(2, _with_momentum, tmp_path)


def _groups(params: list[Any]) -> list[dict[str, Any]]:
    return [
        {"params": params[::2], "lr": 3e-2, "codec": "companded8", "weight_decay": 0.0},
        {"params": params[1::2], "block_size": 16, "betas": (0.8, 0.9)},
    ]


@pytest.mark.ranks(3)
def test_param_groups(tmp_path: Path) -> None:
    """Groups with options of their own, of which some change between steps, and a reload."""
    path = tmp_path / "optimizer"
    model, whole = _model(), make_net()
    optimizer = _optimizer(_groups(list(model.parameters())), "adamw")
    expected = RULES["adamw"].make(_groups(list(whole.parameters())), **SMALL)
    for step in range(4):
        for each in (optimizer, expected):
            each.param_groups[0]["lr"] = 1e-2 / (step + 1)
        if step == 2:
            _consolidated(optimizer, path)
            optimizer = _optimizer(_groups(list(model.parameters())), "adamw")
            optimizer.load_state_dict(torch.load(path, weights_only=True))
        step_with(model, optimizer, step)
        step_with(whole, expected, step)
    assert_same_on_rank_0(gathered(model, optimizer), lambda: snapshot_of(whole, expected))


def _train(zero: bool) -> list[float]:
    model = _model() if zero else make_net()
    optimizer = _optimizer(model.parameters(), "adamw") if zero else RULES["adamw"].make(model.parameters(), **SMALL)
    losses = []
    for step in range(5):
        loss = loss_of(model, make_batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def test_trains_as_one(ranks: Pool) -> None:
    """With the same batch on both ranks: the mean of two equal gradients is exact."""
    (expected,) = ranks.run(1, _train, False)
    assert expected[-1] < expected[0]
    assert ranks.run(2, _train, True) == [expected, expected]


@pytest.mark.ranks(4)
def test_more_ranks_than_parameters() -> None:
    """A rank that owns no parameter."""
    models = [nn.Sequential(nn.Linear(70, 97)) for _ in range(2)]
    for param in (param for model in models for param in model.parameters()):
        param.data.fill_(0.5)
    whole, model = models[0], remember_bare(DistributedDataParallel(models[1]), bare_shapes(models[1]))
    optimizer, expected = _optimizer(model.parameters(), "adamw"), RULES["adamw"].make(whole.parameters(), **SMALL)
    for step in range(2):
        step_with(model, optimizer, step)
        step_with(whole, expected, step)
    optimizer.consolidate_state_dict()
    assert_same_on_rank_0(gathered(model, optimizer), lambda: snapshot_of(whole, expected))


@pytest.mark.ranks(3)
def test_stochastic_rounding() -> None:
    """The noise depends on a parameter's place among all, not among those of its rank."""
    model = _model(BF16)
    options = {"stochastic_rounding": True, "stochastic_rounding_seed": 7}
    params = list(model.parameters())
    optimizer = _optimizer(params[:-2], "adamw", **options)
    optimizer.add_param_group({"params": params[-2:]})
    for step in range(STEPS):
        step_with(model, optimizer, step)
    assert_same_on_rank_0(gathered(model, optimizer), lambda: snapshot_of(*_whole(STEPS, "adamw", BF16, **options)))


@pytest.mark.ranks(2)
def test_stochastic_rounding_of_another_optimizer_afterwards() -> None:
    """An optimizer of its own, over parameters that another one had in another order."""
    found = []
    for before in (False, True):
        model = make_net(BF16)
        params = list(model.parameters())[::-1]
        if before:
            _optimizer(params[::-1], "adamw", stochastic_rounding=True)
        optimizer = RULES["adamw"].make(params, stochastic_rounding=True)
        step_with(model, optimizer, 0)
        found.append(snapshot_of(model, optimizer))
    assert_same(found[1], found[0])


@pytest.mark.ranks(2)
def test_the_way_of_the_pool_is_this_one() -> None:
    got = snapshot_of(*trained("zero", STEPS))
    assert_same_on_rank_0(got, lambda: snapshot_of(*trained("single", STEPS)))
    assert isinstance(trained("zero", 0)[1], ZeroRedundancyOptimizer)


def test_a_step_count_is_moved_to_its_parameter() -> None:
    """Loading leaves it on the CPU."""
    for device in ("cpu", "meta"):
        param = torch.nn.Parameter(torch.zeros(3, device=device))
        optimizer = RULES["momentum"].make([param])
        buffer = torch.zeros(3)
        state = {"step": torch.tensor(3.0), "momentum_buffer": buffer}
        optimizer._internals.residency.put(
            param, optimizer._internals.state_of(param, optimizer.param_groups[0]), state
        )
        assert state["step"].device.type == device
        assert state["momentum_buffer"] is buffer
