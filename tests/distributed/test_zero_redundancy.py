"""ZeroRedundancyOptimizer around ours beside ``test_layouts.py``: states put together on one rank, and refused ones."""

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
from ranks.models import make_net, set_gradients
from ranks.pool import Pool
from ranks.runs import snapshot_of, step_with
from ranks.snapshot import assert_same, assert_same_on_rank_0
from shardopt.optim import ShardedOptimizer

STEPS = 3
BF16 = torch.bfloat16
SMALL = {"min_quantized_numel": 64}


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = make_net(dtype)
    return remember_bare(DistributedDataParallel(model), bare_shapes(model))


def _optimizer(params: Any, rule: str = "adamw", views: bool = False, **options: Any) -> ZeroRedundancyOptimizer:
    case = RULES[rule]
    hyper = {**case.hyper, **SMALL, **options}
    return ZeroRedundancyOptimizer(params, optimizer_class=case.optimizer, parameters_as_bucket_view=views, **hyper)


def _whole(steps: int, rule: str, dtype: torch.dtype, **options: Any) -> tuple[nn.Module, ShardedOptimizer]:
    model = make_net(dtype)
    optimizer = RULES[rule].make(model.parameters(), **SMALL, **options)
    for step in range(steps):
        step_with(model, optimizer, step)
    return model, optimizer


def _save(path: Path, rule: str, views: bool, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """The state of each parameter is on one rank until they are put together."""
    model = _model(dtype)
    optimizer = _optimizer(model.parameters(), rule, views, **options)
    owned = {param for group in optimizer.optim.param_groups for param in group["params"]}
    assert len(owned) < len(model.bare_shapes)
    for step in range(STEPS):
        step_with(model, optimizer, step)
    assert set(optimizer.optim.state) == owned
    weights = gathered_parameters(model)
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        torch.save(optimizer.state_dict(), path / "optimizer")
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


@pytest.mark.parametrize(
    ("rule", "dtype", "options", "views"),
    [
        ("lion", torch.float32, {"codec": "dynamic8", "block_size": 32}, False),
        ("adamw", BF16, {"master_weight_bits": 24}, True),
        pytest.param("momentum", BF16, {"codec": "bf16"}, False, marks=pytest.mark.slow),
    ],
)
def test_consolidate_and_reload(
    ranks: Pool, tmp_path: Path, rule: str, dtype: torch.dtype, options: dict[str, Any], views: bool
) -> None:
    """On more ranks, on fewer, and without ZeRO: the next steps are those of never having stopped."""
    ranks.run(3, _save, tmp_path, rule, views, dtype, options)
    for world_size in (4, 2):
        ranks.run(world_size, _resume, tmp_path, rule, not views, dtype, options)
    ranks.run(1, _resume_whole, tmp_path, rule, dtype, options)


def _whole_state(path: Path, rule: str = "adamw") -> None:
    whole, optimizer = _whole(STEPS, rule, torch.float32)
    torch.save(optimizer.state_dict(), path / "optimizer")
    torch.save({name: param.detach() for name, param in whole.named_parameters()}, path / "weights")


def _with_momentum(path: Path) -> None:
    """A state of one rank; what state there is follows from the options that are loaded."""
    model = _model()
    _load_weights(model.module, path)
    optimizer = _optimizer(model.parameters(), "sgd")
    optimizer.load_state_dict(torch.load(path / "optimizer", weights_only=True))
    step_with(model, optimizer, STEPS)
    expected = _whole(STEPS + 1, "momentum", torch.float32)
    assert_same_on_rank_0(gathered(model, optimizer), lambda: snapshot_of(*expected))


def test_options_say_what_state_there_is(ranks: Pool, tmp_path: Path) -> None:
    _whole_state(tmp_path, "momentum")
    ranks.run(2, _with_momentum, tmp_path)


def _of_torch(path: Path) -> None:
    """Loading puts torch.optim's state past our load_state_dict: the next step says so, and changes nothing."""
    model = _model()
    optimizer = _optimizer(model.parameters())
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


#: Where a state dict is damaged, by what, and the error on every rank, whoever owns the parameter.
DAMAGES: list[tuple[tuple[Any, ...], Any, str]] = [
    (("state", 0, "exp_avg_scales"), math.nan, "parameter 0 of param group 0: got"),
    (("state", 0), [1], "parameter 0 of param group 0: got its state as"),
    (("param_groups", 0, "lr"), math.nan, "param group 0: lr: got nan"),
    (("param_groups", 0, "block_size"), 64, "param group 0: got state saved with block_size=64, expected 128"),
    (("param_groups", 0, "params"), None, "param group 0: got params as None"),
    (("param_groups", 0, "params"), [0], r"got a state dict with \[1\] parameters per param group"),
]


def _refused(path: Path) -> None:
    """The optimizer keeps what it had."""
    model = _model()
    optimizer = _optimizer(model.parameters())
    step_with(model, optimizer, 0)
    inner = optimizer.optim
    state = {param: dict(entries) for param, entries in inner.state.items()}
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for (*way, last), value, message in DAMAGES:
        state_dict = damaged = torch.load(path, weights_only=True)
        for key in way:
            damaged = damaged[key]
        if isinstance(damaged[last], torch.Tensor):
            damaged[last].view(-1)[0] = value
        else:
            damaged[last] = value
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state_dict)
        for groups in (optimizer.param_groups, inner.param_groups):
            assert [{k: v for k, v in group.items() if k != "params"} for group in groups] == options
        assert inner.state.keys() == state.keys()
        assert all(inner.state[param][k] is x for param, entries in state.items() for k, x in entries.items())


def test_damaged_state_is_refused(ranks: Pool, tmp_path: Path) -> None:
    _whole_state(tmp_path)
    ranks.run(2, _refused, tmp_path / "optimizer")


@pytest.mark.ranks(4)
def test_more_ranks_than_parameters() -> None:
    """A rank that owns no parameter."""
    models = [nn.Sequential(nn.Linear(70, 97)) for _ in range(2)]
    for param in (param for model in models for param in model.parameters()):
        param.data.fill_(0.5)
    whole, model = models[0], remember_bare(DistributedDataParallel(models[1]), bare_shapes(models[1]))
    optimizer, expected = _optimizer(model.parameters()), RULES["adamw"].make(whole.parameters(), **SMALL)
    for step in range(2):
        step_with(model, optimizer, step)
        step_with(whole, expected, step)
    optimizer.consolidate_state_dict()
    assert_same_on_rank_0(gathered(model, optimizer), lambda: snapshot_of(whole, expected))


@pytest.mark.ranks(3)
def test_stochastic_rounding_of_added_parameters() -> None:
    """The noise depends on a parameter's place among all, not among those of its rank."""
    model = _model(BF16)
    options = {"stochastic_rounding": True, "stochastic_rounding_seed": 7}
    params = list(model.parameters())
    optimizer = _optimizer(params[:-2], **options)
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
            _optimizer(params[::-1], stochastic_rounding=True)
        optimizer = RULES["adamw"].make(params, stochastic_rounding=True)
        step_with(model, optimizer, 0)
        found.append(snapshot_of(model, optimizer))
    assert_same(found[1], found[0])


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
