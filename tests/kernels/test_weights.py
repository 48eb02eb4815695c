"""Weights of more precision than their dtype: low bits of a master weight in the state, and stochastic rounding."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from helpers import (
    CODEC_NAMES,
    RULES,
    USUAL_RULES,
    everything,
    single,
    step,
)
from kernel_problem import FEW_SHAPES, SHAPES, STEPS, TARGETS, compare, gradients, make, start, using
from ranks.layouts import values
from ranks.snapshot import assert_same
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


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize(("codec", "block_size"), [("log8", 16), ("dynamic8", 64), ("log8", 4096)])
def test_block_sizes(codec: str, block_size: int, weights: str) -> None:
    shapes = ((2, 5000), (3, 257), (2, 4097))
    dtype, options = FORMATS[weights]
    steps = [gradients(t, dtype, shapes) for t in (1, 3)]
    compare("adamw", codec, start(dtype, shapes), steps, EACH_TARGET, block_size=block_size, **options)


@pytest.mark.parametrize("weights", FORMATS)
def test_many_elements_on_two_threads(weights: str) -> None:
    shapes = ((1, 100_003), (397, 257), (70_001,))
    dtype, options = FORMATS[weights]
    compare("adamw", "log8", start(dtype, shapes), [gradients(3, dtype, shapes)], [(TARGETS[0], 2)], **options)


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
    for weights in [every_mantissa(127)[::7], *(-every_mantissa(each)[1::41] for each in few), special_values()]:
        for x in weights[weights != 0].split(2**17):  # 0 - -0 is 0
            high, low = split_weight(x, LOW[bits], dtype)
            for target in TARGETS:
                param, state = written(x, target, dtype, master_weight_bits=bits)
                found = integers(state["master_low_bits"], bits)
                assert torch.equal(int_bits(param.abs()), int_bits(high.abs()))
                assert torch.equal(param.signbit()[~x.isnan()], high.signbit()[~x.isnan()])
                assert torch.equal(found.int(), low)


@pytest.mark.parametrize("target", TARGETS)
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


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ("rule", "codec"), [("adamw", "log8"), ("lion", "dynamic8"), ("repaid_adamw", "log8"), ("prodigy", "bf16")]
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
        with using(TARGETS[0], threads=1):
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


@pytest.mark.parametrize("target", TARGETS)
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


@pytest.mark.parametrize("target", TARGETS)
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
