"""State dicts of shardopt itself: state, master bits and noise come back bit for bit; a wrong one changes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from helpers import CODEC_NAMES, EIGHT_BIT, RULES, everything, step, through_a_file
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.codec import CODECS
from shardopt.optim import ShardedOptimizer
from slow_cases import slow
from step_problem import assert_noticed, set_option
from step_problem import make as make_groups
from weight_formats import ALL, BF16, FP16, FP32

#: Quantized with a short last block, exactly, and not at all.
SHAPES = ((64, 130), (32, 128), (300,), (3, 3), ())


def params_of(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    return [Parameter(values(shape, seed, dtype)) for seed, shape in enumerate(SHAPES)]


def advance(optimizer: torch.optim.Optimizer, steps: range, dtype: torch.dtype = torch.float32) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for t in steps:
        named = {str(i): param for i, param in enumerate(params)}
        step(optimizer, named, {name: values(p.shape, 100 * t + int(name), dtype) for name, p in named.items()})


def made(rule: str, dtype: torch.dtype = torch.float32, **options: Any) -> ShardedOptimizer:
    return RULES[rule].make(params_of(dtype), **options)


def trained(rule: str = "adamw", steps: int = 3, dtype: torch.dtype = FP32, **options: Any) -> ShardedOptimizer:
    optimizer = made(rule, dtype, **options)
    advance(optimizer, range(steps), dtype)
    return optimizer


def with_weights_of(optimizer: ShardedOptimizer, rule: str, **options: Any) -> ShardedOptimizer:
    """A new optimizer over copies of the parameters of another."""
    return RULES[rule].make([p.detach().clone() for g in optimizer.param_groups for p in g["params"]], **options)


#: By rule and codec, one of the formats of weights in :data:`ALL`.
ROUND_TRIPS = [
    ("adamw", "log8", "bf16 24"),
    ("adamw", "companded8", "fp16 32"),
    ("adamw", "dynamic8", "fp32"),
    ("adamw", "companded16", "bf16 stochastic"),
    ("adamw", "bf16", "bf16 32"),
    ("adamw", "fp32", "fp16 24"),
    ("lion", "log8", "fp16"),
    ("momentum", "bf16", "bf16"),
    ("sgd", "log8", "bf16 24"),
]
ALL_ROUND_TRIPS = product(["adamw", "lion", "momentum", "sgd"], CODEC_NAMES, ALL)


@pytest.mark.parametrize(("rule", "codec", "weights"), [*ROUND_TRIPS, *slow(ALL_ROUND_TRIPS, besides=ROUND_TRIPS)])
def test_round_trip(rule: str, codec: str, weights: str) -> None:
    dtype, options = ALL[weights]
    optimizer = trained(rule, dtype=dtype, codec=codec, **options)
    other = with_weights_of(optimizer, rule, codec=codec, **options)
    if "stochastic_rounding" in options:
        other.param_groups[0]["stochastic_rounding_seed"] = 0  # comes with the state
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_same(everything(other), everything(optimizer))
    for each in (optimizer, other):
        advance(each, range(3, 6), dtype)
    assert_same(everything(other), everything(optimizer))


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_names_dtypes_and_shapes(codec: str) -> None:
    """Of state for bf16 parameters, made, loaded from a file, and loaded from torch's state."""
    optimizer, loaded, adopted = (made("adamw", BF16, codec=codec) for _ in range(3))
    advance(optimizer, range(1), BF16)
    loaded.load_state_dict(through_a_file(optimizer.state_dict()))
    theirs = torch.optim.AdamW(params_of(BF16))
    advance(theirs, range(1), BF16)
    adopted.load_state_dict(theirs.state_dict())
    unit = () if CODECS[codec].scales(signed=False) == 1 else (CODECS[codec].scales(signed=False),)
    for each in (optimizer, loaded, adopted):
        for param, state in each.state.items():
            actual = {name: (value.dtype, tuple(value.shape)) for name, value in state.items()}
            shape = tuple(param.shape)
            expected = {"step": (torch.float32, ())}
            if CODECS[codec].blockwise and param.numel() >= 4096:
                blocks = (shape[0], -(-shape[1] // 128))
                for moment, last in (("exp_avg", ()), ("exp_avg_sq", unit)):
                    expected[f"{moment}_codes"] = (torch.uint8, shape if codec in EIGHT_BIT else (*shape, 2))
                    expected[f"{moment}_scales"] = (torch.float32, (*blocks, *last))
            else:
                dtype = BF16 if codec == "bf16" and param.numel() >= 4096 else FP32
                expected |= dict.fromkeys(("exp_avg", "exp_avg_sq"), (dtype, shape))
            assert actual == expected


def test_hooks_of_users_are_called() -> None:
    optimizer, called = trained(), []
    optimizer.register_state_dict_pre_hook(lambda o: called.append("save pre"))
    optimizer.register_state_dict_post_hook(lambda o, state_dict: called.append("save post"))
    optimizer.register_load_state_dict_pre_hook(
        lambda o, state_dict: {**state_dict, "param_groups": [{**g, "lr": 7.0} for g in state_dict["param_groups"]]}
    )
    optimizer.register_load_state_dict_post_hook(lambda o: called.append("load post"))
    for _ in range(2):  # the optimizer's own hook does not pile up or stay
        optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["save pre", "save post", "load post"] * 2
    assert optimizer.param_groups[0]["lr"] == 7.0
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


@pytest.mark.parametrize(
    ("rule", "off"),
    [
        ("amsgrad", {"amsgrad": False}),
        ("centered_rmsprop_momentum", {"centered": False, "momentum": 0.0}),
        ("momentum", {"momentum": 0.0, "dampening": 0.0}),
    ],
)
def test_state_of_a_moment_that_is_switched_off_is_left_out(rule: str, off: dict[str, Any]) -> None:
    """As in torch.optim, whose state dicts are loaded then, too."""
    optimizer = trained(rule, 1)
    optimizer.param_groups[0].update(off)
    loaded = with_weights_of(optimizer, rule, **off)
    loaded.load_state_dict(optimizer.state_dict())
    for each in (optimizer, loaded):
        advance(each, range(1, 3))
    for param, own in loaded.state.items():
        assert own.keys() == loaded._internals.state_of(param, loaded.param_groups[0]).state_names
    kept = everything(loaded)
    assert_same(kept, {key: value for key, value in everything(optimizer).items() if key in kept})


def test_a_wrong_state_dict_changes_nothing() -> None:
    """Of another rule or format, or with entries that are missing, cast or cut, for log8 and master weights."""
    optimizer = trained(dtype=BF16, lr=0.3, master_weight_bits=24)

    def saved(rule: str = "adamw", bits: int | None = 24, **options: Any) -> dict[str, Any]:
        return trained(rule, 1, BF16, master_weight_bits=bits, **options).state_dict()

    def damaged(index: int, key: str, change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        found = saved()
        state = found["state"][index]
        state[key] = change(state.pop(key))
        if state[key] is None:
            del state[key]
        return found

    few = RULES["adamw"].make(params_of(BF16)[:2], master_weight_bits=24)
    short = RULES["adamw"].make([Parameter(p.detach()[:1]) if p.ndim else p for p in params_of(BF16)])
    short.param_groups[0]["master_weight_bits"] = 24
    for one in (few, short):
        advance(one, range(1), BF16)
    wrong = [
        (saved(codec="dynamic8"), "codec='dynamic8', expected 'log8'"),
        (saved(block_size=64), "block_size=64, expected 128"),
        (saved(min_quantized_numel=1), "min_quantized_numel=1, expected 4096"),
        (saved(bits=None), "master_weight_bits=None, expected 24"),
        (saved(bits=32), "master_weight_bits=32, expected 24"),
        (saved("lion"), "saved by another optimizer"),
        (short.state_dict(), "got exp_avg"),
        (few.state_dict(), "parameters per param group"),
        (damaged(0, "exp_avg_sq_scales", lambda x: None), "expected step, exp_avg_codes"),
        (damaged(0, "exp_avg_codes", lambda x: x.float()), "expected torch.uint8"),
        (damaged(1, "master_low_bits", lambda x: None), "expected master_low_bits too"),
        (damaged(0, "master_low_bits", lambda x: x.short()), "got master_low_bits of torch.int16, expected torch.int8"),
        (
            damaged(0, "master_low_bits", lambda x: x[:5]),
            r"got master_low_bits as Tensor \(5, 130\), expected Tensor \(64, 130\)",
        ),
    ]
    before, groups = everything(optimizer), [dict(group) for group in optimizer.param_groups]
    for state_dict, message in wrong:
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state_dict)
        assert_same(everything(optimizer), before)
        assert [dict(group) for group in optimizer.param_groups] == groups
    advance(optimizer, range(3, 4), BF16)
    with pytest.raises(ValueError, match="master_weight_bits=24, expected None"):
        trained(dtype=BF16).load_state_dict(saved())


@pytest.mark.parametrize(
    ("group", "options"),
    [(1, {"master_weight_bits": None, "stochastic_rounding": True}), (0, {"stochastic_rounding_seed": 3})],
)
def test_changed_weight_formats_are_noticed(group: int, options: dict[str, Any]) -> None:
    assert_noticed(set_option(group, **options), make_groups(dtype=BF16, master_weight_bits=24))


USES: dict[str, Callable[[ShardedOptimizer], object]] = {
    "step": lambda optimizer: advance(optimizer, range(1), optimizer.param_groups[0]["params"][0].dtype),
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "load": lambda optimizer: optimizer.load_state_dict(through_a_file(optimizer.state_dict())),
    "full precision": lambda optimizer: optimizer.full_precision_parameters(),
}


@pytest.mark.parametrize(
    ("use", "before", "after"),
    [
        *((use, BF16, FP16) for use in USES),
        ("step", BF16, FP32),
        ("load", BF16, FP32),
        ("state_dict", FP32, BF16),
        ("state_dict", FP16, BF16),
    ],
)
def test_low_bits_of_weights_that_were_cast(before: torch.dtype, after: torch.dtype, use: str) -> None:
    """Low bits are dropped, and the run is that of an optimizer that gets the weights and moments after the cast."""
    optimizer = trained(dtype=before, master_weight_bits=24)
    for param in optimizer.param_groups[0]["params"]:
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
