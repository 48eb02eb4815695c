"""Weights of more precision than their dtype: low bits of a master weight in the state, and stochastic rounding."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from helpers import (
    CODEC_NAMES,
    RULES,
    RULES_AND_CODECS,
    USUAL_RULES,
    Named,
    ReferenceOptimizer,
    everything,
    single,
    step,
)
from kernel_problem import STEPS, gradients, make, start, using
from ranks.layouts import values
from ranks.snapshot import Snapshot, assert_same, snapshot
from shardopt import _C
from shardopt.kernels.weights import join_weight, split_weight
from slow_cases import slow
from weight_formats import (
    BF16,
    FORMATS,
    FP16,
    FP32,
    LOW,
    every_mantissa,
    int_bits,
    integers,
    master_weights,
    special_values,
)

each_master = pytest.mark.parametrize(("dtype", "bits"), [(BF16, 24), (BF16, 32), (FP16, 24), (FP16, 32)], ids=str)

pytestmark = pytest.mark.usefixtures("one_thread")


def compare(rule: str, codec: str, initial: Named, steps: list[Named], **options: Any) -> None:
    """Demands the reference's bits after each step on every instruction set, on one or two threads."""
    oracle = ReferenceOptimizer(*make(rule, codec, initial, **options))
    wanted: list[Snapshot] = []
    for gradient in steps:
        oracle.step(gradient)
        wanted.append(oracle.snapshot())
    for index, target in enumerate(_C.cpu_targets()):
        params, optimizer = make(rule, codec, initial, **options)
        with using(target, threads=1 + index % 2):
            for gradient, expected in zip(steps, wanted, strict=True):
                step(optimizer, params, gradient)
                assert_same(snapshot(params, optimizer), expected)
        assert optimizer.nonfinite_count == oracle.nonfinite > 0


GRADIENTS = ("as the weights", "fp32")
#: Each rule and codec with one format and kind of gradients, in turn; the test below has the others, in few shapes.
BY_DEFAULT = [
    (*pair, list(FORMATS)[place % len(FORMATS)], GRADIENTS[place % 2]) for place, pair in enumerate(RULES_AND_CODECS)
]
#: Usual rules with all codecs, others with log8.
SMALL = [(rule, codec) for rule in RULES for codec in CODEC_NAMES if rule in USUAL_RULES or codec == "log8"]


@pytest.mark.parametrize(
    ("rule", "codec", "weights", "gradient"),
    [*BY_DEFAULT, *slow(product(RULES, CODEC_NAMES, FORMATS, GRADIENTS), besides=BY_DEFAULT)],
)
def test_equal_the_reference(rule: str, codec: str, weights: str, gradient: str) -> None:
    dtype, options = FORMATS[weights]
    gradient_dtype = FP32 if gradient == "fp32" else dtype
    steps = [gradients(t, gradient_dtype) for t in range(1, STEPS + 1)]
    compare(rule, codec, start(dtype), steps, **options)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize(("rule", "codec"), [*SMALL, *slow(product(RULES, CODEC_NAMES), besides=SMALL)])
def test_each_kernel_equals_the_reference(rule: str, codec: str, weights: str) -> None:
    """Rule, codec and weights choose the kernel: a few shapes and steps for all of them, NaN and Inf among them."""
    shapes = ((129,), (3, 130), (2, 257))
    dtype, options = FORMATS[weights]
    compare(rule, codec, start(dtype, shapes), [gradients(t, dtype, shapes) for t in (1, 3)], **options)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("block_size", [16, 64, 4096])
@pytest.mark.parametrize("codec", ["log8", "dynamic8"])
def test_block_sizes(codec: str, block_size: int, weights: str) -> None:
    shapes = ((2, 5000), (3, 257), (2, 4097))
    dtype, options = FORMATS[weights]
    steps = [gradients(t, dtype, shapes) for t in (1, 3)]
    compare("adamw", codec, start(dtype, shapes), steps, block_size=block_size, **options)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("codec", ["log8", "fp32"])
def test_many_elements_on_two_threads(codec: str, weights: str) -> None:
    shapes = ((1, 100_003), (397, 257), (70_001,))
    dtype, options = FORMATS[weights]
    compare("adamw", codec, start(dtype, shapes), [gradients(t, dtype, shapes) for t in (1, 3)], **options)


def written(x: Tensor, target: str, dtype: torch.dtype = BF16, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The weights that a kernel writes: 0 - 1 * -x."""
    param = Parameter(torch.zeros(x.shape, dtype=dtype))
    optimizer = RULES["sgd"].make([param], lr=1.0, weight_decay=0.0, nonfinite="propagate", **options)
    with using(target, threads=2):
        step(optimizer, {"": param}, {"": -x})
    return param.detach(), optimizer.state[param]


@each_master
def test_kernels_split_as_the_formulas(dtype: torch.dtype, bits: int) -> None:
    few = {BF16: (254, 0), FP16: (142, 112, 109)}[dtype]
    for x in [every_mantissa(127)[::7], *(-every_mantissa(exponent)[1::41] for exponent in few), special_values()]:
        kernels_split(x[x != 0], dtype, bits)  # 0 - -0 is 0


@pytest.mark.slow
@each_master
def test_kernels_split_every_mantissa(dtype: torch.dtype, bits: int) -> None:
    """Of exponents at which something changes, and some between."""
    exponents = {BF16: (0, 1, 64, 127, 253, 254), FP16: (64, 101, 102, 103, 108, 109, 112, 113, 142, 143)}[dtype]
    for place, exponent in enumerate(exponents):
        x = every_mantissa(exponent) * (-1) ** place
        kernels_split(x[x != 0], dtype, bits)


def kernels_split(weights: Tensor, dtype: torch.dtype, bits: int) -> None:
    """Compares what all instruction sets write with the formulas."""
    for x in weights.split(2**17):
        high, low = split_weight(x, LOW[bits], dtype)
        for target in _C.cpu_targets():
            param, state = written(x, target, dtype, master_weight_bits=bits)
            found = integers(state["master_low_bits"], bits)
            assert torch.equal(int_bits(param.abs()), int_bits(high.abs()))
            assert torch.equal(param.signbit()[~x.isnan()], high.signbit()[~x.isnan()])
            assert torch.equal(found.int(), low)


@pytest.mark.parametrize("target", _C.cpu_targets())
@each_master
def test_a_step_of_nothing_keeps_every_weight(dtype: torch.dtype, bits: int, target: str) -> None:
    """Each parameter that is a number with low bits all over their range."""
    high = torch.arange(2**16).to(torch.int32).to(torch.int16).view(dtype)
    high = high[high.isfinite()][:, None]
    half = 2 ** (LOW[bits] - 1)
    low = torch.arange(-half, half, half // 64)
    param = Parameter(high.expand(-1, len(low)).contiguous())
    optimizer = RULES["sgd"].make([param], lr=0.0, weight_decay=0.0, master_weight_bits=bits)
    step(optimizer, {"": param}, {"": torch.ones_like(param)})
    low = torch.where((high == 0) & (low < 0), 0, low)  # no weight is split so
    low = low.to(torch.int8) if bits == 24 else low.to(torch.int16).unsqueeze(-1).view(torch.int8)
    optimizer.state[param]["master_low_bits"].copy_(low)
    before = everything(optimizer)
    with using(target, threads=2):
        step(optimizer, {"": param}, {"": torch.ones_like(param)})
    optimizer.state[param]["step"].fill_(1)
    assert_same(everything(optimizer), before)


#: Each rule and codec with one dtype, in turn.
IN_TURN = [(*pair, (BF16, FP16)[(place + place // 6) % 2]) for place, pair in enumerate(RULES_AND_CODECS)]


@pytest.mark.parametrize(
    ("rule", "codec", "dtype"),
    [*IN_TURN, *slow(product(RULES, CODEC_NAMES, [BF16, FP16]), besides=IN_TURN)],
    ids=str,
)
def test_32_bits_are_float32(rule: str, codec: str, dtype: torch.dtype) -> None:
    """After every step the weights and the moments are those of float32 parameters, and the parameter is the nearest.

    For float16 so long as the weights are far enough from zero, beyond 2^-17.
    """
    initial = start(dtype)
    if dtype == FP16:
        initial = {name: torch.where(x.signbit(), x - 0.5, x + 0.5) for name, x in initial.items()}
    params, optimizer = make(rule, codec, initial, master_weight_bits=32)
    wide, expected = make(rule, codec, {name: x.float() for name, x in initial.items()})
    for t in range(1, STEPS + 3):
        grads = gradients(t, dtype)
        with using(_C.cpu_targets()[0], threads=1):
            step(optimizer, params, grads)
            step(expected, wide, {name: gradient.float() for name, gradient in grads.items()})
        for name, param in params.items():
            assert torch.equal(int_bits(master_weights(optimizer, param)), int_bits(wide[name].detach()))
            high, _ = split_weight(wide[name].detach(), 16, dtype)
            assert torch.equal(int_bits(param.detach()), int_bits(high))
            state = {key: x for key, x in optimizer.state[param].items() if key != "master_low_bits"}
            assert_same(state, expected.state[wide[name]])


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_24_bits_are_nearer_to_float32_than_16(dtype: torch.dtype) -> None:
    """Lion's equal steps of 1/50 of a last place: the parameter alone stands still."""
    found = {}
    last_place = torch.finfo(dtype).eps / 2  # below 1
    for bits in (None, 24, 32):
        param = Parameter(torch.full((64, 128), 1.0, dtype=dtype))
        optimizer = RULES["lion"].make([param], lr=last_place / 50, weight_decay=0.0, master_weight_bits=bits)
        for _ in range(100):
            step(optimizer, {"": param}, {"": torch.ones_like(param)})
        found[bits] = (1 - param.detach().float()).mean().item()
    assert found[None] == 0
    assert found[24] == pytest.approx(2 * last_place, rel=0.05)
    assert found[32] == pytest.approx(2 * last_place, rel=0.001)


# Stochastic rounding.


@pytest.mark.parametrize("target", _C.cpu_targets())
def test_the_mean_is_exact(target: str) -> None:
    """Of 2^20 roundings, within 5 standard deviations of it; each to one of the two neighbours."""
    n = 2**20
    for fraction in (1, 0x100, 0x4000, 0x8000, 0xC001, 0xFFFF):
        for start_bits in (0x3F800000, 0x42FF0000, 0x00120000, -0x40010000):
            constant = torch.tensor(start_bits + fraction, dtype=torch.int32).view(FP32)
            param, _ = written(constant.expand(n).contiguous(), target, stochastic_rounding=True)
            neighbours = (torch.tensor([start_bits, start_bits + 0x10000], dtype=torch.int32)).view(FP32).double()
            up = (param.double() == neighbours[1]).sum().item()
            assert up + (param.double() == neighbours[0]).sum().item() == n
            share = fraction / 2**16
            assert abs(up / n - share) < 5 * (share * (1 - share) / n) ** 0.5


def test_small_updates_are_not_lost() -> None:
    """The nearest value never moves; the mean of values at random does by what all updates make together."""
    steps, n, last_place = 40, 2**16, 2.0**-8  # of bfloat16 below 1
    lr = last_place / 37
    moved = {}
    for stochastic in (False, True):
        param = Parameter(torch.ones(n, dtype=BF16))
        optimizer = RULES["sgd"].make([param], lr=lr, weight_decay=0.0, stochastic_rounding=stochastic)
        for _ in range(steps):
            step(optimizer, {"": param}, {"": torch.ones_like(param)})
        moved[stochastic] = (1 - param.detach().double()).mean().item()
    assert moved[False] == 0
    deviation = last_place * (steps * (1 / 37) * (36 / 37) / n) ** 0.5
    assert abs(moved[True] - steps * lr) < 5 * deviation


def rounded(seed: int = 0, place: int = 0, steps: int = 1) -> Tensor:
    """The bits of a parameter after steps that begin from the same weights each time."""
    params = [Parameter(torch.zeros(64, 128, dtype=BF16)) for _ in range(place + 1)]
    groups = [{"params": [param]} for param in params]
    optimizer = RULES["sgd"].make(
        groups, lr=1.0, weight_decay=0.0, stochastic_rounding=True, stochastic_rounding_seed=seed
    )
    gradient = values((64, 128), 3)
    for _ in range(steps):
        params[place].data.zero_()
        step(optimizer, {"": params[place]}, {"": gradient})
    return int_bits(params[place].detach())


def test_the_same_noise_again_and_other_noise_elsewhere() -> None:
    one = rounded()
    assert torch.equal(rounded(), one)
    for other in (rounded(seed=1), rounded(place=1), rounded(steps=2)):
        assert 0.3 < (other != one).float().mean() < 0.5  # a third of uniform fractions disagree, zeros never


def test_the_seed_may_change_between_steps() -> None:
    """The tables that are kept notice it."""
    changed, expected = (make("adamw", "log8", start(BF16), **FORMATS["bf16 stochastic"].options) for _ in range(2))
    for params, optimizer in (changed, expected):
        step(optimizer, params, gradients(1, BF16))
    changed[1].param_groups[0]["stochastic_rounding_seed"] = 8
    step(changed[1], changed[0], gradients(2, BF16))
    step(expected[1], expected[0], gradients(2, BF16))
    assert not all(torch.equal(a, b) for a, b in zip(changed[0].values(), expected[0].values(), strict=True))


@pytest.mark.parametrize("target", _C.cpu_targets())
def test_infinities_and_nan_are_not_rounded_at_random(target: str) -> None:
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0], dtype=FP32).repeat(100)
    param, _ = written(special, target, stochastic_rounding=True)
    assert torch.equal(param.float().nan_to_num(7.0), special.nan_to_num(7.0))


# As options of an optimizer.


@pytest.mark.parametrize("weights", FORMATS)
def test_float32_parameters_need_nothing(weights: str) -> None:
    """In the same group as narrow ones; their steps are as without the option."""
    dtype, options = FORMATS[weights]
    initial = {"narrow": values((64, 130), 1, dtype), "wide": values((64, 130), 2), "bias": values((7,), 3, dtype)}
    params, optimizer = make("adamw", "log8", initial, **options)
    plain, expected = make("adamw", "log8", initial)
    for t in range(3):
        grads = {name: values(tuple(x.shape), 10 * t + i, x.dtype) for i, (name, x) in enumerate(initial.items())}
        step(optimizer, params, grads)
        step(expected, plain, grads)
    assert_same(optimizer.state[params["wide"]], expected.state[plain["wide"]])
    assert torch.equal(params["wide"], plain["wide"])
    for name in ("narrow", "bias"):
        shape = {24: initial[name].shape, 32: (*initial[name].shape, 2)}.get(options.get("master_weight_bits"))
        low_bits = optimizer.state[params[name]].get("master_low_bits")
        assert (None if low_bits is None else (low_bits.dtype, low_bits.shape)) == (shape and (torch.int8, shape))


def test_float16_is_not_rounded_at_random() -> None:
    half = Parameter(torch.zeros(4, 64, dtype=FP16))
    with pytest.raises(ValueError, match=r"got True for a parameter of torch.float16, expected torch.bfloat16"):
        RULES["adamw"].make([half], stochastic_rounding=True)
    optimizer = RULES["adamw"].make([Parameter(torch.zeros(4, 64))], stochastic_rounding=True)
    with pytest.raises(ValueError, match=r"torch.float16"):
        optimizer.add_param_group({"params": [half]})
    assert len(optimizer.param_groups) == 1
    param, _ = single(optimizer)
    param.data = param.data.half()
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=r"torch.float16"):
        optimizer.step()


@pytest.mark.parametrize("bits", LOW)
def test_float16_overflows_to_infinity_and_comes_back(bits: int) -> None:
    """As torch's does; the master weight, which stays finite, remembers where it was."""
    param = Parameter(torch.full((64, 128), 65504.0, dtype=FP16))
    optimizer = RULES["sgd"].make([param], lr=24.0, weight_decay=0.0, master_weight_bits=bits)
    step(optimizer, {"": param}, {"": -torch.ones_like(param)})
    assert param.isinf().all()
    assert (master_weights(optimizer, param) == 65528).all()
    step(optimizer, {"": param}, {"": torch.ones_like(param)})
    assert (param == 65504).all()


@each_master
def test_what_is_not_finite_changes_nothing(dtype: torch.dtype, bits: int) -> None:
    """Weights keep their bits. Moments keep their values, but are coded anew: the last bit of a scale may move."""
    params, optimizer = make("adamw", "log8", start(dtype), master_weight_bits=bits)
    for t in (1, 2):
        step(optimizer, params, gradients(t, dtype))
    before = everything(optimizer)
    for index, param in enumerate(params.values()):
        spec = optimizer._internals.state_of(param, optimizer.param_groups[0])
        coded = spec.encode(spec.decode(optimizer.state[param])) if param.numel() else {}
        before |= {f"{index}/{key}": value for key, value in coded.items()}
    with using(_C.cpu_targets()[0], threads=1):
        step(optimizer, params, {name: torch.full_like(x, torch.nan) for name, x in gradients(1, dtype).items()})
    for state in optimizer.state.values():
        state["step"] -= 1
    assert_same(everything(optimizer), before)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), torch.tensor(2.0)
    with using(_C.cpu_targets()[0], threads=1):
        step(optimizer, params, gradients(3, dtype))
    assert_same(everything(optimizer), before)


@each_master
def test_a_parameter_set_by_others_keeps_its_low_bits(dtype: torch.dtype, bits: int) -> None:
    """At most half a last place away; also from zero, where low bits below it count for nothing."""
    param = Parameter(values((64, 130), 1, dtype))
    optimizer = RULES["sgd"].make([param], lr=1e-3, weight_decay=0.0, master_weight_bits=bits)
    step(optimizer, {"": param}, {"": values((64, 130), 2, dtype)})
    low = integers(optimizer.state[param]["master_low_bits"], bits).clone()
    assert (low < 0).any()
    new = values((64, 130), 3, dtype)
    new[:32] = 0
    new[16:32] = -new[16:32]
    param.data.copy_(new)
    optimizer.param_groups[0]["lr"] = 0.0
    step(optimizer, {"": param}, {"": torch.ones_like(param)})
    assert torch.equal(int_bits(param.detach()), int_bits(new))
    _, expected = split_weight(join_weight(new, low, LOW[bits]), LOW[bits], dtype)
    assert torch.equal(integers(optimizer.state[param]["master_low_bits"], bits).int(), expected)
    dropped = 7 if (dtype, bits) == (FP16, 32) else 0  # bits beyond float32's, which only the smallest weights have
    assert (expected - torch.where(new == 0, low.clamp(min=0), low)).abs().max() <= dropped


def test_state_without_low_bits_is_told() -> None:
    param = Parameter(values((64, 130), 1, BF16))
    optimizer = RULES["adamw"].make([param])
    step(optimizer, {"": param}, {"": torch.ones_like(param)})
    optimizer.param_groups[0]["master_weight_bits"] = 24
    with pytest.raises(RuntimeError, match=r"got state without master_low_bits, expected .*set the options"):
        step(optimizer, {"": param}, {"": torch.ones_like(param)})
