"""State comes back bit for bit, from shardopt's own state dicts; torch.optim's are quantized on the way in."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
from helpers import CODEC_NAMES, EIGHT_BIT, RULES, everything, step, through_a_file
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.codec import CODECS
from shardopt.optim import ShardedOptimizer
from shardopt.state.tensor_state import TensorState, tensor_state_of
from slow_cases import slow
from weight_formats import BF16, FP16, FP32

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


def specification(optimizer: ShardedOptimizer, param: Tensor) -> TensorState:
    (group,) = optimizer.param_groups
    return tensor_state_of(param, group, optimizer.rule(group).moments)


#: Dtypes of the parameters, in the order of ``CODEC_NAMES``: log8, companded8, dynamic8, companded16, bf16, fp32.
ROUND_TRIPS = [
    *(("adamw", *case) for case in zip(CODEC_NAMES, (FP32, FP32, FP32, BF16, BF16, FP16), strict=True)),
    *(("lion", *case) for case in zip(CODEC_NAMES, (FP16, BF16, FP32, FP16, FP32, FP32), strict=True)),
    *(("momentum", *case) for case in zip(CODEC_NAMES, (BF16, FP32, FP16, FP32, FP16, BF16), strict=True)),
    *(("sgd", *case) for case in zip(CODEC_NAMES, (FP32, FP16, BF16, FP32, FP32, FP32), strict=True)),
]
ALL_ROUND_TRIPS = product(["adamw", "lion", "momentum", "sgd"], CODEC_NAMES, [FP32, BF16, FP16])


@pytest.mark.parametrize(
    ("rule", "codec", "dtype"), [*ROUND_TRIPS, *slow(ALL_ROUND_TRIPS, besides=ROUND_TRIPS)], ids=str
)
def test_round_trip(rule: str, codec: str, dtype: torch.dtype) -> None:
    optimizer = made(rule, dtype, codec=codec)
    advance(optimizer, range(3), dtype)
    other = made(rule, dtype, codec=codec)
    for param, trained in zip(other.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True):
        param.data.copy_(trained.data)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_same(everything(other), everything(optimizer))
    for each in (optimizer, other):
        advance(each, range(3, 6), dtype)
    assert_same(everything(other), everything(optimizer))


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_names_dtypes_and_shapes(codec: str) -> None:
    """Of state for bf16 parameters, made, loaded from a file, and loaded from torch's state."""
    optimizer = made("adamw", torch.bfloat16, codec=codec)
    advance(optimizer, range(1), torch.bfloat16)
    loaded = made("adamw", torch.bfloat16, codec=codec)
    loaded.load_state_dict(through_a_file(optimizer.state_dict()))
    theirs = torch.optim.AdamW(params_of(torch.bfloat16))
    advance(theirs, range(1), torch.bfloat16)
    adopted = made("adamw", torch.bfloat16, codec=codec)
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
                quantized = codec == "bf16" and param.numel() >= 4096
                dtype = torch.bfloat16 if quantized else torch.float32
                expected |= dict.fromkeys(("exp_avg", "exp_avg_sq"), (dtype, shape))
            assert actual == expected


def test_before_the_first_step() -> None:
    optimizer = made("adamw")
    state_dict = optimizer.state_dict()
    assert state_dict["state"] == {}
    other = made("adamw", lr=1.0)
    other.load_state_dict(through_a_file(state_dict))
    assert not other.state
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    advance(other, range(2))
    advance(optimizer, range(2))
    assert_same(everything(other), everything(optimizer))


def test_loading_copies() -> None:
    optimizer, other = made("adamw"), made("adamw")
    advance(optimizer, range(1))
    state_dict = optimizer.state_dict()
    before = copy.deepcopy(state_dict)
    other.load_state_dict(state_dict)
    advance(other, range(1, 3))
    for index, state in before["state"].items():
        assert_same(state_dict["state"][index], state)


def test_loading_takes_over_the_groups() -> None:
    optimizer = made("adamw", lr=0.5, betas=(0.5, 0.6))
    advance(optimizer, range(1))
    other = made("adamw")
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.5
    assert other.param_groups[0]["betas"] == (0.5, 0.6)


def test_hooks_of_users_are_called() -> None:
    optimizer, called = made("adamw"), []
    advance(optimizer, range(1))
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


TORCH = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}, ("exp_avg", "exp_avg_sq")),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}, ("exp_avg", "exp_avg_sq")),
    "momentum": (
        torch.optim.SGD,
        {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
        ("momentum_buffer",),
    ),
}


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("rule", TORCH)
def test_a_state_dict_of_torch_is_quantized(rule: str, codec: str) -> None:
    theirs_class, hyper, moments = TORCH[rule]
    theirs = theirs_class(params_of(), **hyper)
    advance(theirs, range(5))
    ours = made(rule, codec=codec)
    ours.load_state_dict(through_a_file(theirs.state_dict()))
    for mine, other in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        spec = specification(ours, mine)
        expected = spec.encode({name: theirs.state[other][name] for name in moments})
        state = dict(ours.state[mine])
        assert state.pop("step") == theirs.state[other].get("step", 1.0)
        assert_same(dict(sorted(state.items())), dict(sorted(expected.items())))
    advance(ours, range(5, 8))


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("rule", TORCH)
def test_torch_loads_a_dequantized_state_dict(rule: str, codec: str) -> None:
    theirs_class, hyper, moments = TORCH[rule]
    ours = made(rule, codec=codec)
    advance(ours, range(5))
    own_before = everything(ours)
    theirs = theirs_class(params_of(), **hyper)
    theirs.load_state_dict(through_a_file(ours.state_dict(dequantize=True)))
    assert_same(everything(ours), own_before)
    for mine, other in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        decoded = specification(ours, mine).decode(ours.state[mine])
        assert list(decoded) == list(moments)
        assert_same({name: theirs.state[other][name] for name in moments}, decoded)
        assert theirs.state[other]["step"] == 5
        other.data.copy_(mine.data)
    if codec == "fp32":  # and it is the same optimizer with the same hyper-parameters that goes on
        for each in (ours, theirs):
            advance(each, range(5, 8))
        for mine, other in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
            torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("codec", EIGHT_BIT)
def test_dequantized_state_changes_the_codec(codec: str) -> None:
    """The way that the error about another codec advises."""
    ours = made("adamw", codec="log8", block_size=64)
    advance(ours, range(3))
    other = made("adamw", codec=codec, block_size=256, min_quantized_numel=0)
    other.load_state_dict(ours.state_dict(dequantize=True))
    group = other.param_groups[0]
    assert (group["codec"], group["block_size"], group["min_quantized_numel"]) == (codec, 256, 0)
    for mine, theirs in zip(ours.param_groups[0]["params"], group["params"], strict=True):
        expected = specification(other, theirs).encode(specification(ours, mine).decode(ours.state[mine]))
        assert_same({name: other.state[theirs][name] for name in expected}, expected)
    advance(other, range(3, 5))


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
    optimizer = made(rule)
    advance(optimizer, range(1))
    optimizer.param_groups[0].update(off)
    copies = [Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]]
    loaded = RULES[rule].make(copies, **off)
    loaded.load_state_dict(optimizer.state_dict())
    for each in (optimizer, loaded):
        advance(each, range(1, 3))
    for param, own in loaded.state.items():
        assert own.keys() == loaded._internals.state_of(param, loaded.param_groups[0]).state_names
    kept = everything(loaded)
    assert_same(kept, {key: value for key, value in everything(optimizer).items() if key in kept})


def wrong_state_dicts() -> dict[str, tuple[dict[str, Any], str]]:
    """State dicts that an AdamW with log8 and blocks of 128 refuses, and what it says."""

    def saved(rule: str, params: list[Parameter] | None = None, **options: Any) -> dict[str, Any]:
        optimizer = RULES[rule].make(params or params_of(), **options)
        advance(optimizer, range(1))
        return optimizer.state_dict()

    broken = saved("adamw")
    del broken["state"][0]["exp_avg_sq_scales"]
    cast = saved("adamw")
    cast["state"][0]["exp_avg_codes"] = cast["state"][0]["exp_avg_codes"].float()
    return {
        "codec": (saved("adamw", codec="dynamic8"), "codec='dynamic8', expected 'log8'"),
        "block_size": (saved("adamw", block_size=64), "block_size=64, expected 128"),
        "min_quantized_numel": (saved("adamw", min_quantized_numel=1), "min_quantized_numel=1, expected 4096"),
        "rule": (saved("lion"), "saved by another optimizer"),
        "shape": (saved("adamw", [Parameter(p.detach()[:1]) if p.ndim else p for p in params_of()]), "got exp_avg"),
        "count": (saved("adamw", params_of()[:2]), "parameters per param group"),
        "missing entry": (broken, "expected step, exp_avg_codes"),
        "cast codes": (cast, "expected torch.uint8"),
    }


@pytest.mark.parametrize("name", wrong_state_dicts())
def test_a_wrong_state_dict_changes_nothing(name: str) -> None:
    state_dict, message = wrong_state_dicts()[name]
    optimizer = made("adamw", lr=0.3)
    advance(optimizer, range(2))
    before = everything(optimizer)
    groups = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state_dict)
    assert_same(everything(optimizer), before)
    assert [dict(group) for group in optimizer.param_groups] == groups
    advance(optimizer, range(2, 3))


def test_presets_load_each_other() -> None:
    optimizer = shardopt.AdamW8bit(params_of())
    advance(optimizer, range(1))
    other = shardopt.AdamW8bit(params_of())
    other.load_state_dict(optimizer.state_dict())
    for mine, theirs in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert_same(theirs, mine)
