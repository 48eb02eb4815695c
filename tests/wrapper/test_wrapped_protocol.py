"""quantize_state gives an optimizer: hooks, schedulers, GradScaler, closures, param groups, copies, reports."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import shardopt
from shardopt import quantize_state
from wrapped import ELEMENTWISE, AdamW, Custom, bits, parameters, quietly, same, set_gradients, trained, trained_adamw


def test_step_hooks_run_once_per_step() -> None:
    params = parameters()
    optimizer = quantize_state(AdamW(params), working_memory=0)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda o, *_: seen.append("post"))
    trained(optimizer, params, range(2))
    assert seen == ["pre", "post"] * 2


def test_schedulers() -> None:
    params, bare_params = parameters(), parameters()
    for optimizer, own in (
        (quantize_state(AdamW(params), min_quantized_numel=2**40), params),
        (AdamW(bare_params), bare_params),
    ):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
        for step in range(4):
            trained(optimizer, own, range(step, step + 1))
            scheduler.step()
    assert all(map(torch.equal, params, bare_params))


@pytest.mark.parametrize("name", ["torch AdamW foreach", "torch AdamW fused"])
def test_grad_scaler(name: str) -> None:
    """Gradients are unscaled once, and a step with an infinite one is left out."""
    params, scaled = parameters(), parameters()
    optimizer, again = (quantize_state(ELEMENTWISE[name](own), working_memory=0) for own in (params, scaled))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    trained(optimizer, params, range(1))
    set_gradients(scaled, 0)
    for param in scaled:
        assert param.grad is not None
        param.grad *= 8
    scaler.step(again)
    scaler.update()
    assert same(bits(scaled, again), bits(params, optimizer))
    set_gradients(scaled, 1)
    assert scaled[0].grad is not None
    scaled[0].grad[0, 0] = torch.inf
    scaler.step(again)
    assert same(bits(scaled, again), bits(params, optimizer))


def test_closure() -> None:
    params = parameters()
    optimizer = quantize_state(AdamW(params), working_memory=0)
    calls: list[bool] = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        set_gradients(params, 0)
        return 2.5

    assert optimizer.step(closure) == 2.5
    assert calls == [True]
    assert len(optimizer.state) == 4


def test_param_groups() -> None:
    params = parameters()
    inner = AdamW(params[:2])
    optimizer = quantize_state(inner, working_memory=0)
    optimizer.add_param_group({"params": params[2:], "lr": 0.5})
    assert optimizer.param_groups is inner.param_groups
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.5]
    trained(optimizer, params)
    assert set(optimizer.state) == set(params)
    optimizer.zero_grad()
    assert all(param.grad is None for param in params)
    before = bits(params, optimizer)
    optimizer.step()  # without gradients
    assert same(bits(params, optimizer), before)


def test_named_parameters() -> None:
    model = nn.Linear(128, 64)
    optimizer = quantize_state(torch.optim.AdamW(model.named_parameters()), working_memory=0)
    model(torch.ones(2, 128)).sum().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies(duplicate: Any) -> None:
    params, optimizer = trained_adamw(working_memory=0)
    others, again = duplicate((params, optimizer))
    for run, own_params in ((optimizer, params), (again, others)):
        trained(run, own_params, range(4, 6))
    assert same(bits(others, again), bits(params, optimizer))
    assert again.state is not optimizer.state


def test_methods_of_the_optimizer_inside() -> None:
    pytest.importorskip("schedulefree")
    params, bare_params = parameters(), parameters()
    make = ELEMENTWISE["schedulefree AdamW"]
    optimizer, bare = quantize_state(make(params), min_quantized_numel=2**40), make(bare_params)
    for each, own in ((optimizer, params), (bare, bare_params)):
        each.train()
        trained(each, own)
        each.eval()
    assert all(map(torch.equal, params, bare_params))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        optimizer.nothing()


def test_memory_report() -> None:
    params, optimizer = trained_adamw()
    report = shardopt.memory_report(optimizer)
    assert report.host.scales > 0
    assert report.host.state < 2.2 * sum(param.numel() for param in params)


@pytest.mark.parametrize(
    ("options", "error"), [({"differentiable": True}, "differentiable"), ({"max_grad_norm": 1.0}, "working_memory")]
)
def test_added_and_loaded_groups_are_checked(options: dict[str, Any], error: str) -> None:
    """Added and loaded param groups are checked like the first ones; a refusal changes nothing."""
    params = parameters()
    optimizer = trained(quantize_state(AdamW(params[:2])), params)
    before = [x.clone() for x in bits(params, optimizer)]
    with pytest.raises(ValueError, match=error):
        optimizer.add_param_group({"params": params[2:], **options})
    saved = optimizer.state_dict()
    with pytest.raises(ValueError, match=error):
        optimizer.load_state_dict({**saved, "param_groups": [{**saved["param_groups"][0], **options}]})
    assert len(optimizer.param_groups) == 1
    assert not any(optimizer.param_groups[0].get(name) for name in options)
    assert same(bits(params, optimizer), before)
    optimizer.add_param_group({"params": params[2:]})


def test_a_group_of_another_kind() -> None:
    """An option of an added group, or of a loaded one, can make an optimizer one of whole parameters."""
    pytest.importorskip("timm.optim")
    params = parameters()
    optimizer = quantize_state(ELEMENTWISE["timm NAdamW"](params[:2]))
    assert optimizer._is_elementwise
    saved = optimizer.state_dict()
    optimizer.add_param_group({"params": params[2:], "caution": True})
    assert not optimizer._is_elementwise
    again = quantize_state(ELEMENTWISE["timm NAdamW"](params[:2]))
    again.load_state_dict({**saved, "param_groups": [{**saved["param_groups"][0], "caution": True}]})
    assert not again._is_elementwise


def test_an_added_group_whose_state_cannot_be_quantized() -> None:
    class Eager(Custom):
        def add_param_group(self, param_group: dict[str, Any]) -> None:
            super().add_param_group(param_group)
            for param in self.param_groups[-1]["params"]:
                self.state[param]["squares"] = -torch.ones_like(param)

    params = parameters()
    optimizer = quietly(Eager(params[2:]), unsigned=("squares",))
    with pytest.raises(ValueError, match="squares: got -1"):
        optimizer.add_param_group({"params": params[:2]})
    assert len(optimizer.param_groups) == 1
    assert set(optimizer.state) == set(params[2:])
