"""The kernels equal the reference step bit for bit: every rule, codec, dtype, instruction set and thread count.

Rules and codecs meet as :data:`helpers.RULES_AND_CODECS` has it, and instruction sets and thread counts take turns.
"""

from __future__ import annotations

from itertools import cycle, product

import pytest
import torch

from helpers import (
    CODEC_NAMES,
    EACH_RULE_AND_CODEC,
    EIGHT_BIT,
    RULES,
    RULES_AND_CODECS,
    USUAL_RULES,
    Named,
    ReferenceOptimizer,
    Shape,
    at_odd_offset,
    everything,
    single,
    step,
)
from kernel_problem import DTYPES, FEW_SHAPES, HUGE, STEPS, TARGETS, VARIANTS, compare, gradients, make, start, using
from ranks.snapshot import assert_same, snapshot
from shardopt.kernels import dispatch
from shardopt.kernels.dispatch import CpuCall
from slow_cases import slow
from step_tables import PIECES, Problem
from weight_formats import ALL, BF16, FP16, FP32

pytestmark = pytest.mark.usefixtures("one_thread")


#: Usual rules with the dtypes that are compiled with them and a codec, on an instruction set that has such kernels (the
#: portable one has none); others with float32, in which the last bit of an update shows; and all dtypes with one rule
#: and codec.
OTHERS = [pair for pair in RULES_AND_CODECS if pair[0] not in (*USUAL_RULES, "repaid_adamw")]
COMPILED = [(*pair, dtypes) for pair in RULES_AND_CODECS if pair not in OTHERS for dtypes in ("fp32", "bf16")]
IN_TURN = [(*pair, "fp32") for pair in OTHERS]
IN_TURN += [("amsgrad", "dynamic8", dtypes) for dtypes in DTYPES]


@pytest.mark.parametrize(
    ("rule", "codec", "dtypes", "variants"),
    [
        *((*case, VARIANTS[:1]) for case in COMPILED),
        *((*case, [variant]) for case, variant in zip(IN_TURN, cycle(VARIANTS), strict=False)),
        *(("adamw", "log8", dtypes, VARIANTS) for dtypes in DTYPES),
        *slow(product(RULES, CODEC_NAMES, DTYPES, [VARIANTS])),
    ],
)
def test_equal_the_reference(rule: str, codec: str, dtypes: str, variants: list[tuple[str, int]]) -> None:
    param_dtype, gradient_dtype = DTYPES[dtypes]
    few = [] if rule in USUAL_RULES else [FEW_SHAPES]
    steps = [gradients(t, gradient_dtype, *few) for t in range(1, STEPS + 1)]
    ((_, optimizer), *_) = compare(rule, codec, start(param_dtype, *few), steps, variants)
    assert optimizer.nonfinite_count > 0


@pytest.mark.parametrize("rule", RULES)
def test_many_steps_of_steady_gradients(rule: str) -> None:
    """Branches that first steps and gradients around zero do not reach: RAdam's rectified rate, the least variance."""
    shapes = ((3, 257),)
    steps = [
        {name: 1 + 1e-3 * gradient for name, gradient in gradients(t + 10, FP32, shapes).items()} for t in range(14)
    ]
    compare(rule, "fp32", start(FP32, shapes), steps, VARIANTS[:1])


@pytest.mark.parametrize(("rule", "codec"), EACH_RULE_AND_CODEC)
def test_nan_propagates_whatever_its_sign(rule: str, codec: str) -> None:
    """Weights are the same numbers on every instruction set, and NaN in the same places."""
    shapes, found = ((3, 257), (2, 31)), []
    for target, sign in product(TARGETS, (1.0, -1.0)):
        params, optimizer = make(rule, codec, start(FP32, shapes), nonfinite="propagate")
        with using(target, threads=1):
            for t in range(11, 15):
                bad = {name: gradient.clone() for name, gradient in gradients(t, FP32, shapes).items()}
                if t == 12:
                    for gradient in bad.values():
                        gradient[1, 3:9] = torch.tensor(torch.nan).copysign(torch.tensor(sign))
                step(optimizer, params, bad)
        found.append({name: torch.where(param.isnan(), torch.nan, param.detach()) for name, param in params.items()})
    for other in found[1:]:
        assert_same(other, found[0])
    assert all(weights[1, 3:9].isnan().all() for weights in found[0].values())
    if rule not in ("lamb", "lars", "stable_adamw"):  # whose rates depend on all elements
        assert all(weights.isfinite().any() for weights in found[0].values())


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_propagate_equals_the_reference_on_finite_gradients(codec: str) -> None:
    steps = [gradients(t, FP32, FEW_SHAPES) for t in (1, 2, 4)]
    compare("adamw", codec, start(FP32, FEW_SHAPES), steps, VARIANTS[::2], nonfinite="propagate")


@pytest.mark.parametrize(
    ("block_size", "codec", "rule"),
    [
        *((*case, "adamw") for case in product([16, 32, 256, 1024, 4096], EIGHT_BIT)),
        *((size, codec, rule) for size, rule in ((16, "repaid_adamw"), (4096, "momentum")) for codec in EIGHT_BIT),
    ],
)
def test_block_sizes(rule: str, codec: str, block_size: int) -> None:
    shapes = ((2, 5000), (3, 257), (2, 4096), (2, 4097))
    steps = [gradients(t, FP32, shapes) for t in (1, 3)]
    compare(rule, codec, start(FP32, shapes), steps, [(t, 1) for t in TARGETS], block_size=block_size)


@pytest.mark.parametrize(
    ("codec", "weights"), [("fp32", "bf16"), ("log8", "bf16"), ("log8", "bf16 stochastic"), ("companded8", "fp16 24")]
)
def test_more_than_a_million_elements_on_one_and_two_threads(codec: str, weights: str) -> None:
    dtype, options = ALL[weights]
    shapes: tuple[Shape, ...] = ((1_000_003,), (4001, 257)) if codec == "fp32" else ((1, 1_000_003), (4001, 257))
    compare("adamw", codec, start(dtype, shapes), [gradients(3, dtype, shapes)], VARIANTS[:2], **options)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("codec", "dtypes"),  # 16-bit codes begin at even addresses
    [("log8", "bf16"), ("companded8", "fp32"), ("dynamic8", "fp16-fp32"), ("bf16", "fp16-fp32")],
)
def test_unaligned_storage(codec: str, dtypes: str, target: str) -> None:
    param_dtype, gradient_dtype = DTYPES[dtypes]
    initial = start(param_dtype)
    aligned, optimizer = make("adamw", codec, initial)
    odd = {name: torch.nn.Parameter(at_odd_offset(value)) for name, value in initial.items()}
    odd_optimizer = RULES["adamw"].make(list(odd.values()), codec=codec, min_quantized_numel=0)
    with using(target, threads=2):
        for t in range(1, STEPS + 1):
            grads = gradients(t, gradient_dtype)
            step(optimizer, aligned, grads)
            step(odd_optimizer, odd, {name: at_odd_offset(g, 1) for name, g in grads.items()})
            for state in odd_optimizer.state.values():
                state.update({entry: at_odd_offset(value, 5) for entry, value in state.items()})
    assert_same(snapshot(odd, odd_optimizer), snapshot(aligned, optimizer))


#: Gradients so small that a moment is subnormal, and which.
TINY = {"adamw": (1e-20, "exp_avg_sq"), "lion": (1e-39, "exp_avg"), "momentum": (1e-40, "momentum_buffer")}


@pytest.mark.parametrize("flush_denormal", [False, True])
@pytest.mark.parametrize(
    ("rule", "codec"), [*product(TINY, ("log8", "fp32")), *(("adamw", c) for c in ("dynamic8", "companded16", "bf16"))]
)
def test_subnormal_state(rule: str, codec: str, flush_denormal: bool) -> None:
    shapes, (scale, moment) = ((257,), (3, 257), (4, 33)), TINY[rule]
    steps = [gradients(t, FP32, shapes, scale) for t in (1, 2)]
    if not torch.set_flush_denormal(flush_denormal):
        pytest.skip("this CPU cannot flush denormals")
    try:
        found = [make(rule, codec, start(FP32, shapes), weight_decay=0.0) for _ in VARIANTS]
        for (params, optimizer), variant in zip(found, VARIANTS, strict=True):
            with using(*variant):
                for gradient in steps:
                    step(optimizer, params, gradient)
    finally:
        torch.set_flush_denormal(False)
    oracle = ReferenceOptimizer(*make(rule, codec, start(FP32, shapes), weight_decay=0.0))
    for gradient in steps:
        oracle.step(gradient)
    for params, optimizer in found:
        assert_same(snapshot(params, optimizer), oracle.snapshot())
    if codec == "fp32":
        for state in found[0][1].state.values():
            magnitude = state[moment].abs()
            subnormal = (magnitude > 0) & (magnitude < torch.finfo(FP32).smallest_normal)
            assert subnormal.sum() > magnitude.numel() / 4


@pytest.mark.parametrize(
    ("rule", "codec", "dtype"),
    [
        *(("adamw", "log8", FP32), ("lion", "fp32", FP16), ("momentum", "dynamic8", FP32)),
        *(("radam", "log8", FP16), ("lars", "bf16", FP32)),
    ],
    ids=str,
)
def test_loss_scale_and_maximize(rule: str, codec: str, dtype: torch.dtype) -> None:
    params, optimizer = make(rule, codec, start(dtype, FEW_SHAPES), maximize=True)
    oracle = ReferenceOptimizer(params, optimizer)
    optimizer.grad_scale = torch.tensor(3000.0)
    optimizer.found_inf = torch.tensor(0.0)
    with using(TARGETS[0], threads=1):
        for t in range(1, STEPS + 1):
            step(optimizer, params, gradients(t, dtype, FEW_SHAPES))
            oracle.step(gradients(t, dtype, FEW_SHAPES), gradient_scale=-1 / 3000.0)
    assert_same(snapshot(params, optimizer), oracle.snapshot())


#: By their places in a parameter. Coupled decay of them overflows a second moment, a sum, or nothing.
LARGE_WEIGHTS = {0: 1e24, 2: 3e38, 40: -1e21, 129: -3e38, 130: 9.2e18}


def replaced(values: Named, by_place: dict[int, float]) -> Named:
    found = {name: value.clone() for name, value in values.items()}
    for value in found.values():
        for at, number in by_place.items():
            if at < value.numel():
                value.view(-1)[at] = number
    return found


@pytest.mark.parametrize(
    ("rule", "codec", "overflows", "dtype", "target"),
    [
        (*pair, overflows, *how)
        for overflows in ("gradients", "weights")
        for pair, how in zip(EACH_RULE_AND_CODEC, cycle(product((FP32, BF16), TARGETS)), strict=False)
    ],
    ids=str,
)
def test_what_overflows(rule: str, codec: str, overflows: str, dtype: torch.dtype, target: str) -> None:
    """Gradients whose squares or sums are infinite, and weights whose decay is."""
    initial, steps = start(dtype, FEW_SHAPES), [gradients(t, dtype, FEW_SHAPES) for t in (1, 2, 4)]
    if overflows == "gradients":
        steps[1] = replaced(steps[1], HUGE)
    else:
        initial = replaced(initial, LARGE_WEIGHTS)
    ((params, optimizer),) = compare(rule, codec, initial, steps, [(target, 1)])
    # The trust ratios of such weights are infinite, and decoupled Prodigy's estimate is as large as they are.
    if overflows == "weights" and rule not in ("lamb", "lars", "decoupled_prodigy"):
        assert all(value.isfinite().all() for value in snapshot(params, optimizer).values())


@pytest.mark.parametrize("codec", ["log8", "dynamic8"])
@pytest.mark.parametrize(("rule", "options"), [("prodigy", {"d0": 8.0, "d_coef": 1.0}), ("adan", {})])
def test_gradients_that_overflow_once_they_are_multiplied(rule: str, options: dict[str, float], codec: str) -> None:
    """By Prodigy's d, or as Adan's difference from the last one."""
    steps = [{name: g.clone() for name, g in gradients(t, FP32, FEW_SHAPES).items()} for t in (1, 2, 4, 5)]
    for sign, huge in ((1, steps[1]), (-1, steps[2])):
        for gradient in huge.values():
            gradient.view(-1)[::7] = sign * 2.0**62
    stepped = compare(rule, codec, start(FP32, FEW_SHAPES), steps, [(t, 1) for t in TARGETS], **options)
    params, optimizer = stepped[0]
    assert optimizer.nonfinite_count > 0
    assert all(value.isfinite().all() for value in snapshot(params, optimizer).values())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_rounding_to_half_precision(dtype: torch.dtype, target: str) -> None:
    """Everything between neighbours: the values themselves, quarters, midpoints, and just beside midpoints."""
    exact = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    exact = exact[exact.abs() < 0.99 * torch.finfo(dtype).max].sort().values
    low, high = exact[:-1].double(), exact[1:].double()
    for share in (0.0, 0.25, 0.4999, 0.5, 0.5001, 0.75):
        wanted = (low + share * (high - low)).float()
        param = torch.nn.Parameter(torch.zeros_like(wanted, dtype=dtype))
        optimizer = RULES["sgd"].make([param], lr=1.0, weight_decay=0.0)
        with using(target, threads=1):
            step(optimizer, {"": param}, {"": -wanted})
        assert torch.equal(param.detach().float(), wanted.to(dtype).float())


def test_a_table_with_a_cut_block_of_two_blocks_is_refused() -> None:
    """Scales and extremes of the second one would lie beyond the end."""
    problem = Problem("adam", "log8", "bf16", PIECES["fragment"], 32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"kernel row 0: got a cut block of 45 columns from 168, .* one block of 32"):
        problem.run(lambda _, *tables: CpuCall(*tables), steps=1)


def test_an_unknown_instruction_set_is_refused() -> None:
    _, optimizer = make("adamw", "log8", start(FP32, ((4, 33),)))
    param, _ = single(optimizer)
    param.grad = torch.ones_like(param)
    before = everything(optimizer)
    with dispatch.use_cpu_target("abacus"), pytest.raises(ValueError, match="abacus"):
        optimizer.step()
    assert_same({"0": everything(optimizer)["0"]}, {"0": before["0"]})
