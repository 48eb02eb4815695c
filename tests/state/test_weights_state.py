"""Low bits of master weights and the noise of stochastic rounding in state dicts and copies."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers import CODEC_NAMES, RULES, everything
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer
from step_problem import assert_noticed, put, put_data, set_option
from step_problem import make as make_groups
from test_state_dict import TORCH, advance, made, params_of, through_a_file
from weight_formats import BF16, FORMATS, FP16, FP32

BITS = (24, 32)


def trained(rule: str, steps: int = 3, dtype: torch.dtype = BF16, **options: Any) -> ShardedOptimizer:
    optimizer = made(rule, dtype, **options)
    advance(optimizer, range(steps), dtype)
    return optimizer


def with_weights_of(optimizer: ShardedOptimizer, rule: str, **options: Any) -> ShardedOptimizer:
    """A new optimizer over copies of the parameters of another."""
    return RULES[rule].make([p.detach().clone() for g in optimizer.param_groups for p in g["params"]], **options)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_round_trip(rule: str, codec: str, weights: str) -> None:
    dtype, options = FORMATS[weights]
    optimizer = trained(rule, dtype=dtype, codec=codec, **options)
    other = with_weights_of(optimizer, rule, codec=codec, **options)
    if "stochastic_rounding" in options:
        other.param_groups[0]["stochastic_rounding_seed"] = 0  # comes with the state
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_same(everything(other), everything(optimizer))
    for each in (optimizer, other):
        advance(each, range(3, 6), dtype)
    assert_same(everything(other), everything(optimizer))


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_copies_go_on_alike(how: Callable[[ShardedOptimizer], ShardedOptimizer], weights: str) -> None:
    dtype, options = FORMATS[weights]
    optimizer = trained("adamw", dtype=dtype, **options)
    other = how(optimizer)
    for each in (optimizer, other):
        advance(each, range(3, 5), dtype)
    assert_same(everything(other), everything(optimizer))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("codec", ["log8", "fp32"])
@pytest.mark.parametrize("rule", TORCH)
def test_torch_loads_a_dequantized_state_dict(rule: str, codec: str, bits: int) -> None:
    """Without the low bits; and master weights made from a state of torch's begin as the parameters."""
    theirs_class, hyper, moments = TORCH[rule]
    ours = trained(rule, codec=codec, master_weight_bits=bits)
    dequantized = through_a_file(ours.state_dict(dequantize=True))
    assert all(set(state) == {"step", *moments} for state in dequantized["state"].values())
    theirs = theirs_class(params_of(BF16), **hyper)
    theirs.load_state_dict(dequantized)
    advance(theirs, range(3, 4), BF16)
    for state_dict in (dequantized, theirs.state_dict()):
        again = made(rule, BF16, codec=codec, master_weight_bits=bits)
        again.load_state_dict(state_dict)
        assert again.param_groups[0]["master_weight_bits"] == bits
        for state, trained_state in zip(again.state.values(), ours.state.values(), strict=True):
            low_bits = state["master_low_bits"]
            assert not low_bits.any()
            assert trained_state["master_low_bits"].any()
            assert (low_bits.dtype, low_bits.shape) == (torch.int8, trained_state["master_low_bits"].shape)
        advance(again, range(3, 5), BF16)


def wrong_state_dicts() -> dict[str, tuple[dict[str, Any], str]]:
    """State dicts that an AdamW with 24 bits refuses, and what it says."""
    removed, cast, cut = (trained("adamw", 1, master_weight_bits=24).state_dict() for _ in range(3))
    del removed["state"][1]["master_low_bits"]
    cast["state"][0]["master_low_bits"] = cast["state"][0]["master_low_bits"].short()
    cut["state"][0]["master_low_bits"] = cut["state"][0]["master_low_bits"][:5]
    return {
        "none": (trained("adamw", 1).state_dict(), "master_weight_bits=None, expected 24"),
        "32": (trained("adamw", 1, master_weight_bits=32).state_dict(), "master_weight_bits=32, expected 24"),
        "removed": (removed, "expected master_low_bits too"),
        "cast": (cast, "got master_low_bits of torch.int16, expected torch.int8"),
        "cut": (cut, r"got master_low_bits as Tensor \(5, 130\), expected Tensor \(64, 130\)"),
    }


@pytest.mark.parametrize("name", wrong_state_dicts())
def test_a_wrong_state_dict_changes_nothing(name: str) -> None:
    state_dict, message = wrong_state_dicts()[name]
    optimizer = trained("adamw", 2, master_weight_bits=24)
    before = everything(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state_dict)
    assert_same(everything(optimizer), before)
    advance(optimizer, range(2, 3), BF16)


def test_a_state_with_low_bits_for_an_optimizer_without() -> None:
    state_dict = trained("adamw", 1, master_weight_bits=24).state_dict()
    with pytest.raises(ValueError, match="master_weight_bits=24, expected None"):
        trained("adamw", 1).load_state_dict(state_dict)


CHANGES: dict[str, Callable[[ShardedOptimizer], object]] = {
    "low bits": lambda optimizer: put(optimizer, 0, "master_low_bits", lambda x: x.roll(1, 0)),
    "data of low bits": lambda optimizer: put_data(optimizer, 3, "master_low_bits", lambda x: -x),
    "weight format": lambda optimizer: optimizer.param_groups[1].update(
        master_weight_bits=None, stochastic_rounding=True
    ),
    "seed of the other group": set_option(0, stochastic_rounding_seed=3),
}


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", CHANGES)
def test_changes_between_steps_are_noticed(name: str, bits: int) -> None:
    assert_noticed(CHANGES[name], make_groups(dtype=BF16, master_weight_bits=bits))


def _step(optimizer: ShardedOptimizer) -> None:
    advance(optimizer, range(1), optimizer.param_groups[0]["params"][0].dtype)


USES: dict[str, Callable[[ShardedOptimizer], object]] = {
    "step": _step,
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "load": lambda optimizer: optimizer.load_state_dict(through_a_file(optimizer.state_dict())),
    "copy": lambda optimizer: copy.deepcopy(optimizer.state_dict()),
    "full precision": lambda optimizer: optimizer.full_precision_parameters(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("before", "after"), [(BF16, FP32), (FP32, BF16), (BF16, FP16), (FP16, BF16)])
def test_low_bits_of_weights_that_were_cast(before: torch.dtype, after: torch.dtype, use: str) -> None:
    """Low bits are dropped, and the run is that of an optimizer that gets the weights and moments after the cast."""
    optimizer = trained("adamw", dtype=before, master_weight_bits=24)
    params = optimizer.param_groups[0]["params"]
    for param in params:
        param.data = param.data.to(after)
    with pytest.warns(UserWarning, match=f"got weights that were cast to {after} after steps"):
        USES[use](optimizer)
    assert all(("master_low_bits" in state) == (after != FP32) for state in optimizer.state.values())
    if use == "step":
        return
    for state in optimizer.state.values():
        assert not state.get("master_low_bits", torch.zeros(1)).any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = with_weights_of(optimizer, "adamw", master_weight_bits=24)
        other.load_state_dict(through_a_file(optimizer.state_dict()))
        for each in (optimizer, other):
            advance(each, range(3, 5), after)
    assert_same(everything(other), everything(optimizer))
