"""Parameters that are put into the param groups by assignment: the noise of rounding, and what is kept of others."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import shardopt
from ranks.layouts import values
from shardopt.optim import ShardedOptimizer

OPTIONS = {"stochastic_rounding": True, "min_quantized_numel": 64}


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 33), nn.Linear(33, 64)).bfloat16()
    for index, param in enumerate(model.parameters()):
        param.data = values(tuple(param.shape), index, torch.bfloat16)
    return model


def _step(model: nn.Module, optimizer: ShardedOptimizer, t: int) -> None:
    for index, param in enumerate(model.parameters()):
        param.grad = values(tuple(param.shape), 10 * t + index, torch.bfloat16)
    optimizer.step()


def test_assigned_parameters_are_rounded_by_their_numbers() -> None:
    models = [_model(), _model()]
    for assigns, model in enumerate(models):
        table = [{"params": [param]} for group in shardopt.param_groups(model) for param in group["params"][::-1]]
        optimizer = shardopt.AdamW8bit(table[:1] if assigns else table, lr=1e-2, **OPTIONS)
        if assigns:
            optimizer.param_groups = [{**optimizer.param_groups[0], **group} for group in table]
        for t in range(3):
            _step(model, optimizer, t)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("all_of_them", "steps_before", "message"),
    [
        (False, 1, r"parameter 2 of .* \(64, 33\): got a parameter without a number"),
        (True, 0, "got 2 parameters without numbers in the model in place of some"),
        (True, 1, "got 2 parameters without numbers in the model in place of some"),
    ],
)
def test_new_parameters_in_place_of_numbered_ones_warn(all_of_them: bool, steps_before: int, message: str) -> None:
    model = _model()
    kept = [] if all_of_them else [*model[0].parameters()]
    optimizer = shardopt.AdamW8bit([*kept, *model[1].parameters()], lr=1e-2, **OPTIONS)
    optimizer.attach(model)
    for t in range(steps_before):
        _step(model, optimizer, t)
    for name in ("weight", "bias") if all_of_them else ("weight",):
        setattr(model[1], name, Parameter(getattr(model[1], name).detach().clone()))
    optimizer.param_groups[0]["params"] = [*kept, *model[1].parameters()]
    with pytest.warns(RuntimeWarning, match=message):
        _step(model, optimizer, 1)
    optimizer.attach(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(model, optimizer, 2)


def test_nothing_is_kept_of_replaced_parameters() -> None:
    optimizer = shardopt.AdamW8bit([Parameter(torch.zeros(64, 33)), Parameter(torch.zeros(64))], min_quantized_numel=64)
    alive: list[weakref.ref[Parameter]] = []
    for _ in range(20):
        new = Parameter(torch.zeros(64, 33))
        new.grad = torch.ones(64, 33)
        optimizer.state.pop(optimizer.param_groups[0]["params"][0], None)
        optimizer.param_groups[0]["params"][0] = new
        optimizer.step()
        alive.append(weakref.ref(new))
        del new
    gc.collect()
    assert sum(reference() is not None for reference in alive) == 1
    assert len(optimizer._internals._steppers) == 1
