"""Muon and NorMuon in one process: the reference's bits, matrices in a parameter, NaN, other rules' groups, storage.

``codec="fp32"`` has the state and the directions of torch.optim.Muon, bit for bit; weights differ by rounding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
import shardopt.checkpoint
from helpers import CODEC_NAMES, ReferenceOptimizer, Shape, everything, with_gradient
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.kernels.newton_schulz import POLAR_EXPRESS, QUINTIC, NewtonSchulz
from shardopt.optim import ShardedOptimizer
from step_problem import MUON_OPTIONS as OPTIONS
from step_problem import advance, assert_equal, gradient, params_of, start
from step_problem import make_muon as make
from weight_formats import ALL

STEPS = 3

# The reference step ---------------------------------------------------------------------------------------------------


def check_reference(
    optimizer: ShardedOptimizer,
    dtype: torch.dtype = torch.float32,
    change: Callable[[Tensor], Tensor] = lambda x: x,
    **later: Any,
) -> ReferenceOptimizer:
    """After the first step some parameters have no gradient: these stay, and the others step as if alone.

    later: options that the first param group gets then.
    """
    names = {str(index): param for index, param in enumerate(params_of(optimizer))}
    oracle = ReferenceOptimizer(names, optimizer)
    for step in range(STEPS):
        gradients = {n: change(gradient(tuple(p.shape), step, int(n), dtype)) for n, p in names.items()}
        gradients = {n: given for n, given in gradients.items() if step == 0 or int(n) % STEPS != step}
        for name, param in names.items():
            param.grad = None
            if name in gradients:
                with_gradient(param, gradients[name].clone())
        optimizer.step()
        oracle.step(gradients)
        assert_same(everything(optimizer), oracle.snapshot())
        optimizer.param_groups[0].update(later)
    return oracle


@pytest.mark.parametrize(
    ("format", "codec"), [*((name, "log8") for name in ALL), *(("fp32", c) for c in CODEC_NAMES if c != "log8")]
)
def test_as_the_reference(format: str, codec: str) -> None:
    dtype, options = ALL[format]
    check_reference(make(dtype, codec=codec, **options), dtype)


@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": False, "block_size": 32},
        {"momentum": 0.0},
        {"momentum": 0.3, "weight_decay": 0.0},
        {"ns_coefficients": "polar_express", "ns_steps": len(POLAR_EXPRESS) + 2},  # further steps take the last triple
        {"ns_coefficients": [(3.0, -2.0, 0.5), (1.5, -0.5, 0.0)], "ns_steps": 4, "eps": 0.5},
        {"adjust_lr_fn": "match_rms_adamw", "memory": 1},
        {"adjust_lr_fn": "spectral_norm"},
        {"normalize": "rows", "beta2": 0.5},
        {"dtype": torch.bfloat16, "master_weight_bits": 24},  # with gradients of float32
    ],
    ids=str,
)
def test_options_as_the_reference(options: dict[str, Any]) -> None:
    check_reference(make(**options), torch.float32)


@pytest.mark.parametrize("format", ["bf16 24", "bf16 stochastic"])
def test_splits_as_the_reference(format: str) -> None:
    """Stochastic rounding counts elements of the parameter, not of its matrices."""
    dtype, options = ALL[format]
    groups = [
        {"params": start(dtype, ((40, 130), (40, 5, 5))), "split": (3, 1, 36), "adjust_lr_fn": "spectral_norm"},
        {"params": start(dtype, ((3, 33, 40), (2, 20, 4, 5))), "split": "each", "adjust_lr_fn": "match_rms_adamw"},
    ]
    check_reference(shardopt.Muon8bit(groups, **{**OPTIONS, **options}), dtype)


# torch.optim.Muon -----------------------------------------------------------------------------------------------------

#: Wide, tall, square, one row, one column: all multiples of 64 elements, so that PyTorch has no scalar remainder, in
#: which it rounds a product before it adds.
VECTORS: tuple[Shape, ...] = ((32, 66), (96, 30), (40, 40), (1, 256), (192, 1))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this version of PyTorch has no Muon")
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="PyTorch rounds twice in lerp")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False},
        {"momentum": 0.7, "weight_decay": 0.0},
        {"adjust_lr_fn": "original", "lr": 1e-3},
        {"adjust_lr_fn": "match_rms_adamw"},
        {"adjust_lr_fn": "spectral_unclamped", "lr": 1e-3},
        {"ns_steps": 1},
        {"ns_steps": 7, "eps": 1e-3},
        {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 12},
        {"lr": torch.tensor(0.02)},
    ],
    ids=str,
)
def test_as_torch(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """The momentum and the direction are computed by the same operations, as long as ``momentum >= 0.5``: torch.lerp
    begins at its other end with a weight of 0.5 or more. Weights are rounded at other places.

    Per step torch rounds ``1 - lr * weight_decay``, the product with the weight and the sum; we round twice; and the
    learning rate times its factor may differ by a unit in the last place. All of that is at most 2^-22 of the old and
    new weight together, since the step is no longer than both. Directions that differed would show: they are bfloat16.
    """
    if str(options.get("adjust_lr_fn")) not in f"None {torch.optim.Muon.__doc__}":
        pytest.skip("PyTorch's Muon has no such factor")
    # By the products that torch computes: on the CPU ours are computed in float32 and rounded.
    monkeypatch.setattr(NewtonSchulz, "_in_float32", NewtonSchulz._in_bfloat16)
    given = {"lr": 0.02, "weight_decay": 0.1, **options}
    ours = shardopt.Muon(start(shapes=VECTORS), codec="fp32", **given)
    theirs = torch.optim.Muon(start(shapes=VECTORS), **given)
    bounds = [torch.zeros_like(param) for param in params_of(theirs)]
    for t in range(4):
        before = [param.detach().clone() for param in params_of(theirs)]
        for optimizer in (ours, theirs):
            advance(optimizer, [t])
        for one, other, bound, old in zip(params_of(ours), params_of(theirs), bounds, before, strict=True):
            assert torch.equal(ours.state[one]["momentum_buffer"], theirs.state[other]["momentum_buffer"])
            bound += 2.0**-22 * (old.abs() + other.detach().abs())
            assert bool(((one - other).abs() <= bound).all())


# Matrices in a parameter ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "split", "options"),
    [
        ((96, 130), (30, 5, 61), {"codec": "fp32", "adjust_lr_fn": "spectral_norm"}),
        ((40, 130), (10, 17, 13), {"codec": "log8", "normalize": "rows"}),
        ((3, 11, 70), "each", {"codec": "fp32", "normalize": "rows"}),
        ((4, 33, 64), "each", {"codec": "log8", "block_size": 32, "adjust_lr_fn": "spectral_norm"}),
        ((12, 7, 3, 3), None, {"codec": "log8"}),
    ],
    ids=str,
)
def test_matrices_are_as_parameters_of_their_own(shape: Shape, split: Any, options: dict[str, Any]) -> None:
    """Fused rows, stacks whose matrices end with a block, and a convolution, which is one matrix."""

    def matrices(x: Tensor) -> Sequence[Tensor]:
        return x.split(split) if isinstance(split, tuple) else x if split == "each" else [x.flatten(1)]

    whole = make(shapes=(shape,), split=split, **options)
    apart = shardopt.Muon8bit([Parameter(x.clone()) for x in matrices(values(shape, 0))], **{**OPTIONS, **options})
    for step in range(STEPS):
        given = gradient(shape, step, 0)
        for param, part in zip(params_of(apart), matrices(given), strict=True):
            param.grad = part.clone()
        params_of(whole)[0].grad = given
        for optimizer in (whole, apart):
            optimizer.step()
    (param,) = params_of(whole)
    assert torch.equal(param.flatten(), torch.cat([p.flatten() for p in params_of(apart)]))
    for name, value in whole.state[param].items():
        others = [apart.state[p][name].flatten() for p in params_of(apart)]
        assert torch.equal(value.flatten(), others[0] if name == "step" else torch.cat(others))


def test_the_spectral_norm_of_a_step() -> None:
    """Is the root of rows over columns, where usually it is that or 1, if that is more: of powers of two exactly."""
    for shape, lr in (((16, 64), 0.01), ((64, 16), 0.02)):
        got = make(shapes=(shape,), adjust_lr_fn="spectral_norm", weight_decay=0.0)
        assert_equal(advance(got, range(1)), advance(make(shapes=(shape,), lr=lr, weight_decay=0.0), range(1)))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_parameters_without_elements(shape: Shape) -> None:
    advance(make(shapes=(shape, (8, 8))), range(2))


# NaN and Inf ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, -math.inf, 3e38])
@pytest.mark.filterwarnings("ignore:skipped .* gradient elements")
def test_nonfinite_as_the_reference(bad: float) -> None:
    def change(x: Tensor) -> Tensor:
        x.flatten()[3] = bad
        return x

    optimizer = make(shapes=((40, 130), (12, 7, 3, 3)))
    oracle = check_reference(optimizer, torch.float32, change)
    assert optimizer.nonfinite_count == oracle.nonfinite == (0 if bad == 3e38 else 2 * STEPS - 1)


# Around a step --------------------------------------------------------------------------------------------------------


def test_groups_of_other_rules_as_the_reference() -> None:
    """``use_muon`` is another name of the algorithm."""
    shapes = ((300,), (40, 130), (7,))
    hyper = {"lr": 3e-3, "weight_decay": 0.05, "betas": (0.8, 0.97)}
    groups = [
        {"params": start(), "lr": 0.02, "use_muon": True},
        {"params": start(shapes=shapes), "use_muon": False, **hyper},
        {"params": start(shapes=shapes), "algorithm": "lion", **hyper, "codec": "dynamic8"},
    ]
    optimizer = shardopt.Muon8bit(groups, min_quantized_numel=64)
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "adamw", "lion"]
    check_reference(optimizer)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("momentum", 0.5),
        ("lr", torch.tensor(0.3)),
        ("nesterov", False),
        ("ns_coefficients", "polar_express"),
        ("eps", 100.0),
        ("adjust_lr_fn", "match_rms_adamw"),
        ("split", (1, 39)),
        ("beta2", 0.0),
    ],
    ids=str,
)
def test_options_may_change_between_steps(option: str, value: Any) -> None:
    check_reference(
        make(shapes=((40, 130), (40, 9)), normalize="rows" if option == "beta2" else None), **{option: value}
    )


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("algorithm", "adamw", "got state without exp_avg"),
        ("normalize", "rows", "got state without second_momentum_buffer"),
    ],
)
def test_a_rule_with_other_state_is_refused_between_steps(option: str, value: Any, error: str) -> None:
    optimizer = advance(make(), range(1))
    before, old = everything(optimizer), optimizer.param_groups[0][option]
    optimizer.param_groups[0][option] = value
    with pytest.raises((ValueError, RuntimeError), match=error):
        advance(optimizer, range(1, 2))
    assert_same(everything(optimizer), before)
    optimizer.param_groups[0][option] = old
    advance(optimizer, range(1, 2))


# Storage --------------------------------------------------------------------------------------------------------------


def test_a_parameter_that_is_no_matrix() -> None:
    named = [("up.weight", Parameter(torch.zeros(4, 4))), ("norm.weight", Parameter(torch.zeros(4)))]
    with pytest.raises(ValueError, match=r"norm\.weight.*got a parameter of shape \(4,\) in a param group for Muon"):
        shardopt.Muon8bit(named)
    with pytest.raises(ValueError, match=r"got a parameter of shape \(4,\).*muon_groups"):
        shardopt.Muon8bit([param for _, param in named])


# NorMuon: rows normalized by second moments ---------------------------------------------------------------------------

#: For steps of formulas: wide, tall, square.
MATRICES: tuple[Shape, ...] = ((40, 130), (97, 64), (64, 64))
LONG = 30
NEWTON_SCHULZ = NewtonSchulz((QUINTIC,) * 5, 1e-7)


def normuon(**options: Any) -> shardopt.ShardedOptimizer:
    return make(normalize="rows", **options)


def uneven(shape: Shape, step: int, index: int) -> Tensor:
    """A gradient whose rows differ in size, as those that get one rarely."""
    rows = torch.logspace(-2, 1, shape[0]).unsqueeze(1)
    return values(shape, 100 * (step + 1) + index, torch.float32) * rows


def test_formulas() -> None:
    """Each output's row is divided by the root of its second moment; the matrix keeps its norm.

    Our results are rounded to bfloat16 for their way back, by at most 2^-8 of an element; other roundings are those of
    float32: two of the weight, and as many of a row's sum as it has elements.
    """
    ours, theirs = ([Parameter(values(shape, index)) for index, shape in enumerate(MATRICES)] for _ in range(2))
    optimizer = shardopt.NorMuon(ours, lr=0.02, weight_decay=0.1)
    momentum, bounds = ([torch.zeros_like(param) for param in theirs] for _ in range(2))
    second = [torch.zeros(len(param), 1, dtype=torch.float64) for param in theirs]
    for number in range(LONG):
        gradients = [uneven(shape, number, index) for index, shape in enumerate(MATRICES)]
        for param, given in zip(ours, gradients, strict=True):
            param.grad = given.clone()
        optimizer.step()
        for one, other, g, m, v, bound in zip(ours, theirs, gradients, momentum, second, bounds, strict=True):
            m.lerp_(g, 0.05)
            o = NEWTON_SCHULZ(g.lerp(m, 0.95).bfloat16()).double()
            v += 0.05 * (o.square().mean(1, keepdim=True) - v)
            normed = o / v.sqrt()
            normed *= o.norm() / normed.norm()
            (rows, cols), old = other.shape, other.detach().clone()
            scale = math.sqrt(max(1.0, rows / cols))
            other.data = (other * (1 - 0.02 * 0.1) - 0.02 * scale * normed).float()
            moments, expected = optimizer.state[one]["second_momentum_buffer"], v.float()
            assert bool(((moments - expected).abs() <= (cols + LONG) * 2.0**-24 * expected).all())
            moved = (other.detach() - old * (1.0 - 0.02 * 0.1)).abs()
            bound += moved * (2.0**-8 + cols * 2.0**-23) + 2.0**-22 * (old.abs() + other.detach().abs())
            assert bool(((one - other).abs() <= bound).all())
    # The state as the authors' code keeps it goes on here.
    entries = zip(momentum, (v.float() for v in second), strict=True)
    state = {i: {"momentum_buffer": m, "second_momentum_buffer": v} for i, (m, v) in enumerate(entries)}
    fresh = shardopt.NorMuon8bit([Parameter(param.detach().clone()) for param in theirs])
    group = {"params": list(state), "lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "beta2": 0.95}
    fresh.load_state_dict({"state": state, "param_groups": [group]})
    for param, given in zip(params_of(fresh), state.values(), strict=True):
        assert torch.equal(fresh.state[param]["second_momentum_buffer"], given["second_momentum_buffer"])


def test_zeros_stay() -> None:
    """A row, and a matrix, whose gradient is always zero."""
    params = [Parameter(values((8, 40), index)) for index in range(2)]
    optimizer = shardopt.NorMuon(params, lr=0.1, weight_decay=0.0)
    before = [param.detach().clone() for param in params]
    for step in range(STEPS):
        params[0].grad = gradient((8, 40), step, 0)
        params[0].grad[3] = 0.0
        params[1].grad = torch.zeros(8, 40)
        optimizer.step()
    assert torch.equal(params[0][3], before[0][3])
    assert torch.equal(params[1], before[1])
    assert bool(torch.isfinite(params[0]).all())
    assert not torch.equal(params[0], before[0])


def test_state_without_second_moments() -> None:
    """Begins with zeros where the state is torch's, and is refused where it is ours."""
    plain = advance(make(), range(STEPS))
    assert "second_momentum_buffer" not in everything(plain)
    may_lack_low_bits, ours = plain.state_dict(dequantize=True), plain.state_dict()
    for group in (*may_lack_low_bits["param_groups"], *ours["param_groups"]):
        del group["normalize"]
    optimizer = normuon()
    with pytest.raises(ValueError, match=r"got state with .*, expected .*second_momentum_buffer"):
        optimizer.load_state_dict(ours)
    optimizer.load_state_dict(may_lack_low_bits)
    assert not any(optimizer.state[param]["second_momentum_buffer"].any() for param in params_of(optimizer))
    state = advance(normuon(), range(1)).state_dict()["state"]
    with pytest.raises(ValueError, match="second_momentum_buffer, expected step, momentum_buffer_codes"):
        make().load_state_dict({"state": state, "param_groups": ours["param_groups"]})


def test_second_moments_that_are_replaced_or_damaged() -> None:
    """Moments put into the state count in the next step; a state dict with some below zero is refused."""
    untouched, replaced = (advance(normuon(), range(2)) for _ in range(2))
    state = replaced.state[params_of(replaced)[0]]
    state["second_momentum_buffer"] = torch.full_like(state["second_momentum_buffer"], 0.25)
    found = [everything(advance(each, range(2, 3))) for each in (untouched, replaced)]
    for name in ("0", "0/second_momentum_buffer"):
        assert not torch.equal(found[0][name], found[1][name])
    given = copy.deepcopy(untouched.state_dict())
    given["state"][1]["second_momentum_buffer"].neg_()
    with pytest.raises(ValueError, match="got second_momentum_buffer that stands for NaN, Inf or numbers below zero"):
        untouched.load_state_dict(given)
    assert_same(everything(untouched), found[0])


def test_conversion_keeps_second_moments(tmp_path: Path) -> None:
    model = torch.nn.ParameterList([Parameter(values((2, 40, 301), 0))])
    optimizer, fresh = (shardopt.NorMuon8bit(model, split="each", codec=codec) for codec in ("log8", "dynamic8"))
    advance(optimizer, range(1))
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    assert len(shardopt.checkpoint.load(tmp_path, model, fresh, convert=True).converted) == 1
    taken, given = (each.state[model[0]]["second_momentum_buffer"] for each in (fresh, optimizer))
    assert torch.equal(taken, given)


def test_an_overflow_does_not_stay_in_the_second_moments() -> None:
    """A finite gradient whose direction overflows leaves the weights as they are, and later steps move all of them."""
    param = Parameter(torch.zeros(4, 16))
    optimizer = shardopt.NorMuon([param], lr=0.1, momentum=0.0, weight_decay=0.0, codec="fp32")
    for step in range(4):
        param.grad = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        if step == 1:
            param.grad[1] = 3.4e38
        before = param.detach().clone()
        optimizer.step()
        assert bool((param != before).all()) == (step != 1)
    assert bool(optimizer.state[param]["second_momentum_buffer"].isfinite().all())
    other = shardopt.NorMuon([Parameter(torch.zeros(4, 16))], lr=0.1, momentum=0.0, weight_decay=0.0, codec="fp32")
    other.load_state_dict(optimizer.state_dict())
