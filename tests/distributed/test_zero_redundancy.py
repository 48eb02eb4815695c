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

import shardopt
from ranks.flat import gathered_parameters
from ranks.models import WAYS, make_net, set_gradients
from ranks.pool import Pool
from ranks.runs import make_optimizer, single, snapshot_of, step_with, trained
from ranks.snapshot import assert_same

STEPS = 3
BF16 = torch.bfloat16


def _save(path: Path, dtype: torch.dtype, rule: str, options: dict[str, Any]) -> None:
    """The state of each parameter is on one rank until they are put together."""
    model, optimizer = trained("zero", 0, rule, dtype=dtype, **options)
    owned = {param for group in optimizer.optim.param_groups for param in group["params"]}
    assert len(owned) < len(model.bare_shapes)
    for step in range(STEPS):
        step_with(model, optimizer, step)
    assert set(optimizer.optim.state) == owned
    weights = gathered_parameters(model)
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        torch.save({"optimizer": optimizer.state_dict(), "weights": weights}, path)
    dist.barrier()


def _resume(path: Path, way: str, dtype: torch.dtype, rule: str, options: dict[str, Any]) -> None:
    """A consolidated state is that of the optimizer without ZeRO, too."""
    model, optimizer = trained(way, 0, rule, dtype=dtype, **options)
    saved = torch.load(path, weights_only=True)
    getattr(model, "module", model).load_state_dict(saved["weights"])
    optimizer.load_state_dict(saved["optimizer"])
    for step in range(STEPS, STEPS + 2):
        step_with(model, optimizer, step)
    assert_same(snapshot_of(model, optimizer), single(STEPS + 2, rule, dtype=dtype, **options))


@pytest.mark.parametrize(
    ("rule", "dtype", "options"),
    [
        ("lion", torch.float32, {"codec": "dynamic8", "block_size": 32}),
        ("adamw", BF16, {"master_weight_bits": 24, "parameters_as_bucket_view": True}),
    ],
)
def test_consolidate_and_reload(
    ranks: Pool, tmp_path: Path, rule: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """On fewer ranks, and without ZeRO: the next steps are those of never having stopped."""
    path = tmp_path / "state"
    ranks.run(3, _save, path, dtype, rule, options)
    own = {key: value for key, value in options.items() if key != "parameters_as_bucket_view"}
    for world_size, way in ((2, "zero"), (1, "single")):
        ranks.run(world_size, _resume, path, way, dtype, rule, own)


@pytest.mark.ranks(2)
def test_state_of_torch_is_refused() -> None:
    """Loading puts torch.optim's state past our load_state_dict: the next step says so, and changes nothing."""
    whole = make_net()
    theirs = torch.optim.AdamW(whole.parameters())
    step_with(whole, theirs, 0)
    model, optimizer = trained("zero", 0)
    optimizer.load_state_dict(theirs.state_dict())
    set_gradients(model, 0)
    before = copy.deepcopy(dict(model.named_parameters()))
    with pytest.raises(RuntimeError, match=r"got state without exp_avg.*_codes"):
        optimizer.step()
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())


#: Where a state dict is damaged, by what, and the error on every rank, whoever owns the parameter.
DAMAGES: list[tuple[tuple[Any, ...], Any, str]] = [
    (("state", 0, "exp_avg_scales"), math.nan, "parameter 0 of param group 0: got"),
    (("param_groups", 0, "block_size"), 64, "param group 0: got state saved with block_size=64, expected 128"),
    (("param_groups", 0, "params"), [0], r"got a state dict with \[1\] parameters per param group"),
]


@pytest.mark.ranks(2)
def test_damaged_state_is_refused() -> None:
    """The optimizer keeps what it had."""
    _, whole = trained("single", STEPS)
    _, optimizer = trained("zero", 1)
    inner = optimizer.optim
    state = {param: dict(entries) for param, entries in inner.state.items()}
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for (*way, last), value, message in DAMAGES:
        state_dict = damaged = copy.deepcopy(whole.state_dict())
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


@pytest.mark.ranks(3)
@pytest.mark.parametrize("named", [False, True])
def test_stochastic_rounding_of_added_parameters(named: bool) -> None:
    """The noise depends on a parameter's place among all, not among those of its rank."""
    runs = []
    for way in ("zero", "single"):
        model = WAYS[way](make_net(BF16))
        params = list(model.parameters())
        groups = [{"params": params[:-2]}, {"params": params[-2:]}]
        first, second = shardopt.param_groups(model, no_decay=["*.bias"]) if named else groups
        options = {"stochastic_rounding": True, "stochastic_rounding_seed": 7}
        optimizer = make_optimizer(way, model, params=[first], **options)
        optimizer.add_param_group(second)
        for step in range(STEPS):
            step_with(model, optimizer, step)
        runs.append(snapshot_of(model, optimizer))
    assert_same(*runs)


@pytest.mark.ranks(4)
def test_more_ranks_than_parameters() -> None:
    """A rank that owns no parameter."""
    runs = []
    for way in ("zero", "single"):
        torch.manual_seed(0)
        model = WAYS[way](nn.Sequential(nn.Linear(70, 97)))
        optimizer = make_optimizer(way, model)
        step_with(model, optimizer, 0)
        runs.append(snapshot_of(model, optimizer))
    assert_same(*runs)
