"""State dicts of other packages' optimizers, made by hand in their forms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
from helpers import with_gradient
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.codec.dynamic8 import dynamic_map
from shardopt.optim import ShardedOptimizer

#: Rows of whole blocks of 256; not; one row; whole blocks of 32 only; a convolution with rows of whole blocks.
MATRICES = ((16, 512), (33, 130), (1, 4099), (50, 96), (6, 5, 8, 32))
#: Float32 here: a vector that bitsandbytes quantizes, and two that it does not.
OTHERS = ((5000,), (7,), ())
SHAPES = (*MATRICES, *OTHERS)
#: State that the import makes, per size of the source's blocks and for a source that quantizes from so many elements.
ALIGNED = {256: {(16, 512), (1, 4099), (6, 5, 8, 32)}, 32: {(16, 512), (1, 4099), (50, 96), (6, 5, 8, 32)}}

STEP = 3
#: Where bitsandbytes keeps a parameter's state.
WRAPPED = "__bnb_optimizer_quant_state__"


class Moments(NamedTuple):
    """Moments made up for a parameter."""

    signed: Tensor
    unsigned: Tensor


def made_up(shape: tuple[int, ...], seed: int) -> Moments:
    return Moments(values(shape, 2 * seed), values(shape, 2 * seed + 1).square())


class Coded(NamedTuple):
    """Codes and scales, and what they stand for by the other package's formula."""

    codes: Tensor
    scales: Tensor
    decoded: Tensor


def in_blocks(x: Tensor, size: int) -> Tensor:
    """The flattened tensor in blocks, the last one filled up with zeros."""
    return torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % size)).view(-1, size)


def from_blocks(blocks: Tensor, like: Tensor) -> Tensor:
    return blocks.reshape(-1)[: like.numel()].view(like.shape)


def dynamic(x: Tensor, signed: bool, size: int = 256) -> Coded:
    """Codes of the dynamic map over the flattened tensor: the nearest value's."""
    table, blocks = dynamic_map(signed=signed), in_blocks(x, size)
    scales = blocks.abs().amax(1)
    codes = torch.bucketize(blocks / scales.clamp(min=1e-30)[:, None], (table[1:] + table[:-1]) / 2)
    return Coded(from_blocks(codes.to(torch.uint8), x), scales, from_blocks(table[codes] * scales[:, None], x))


def companded(x: Tensor, signed: bool) -> Coded:
    """flashoptim's codes, as its quantize() makes them."""
    blocks = in_blocks(x if signed else x.sqrt(), 32)
    scales = blocks.abs().amax(1).clamp(min=1e-12)
    normal = blocks / scales[:, None]
    kept = scales.half().float()[:, None]
    if signed:
        codes = torch.floor(127 * (2 * normal / (1 + normal.abs())) + 0.5).to(torch.int8)
        t = codes.double() / 127
        decoded = t / (2 - t.abs()) * kept
    else:
        codes = torch.floor(255 * normal + 0.5).to(torch.uint8)
        decoded = (codes.double() / 255 * kept).square()
    return Coded(from_blocks(codes, x), scales.half(), from_blocks(decoded.float(), x))


def bitsandbytes_moment(
    place: int, value: Tensor, *, signed: bool, size: int = 256, least: int = 4096
) -> tuple[dict[str, Tensor], Tensor]:
    """The entries of one moment, and what they stand for."""
    if value.numel() < least:
        return {f"state{place}": value}, value
    coded = dynamic(value, signed, size)
    entries = {f"state{place}": coded.codes, f"absmax{place}": coded.scales, f"qmap{place}": dynamic_map(signed=signed)}
    return entries, coded.decoded


def bitsandbytes_state(x: Moments, count: int = 2, size: int = 256, least: int = 4096) -> tuple[dict, list[Tensor]]:
    """The state of one parameter, and what it stands for."""
    state: dict[str, Any] = {}
    decoded = []
    for place, value in enumerate(x[:count], start=1):
        entries, stands_for = bitsandbytes_moment(place, value, signed=place == 1, size=size, least=least)
        state |= entries
        decoded.append(stands_for)
    return {"step": STEP, WRAPPED: state}, decoded


def bitsandbytes_squares(x: Moments) -> tuple[dict, list[Tensor]]:
    """The state of a parameter of RMSprop or Adagrad: averages or sums of squares in codes of the signed map."""
    entries, decoded = bitsandbytes_moment(1, x.unsigned, signed=True)
    return {"step": STEP, WRAPPED: entries}, [decoded]


def bitsandbytes_ademamix(x: Moments) -> tuple[dict, list[Tensor]]:
    """The state of a parameter of AdEMAMix: a fast and a slow average in one tensor."""
    averages = [
        bitsandbytes_moment(1, value, signed=True)
        for value in (x.signed, x.signed.reshape(-1).flip(0).view(x.signed.shape) / 512)
    ]
    (fast, _), (slow, _) = averages
    stacked = {key: value if key == "qmap1" else torch.stack([value, slow[key]]) for key, value in fast.items()}
    squares, decoded = bitsandbytes_moment(2, x.unsigned, signed=False)
    state = {"step": STEP, WRAPPED: {**stacked, **squares}}
    return state, [*(stands_for for _, stands_for in averages), decoded]


class OptimState8bit:
    """Attributes of torchao's tensor subclass of this name."""

    def __init__(self, coded: Coded, signed: bool) -> None:
        self.codes, self.scale, self.signed = coded.codes, coded.scales, signed
        self.qmap = dynamic_map(signed=signed)


def torchao_state(x: Moments) -> tuple[dict, list[Tensor]]:
    quantized = x.signed.numel() >= 4096 and x.signed.numel() % 256 == 0
    state: dict[str, Any] = {"step": torch.tensor(float(STEP))}
    if not quantized:
        return {**state, "exp_avg": x.signed, "exp_avg_sq": x.unsigned}, list(x)
    coded = dynamic(x.signed, True), dynamic(x.unsigned, False)
    moments = {"exp_avg": OptimState8bit(coded[0], True), "exp_avg_sq": OptimState8bit(coded[1], False)}
    return {**state, **moments}, [c.decoded for c in coded]


def flashoptim_state(x: Moments, bfloat16: bool = False) -> tuple[dict, list[Tensor]]:
    coded = companded(x.signed, True), companded(x.unsigned, False)
    state: dict[str, Any] = {"step": torch.tensor(STEP)}
    for name, (codes, scales, _) in zip(("exp_avg", "exp_avg_sq"), coded, strict=True):
        state[f"{name}::quantized"] = codes
        state[f"{name}::scales"] = scales.view(torch.bfloat16) if bfloat16 else scales
    return state, [c.decoded for c in coded]


class Source(NamedTuple):
    """An optimizer of another package.

    Attributes:
        package: its package.
        kind: the class here, without its bits.
        state: makes the state of a parameter, and what it stands for.
        group: its hyper-parameters.
        taken: what becomes of them here.
        native: the codec and block size here that take over its codes.
    """

    package: str
    kind: str
    state: Callable[[Moments], tuple[dict, list[Tensor]]]
    group: dict[str, Any]
    taken: dict[str, Any]
    native: tuple[str, int] = ("dynamic8", 256)


BNB = "bitsandbytes"
_ADAM = {"betas": (0.8, 0.99), "eps": 1e-7}
_MIXED = {"betas": (0.8, 0.99, 0.995), "eps": 1e-7, "alpha": 4.0}
_FLASH = {"initial_lr": 1.0, "master_bytewidth": 3, "quantize": True}
#: By package, or by the kind that is not Adam's of bitsandbytes.
SOURCES = {
    BNB: Source(BNB, "AdamW", bitsandbytes_state, {**_ADAM, "alpha": 0.0, "t_alpha": None, "t_beta3": None}, _ADAM),
    "torchao": Source("torchao", "AdamW", torchao_state, {**_ADAM, "amsgrad": False, "lr": torch.tensor(0.5)}, _ADAM),
    "flashoptim": Source("flashoptim", "AdamW", flashoptim_state, {**_ADAM, **_FLASH}, _ADAM, ("companded8", 32)),
    "AdEMAMix": Source(
        BNB,
        "AdEMAMix",
        bitsandbytes_ademamix,
        {**_MIXED, "t_alpha": 50, "t_beta3": None},
        {**_MIXED, "alpha_steps": 50, "beta3_steps": None},
    ),
    "Lion": Source(
        BNB, "Lion", lambda x: bitsandbytes_state(x, 1), {"betas": (0.8, 0.9), "eps": 0.0}, {"betas": (0.8, 0.9)}
    ),
    "SGD": Source(
        BNB,
        "SGD",
        lambda x: bitsandbytes_state(x, 1),
        {"betas": (0.8, 0), "eps": 0.0},
        {"momentum": 0.8, "dampening": 0.0},
    ),
    "RMSprop": Source(
        BNB,
        "RMSprop",
        bitsandbytes_squares,
        {"betas": (0.8, 0), "eps": 1e-7},
        {"alpha": 0.8, "eps": 1e-7, "momentum": 0.0, "centered": False},
    ),
    "Adagrad": Source(
        BNB, "Adagrad", bitsandbytes_squares, {"betas": (0.0, 0.0), "eps": 1e-7}, {"eps": 1e-7, "lr_decay": 0.0}
    ),
}
#: The kinds of optimizer that bitsandbytes has.
KINDS = [name for name, source in SOURCES.items() if source.package == BNB]


def ours_of(source: str, params: Any, **options: Any) -> ShardedOptimizer:
    """The optimizer here for another package's; that of torch.optim is AdamW."""
    kind = SOURCES[source].kind if source in SOURCES else "AdamW"
    momentum = {"momentum": 0.5} if kind == "SGD" else {}  # without, it keeps no moments
    found: ShardedOptimizer = getattr(shardopt, f"{kind}8bit")(params, **momentum, **options)
    return found


def params_of() -> list[Parameter]:
    return [Parameter(values(shape, 50 + seed)) for seed, shape in enumerate(SHAPES)]


def by_hand(source: str) -> tuple[dict[str, Any], list[list[Tensor]]]:
    """A state dict in a package's form, and per parameter the moments it stands for."""
    made = [SOURCES[source].state(made_up(shape, seed)) for seed, shape in enumerate(SHAPES)]
    group = {"lr": 0.5, "weight_decay": 0.25, **SOURCES[source].group, "params": list(range(len(SHAPES)))}
    state_dict = {"state": {i: state for i, (state, _) in enumerate(made)}, "param_groups": [group]}
    return copy.deepcopy((state_dict, [decoded for _, decoded in made]))


def stepped(optimizer: torch.optim.Optimizer, steps: int = STEP) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for t in range(steps):
        for index, param in enumerate(params):
            with_gradient(param, values(tuple(param.shape), 100 * t + index, param.dtype))
        optimizer.step()


def moments_of(optimizer: ShardedOptimizer) -> list[dict[str, Tensor]]:
    """The moments of each parameter, decoded."""
    states = optimizer.state_dict(dequantize=True)["state"].values()
    return [{key: x for key, x in state.items() if key != "step"} for state in states]


def assert_imported(optimizer: ShardedOptimizer, decoded: list[list[Tensor]], exact: set[tuple[int, ...]]) -> None:
    """Demands the state that load_state_dict makes of the decoded moments, except where codes were taken over.

    No entry keeps the memory of more than itself, such as two stacked averages, which would be saved with it.
    """
    found = moments_of(optimizer)
    named = [dict(zip(names, moments, strict=True)) for names, moments in zip(found, decoded, strict=True)]
    coded = {index: {"step": torch.tensor(float(STEP)), **moments} for index, moments in enumerate(named)}
    again = copy.deepcopy(optimizer)
    again.load_state_dict({**again.state_dict(), "state": coded})
    for index, (state, expected) in enumerate(zip(optimizer.state.values(), again.state.values(), strict=True)):
        assert_same({"step": state["step"]}, {"step": torch.tensor(float(STEP))})
        assert all(entry.untyped_storage().nbytes() == entry.nbytes for entry in state.values())
        if tuple(decoded[index][0].shape) in exact:
            assert_same(found[index], named[index])
        else:
            assert_same(state, expected)
