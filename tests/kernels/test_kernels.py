"""The kernels equal the reference step bit for bit: every rule, codec, dtype, instruction set and thread count."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import pytest
import torch
from torch import Tensor

from helpers import (
    ALL_RULES_AND_CODECS,
    CODEC_NAMES,
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
from kernel_problem import DTYPES, FEW_SHAPES, HUGE, STEPS, gradients, make, start, using
from ranks.snapshot import Snapshot, assert_same, snapshot
from shardopt import _C
from shardopt.kernels import dispatch
from shardopt.kernels.dispatch import CpuCall
from shardopt.optim import ShardedOptimizer
from slow_cases import slow
from step_tables import PIECES, Problem
from weight_formats import BF16, FP16, FP32

VARIANTS = [(target, threads) for target in _C.cpu_targets() for threads in (1, 2)]
PRIME = 1_000_003

pytestmark = pytest.mark.usefixtures("one_thread")


@lru_cache(maxsize=2)
def expected(rule: str, codec: str, dtypes: str) -> tuple[list[Snapshot], int]:
    """The reference's parameters and state after each step, and how many elements it skipped."""
    param_dtype, gradient_dtype = DTYPES[dtypes]
    oracle = ReferenceOptimizer(*make(rule, codec, start(param_dtype)))
    found = []
    for t in range(1, STEPS + 1):
        oracle.step(gradients(t, gradient_dtype))
        found.append(oracle.snapshot())
    return found, oracle.nonfinite


#: Unusual rules in all dtypes, of which each of their two codecs has some, usual rules and codecs in two, and variants
#: in turn.
BY_DEFAULT = [
    (rule, codec, dtypes, VARIANTS[(place + number) % len(VARIANTS)])
    for place, (rule, codec) in enumerate(RULES_AND_CODECS)
    for number, dtypes in enumerate(DTYPES)
    if ((place - number) % len(DTYPES) < 2 if rule in USUAL_RULES else (place // 2 + number) % 2 == (codec == "log8"))
]


@pytest.mark.parametrize(
    ("rule", "codec", "dtypes", "variant"),
    [*BY_DEFAULT, *slow(product(RULES, CODEC_NAMES, DTYPES, VARIANTS), besides=BY_DEFAULT)],
)
def test_equal_the_reference(rule: str, codec: str, dtypes: str, variant: tuple[str, int]) -> None:
    (param_dtype, gradient_dtype), (target, threads) = DTYPES[dtypes], variant
    params, optimizer = make(rule, codec, start(param_dtype))
    actual, nonfinite = expected(rule, codec, dtypes)
    with using(target, threads):
        for t in range(1, STEPS + 1):
            step(optimizer, params, gradients(t, gradient_dtype))
            assert_same(snapshot(params, optimizer), actual[t - 1])
    assert optimizer.nonfinite_count == nonfinite > 0


def compare(
    rule: str,
    codec: str,
    initial: Named,
    steps: list[Named],
    variants: list[tuple[str, int]],
    **options: object,
) -> None:
    """Demands the reference's bits after these steps of every variant."""
    oracle = ReferenceOptimizer(*make(rule, codec, initial, **options))
    for gradient in steps:
        oracle.step(gradient)
    wanted = oracle.snapshot()
    for target, threads in variants:
        params, optimizer = make(rule, codec, initial, **options)
        with using(target, threads):
            for gradient in steps:
                step(optimizer, params, gradient)
        assert_same(snapshot(params, optimizer), wanted)


@pytest.mark.parametrize("codec", ["log8", "fp32"])
@pytest.mark.parametrize("rule", RULES)
def test_many_steps_of_steady_gradients(rule: str, codec: str) -> None:
    """Branches that first steps and gradients around zero do not reach: RAdam's rectified rate, the least variance."""
    shapes = ((3, 257), (5,))
    steps = [
        {name: 1 + 1e-3 * gradient for name, gradient in gradients(t + 10, FP32, shapes).items()} for t in range(14)
    ]
    compare(rule, codec, start(FP32, shapes), steps, [(_C.cpu_targets()[0], 1)])


@pytest.mark.parametrize("codec", ["log8", "companded8", "fp32"])
@pytest.mark.parametrize("rule", RULES)
def test_nan_propagates(rule: str, codec: str) -> None:
    params, optimizer = make(rule, codec, start(FP32, ((3, 257),)), nonfinite="propagate")
    for t in range(1, 4):
        gradient = gradients(t + 10, FP32, ((3, 257),))
        if t == 3:
            for value in gradient.values():
                value[1, 100] = torch.nan
        step(optimizer, params, gradient)
    for param in params.values():
        assert torch.isnan(param[1, 100])


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("rule", RULES)
def test_the_sign_of_nan_decides_nothing(rule: str, codec: str) -> None:
    """Weights are the same numbers on every instruction set, and NaN in the same places."""
    shapes, found = ((3, 257), (2, 31)), []
    for target, sign in product(_C.cpu_targets(), (1.0, -1.0)):
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
    assert all(weights.isnan().any() for weights in found[0].values())
    if rule not in ("lamb", "lars", "stable_adamw"):  # whose rates depend on all elements
        assert all(weights.isfinite().any() for weights in found[0].values())


@pytest.mark.parametrize("block_size", [16, 32, 256, 1024, 4096])
@pytest.mark.parametrize("codec", EIGHT_BIT)
@pytest.mark.parametrize("rule", ["adamw", "momentum", "repaid_adamw"])
def test_block_sizes(rule: str, codec: str, block_size: int) -> None:
    shapes = ((2, 5000), (3, 257), (2, 4096), (2, 4097))
    steps = [gradients(t, FP32, shapes) for t in (1, 3, 4)]
    compare(rule, codec, start(FP32, shapes), steps, [(t, 1) for t in _C.cpu_targets()], block_size=block_size)


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_more_than_a_million_elements_on_one_and_two_threads(codec: str) -> None:
    shapes: tuple[Shape, ...] = ((PRIME,),) if codec == "fp32" else ((1, PRIME),)
    steps = [gradients(t, BF16, shapes) for t in (1, 3)]
    compare("adamw", codec, start(BF16, shapes), steps, [(_C.cpu_targets()[0], threads) for threads in (1, 2)])


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("rule", RULES)
def test_more_than_a_million_elements_everywhere(rule: str, codec: str, dtypes: str) -> None:
    param_dtype, gradient_dtype = DTYPES[dtypes]
    shapes = ((1, PRIME), (7919, 130), (4001, 257))
    steps = [gradients(t, gradient_dtype, shapes) for t in (1, 3)]
    compare(rule, codec, start(param_dtype, shapes), steps, VARIANTS)


@pytest.mark.parametrize("target", _C.cpu_targets())
@pytest.mark.parametrize("dtypes", ["fp32", "bf16", "fp16-fp32"])
@pytest.mark.parametrize("codec", [*EIGHT_BIT, "bf16", "fp32"])  # 16-bit codes begin at even addresses
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


def test_nothing_beyond_a_view_is_written() -> None:
    buffers = {shape: torch.full((1000,), 7.0, dtype=BF16) for shape in ((1, 33), (5, 130), (3, 257))}
    params = [torch.nn.Parameter(b[101 : 101 + s[0] * s[1]].view(s)) for s, b in buffers.items()]
    optimizer = RULES["adamw"].make(params, min_quantized_numel=0)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    for (rows, cols), buffer in buffers.items():
        assert (buffer[:101] == 7).all()
        assert (buffer[101 : 101 + rows * cols] != 7).all()
        assert (buffer[101 + rows * cols :] == 7).all()


#: Gradients so small that Adam's second moment, or Lion's momentum, is subnormal.
TINY = {"adamw": 1e-20, "lion": 1e-39, "momentum": 1e-40}
TINY_SHAPES: tuple[Shape, ...] = ((257,), (3, 257), (4, 33))


def make_tiny(rule: str, codec: str) -> tuple[Named, ShardedOptimizer]:
    return make(rule, codec, start(FP32, TINY_SHAPES), weight_decay=0.0)


@pytest.mark.parametrize("flush_denormal", [False, True])
@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("rule", TINY)
def test_subnormal_state(rule: str, codec: str, flush_denormal: bool) -> None:
    steps = [gradients(t, FP32, TINY_SHAPES, TINY[rule]) for t in (1, 2)]
    oracle = ReferenceOptimizer(*make_tiny(rule, codec))
    for gradient in steps:
        oracle.step(gradient)
    for target, threads in VARIANTS:
        params, optimizer = make_tiny(rule, codec)
        if not torch.set_flush_denormal(flush_denormal):
            pytest.skip("this CPU cannot flush denormals")
        try:
            with using(target, threads):
                for gradient in steps:
                    step(optimizer, params, gradient)
        finally:
            torch.set_flush_denormal(False)
        assert_same(snapshot(params, optimizer), oracle.snapshot())


def test_subnormal_state_is_one() -> None:
    """The test above tests what it says: there are subnormal moments."""
    for rule, scale in TINY.items():
        params, optimizer = make_tiny(rule, "fp32")
        step(optimizer, params, gradients(1, FP32, TINY_SHAPES, scale))
        moment = "exp_avg_sq" if rule == "adamw" else "exp_avg" if rule == "lion" else "momentum_buffer"
        smallest = torch.finfo(FP32).smallest_normal
        for state in optimizer.state.values():
            magnitude = state[moment].abs()
            assert ((magnitude > 0) & (magnitude < smallest)).sum() > magnitude.numel() / 4


@pytest.mark.parametrize(("rule", "codec"), [*RULES_AND_CODECS, *slow(ALL_RULES_AND_CODECS, besides=RULES_AND_CODECS)])
def test_loss_scale_and_maximize(rule: str, codec: str) -> None:
    initial = start(FP16, FEW_SHAPES)
    params, optimizer = make(rule, codec, initial, maximize=True)
    oracle = ReferenceOptimizer(params, optimizer)
    optimizer.grad_scale = torch.tensor(3000.0)
    optimizer.found_inf = torch.tensor(0.0)
    with using(_C.cpu_targets()[0], threads=1):
        for t in range(1, STEPS + 1):
            step(optimizer, params, gradients(t, FP16, FEW_SHAPES))
            oracle.step(gradients(t, FP16, FEW_SHAPES), gradient_scale=-1 / 3000.0)
    assert_same(snapshot(params, optimizer), oracle.snapshot())


#: Each rule and codec with one of two dtypes, in turn.
IN_TURN = [(*pair, (FP32, BF16)[(place + place // 6) % 2]) for place, pair in enumerate(RULES_AND_CODECS)]
IN_TWO_DTYPES = [*IN_TURN, *slow(product(RULES, CODEC_NAMES, (FP32, BF16)), besides=IN_TURN)]


@pytest.mark.parametrize(("rule", "codec", "dtype"), IN_TWO_DTYPES, ids=str)
def test_gradients_that_overflow(rule: str, codec: str, dtype: torch.dtype) -> None:
    huge = {name: gradient.clone() for name, gradient in gradients(2, dtype, FEW_SHAPES).items()}
    for gradient in huge.values():
        for at, value in HUGE.items():
            if at < gradient.numel():
                gradient.view(-1)[at] = value
    steps = [gradients(1, dtype, FEW_SHAPES), huge, gradients(4, dtype, FEW_SHAPES)]
    compare(rule, codec, start(dtype, FEW_SHAPES), steps, [(target, 1) for target in _C.cpu_targets()])


#: By their places in a parameter. Coupled decay of them overflows a second moment, a sum, or nothing.
LARGE_WEIGHTS = {0: 1e24, 2: 3e38, 40: -1e21, 129: -3e38, 130: 9.2e18}


@pytest.mark.parametrize(("rule", "codec", "dtype"), IN_TWO_DTYPES, ids=str)
def test_weights_whose_decay_overflows(rule: str, codec: str, dtype: torch.dtype) -> None:
    initial = {name: value.clone() for name, value in start(dtype, FEW_SHAPES).items()}
    for value in initial.values():
        for at, weight in LARGE_WEIGHTS.items():
            if at < value.numel():
                value.view(-1)[at] = weight
    steps = [gradients(t, dtype, FEW_SHAPES) for t in (1, 2, 4)]
    compare(rule, codec, initial, steps, [(target, 1) for target in _C.cpu_targets()])
    params, optimizer = make(rule, codec, initial)
    with using(_C.cpu_targets()[0], threads=1):
        for gradient in steps:
            step(optimizer, params, gradient)
    # The trust ratios of such weights are infinite, and decoupled Prodigy's estimate is as large as they are.
    if rule not in ("lamb", "lars", "decoupled_prodigy"):
        assert all(value.isfinite().all() for value in snapshot(params, optimizer).values())


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize(("rule", "options"), [("prodigy", {"d0": 8.0, "d_coef": 1.0}), ("adan", {})])
def test_gradients_that_overflow_once_they_are_multiplied(rule: str, options: dict[str, float], codec: str) -> None:
    """By Prodigy's d, or as Adan's difference from the last one."""
    initial = start(FP32, FEW_SHAPES)
    steps = [{name: g.clone() for name, g in gradients(t, FP32, FEW_SHAPES).items()} for t in (1, 2, 4, 5)]
    for sign, huge in ((1, steps[1]), (-1, steps[2])):
        for gradient in huge.values():
            gradient.view(-1)[::7] = sign * 2.0**62
    compare(rule, codec, initial, steps, [(target, 1) for target in _C.cpu_targets()], **options)
    params, optimizer = make(rule, codec, initial, **options)
    with using(_C.cpu_targets()[0], threads=1):
        for gradient in steps:
            step(optimizer, params, gradient)
    assert optimizer.nonfinite_count > 0
    assert all(value.isfinite().all() for value in snapshot(params, optimizer).values())


def half_precision_values(dtype: torch.dtype) -> Tensor:
    """All finite values."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return every[every.isfinite()]


@pytest.mark.parametrize("target", _C.cpu_targets())
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_rounding_to_half_precision(dtype: torch.dtype, target: str) -> None:
    """Everything between neighbours: the values themselves, quarters, midpoints, and just beside midpoints."""
    exact = half_precision_values(dtype).float()
    exact = exact[exact.abs() < 0.99 * torch.finfo(dtype).max].sort().values
    low, high = exact[:-1].double(), exact[1:].double()
    for share in (0.0, 0.25, 0.4999, 0.5, 0.5001, 0.75):
        wanted = (low + share * (high - low)).float()
        param = torch.nn.Parameter(torch.zeros_like(wanted, dtype=dtype))
        optimizer = RULES["sgd"].make([param], lr=1.0, weight_decay=0.0)
        with using(target, threads=1):
            step(optimizer, {"": param}, {"": -wanted})
        assert torch.equal(param.detach().float(), wanted.to(dtype).float())


@pytest.mark.parametrize("target", _C.cpu_targets())
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_step_of_nothing_keeps_every_half_precision_value(dtype: torch.dtype, target: str) -> None:
    param = torch.nn.Parameter(half_precision_values(dtype))
    before = param.detach().clone()
    optimizer = RULES["sgd"].make([param], lr=0.0, weight_decay=0.0)
    with using(target, threads=1):
        step(optimizer, {"": param}, {"": torch.ones_like(param)})
    assert torch.equal(param.detach().view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_propagate_equals_the_reference_on_finite_gradients(codec: str) -> None:
    steps = [gradients(t, FP32) for t in (1, 2, 4)]
    compare("adamw", codec, start(FP32), steps, VARIANTS, nonfinite="propagate")


def test_a_table_with_a_cut_block_of_two_blocks_is_refused() -> None:
    """Scales and extremes of the second one would lie beyond the end."""
    problem = Problem("adam", "log8", "bf16", PIECES["fragment"], 32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"kernel row 0: got a cut block of 45 columns from 168, .* one block of 32"):
        problem.run(lambda _, tables: CpuCall(tables), steps=1)


def test_an_unknown_instruction_set_is_refused() -> None:
    _, optimizer = make("adamw", "log8", start(FP32, ((4, 33),)))
    param, _ = single(optimizer)
    param.grad = torch.ones_like(param)
    before = everything(optimizer)
    with dispatch.use_cpu_target("abacus"), pytest.raises(ValueError, match="abacus"):
        optimizer.step()
    assert_same({"0": everything(optimizer)["0"]}, {"0": before["0"]})
