"""Weights of more precision than their dtype: low bits of a master weight in the state, and stochastic rounding."""

from __future__ import annotations

import math
from itertools import cycle, product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from helpers import CODEC_NAMES, RULES, USUAL_RULES, ReferenceOptimizer, everything, single, step
from kernel_problem import FEW_SHAPES, SHAPES, STEPS, TARGETS, compare, gradients, make, start, using
from ranks.layouts import values
from ranks.snapshot import assert_same, snapshot
from reference import noise
from shardopt.kernels.weights import join_weight, noise_key, split_weight
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

#: Each instruction set, on one or two threads.
EACH_TARGET = [(target, 1 + place % 2) for place, target in enumerate(TARGETS)]

pytestmark = pytest.mark.usefixtures("one_thread")


GRADIENTS = ("as the weights", "fp32")
#: Usual rules and codecs are compiled together with bfloat16 of 24 bits. Other code knows of formats alone, except that
#: repaid parameters move again once the moments are coded.
CASES = [
    *((rule, codec, "bf16 24", "as the weights") for rule in USUAL_RULES for codec in CODEC_NAMES),
    *product(("adamw",), ("log8", "fp32"), FORMATS, GRADIENTS),
    *(("repaid_adamw", codec, weights, "as the weights") for codec in ("log8", "companded8") for weights in FORMATS),
    *zip(RULES, cycle(("companded8", "bf16")), cycle(FORMATS), cycle(GRADIENTS), strict=False),
]


@pytest.mark.parametrize(
    ("rule", "codec", "weights", "gradient"), [*CASES, *slow(product(RULES, CODEC_NAMES, FORMATS, GRADIENTS))]
)
def test_equal_the_reference(rule: str, codec: str, weights: str, gradient: str) -> None:
    dtype, options = FORMATS[weights]
    shapes = SHAPES if rule == "adamw" and codec == "log8" else FEW_SHAPES
    steps = [gradients(t, FP32 if gradient == "fp32" else dtype, shapes) for t in (1, 2, 3)]
    compare(rule, codec, start(dtype, shapes), steps, EACH_TARGET, **options)


def written(x: Tensor, target: str, dtype: torch.dtype = BF16, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The weights that a kernel writes: 0 - 1 * -x."""
    param = Parameter(torch.zeros(x.shape, dtype=dtype))
    optimizer = RULES["sgd"].make([param], lr=1.0, weight_decay=0.0, nonfinite="propagate", **options)
    with using(target, threads=2):
        step(optimizer, {"": param}, {"": -x})
    return param.detach(), optimizer.state[param]


#: Biased exponents of float32: its ends and a middle; below, in and above float16's subnormals, its end.
EXPONENTS = {BF16: (0, 127, 254), FP16: (101, 109, 112, 127, 142)}


@each_master
def test_kernels_split_as_the_definition(dtype: torch.dtype, bits: int) -> None:
    """So do the formulas in PyTorch. Every 97th mantissa: the low 16 bits take all their values."""
    for exponent in EXPONENTS[dtype]:
        x = every_mantissa(exponent)[::97]
        for sign in (1, -1):
            check_split(x, sign, dtype, LOW[bits])
            check_kernels(sign * x[x != 0], dtype, bits)  # 0 - -0 is 0
    special = special_values()
    back = join_weight(*split_weight(special, LOW[bits], dtype), LOW[bits])
    for of in (torch.isnan, torch.isinf, torch.signbit):
        assert torch.equal(of(back), of(special))
    check_kernels(special[special != 0], dtype, bits)


def check_kernels(x: Tensor, dtype: torch.dtype, bits: int) -> None:
    """Compares what kernels write with the formulas."""
    high, low = split_weight(x, LOW[bits], dtype)
    for target in TARGETS:
        param, state = written(x, target, dtype, master_weight_bits=bits)
        found = integers(state["master_low_bits"], bits)
        assert torch.equal(int_bits(param.abs()), int_bits(high.abs()))
        assert torch.equal(param.signbit()[~x.isnan()], high.signbit()[~x.isnan()])
        assert torch.equal(found.int(), low)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bits", [None, *LOW])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_a_step_of_nothing_keeps_every_weight(dtype: torch.dtype, bits: int | None, target: str) -> None:
    """Each parameter that is a number, with low bits all over their range if it has any."""
    high = torch.arange(2**16).to(torch.int32).to(torch.int16).view(dtype)
    high = high[high.isfinite()][:, None]
    half = 2 ** (LOW.get(bits, 6) - 1)
    low = torch.arange(-half, half, half // 32)
    param = Parameter(high.expand(-1, len(low)).contiguous())
    optimizer = RULES["sgd"].make([param], lr=0.0, weight_decay=0.0, master_weight_bits=bits)
    step(optimizer, {"": param}, {"": torch.ones_like(param)})
    if bits is not None:
        low = torch.where((high == 0) & (low < 0), 0, low)  # no weight is split so
        low = low.to(torch.int8) if bits == 24 else low.to(torch.int16).unsqueeze(-1).view(torch.int8)
        optimizer.state[param]["master_low_bits"].copy_(low)
    before = everything(optimizer)
    with using(target, threads=2):
        step(optimizer, {"": param}, {"": torch.ones_like(param)})
    optimizer.state[param]["step"].fill_(1)
    assert_same(everything(optimizer), before)
    assert torch.equal(int_bits(param.detach()), int_bits(high).expand_as(param))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("rule", "codec"), [("adamw", "log8"), ("lion", "dynamic8"), ("repaid_adamw", "log8")])
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
        with using(TARGETS[0], threads=1):
            step(optimizer, params, grads)
            step(expected, wide, {name: gradient.float() for name, gradient in grads.items()})
        for name, param in params.items():
            assert torch.equal(int_bits(master_weights(optimizer, param)), int_bits(wide[name].detach()))
            high, _ = split_weight(wide[name].detach(), 16, dtype)
            assert torch.equal(int_bits(param.detach()), int_bits(high))
            state = {key: x for key, x in optimizer.state[param].items() if key != "master_low_bits"}
            assert_same(state, expected.state[wide[name]])


# Stochastic rounding.


@pytest.mark.parametrize("target", TARGETS)
def test_the_mean_is_exact(target: str) -> None:
    """Of 2^18 roundings, within 5 standard deviations of it; each to one of the two neighbours."""
    n = 2**18
    for fraction in (1, 0x100, 0x4000, 0x8000, 0xC001, 0xFFFF):
        for start_bits in (0x3F800000, 0x42FF0000, 0x00120000, -0x40010000):
            constant = torch.tensor(start_bits + fraction, dtype=torch.int32).view(FP32)
            param, _ = written(constant.expand(n).contiguous(), target, stochastic_rounding=True)
            neighbours = (torch.tensor([start_bits, start_bits + 0x10000], dtype=torch.int32)).view(FP32).double()
            up = (param.double() == neighbours[1]).sum().item()
            assert up + (param.double() == neighbours[0]).sum().item() == n
            share = fraction / 2**16
            assert abs(up / n - share) < 5 * (share * (1 - share) / n) ** 0.5


def test_the_seed_may_change_between_steps() -> None:
    """The tables that are kept notice it."""
    params, optimizer = make("adamw", "log8", start(BF16, FEW_SHAPES), **FORMATS["bf16 stochastic"].options)
    reference = ReferenceOptimizer(params, optimizer)
    for t, seed in enumerate((7, 8)):
        optimizer.param_groups[0]["stochastic_rounding_seed"] = seed
        reference.step(gradients(t, BF16, FEW_SHAPES))
        step(optimizer, params, gradients(t, BF16, FEW_SHAPES))
        assert_same(snapshot(params, optimizer), reference.snapshot())


@pytest.mark.parametrize("target", TARGETS)
def test_infinities_and_nan_are_not_rounded_at_random(target: str) -> None:
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0], dtype=FP32).repeat(100)
    param, _ = written(special, target, stochastic_rounding=True)
    assert torch.equal(param.float().nan_to_num(7.0), special.nan_to_num(7.0))


# As options of an optimizer.


@pytest.mark.parametrize("weights", ["bf16 24", "bf16 stochastic", "fp16 32"])
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


# The formulas, in PyTorch: exact for every mantissa, and noise that is fair.


class Word(NamedTuple):
    """A weight as its format defines it, computed in float64.

    Attributes:
        unit: of the last place of the parameter's dtype where the weight is.
        value: of parameter and low bits together.
        nearest: the parameter.
    """

    unit: Tensor
    value: Tensor
    nearest: Tensor


def word_of(x: Tensor, dtype: torch.dtype, low_bits: int) -> Word:
    """The word of finite weights >= 0: rounded to nearest even, clamped to finite; the parameter away from zero."""
    info = torch.finfo(dtype)
    wide = x.double()
    exponent = torch.frexp(wide.clamp(min=info.smallest_normal)).exponent - 1
    last_place = torch.ldexp(torch.full_like(wide, info.eps), exponent)
    word = (wide / last_place * 2**low_bits).round()
    largest = 2.0 ** math.floor(math.log2(info.max)) * (2 - max(info.eps / 2**low_bits, 2.0**-23))
    value = (word * last_place / 2**low_bits).clamp(max=largest)
    nearest = (value / last_place + 0.5).floor() * last_place
    overflows = value >= 2.0 ** math.floor(math.log2(info.max)) * (2 - info.eps / 2)
    return Word(last_place, value, torch.where(overflows, torch.inf, nearest))


def check_split(x: Tensor, sign: int, dtype: torch.dtype, low_bits: int) -> None:
    """Compares with the definition, and the definition with what is promised of it."""
    high, low = split_weight(sign * x, low_bits, dtype)
    back = join_weight(high, low, low_bits)
    unit, value, nearest = word_of(x, dtype, low_bits)
    assert torch.equal(back.double(), sign * value)
    assert torch.equal(high.double(), sign * nearest)
    assert high.dtype == dtype
    assert ((low >= -(2 ** (low_bits - 1))) & (low < 2 ** (low_bits - 1))).all()
    assert torch.equal(back.signbit(), (sign * x).signbit())
    begin, end = {BF16: (0.0, 2.0**127), FP16: (2.0**-17, 2.0**15)}[dtype]
    if x[0] < end:  # the last binade saturates
        assert ((back.double() - sign * x.double()).abs() / unit).max() <= 2.0 ** -(low_bits + 1)
        if low_bits == 16 and x[0] >= begin:
            assert torch.equal(int_bits(back), int_bits(sign * x))


def test_noise_depends_on_all_that_it_should() -> None:
    """And its bits are fair: of 2^18 draws each bit is set half of the time, within 5 standard deviations."""
    elements = torch.arange(2**18)
    draws = {
        "one": noise(noise_key(0, 0), 1, elements),
        "other seed": noise(noise_key(1, 0), 1, elements),
        "other parameter": noise(noise_key(0, 1), 1, elements),
        "other step": noise(noise_key(0, 0), 2, elements),
        "other elements": noise(noise_key(0, 0), 1, elements + 2**18),
    }
    for name, draw in draws.items():
        for bit in range(32):
            assert abs(int((draw >> bit & 1).sum()) - 2**17) < 5 * 2**8, (name, bit)
        same = [int(((draw ^ other) & 0xFFFF == 0).sum()) for key, other in draws.items() if key != name]
        assert max(same) < 4 + 5 * 2, name  # 4 are expected
    assert torch.equal(draws["one"], noise(noise_key(0, 0), 1, elements))
