"""Behaviour that users lean on: copies, hooks, groups of their own options, non-finite gradients, and clear errors."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
from helpers import CODEC_NAMES, RULES, everything, single, with_gradient
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.kernels.dispatch import check_device
from shardopt.optim import ShardedOptimizer

SHAPES = ((64, 130), (300,))


def make(rule: str = "adamw", dtype: torch.dtype = torch.float32, **options: Any) -> ShardedOptimizer:
    return RULES[rule].make([Parameter(values(shape, i, dtype)) for i, shape in enumerate(SHAPES)], **options)


def advance(optimizer: ShardedOptimizer, steps: range) -> None:
    for t in steps:
        give_gradients(optimizer, t)
        optimizer.step()


def give_gradients(optimizer: ShardedOptimizer, t: int) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, param in enumerate(params):
        with_gradient(param, values(tuple(param.shape), 100 * (t + 1) + index, param.dtype))


COPIES: dict[str, Callable[[ShardedOptimizer], ShardedOptimizer]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
}


def in_another_order() -> ShardedOptimizer:
    """Stochastic rounding whose noise follows the model, in which the parameters have another order."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40)).bfloat16()
    groups = shardopt.param_groups(model, {"*.bias": {"lr": 1e-3}})
    return shardopt.AdamW8bit(groups, min_quantized_numel=64, stochastic_rounding=True)


def of_muon() -> ShardedOptimizer:
    first, second = (Parameter(values(shape, 0)) for shape in SHAPES)
    return shardopt.Muon8bit([{"params": [first]}, {"params": [second], "algorithm": "lion"}])


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize(
    ("made", "steps"),
    [
        (make, 0),
        (partial(make, codec="fp32"), 3),
        (in_another_order, 2),
        (of_muon, 2),
    ],
)
def test_copies_go_on_alike(made: Callable[[], ShardedOptimizer], steps: int, how: str) -> None:
    optimizer = made()
    advance(optimizer, range(steps))
    other = COPIES[how](optimizer)
    assert type(other) is type(optimizer)
    before = everything(optimizer)
    advance(other, range(steps, steps + 2))
    assert_same(everything(optimizer), before)
    advance(optimizer, range(steps, steps + 2))
    assert_same(everything(other), everything(optimizer))


def test_step_hooks() -> None:
    optimizer, called = make(), []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: called.append(("pre", o.state == {})))
    optimizer.register_step_post_hook(lambda o, args, kwargs: called.append(("post", o.state == {})))
    advance(optimizer, range(1))
    assert called == [("pre", True), ("post", False)]


def test_groups_override_every_option() -> None:
    """Each is as an optimizer of its own with these options, also a group that is added later."""
    options: list[dict[str, Any]] = [
        {},
        {"codec": "companded8", "block_size": 64},
        {"min_quantized_numel": 10**6},
        {"codec": "bf16", "nonfinite": "propagate"},
        {"codec": "dynamic8", "block_size": 256, "betas": (0.8, 0.9)},
    ]
    groups = [{"params": [Parameter(values((64, 130), 0))], **each} for each in options]
    optimizer = shardopt.AdamW8bit(groups[:-1])
    optimizer.add_param_group(groups[-1])
    alone = [shardopt.AdamW8bit([Parameter(values((64, 130), 0))], **each) for each in options]
    for t in range(2):
        for own in (*optimizer.param_groups, *(each.param_groups[0] for each in alone)):
            own["params"][0].grad = values((64, 130), 1 + t)
            own["params"][0].grad[3, 5] = torch.inf if own["nonfinite"] == "propagate" else 1.0
        for each in (optimizer, *alone):
            each.step()
    for group, each in zip(optimizer.param_groups, alone, strict=True):
        (mine,), (param, state) = group["params"], single(each)
        assert_same({"": mine.detach(), **optimizer.state[mine]}, {"": param.detach(), **state})


def test_options_of_torch_are_taken_and_ignored() -> None:
    options = dict.fromkeys(("foreach", "fused", "capturable"), True)
    plain, constructed, in_group = make(), make(**options), make()
    in_group.param_groups[0].update(options)
    for each in (plain, constructed, in_group):
        advance(each, range(2))
        assert_same(everything(each), everything(plain))


# Non-finite gradients. A bad element must be as if it had no gradient; nothing else may notice.

BAD = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


@pytest.mark.parametrize(
    ("rule", "codec", "bad"),
    [*(("adamw", codec, "nan") for codec in CODEC_NAMES), ("lion", "log8", "inf"), ("momentum", "dynamic8", "-inf")],
)
def test_one_bad_element_harms_no_other(rule: str, codec: str, bad: str) -> None:
    """In every step: bit for bit as if the element's gradient, and so its state, were always zero."""
    struck, zeroed = (make(rule, codec=codec, weight_decay=0.0) for _ in range(2))
    before = struck.param_groups[0]["params"][0].detach()[3, 5].item()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for t in range(5):
            for optimizer, value in ((struck, BAD[bad]), (zeroed, 0.0)):
                give_gradients(optimizer, t)
                for param, at in zip(optimizer.param_groups[0]["params"], ((3, 5), (7,)), strict=True):
                    param.grad[at] = value
                optimizer.step()
    assert_same(everything(struck), everything(zeroed))
    assert struck.param_groups[0]["params"][0].detach()[3, 5] == before
    assert struck.nonfinite_count == 10
    assert zeroed.nonfinite_count == 0


@pytest.mark.parametrize("scheduled", [False, True])
def test_bad_elements_are_reported(scheduled: bool) -> None:
    optimizer = make()
    if scheduled:
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # which wraps step()
    give_gradients(optimizer, 0)
    optimizer.param_groups[0]["params"][0].grad[:2, 0] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        assert optimizer.nonfinite_count == 2
    give_gradients(optimizer, 1)
    with pytest.warns(RuntimeWarning, match="skipped 2 gradient elements that were NaN or Inf") as caught:
        optimizer.step()
    assert [warning.filename for warning in caught] == [__file__], "the warning points at the user's line"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advance(optimizer, range(2, 4))
    assert optimizer.nonfinite_count == 2


def test_parameters_whose_gradients_stay_bad_are_named_once() -> None:
    optimizer = make()
    said: list[str] = []
    for t in range(4):
        give_gradients(optimizer, t)
        optimizer.param_groups[0]["params"][1].grad.fill_(torch.nan)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        said += [str(warning.message) for warning in caught]
    assert len(said) == 3
    named = "; this step has some again, in parameter 1 of param group 0 (nonfinite"
    assert [named in message for message in said] == [True, False, False]


# Errors: got, expected, remedy; and nothing changed.


def odd_gradients() -> dict[str, tuple[Parameter, Tensor, str]]:
    """A parameter, a gradient that cannot be stepped with it, and what the error says."""
    weight = torch.zeros(64, 130)
    return {
        "sparse": (Parameter(weight), torch.eye(64, 130).to_sparse(), r"got a sparse gradient.*sparse=False"),
        "complex": (Parameter(weight.cfloat()), weight.cfloat(), r"torch.complex64.*real and imaginary parts apart"),
        "float64": (Parameter(weight.double()), weight.double(), r"torch.float64, expected torch.float32.*cast it"),
        "expanded": (
            Parameter(weight[0].expand(64, 130)),
            weight,
            r"strides \(0, 1\), whose elements share memory.*clone",
        ),
        "other device": (Parameter(weight.to("meta")), weight.to("meta"), r"got a parameter on meta.*to_empty\(\)"),
    }


@pytest.mark.parametrize("name", odd_gradients())
def test_a_step_that_cannot_be_taken_changes_nothing(name: str) -> None:
    odd, gradient, message = odd_gradients()[name]
    optimizer = make()
    advance(optimizer, range(2))
    before = everything(optimizer)
    good = optimizer.param_groups[0]["params"]
    optimizer.add_param_group({"params": [odd]})
    for param in good:
        param.grad = torch.ones_like(param)
    with_gradient(odd, gradient)
    with pytest.raises(RuntimeError, match="(?s)parameter 0 of param group 1 .*" + message):
        optimizer.step()
    assert not optimizer.state.get(odd)
    del optimizer.param_groups[1]
    assert_same(everything(optimizer), before)


def test_devices_without_kernels() -> None:
    """Such as Apple's: there is no CUDA build to ask for."""
    message = r"^weight: got a parameter on mps, expected one on cpu.*move it there, or step it with another"
    with pytest.raises(RuntimeError, match=message) as caught:
        check_device("weight", torch.device("mps"))
    assert "nvcc" not in str(caught.value)


@pytest.mark.parametrize("has_schedule", [False, True])
@pytest.mark.parametrize("way", ["replaced", "hook"])
def test_a_watched_step_is_called_for_taken_steps_only(way: str, has_schedule: bool) -> None:
    """A loss scaler unscales by itself then. torch's schedules, which replace ``step`` as well, change nothing."""
    param, half = Parameter(torch.ones(8, 8)), Parameter(torch.ones(8, dtype=torch.float16))
    optimizer = shardopt.AdamW8bit([param])
    if has_schedule:
        torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert optimizer._step_supports_amp_scaling
    seen = []
    if way == "hook":
        optimizer.register_step_post_hook(lambda *_: seen.append(1))
    else:
        step = optimizer.step
        optimizer.step = wraps(step)(lambda: (seen.append(1), step()))  # type: ignore[assignment, method-assign]
    assert not optimizer._step_supports_amp_scaling
    scaler = torch.amp.GradScaler("cpu")
    for factor in (1.0, torch.inf):
        param.grad = None
        scaler.scale((param * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert seen == [1]
    assert float(optimizer.state[param]["step"]) == 1
    optimizer.add_param_group({"params": [half]})  # a loss scaler refuses to unscale its gradients
    assert optimizer._step_supports_amp_scaling
    optimizer._step_supports_amp_scaling = False
    assert not optimizer._step_supports_amp_scaling
