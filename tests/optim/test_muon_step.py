"""Muon in one process: the reference's bits, matrices in a parameter, NaN, other rules' groups, storage, memory."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
import shardopt.optim.muon
from helpers import CASES, CODEC_NAMES, ReferenceOptimizer, Shape, at_odd_offset, everything, with_gradient
from live_bytes import LiveBytes
from ranks.layouts import values
from ranks.models import loss_of, make_batch, make_net
from ranks.offload import LateTransfers, late_transfers, offload_from_cpu
from ranks.snapshot import assert_same
from shardopt.kernels.newton_schulz import POLAR_EXPRESS, QUINTIC, NewtonSchulz
from shardopt.optim import ShardedOptimizer
from shardopt.step.muon.matrices import padded
from step_problem import LAYOUTS, advance, assert_equal, gradient, params_of, set_gradients, start
from step_problem import MATRICES as SHAPES
from step_problem import MUON_OPTIONS as OPTIONS
from step_problem import make_muon as make
from weight_formats import ALL

STEPS = 3
TWO = ((40, 130), (30, 30))

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
        {"ns_coefficients": "polar_express", "ns_steps": 9},
        {"ns_coefficients": [(3.0, -2.0, 0.5), (1.5, -0.5, 0.0)], "ns_steps": 4, "eps": 0.5},
        {"adjust_lr_fn": "match_rms_adamw", "memory": 1},
        {"adjust_lr_fn": "spectral_norm"},
        {"dtype": torch.bfloat16, "master_weight_bits": 24},  # with gradients of float32
    ],
    ids=str,
)
def test_options_as_the_reference(options: dict[str, Any]) -> None:
    check_reference(make(**options), torch.float32)


@pytest.mark.parametrize("format", ["fp32", "bf16 24", "bf16 stochastic"])
def test_splits_as_the_reference(format: str) -> None:
    """Stochastic rounding counts elements of the parameter, not of its matrices."""
    dtype, options = ALL[format]
    groups = [
        {"params": start(dtype, ((40, 130), (40, 5, 5))), "split": (3, 1, 36), "adjust_lr_fn": "spectral_norm"},
        {"params": start(dtype, ((3, 33, 40), (2, 20, 4, 5))), "split": "each", "adjust_lr_fn": "match_rms_adamw"},
    ]
    check_reference(shardopt.Muon8bit(groups, **{**OPTIONS, **options}), dtype)


def test_bytes_of_state() -> None:
    """As the docstrings say: per element 1.031 bytes in blocks of 128, 4 with ``codec="fp32"``; NorMuon 4 per row."""
    for options, expected in (({}, 1 + 4 / 128), ({"codec": "fp32"}, 4), ({"normalize": "rows"}, 1 + 4 / 128)):
        optimizer = advance(make(shapes=((64, 256),), **options), range(1))
        (state,) = optimizer.state.values()
        rows = 4 * 64 if "normalize" in options else 0
        assert sum(value.nbytes for name, value in state.items() if name != "step") == expected * 64 * 256 + rows


# Matrices in a parameter ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "split", "options"),
    [
        ((96, 130), (30, 5, 61), {"codec": "log8"}),
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


@pytest.mark.parametrize(
    ("adjust", "scale"),
    [
        (None, lambda m, n: math.sqrt(max(1, m / n))),
        ("match_rms_adamw", lambda m, n: 0.2 * math.sqrt(max(m, n))),
        ("spectral_norm", lambda m, n: math.sqrt(m / n)),
    ],
)
def test_each_matrix_has_its_learning_rate(adjust: str | None, scale: Callable[[int, int], float]) -> None:
    """By its own shape, in one parameter; the decay, in a second step, knows of none of it."""
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
    optimizer.param_groups[0].update(lr=0.25, weight_decay=0.5)
    before = param.detach().clone()
    param.grad = torch.zeros(50, 20)
    optimizer.step()
    assert torch.equal(param.detach(), before * (1 - 0.25 * 0.5))  # exact but for the product


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
    assert optimizer.nonfinite_count == oracle.nonfinite == (0 if bad == 3e38 else 2 * STEPS)


def advance_with_nan(optimizer: ShardedOptimizer) -> None:
    """Takes step 1 with a NaN in the first parameter's gradient."""
    for index, param in enumerate(params_of(optimizer)):
        param.grad = gradient(tuple(param.shape), 1, index)
    params_of(optimizer)[0].grad[2, 5] = math.nan
    optimizer.step()


def test_one_element_harms_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The direction is zero, its momentum stays, and all others step as they would have beside a zero direction."""
    broken, whole = (advance(make(shapes=TWO, codec="fp32"), range(1)) for _ in range(2))
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
    assert own[0][2, 5] == before[2, 5] != own[1][2, 5]
    own[1][2, 5] = before[2, 5]
    assert_equal(broken, whole)
    assert broken.nonfinite_count == 1


def test_a_wholly_lost_matrix_decays_only() -> None:
    optimizer = advance(make(shapes=((20, 30),), codec="fp32", lr=0.25, weight_decay=0.5), range(1))
    (param,) = params_of(optimizer)
    expected, state = param.detach() * 0.875, {k: v.clone() for k, v in optimizer.state[param].items()}
    param.grad = torch.full((20, 30), math.nan)
    optimizer.step()
    assert_same({"param": param.detach()}, {"param": expected})
    assert_same(optimizer.state[param], {**state, "step": state["step"] + 1})


def test_nonfinite_raise_changes_nothing() -> None:
    optimizer = advance(make(nonfinite="raise", shapes=TWO), range(1))
    before = everything(optimizer)
    with pytest.raises(FloatingPointError, match="NaN or Inf"):
        advance_with_nan(optimizer)
    assert_same(everything(optimizer), before)


def test_nonfinite_propagate_spoils_the_matrix() -> None:
    """And no other one."""
    optimizer, expected = (advance(make(nonfinite="propagate", shapes=TWO, codec="fp32"), range(1)) for _ in range(2))
    advance_with_nan(optimizer)
    advance(expected, range(1, 2))
    (spoilt, other), (_, others) = params_of(optimizer), params_of(expected)
    assert bool(spoilt.isnan().all())
    assert torch.equal(other, others)
    assert optimizer.nonfinite_count == 0


# Around a step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["fp32", "log8"])
@pytest.mark.parametrize("algorithm", ["adamw", "lion"])
def test_other_groups_are_as_their_class(algorithm: str, codec: str) -> None:
    """Beside matrices, whose results do not know of them either. ``use_muon`` is another name of the algorithm."""
    shapes = ((300,), (40, 130), (7,))
    hyper = {"lr": 3e-3, "weight_decay": 0.05, "betas": (0.8, 0.97), "codec": codec, "min_quantized_numel": 64}
    named = {"use_muon": False} if algorithm == "adamw" else {"algorithm": "lion"}
    groups = [{"params": start(), "lr": 0.02, "use_muon": True}, {"params": start(shapes=shapes), **named, **hyper}]
    optimizer = shardopt.Muon(groups, codec=codec, min_quantized_numel=64)
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", algorithm]
    kind = shardopt.AdamW if algorithm == "adamw" else shardopt.Lion
    others, matrices = kind(start(shapes=shapes), **hyper), make(codec=codec)
    for step in range(STEPS):
        for of, first in ((matrices, 0), (others, len(SHAPES)), (optimizer, 0)):
            for index, param in enumerate(params_of(of), first):
                param.grad = gradient(tuple(param.shape), step, index)
            of.step()
    expected = [(param, each.state[param]) for each in (matrices, others) for param in params_of(each)]
    for ours, (theirs, state) in zip(params_of(optimizer), expected, strict=True):
        assert torch.equal(ours, theirs)
        assert_same(optimizer.state[ours], state)


def test_waves_change_nothing() -> None:
    """Nor what is in memory: all matrices at once, some, or one parameter at a time."""
    expected = advance(make(codec="log8"), range(STEPS))
    for memory in (1, 60_000, 100_000):
        assert_equal(advance(make(codec="log8", memory=memory), range(STEPS)), expected)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("momentum", 0.5),
        ("lr", torch.tensor(0.3)),
        ("weight_decay", 0.7),
        ("nesterov", False),
        ("ns_steps", 2),
        ("ns_coefficients", "polar_express"),
        ("eps", 100.0),
        ("adjust_lr_fn", "match_rms_adamw"),
        ("split", (1, 39)),
        ("maximize", True),
    ],
    ids=str,
)
def test_options_may_change_between_steps(option: str, value: Any) -> None:
    """The next step is that of an optimizer that always had them, and loads the state dict."""
    shapes = ((40, 130), (40, 9))
    optimizer, unchanged = (advance(make(shapes=shapes), range(2)) for _ in range(2))
    other = make(shapes=shapes, **{option: value})
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0][option] = value
    other.load_state_dict(state)
    for mine, theirs in zip(params_of(optimizer), params_of(other), strict=True):
        theirs.data.copy_(mine)
    optimizer.param_groups[0][option] = value
    assert_equal(advance(optimizer, range(2, 4)), advance(other, range(2, 4)))
    advance(unchanged, range(2, 4))
    assert any(not torch.equal(x, y) for x, y in zip(params_of(optimizer), params_of(unchanged), strict=True))


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("split", (10, 20), r"got split=\(10, 20\) for a parameter of shape \(40, 130\), expected a sum of 40"),
        ("algorithm", "rmsprop", "algorithm: got 'rmsprop', expected 'muon', 'adamw' or 'lion'"),
        ("algorithm", "adamw", "got state without exp_avg"),
        ("normalize", "rows", "got state without second_momentum_buffer"),
        ("ns_coefficients", (1, 2), "ns_coefficients: got"),
    ],
)
def test_bad_changes_between_steps_change_nothing(option: str, value: Any, error: str) -> None:
    optimizer = advance(make(shapes=((40, 130), (40, 30))), range(1))
    before, old = everything(optimizer), optimizer.param_groups[0][option]
    optimizer.param_groups[0][option] = value
    with pytest.raises((ValueError, RuntimeError), match=error):
        advance(optimizer, range(1, 2))
    assert_same(everything(optimizer), before)
    optimizer.param_groups[0][option] = old
    advance(optimizer, range(1, 2))


def test_grad_scaler() -> None:
    """The scaler's factor is divided out; an overflow leaves everything as it was."""
    got, expected = make(), make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=100)
    scaler.scale(torch.ones(()))
    for step in range(2):
        advance(expected, range(step, step + 1))
        for index, param in enumerate(params_of(got)):
            param.grad = gradient(tuple(param.shape), step, index) * 2.0**12
        scaler.step(got)
        scaler.update()
        assert_equal(got, expected)
    before = everything(got)
    params_of(got)[0].grad[0, 0] = math.inf
    scaler.step(got)
    scaler.update()
    assert scaler.get_scale() == 2.0**11
    assert_same(everything(got), before)


def test_matrices_without_gradient_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such parameters stay, have no state and are not multiplied; the others step as if alone."""
    seen: list[Shape] = []
    original = NewtonSchulz.__call__
    monkeypatch.setattr(NewtonSchulz, "__call__", lambda ns, x: seen.append(tuple(x.shape)) or original(ns, x))
    optimizer, alone = make(), make(shapes=(SHAPES[1], SHAPES[4]))
    before = params_of(optimizer)[0].detach().clone()
    some = [params_of(optimizer)[index] for index in (1, 4)]
    for theirs, mine, index in zip(params_of(alone), some, (1, 4), strict=True):
        theirs.data.copy_(mine)
        mine.grad, theirs.grad = (gradient(SHAPES[index], 0, index) for _ in range(2))
    optimizer.step()
    assert sorted(seen) == [(12, 63), (97, 64)]
    alone.step()
    for theirs, mine in zip(params_of(alone), some, strict=True):
        assert torch.equal(theirs, mine)
        assert_same(alone.state[theirs], optimizer.state[mine])
    assert torch.equal(params_of(optimizer)[0], before)
    assert not optimizer.state.get(params_of(optimizer)[0])


@pytest.mark.parametrize("how", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_copies_go_on_alike(how: Callable[[ShardedOptimizer], ShardedOptimizer]) -> None:
    groups = [{"params": start()}, {"params": start(shapes=((30,),)), "algorithm": "lion"}]
    optimizer = advance(shardopt.Muon8bit(groups, **OPTIONS), range(2))
    other = how(optimizer)
    assert_equal(advance(optimizer, range(2, 4)), advance(other, range(2, 4)))


# Storage and memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "options"),
    [
        (torch.float32, None, {}),
        (torch.float32, None, {"codec": "fp32", "memory": 1}),
        (torch.bfloat16, torch.float32, {"master_weight_bits": 24}),
        (torch.bfloat16, None, {"stochastic_rounding": True}),
    ],
    ids=str,
)
def test_memory_formats(dtype: torch.dtype, grad_dtype: torch.dtype | None, options: dict[str, Any]) -> None:
    """Channels last, transposed, parts of wider tensors: as contiguous copies."""
    made = []
    for strided in (True, False):
        found = [(values(shape, i, dtype), layout) for i, (shape, layout) in enumerate(LAYOUTS)]
        params = [Parameter(layout(x) if strided else x) for x, layout in found]
        groups = [{"params": params[:4]}, {"params": params[4:], "weight_decay": 0.0}]
        made.append(CASES["muon"].make(groups, **{"min_quantized_numel": 64, "block_size": 32, **options}))
    strides = [param.stride() for param in params_of(made[0])]
    for step in range(3):
        for optimizer in made:
            set_gradients(optimizer, step, grad_dtype)
            optimizer.step()
        assert_equal(*made)
    assert [param.stride() for param in params_of(made[0])] == strides


def test_storage_at_odd_offsets() -> None:
    """Gradients are not changed, nor what lies between the elements of a parameter."""
    expected, wide = advance(make(), range(STEPS)), torch.full((48, 60), 3.0)
    got = shardopt.Muon8bit([Parameter(at_odd_offset(values(shape, i))) for i, shape in enumerate(SHAPES)], **OPTIONS)
    within = shardopt.Muon8bit([Parameter(wide[:, 7:53])], **OPTIONS)
    for step in range(STEPS):
        for index, param in enumerate(params_of(got)):
            param.grad = at_odd_offset(gradient(tuple(param.shape), step, index), 5)
        got.step()
        for index, param in enumerate(params_of(got)):
            assert torch.equal(param.grad, gradient(tuple(param.shape), step, index))
    assert_equal(got, expected)
    advance(within, range(STEPS))
    assert (wide[:, :7] == 3).all()
    assert (wide[:, 53:] == 3).all()
    assert (wide[:, 7:53] != 3).any()


@pytest.mark.parametrize(
    ("format", "options"),
    [("fp32", {"memory": 1}), ("bf16 24", {}), ("bf16 stochastic", {"codec": "fp32"}), ("fp32", {"normalize": "rows"})],
    ids=str,
)
def test_offloaded_state(format: str, options: dict[str, Any]) -> None:
    """In chunks that are smaller than a parameter, with copies that come as late as they may."""
    dtype, weights = ALL[format]
    expected = advance(make(dtype, **weights, **options), range(STEPS))
    with offload_from_cpu(4096, late_transfers("state")):
        got = advance(make(dtype, offload="state", **weights, **options), range(STEPS))
        got.synchronize()
        assert_equal(got, expected)
        if "normalize" not in options:
            entries = [value.nbytes for state in got.state.values() for name, value in state.items() if name != "step"]
            # Each entry there and back once, in one of the two passes.
            assert LateTransfers.latest.bytes_in == LateTransfers.latest.bytes_out == STEPS * sum(entries)


@pytest.mark.parametrize(("dtype", "offload"), [(torch.float32, "state"), (torch.bfloat16, None)], ids=str)
def test_released_gradients(dtype: torch.dtype, offload: str | None) -> None:
    with offload_from_cpu(8192):
        models = [make_net(dtype) for _ in range(2)]
        options = {"stochastic_rounding": dtype == torch.bfloat16, "min_quantized_numel": 64}
        released, ordinary = (
            shardopt.Muon8bit(shardopt.muon_groups(model), **options, offload=how)
            for model, how in zip(models, (offload, None), strict=True)
        )
        shardopt.release_gradients(models[0], released)
        for number in range(STEPS):
            for model, optimizer in zip(models, (released, ordinary), strict=True):
                loss_of(model, make_batch(number)).backward()
                if optimizer is released:
                    assert all(param.grad is None for param in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
        released.synchronize()
        assert_equal(released, ordinary)


def _most_bytes(optimizer: ShardedOptimizer) -> int:
    """The most bytes of new tensors that live at a time during the second step."""
    advance(optimizer, range(1))
    with LiveBytes() as live:
        optimizer.step()
    assert live.now == 0  # nothing is kept until the next step
    return live.most


@pytest.mark.parametrize("memory", [600_000, 1_000_000])
def test_memory_is_kept_to(memory: int) -> None:
    """Directions and what is computed of them: more than half of what is allowed, and never more."""
    shapes = ((100, 130), (260, 100)) * 10  # 780,000 bytes of directions
    for normalize in (None, "rows"):
        assert memory / 2 < _most_bytes(make(shapes=shapes, memory=memory, normalize=normalize)) <= memory
    shapes = ((100, 130),) * 6
    one, least = (_most_bytes(make(shapes=some, memory=1)) for some in (shapes[:1], shapes))
    # A parameter that needs more is by itself, with the direction that comes next and the one computed before.
    assert one < least <= one + 2 * 2 * padded(100 * 130)


# Refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "step"}, "offload: got 'step' for Muon, which multiplies matrices where the parameters are"),
        ({"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients: got \(1.0, 2.0\), expected three numbers"),
        ({"ns_coefficients": "polar"}, "ns_coefficients: got 'polar', expected three numbers"),
        ({"ns_coefficients": None}, "ns_coefficients: got None"),
        ({"ns_coefficients": [(1, 2, 3), (1, 2)]}, "ns_coefficients: got"),
        ({"ns_coefficients": [(1, 2, 3), (1, math.inf, 3)]}, "ns_coefficients: got .*, expected finite numbers"),
        ({"ns_steps": 0}, "ns_steps: got 0, expected a whole number from 1 to 99"),
        ({"ns_steps": 2.5}, "ns_steps: got 2.5"),
        ({"normalize": "columns"}, "normalize: got 'columns', expected None or 'rows'"),
        ({"beta2": 1.0}, r"beta2: got 1.0, expected a number in \[0.0, 1.0\)"),
        ({"eps": 0.0}, "eps: got 0 for Muon"),
        ({"momentum": 1.0}, r"momentum: got 1.0, expected a number in \[0.0, 1.0\)"),
        ({"nesterov": 2}, "nesterov: got 2"),
        ({"adjust_lr_fn": "rms"}, "adjust_lr_fn: got 'rms', expected None or one of 'original'"),
        ({"algorithm": "sgd"}, "algorithm: got 'sgd', expected 'muon', 'adamw' or 'lion'"),
        ({"split": 3}, "split: got 3, expected None, 'each', or the rows of each matrix"),
        ({"split": (40, 0)}, "split: got"),
        ({"split": (10, 20)}, r"got split=\(10, 20\) for a parameter of shape \(40, 130\), expected a sum of 40"),
        ({"split": "each"}, r"got split='each' for a parameter of shape \(40, 130\), expected three dimensions"),
    ],
    ids=str,
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(shapes=((40, 130),), **options)


def test_a_parameter_that_is_no_matrix() -> None:
    named = [("up.weight", Parameter(torch.zeros(4, 4))), ("norm.weight", Parameter(torch.zeros(4)))]
    with pytest.raises(ValueError, match=r"norm\.weight.*got a parameter of shape \(4,\) in a param group for Muon"):
        shardopt.Muon8bit(named)
    with pytest.raises(ValueError, match=r"got a parameter of shape \(4,\).*muon_groups"):
        shardopt.Muon8bit([param for _, param in named])


def test_a_group_that_is_refused_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, expected = (advance(make(), range(1)) for _ in range(2))
    added = [{"params": [Parameter(torch.zeros(4))]}, {"params": [Parameter(torch.zeros(4, 4))], "split": (3, 3)}]
    for group in added:
        with pytest.raises(ValueError, match="got"):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
    with monkeypatch.context() as patch:
        patch.setattr(shardopt.optim.muon, "shard_of", lambda param: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.add_param_group({"params": [Parameter(torch.ones(4, 4))]})
    assert len(optimizer.param_groups) == 1
    assert_equal(advance(optimizer, range(1, 3)), advance(expected, range(1, 3)))
    optimizer.add_param_group({**added[1], "split": (1, 3)})
    optimizer.add_param_group({**added[0], "algorithm": "adamw"})
    advance(optimizer, range(3, 4))


def test_polar_express_is_for_more_steps_than_it_has() -> None:
    """Further steps take the last triple."""
    given = [*POLAR_EXPRESS, POLAR_EXPRESS[-1], POLAR_EXPRESS[-1]]
    got, expected = (make(ns_coefficients=each, ns_steps=len(given)) for each in ("polar_express", given))
    assert_equal(advance(got, range(2)), advance(expected, range(2)))
