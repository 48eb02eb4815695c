"""Muon in one process: the reference's bits, matrices in a parameter, NaN, other rules' groups, errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
from helpers import CODEC_NAMES, ReferenceOptimizer, Shape, everything, with_gradient
from muon_problem import OPTIONS, SHAPES, STEPS, advance, assert_equal, gradient, make, params_of, start
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.kernels.newton_schulz import QUINTIC, NewtonSchulz
from shardopt.optim import ShardedOptimizer
from weight_formats import ALL

# The reference step ---------------------------------------------------------------------------------------------------


def check_reference(
    optimizer: ShardedOptimizer, dtype: torch.dtype, change: Callable[[Tensor], Tensor] = lambda x: x
) -> ReferenceOptimizer:
    names = {str(index): param for index, param in enumerate(params_of(optimizer))}
    oracle = ReferenceOptimizer(names, optimizer)
    for step in range(STEPS):
        gradients = {n: change(gradient(tuple(p.shape), step, int(n), dtype)) for n, p in names.items()}
        for name, param in names.items():
            with_gradient(param, gradients[name].clone())
        optimizer.step()
        oracle.step(gradients)
        assert_same(everything(optimizer), oracle.snapshot())
    return oracle


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("format", ALL)
def test_as_the_reference(format: str, codec: str) -> None:
    dtype, options = ALL[format]
    check_reference(make(dtype, codec=codec, **options), dtype)


@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": False},
        {"momentum": 0.0},
        {"momentum": 0.3, "weight_decay": 0.0},
        {"ns_coefficients": "polar_express", "ns_steps": 9},
        {"ns_coefficients": [(3.0, -2.0, 0.5), (1.5, -0.5, 0.0)], "ns_steps": 4, "eps": 0.5},
        {"adjust_lr_fn": "match_rms_adamw"},
        {"adjust_lr_fn": "spectral_norm"},
        {"block_size": 32},
        {"memory": 1},
    ],
    ids=str,
)
def test_options_as_the_reference(options: dict[str, Any]) -> None:
    check_reference(make(**options), torch.float32)


def test_gradients_of_float32_for_bfloat16() -> None:
    check_reference(make(torch.bfloat16, master_weight_bits=24), torch.float32)


@pytest.mark.parametrize("format", ["fp32", "bf16 24", "bf16 32", "bf16 stochastic"])
def test_splits_as_the_reference(format: str) -> None:
    """Stochastic rounding counts elements of the parameter, not of its matrices."""
    dtype, options = ALL[format]
    groups = [
        {"params": start(dtype, ((40, 130), (40, 5, 5))), "split": (3, 1, 36), "adjust_lr_fn": "spectral_norm"},
        {"params": start(dtype, ((3, 33, 40), (2, 20, 4, 5))), "split": "each", "adjust_lr_fn": "match_rms_adamw"},
    ]
    check_reference(shardopt.Muon8bit(groups, **{**OPTIONS, **options}), dtype)


def test_defaults_are_those_of_torch() -> None:
    muon = pytest.importorskip("torch.optim._muon", reason="this version of PyTorch has no Muon")
    theirs = muon.Muon([Parameter(torch.zeros(2, 2))]).defaults
    ours = shardopt.Muon8bit([Parameter(torch.zeros(2, 2))]).defaults
    assert {name: ours[name] for name in theirs} == theirs


def test_bytes_of_state() -> None:
    """As its docstring says: per element 1.031 bytes in blocks of 128, 4 with ``codec="fp32"``."""
    for codec, expected in (("log8", 1 + 4 / 128), ("fp32", 4)):
        optimizer = advance(make(shapes=((64, 256),), codec=codec), range(1))
        (state,) = optimizer.state.values()
        assert sum(value.nbytes for name, value in state.items() if name != "step") == expected * 64 * 256


# Matrices in a parameter ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "adjust"), list(product(CODEC_NAMES, ["original", "spectral_norm"])))
def test_fused_rows_are_as_parameters_of_their_own(codec: str, adjust: str) -> None:
    """Blocks do not cross rows, so that any codec does the same."""
    rows, shape = (30, 5, 61), (96, 130)
    fused = advance(make(shapes=(shape,), split=rows, codec=codec, adjust_lr_fn=adjust), range(0))
    options = {**OPTIONS, "codec": codec, "adjust_lr_fn": adjust}
    apart = shardopt.Muon8bit([Parameter(x.clone()) for x in values(shape, 0).split(rows)], **options)
    for step in range(STEPS):
        whole = gradient(shape, step, 0)
        for param, part in zip(params_of(apart), whole.split(rows), strict=True):
            param.grad = part.clone()
        params_of(fused)[0].grad = whole
        for optimizer in (fused, apart):
            optimizer.step()
    _compare_joined(fused, apart)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "log8"])
def test_stacks_are_as_parameters_of_their_own(codec: str) -> None:
    """Where the rows of the matrices end with a block."""
    shape = (4, 33, 64)
    stack = make(shapes=(shape,), split="each", codec=codec, block_size=32, adjust_lr_fn="spectral_norm")
    options = {**OPTIONS, "codec": codec, "adjust_lr_fn": "spectral_norm", "block_size": 32}
    apart = shardopt.Muon8bit([Parameter(x.clone()) for x in values(shape, 0)], **options)
    for step in range(STEPS):
        whole = gradient(shape, step, 0)
        for param, part in zip(params_of(apart), whole, strict=True):
            param.grad = part.clone()
        params_of(stack)[0].grad = whole
        for optimizer in (stack, apart):
            optimizer.step()
    _compare_joined(stack, apart)


def _compare_joined(whole: ShardedOptimizer, apart: ShardedOptimizer) -> None:
    """Demands that the parameters of the second one, after each other, are the only one of the first."""
    (param,) = params_of(whole)
    assert_same(
        {"param": param.detach().flatten()}, {"param": torch.cat([p.detach().flatten() for p in params_of(apart)])}
    )
    for name, value in whole.state[param].items():
        others = [apart.state[p][name].flatten() for p in params_of(apart)]
        assert_same({name: value.flatten()}, {name: others[0] if name == "step" else torch.cat(others)})


def test_convolutions_are_matrices() -> None:
    conv, matrix = (advance(make(shapes=(shape,)), range(0)) for shape in ((12, 7, 3, 3), (12, 63)))
    for step in range(STEPS):
        for optimizer in (conv, matrix):
            (param,) = params_of(optimizer)
            param.grad = gradient((12, 63), step, 0).view(param.shape)
            param.data = param.data if step else values((12, 63), 0).view(param.shape)
            optimizer.step()
    _compare_joined(conv, matrix)


@pytest.mark.parametrize(
    ("adjust", "scale"),
    [
        (None, lambda m, n: math.sqrt(max(1, m / n))),
        ("match_rms_adamw", lambda m, n: 0.2 * math.sqrt(max(m, n))),
        ("spectral_norm", lambda m, n: math.sqrt(m / n)),
    ],
)
def test_each_matrix_has_its_learning_rate(adjust: str | None, scale: Callable[[int, int], float]) -> None:
    """By its own shape, in one parameter; the decay knows of none of it."""
    rows = (40, 8, 2)
    optimizer = make(shapes=((50, 20),), split=rows, adjust_lr_fn=adjust, momentum=0.0, weight_decay=0.0, codec="fp32")
    (param,) = params_of(optimizer)
    before, given = param.detach().clone(), gradient((50, 20), 0, 0)
    param.grad = given.clone()
    optimizer.step()
    for old, new, part in zip(before.split(rows), param.detach().split(rows), given.split(rows), strict=True):
        direction = NewtonSchulz((QUINTIC,) * 5, 1e-7)(part.bfloat16().contiguous()).float()
        expected = 0.02 * scale(*part.shape) * direction
        # A weight and its step are rounded to 2^-24 of themselves.
        assert bool(((old - new - expected).abs() <= 2.0**-22 * (old.abs() + expected.abs())).all())


def test_decay_is_by_the_plain_learning_rate() -> None:
    for adjust in (None, "match_rms_adamw", "spectral_norm"):
        optimizer = make(shapes=((64, 16),), adjust_lr_fn=adjust, lr=0.25, weight_decay=0.5)
        (param,) = params_of(optimizer)
        expected = values((64, 16), 0) * (1 - 0.25 * 0.5)  # exact but for the product
        param.grad = torch.zeros(64, 16)
        optimizer.step()
        assert_same({"param": param.detach()}, {"param": expected})


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 0)])
def test_parameters_without_elements(shape: Shape) -> None:
    advance(make(shapes=(shape, (8, 8))), range(2))


# NaN and Inf ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("codec", ["fp32", "log8"])
@pytest.mark.filterwarnings("ignore:skipped .* gradient elements")
def test_nonfinite_as_the_reference(codec: str, bad: float) -> None:
    def change(x: Tensor) -> Tensor:
        x.flatten()[3] = bad
        return x

    optimizer = make(shapes=((40, 130), (12, 7, 3, 3)), codec=codec)
    oracle = check_reference(optimizer, torch.float32, change)
    assert optimizer.nonfinite_count == oracle.nonfinite == (0 if bad == 3e38 else 2 * STEPS)


def test_one_element_harms_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix with a NaN has direction zero and keeps its momentum.

    The other matrices step as they would have beside a zero direction.
    """
    broken, whole = (advance(make(shapes=((40, 130), (30, 30)), codec="fp32"), range(1)) for _ in range(2))
    before = broken.state[params_of(broken)[0]]["momentum_buffer"].clone()
    advance_with_nan(broken)
    original = NewtonSchulz.__call__

    def without(newton_schulz: NewtonSchulz, matrix: Tensor) -> Tensor:
        if matrix.shape == (40, 130):
            matrix[2, 5] = 0
        return original(newton_schulz, matrix)

    monkeypatch.setattr(NewtonSchulz, "__call__", without)
    advance(whole, range(1, 2))
    own = [each.state[params_of(each)[0]]["momentum_buffer"] for each in (broken, whole)]
    assert own[0][2, 5] == before[2, 5]
    assert own[1][2, 5] != before[2, 5]
    own[1][2, 5] = before[2, 5]
    assert_equal(broken, whole)
    assert broken.nonfinite_count == 1


def advance_with_nan(optimizer: ShardedOptimizer) -> None:
    """Takes step 1 with a NaN in the first parameter's gradient."""
    for index, param in enumerate(params_of(optimizer)):
        param.grad = gradient(tuple(param.shape), 1, index)
    params_of(optimizer)[0].grad[2, 5] = math.nan
    optimizer.step()


def test_a_wholly_lost_matrix_decays_only() -> None:
    optimizer = advance(make(shapes=((20, 30),), codec="fp32", lr=0.25, weight_decay=0.5), range(1))
    (param,) = params_of(optimizer)
    expected, state = param.detach() * 0.875, {k: v.clone() for k, v in optimizer.state[param].items()}
    param.grad = torch.full((20, 30), math.nan)
    optimizer.step()
    assert_same({"param": param.detach()}, {"param": expected})
    assert_same(optimizer.state[param], {**state, "step": state["step"] + 1})


def test_nonfinite_raise_changes_nothing() -> None:
    optimizer = advance(make(nonfinite="raise", shapes=((40, 130), (30, 30))), range(1))
    before = everything(optimizer)
    with pytest.raises(FloatingPointError, match="NaN or Inf"):
        advance_with_nan(optimizer)
    assert_same(everything(optimizer), before)
    advance(optimizer, range(1, 2))
    expected = advance(make(nonfinite="raise", shapes=((40, 130), (30, 30))), range(2))
    assert_equal(optimizer, expected)


def test_nonfinite_propagate_spoils_the_matrix() -> None:
    """And no other one."""
    options = {"shapes": ((40, 130), (30, 30)), "codec": "fp32"}
    optimizer, expected = (advance(make(nonfinite="propagate", **options), range(1)) for _ in range(2))
    advance_with_nan(optimizer)
    advance(expected, range(1, 2))
    (spoilt, other), (_, others) = params_of(optimizer), params_of(expected)
    assert bool(spoilt.isnan().all())
    assert_same({"param": other.detach()}, {"param": others.detach()})
    assert optimizer.nonfinite_count == 0


# Groups of other rules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["fp32", "log8"])
@pytest.mark.parametrize("algorithm", ["adamw", "lion"])
def test_other_groups_are_as_their_class(algorithm: str, codec: str) -> None:
    """Beside matrices, whose results do not know of them either."""
    shapes = ((300,), (40, 130), (7,))
    hyper = {"lr": 3e-3, "weight_decay": 0.05, "betas": (0.8, 0.97)}
    groups = [
        {"params": start(), "lr": 0.02},
        {"params": start(shapes=shapes), "algorithm": algorithm, "eps": 1e-6, **hyper},
    ]
    optimizer = shardopt.Muon(groups, codec=codec, min_quantized_numel=64)
    own = {**hyper, "codec": codec, "min_quantized_numel": 64}
    others: torch.optim.Optimizer = (
        shardopt.AdamW8bit(start(shapes=shapes), eps=1e-6, **own)
        if algorithm == "adamw"
        else shardopt.Lion8bit(start(shapes=shapes), **own)
    )
    matrices = make(codec=codec)
    for step in range(STEPS):
        for of, first in ((matrices, 0), (others, len(SHAPES)), (optimizer, 0)):
            for index, param in enumerate(params_of(of), first):
                param.grad = gradient(tuple(param.shape), step, index)
            of.step()
    actual, other = everything(optimizer), everything(others)
    expected = {
        f"{int(key.split('/')[0]) + len(SHAPES)}{key[key.find('/') :] if '/' in key else ''}": other[key]
        for key in other
    }
    assert_same(actual, {**everything(matrices), **expected})


def test_use_muon_is_another_name() -> None:
    groups = [{"params": start(), "use_muon": True}, {"params": start(), "use_muon": False}]
    optimizer = shardopt.Muon8bit(groups, **OPTIONS)
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "adamw"]
    advance(optimizer, range(2))
    assert set(optimizer.state[params_of(optimizer)[-1]]) == {"step", "exp_avg", "exp_avg_sq"}
