"""State dicts of other packages' optimizers, made by hand in their forms: one table, :data:`SOURCES`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
from helpers import with_gradient
from ranks.layouts import values
from shardopt.codec.dynamic8 import dynamic_map
from shardopt.optim import ShardedOptimizer

#: Rows of whole blocks of 2048; not; one row; whole blocks of 32 only; a convolution with rows of whole blocks of 256.
MATRICES = ((2, 4096), (33, 130), (1, 4099), (50, 96), (6, 5, 8, 32))
#: Float32 here: a vector that bitsandbytes quantizes, and two that it does not.
OTHERS = ((5000,), (7,), ())
SHAPES = (*MATRICES, *OTHERS)
#: By block size, the shapes in which no block crosses a row.
ALIGNED = {
    2048: {(2, 4096), (1, 4099)},
    256: {(2, 4096), (1, 4099), (6, 5, 8, 32)},
    32: {(2, 4096), (1, 4099), (6, 5, 8, 32), (50, 96)},
}

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


def map_of(signed: bool, is_ours: bool = True) -> Tensor:
    """The dynamic map, or one with another number in one place."""
    table = dynamic_map(signed=signed).clone()
    if not is_ours:
        table[200] = torch.nextafter(table[200], torch.tensor(1.0))
    return table


def mapped(x: Tensor, table: Tensor, size: int = 256) -> Coded:
    """Codes of a map over the flattened tensor: the nearest value's."""
    blocks = in_blocks(x, size)
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


def in_bitsandbytes(
    moments: Sequence[tuple[Tensor, bool]], size: int = 256, least: int = 4096, is_ours: bool = True
) -> tuple[dict[str, Any], list[Tensor]]:
    """The state of one parameter, and what it stands for.

    ``moments`` tells of each whether it is signed. Parameters of ``least`` elements have codes in blocks of ``size``,
    by dynamic8's map (``is_ours``) or another.
    """
    state: dict[str, Any] = {}
    decoded = []
    for place, (value, signed) in enumerate(moments, start=1):
        if value.numel() < least:
            state[f"state{place}"] = value
            decoded.append(value)
            continue
        table = map_of(signed, is_ours)
        coded = mapped(value, table, size)
        state |= {f"state{place}": coded.codes, f"absmax{place}": coded.scales, f"qmap{place}": table}
        decoded.append(coded.decoded)
    return {"step": STEP, WRAPPED: state}, decoded


def adam_of_bitsandbytes(x: Moments, **how: Any) -> tuple[dict[str, Any], list[Tensor]]:
    return in_bitsandbytes([(x.signed, True), (x.unsigned, False)], **how)


class OptimState8bit:
    """Attributes of torchao's tensor subclass of this name."""

    def __init__(self, coded: Coded, signed: bool) -> None:
        self.codes, self.scale, self.signed = coded.codes, coded.scales, signed
        self.qmap = dynamic_map(signed=signed)


class OptimState4bit:
    """Does what torchao's tensor subclass of this name does here."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def dequantize(self) -> Tensor:
        return self.value


def is_coded_by_torchao(numel: int) -> bool:
    return numel >= 4096 and numel % 256 == 0


def in_torch(x: Moments) -> tuple[dict[str, Any], list[Tensor]]:
    return {"step": torch.tensor(float(STEP)), "exp_avg": x.signed, "exp_avg_sq": x.unsigned}, list(x)


def in_torchao(x: Moments, bits: int = 8) -> tuple[dict[str, Any], list[Tensor]]:
    state, decoded = in_torch(x)
    if not is_coded_by_torchao(x.signed.numel()):
        return state, decoded
    if bits == 4:
        return state | {name: OptimState4bit(state[name]) for name in ("exp_avg", "exp_avg_sq")}, decoded
    coded = [mapped(value, map_of(signed)) for value, signed in zip(x, (True, False), strict=True)]
    moments = {"exp_avg": OptimState8bit(coded[0], True), "exp_avg_sq": OptimState8bit(coded[1], False)}
    return state | moments, [each.decoded for each in coded]


def in_flashoptim(x: Moments) -> tuple[dict[str, Any], list[Tensor]]:
    coded = companded(x.signed, True), companded(x.unsigned, False)
    state: dict[str, Any] = {"step": torch.tensor(STEP)}
    for name, (codes, scales, _) in zip(("exp_avg", "exp_avg_sq"), coded, strict=True):
        state |= {f"{name}::quantized": codes, f"{name}::scales": scales}
    return state, [c.decoded for c in coded]


class Source(NamedTuple):
    """An optimizer of another package, and the class here (``kind``), without its bits.

    ``state`` makes the state of a parameter, and what it stands for; ``group`` has its hyper-parameters, ``taken`` what
    becomes of them here. ``native`` is the codec and block size here that take over its codes, if any have them;
    ``is_coded`` tells whether moments of so many elements are in codes.
    """

    package: str
    kind: str
    state: Callable[[Moments], tuple[dict[str, Any], list[Tensor]]]
    group: dict[str, Any]
    taken: dict[str, Any]
    native: tuple[str, int] | None = ("dynamic8", 256)
    is_coded: Callable[[int], bool] = lambda numel: numel >= 4096


BNB = "bitsandbytes"
_ADAM = {"betas": (0.8, 0.99), "eps": 1e-7}
_OF_BNB = {**_ADAM, "alpha": 0.0, "t_alpha": None, "t_beta3": None}
_OF_TORCHAO = {**_ADAM, "amsgrad": False, "lr": torch.tensor(0.5)}
_FLASH = {"initial_lr": 1.0, "master_bytewidth": 3, "quantize": True}


def _average(x: Moments) -> tuple[dict[str, Any], list[Tensor]]:
    return in_bitsandbytes([(x.signed, True)])


def _never(numel: int) -> bool:
    return False


#: By package, kind of optimizer, or form.
SOURCES = {
    BNB: Source(BNB, "AdamW", adam_of_bitsandbytes, _OF_BNB, _ADAM),
    "old blocks": Source(
        BNB, "AdamW", lambda x: adam_of_bitsandbytes(x, size=2048), _OF_BNB, _ADAM, ("dynamic8", 2048)
    ),
    "another map": Source(BNB, "AdamW", lambda x: adam_of_bitsandbytes(x, is_ours=False), _OF_BNB, _ADAM, None),
    "32 bits": Source(BNB, "AdamW", lambda x: adam_of_bitsandbytes(x, least=10**9), _OF_BNB, _ADAM, None, _never),
    "torch": Source("torch.optim", "AdamW", in_torch, {**_ADAM, "amsgrad": False}, _ADAM, None, _never),
    "torchao": Source("torchao", "AdamW", in_torchao, _OF_TORCHAO, _ADAM, is_coded=is_coded_by_torchao),
    "4 bits": Source("torchao", "AdamW", lambda x: in_torchao(x, 4), _OF_TORCHAO, _ADAM, None, _never),
    "flashoptim": Source(
        "flashoptim", "AdamW", in_flashoptim, {**_ADAM, **_FLASH}, _ADAM, ("companded8", 32), lambda numel: True
    ),
    "Lion": Source(BNB, "Lion", _average, {"betas": (0.8, 0.9), "eps": 0.0}, {"betas": (0.8, 0.9)}),
    "SGD": Source(
        BNB,
        "SGD",
        _average,
        {"betas": (0.8, 0), "eps": 0.0},
        {"momentum": 0.8, "dampening": 0.0},
    ),
}
#: The kinds of optimizer of bitsandbytes whose state is imported.
KINDS = (BNB, "Lion", "SGD")


def ours_of(source: str, params: Any, **options: Any) -> ShardedOptimizer:
    """The optimizer here for another package's."""
    kind = SOURCES[source].kind
    momentum = {"momentum": 0.5} if kind == "SGD" else {}  # without, it keeps no moments
    found: ShardedOptimizer = getattr(shardopt, f"{kind}8bit")(params, **momentum, **options)
    return found


def params_of() -> list[Parameter]:
    return [Parameter(values(shape, 50 + seed)) for seed, shape in enumerate(SHAPES)]


def by_hand(source: str, shapes: Sequence[tuple[int, ...]] = SHAPES) -> tuple[dict[str, Any], list[list[Tensor]]]:
    """A state dict in a package's form, and per parameter the moments it stands for."""
    made = [SOURCES[source].state(made_up(shape, seed)) for seed, shape in enumerate(shapes)]
    group = {"lr": 0.5, "weight_decay": 0.25, **SOURCES[source].group, "params": list(range(len(shapes)))}
    state_dict = {"state": {i: state for i, (state, _) in enumerate(made)}, "param_groups": [group]}
    return copy.deepcopy((state_dict, [decoded for _, decoded in made]))


def stepped(optimizer: torch.optim.Optimizer, steps: int = STEP) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for t in range(steps):
        for index, param in enumerate(params):
            with_gradient(param, values(tuple(param.shape), 100 * t + index, param.dtype))
        optimizer.step()
