"""State that is matched to its parameter by name; state of no parameter, and of some parameters."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Parameter

import shardopt
from helpers import step, through_a_file
from ranks.layouts import values
from ranks.snapshot import assert_same


def named(order: str, *, kind: str = "own", prefix: str = "") -> tuple[dict[str, Parameter], torch.optim.Optimizer]:
    """Parameters of one shape by name, and an optimizer that has them in this order, with names."""
    params = {name: Parameter(values((64, 96), seed)) for seed, name in enumerate("abc")}
    listed = [(prefix + name, params[name]) for name in order]
    if kind == "wrapped":
        return params, shardopt.quantize_state(torch.optim.AdamW(listed))
    return params, shardopt.AdamW8bit(listed) if kind == "own" else torch.optim.AdamW(listed)


def step_named(params: dict[str, Parameter], optimizer: torch.optim.Optimizer) -> None:
    step(optimizer, params, {name: values((64, 96), 10 + seed) for seed, name in enumerate(params)})


@pytest.mark.parametrize("form", ["as it is", "torch's functions", "dequantized", "imported"])
@pytest.mark.parametrize(("kind", "prefix"), [("own", "module."), ("wrapped", ""), ("wrapped", "module.")])
def test_named_state_in_another_order(kind: str, form: str, prefix: str) -> None:
    """State finds its parameter by name, and saved names are not taken over."""
    dequantize = {"dequantize": True} if form == "dequantized" else {}
    params, optimizer = named("abc", kind="torch" if form == "imported" else kind)
    step_named(params, optimizer)
    others, other = named("cab", kind=kind, prefix=prefix)
    if form == "torch's functions":
        model, its_model = nn.ParameterDict(params), nn.ParameterDict(others)
        set_optimizer_state_dict(its_model, other, get_optimizer_state_dict(model, optimizer))
    elif form == "imported" and kind == "own":
        shardopt.checkpoint.import_state(other, optimizer.state_dict())
    else:
        other.load_state_dict(through_a_file(optimizer.state_dict(**dequantize)))
    assert other.param_groups[0]["param_names"] == [prefix + name for name in "cab"]
    expected = named("abc", kind=kind)[1]
    expected.load_state_dict(optimizer.state_dict(**dequantize))
    for name, param in zip("abc", expected.param_groups[0]["params"], strict=True):
        assert_same(other.state[others[name]], expected.state[param])


@pytest.mark.parametrize("kind", ["own", "wrapped"])
def test_names_of_other_parameters_are_refused(kind: str) -> None:
    params, optimizer = named("abc", kind=kind)
    step_named(params, optimizer)
    saved = optimizer.state_dict()
    others, other = named("abc", kind=kind, prefix="x.")
    with pytest.raises(ValueError, match=r"param group 0: got state of a, b, c, expected x\.a, x\.b, x\.c; make the"):
        other.load_state_dict(saved)
    assert not any(other.state.values())
    del saved["param_groups"][0]["param_names"]
    other.load_state_dict(saved)
    assert_same(other.state[others["a"]], optimizer.state[params["a"]])


@pytest.mark.parametrize("kind", ["own", "wrapped"])
def test_a_key_of_no_group_is_told(kind: str) -> None:
    params, optimizer = named("abc", kind=kind)
    step_named(params, optimizer)
    optimizer.state[Parameter(torch.zeros(3))] = {"step": torch.tensor(1.0)}
    for dequantize in (False, True):
        with pytest.raises(RuntimeError, match=r"got state of a tensor of shape \(3,\) that is in no param group"):
            optimizer.state_dict(dequantize=dequantize)


def test_empty_entries_are_no_state() -> None:
    """Such as reading ``optimizer.state[param]`` makes."""
    params, optimizer = named("abc")
    _, expected = named("abc")
    assert not any(optimizer.state[param] for param in params.values())
    assert optimizer.state_dict(dequantize=True)["state"] == optimizer.state_dict()["state"] == {}
    expected.load_state_dict(optimizer.state_dict())
    assert get_optimizer_state_dict(nn.ParameterDict(params), optimizer)["state"].keys() == set("abc")


def test_the_state_of_some_parameters_is_forgotten() -> None:
    params, optimizer = named("abc")
    step_named(params, optimizer)
    fresh, expected = named("abc")
    step_named(fresh, expected)
    with pytest.raises(ValueError, match="params: got a tensor that is in no param group"):
        optimizer.reset_state([params["a"], Parameter(torch.ones(2))])
    assert all(optimizer.state[param] for param in params.values())
    optimizer.reset_state(iter([params["a"], params["c"]]))
    one = shardopt.AdamW8bit([fresh["a"], fresh["c"]])
    for _ in range(2):
        step_named(params, optimizer)
        for name, of in (("a", one), ("c", one), ("b", expected)):
            fresh[name].grad = values((64, 96), 10 + "abc".index(name))
            of.param_groups[0]["lr"] = 1e-3
        one.step()
        fresh["a"].grad = fresh["c"].grad = None
        expected.step()
        for name, param in params.items():
            assert torch.equal(param, fresh[name])
            assert_same(optimizer.state[param], (expected if name == "b" else one).state[fresh[name]])


def test_torch_leaves_out_the_state_of_frozen_parameters() -> None:
    """pytorch#192202: with a warning, nested or flat."""
    params, optimizer = named("abc")
    step_named(params, optimizer)
    model = nn.ParameterDict(params)
    for options in (StateDictOptions(), StateDictOptions(flatten_optimizer_state_dict=True)):
        saved = get_optimizer_state_dict(model, optimizer, options=options)
        params["b"].requires_grad = False
        with pytest.warns(UserWarning, match="got saved state of b, which requires no gradient"):
            set_optimizer_state_dict(model, optimizer, saved, options=options)
        params["b"].requires_grad = True
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            set_optimizer_state_dict(model, optimizer, saved, options=options)
