"""Emulates optimizers with low-bit state in plain PyTorch, to compare definitions: ``low_bits_study.py`` measures.

State is kept as the float32 numbers that its codes decode to. Blocks lie along the flattened parameter.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

OCTAVE = 1 << 23  #: a factor of 2, in the bits of a float32
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Variant:
    """A definition of the state.

    Attributes:
        m_levels: levels of the first moment, zero among them; 0 keeps float32.
        v_levels: levels of the second moment above zero; 0 keeps float32.
        block: elements that share scales.
        m_curve: where the first moment's levels lie; see :func:`magnitudes`.
        m_relative: whether the first moment is coded in units of the decoded root of the second.
        m_stochastic: whether the first moment is rounded stochastically, unbiased; else to the nearest level.
        repay: whether the effect of the first moment's rounding error on later updates is added to the weights at once.
        s_bits: low bits of the first moment's scale that are cleared, rounded up; 16 makes it a bfloat16.
        v_map: "log", levels even in the bits of the root; "linear", in v; "rank1", in v over the smaller of the row's
            and the column's maximum (arXiv 2309.01507).
        v_rounding: of "log", "nearest"; "stochastic", unbiased in v; "stochastic root", unbiased in the root; "weyl",
            unbiased in v with an element's random numbers spread evenly over the steps.
        cap: largest range of the levels of v, octaves of the root.
        top_bits: low bits of the largest root that are cleared, rounded up.
        step_bits: low bits of the distance of levels that are cleared, rounded up.
    """

    m_levels: int = 15
    v_levels: int = 17
    block: int = 128
    m_curve: str = "companded"
    m_relative: bool = True
    m_stochastic: bool = False
    repay: bool = True
    s_bits: int = 0
    v_map: str = "log"
    v_rounding: str = "stochastic"
    cap: float = 32
    top_bits: int = 0
    step_bits: int = 0


def _variants() -> dict[str, Variant]:
    """Named settings; each of log4 changes :class:`Variant`'s defaults as its name says."""
    log4 = Variant()
    both = replace(log4, m_stochastic=True, cap=8)
    splits = ((15, 15), (17, 15), (21, 12), (13, 19), (11, 23), (9, 28))
    log8 = Variant(255, 254, m_curve="log8", v_rounding="nearest", repay=False)
    published = Variant(15, 16, 128, "dynamic", False, repay=False, v_map="linear", v_rounding="nearest")
    return {
        "fp32": Variant(0, 0, repay=False),
        "log8": log8,
        "log8, repaid": replace(log8, repay=True),
        "log8, v stochastic": replace(log8, v_rounding="stochastic"),
        "torchao 4-bit": published,
        "2309.01507": replace(published, v_map="rank1"),
        "log4": log4,
        "v nearest": replace(log4, v_rounding="nearest"),
        "v nearest, not repaid": replace(log4, v_rounding="nearest", repay=False),
        "not repaid": replace(log4, repay=False),
        "v stochastic root": replace(log4, v_rounding="stochastic root"),
        "v weyl": replace(log4, v_rounding="weyl"),
        "m stochastic": replace(log4, m_stochastic=True),
        "m stochastic, not repaid": replace(log4, m_stochastic=True, repay=False),
        "only v": replace(log4, m_levels=0, repay=False),
        "only m": replace(log4, v_levels=0),
        "only m, stochastic": replace(log4, v_levels=0, m_stochastic=True),
        **{f"{m} x {v}": replace(log4, m_levels=m, v_levels=v) for m, v in splits},
        "block 64": replace(log4, block=64),
        **{f"cap {octaves}": replace(log4, cap=octaves) for octaves in (3, 4, 6, 8, 12, 16)},
        **{f"curve {curve}": replace(log4, m_curve=curve) for curve in ("log8", "linear")},
        "bf16 top": replace(log4, top_bits=16),
        "bf16 s": replace(log4, s_bits=16),
        "uint8 step": replace(log4, step_bits=15, cap=15.9),
        "m stochastic, cap 8": both,
        "m stochastic, cap 8, v weyl": replace(both, v_rounding="weyl"),
        "m stochastic, cap 8, 11 x 23": replace(both, m_levels=11, v_levels=23),
        "m stochastic, cap 8, block 64": replace(both, block=64),
    }


VARIANTS = _variants()
_MOMENTUM = Variant(15, 0, m_relative=False, repay=False)
#: Of optimizers with a momentum alone; Lion has nothing to repay, as its update is a sign.
MOMENTUM_VARIANTS = {
    "fp32": Variant(0, 0, m_relative=False, repay=False),
    "8 bits": replace(_MOMENTUM, m_levels=255, m_curve="log8"),
    "nearest": _MOMENTUM,
    "stochastic": replace(_MOMENTUM, m_stochastic=True),
    "nearest, repaid": replace(_MOMENTUM, repay=True),
    "stochastic, repaid": replace(_MOMENTUM, m_stochastic=True, repay=True),
}

#: The positive levels of bitsandbytes' dynamic map of 4 bits; -1 is not among the negative ones.
_DYNAMIC = (0, 0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1)


@cache
def magnitudes(curve: str, levels: int) -> Tensor:
    """The magnitudes of `levels` levels in [-1, 1], float32, ((levels + 1) / 2,), or one more in "dynamic"."""
    z = torch.linspace(0, 1, levels // 2 + 1, dtype=torch.float64)
    log8 = (1.7 - (1.7**2 - 2.8 * z).sqrt()) / 1.4
    return {"companded": z / (2 - z), "log8": log8, "linear": z, "dynamic": torch.tensor(_DYNAMIC)}[curve].float()


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _rounded_up(x: Tensor, cleared: int) -> Tensor:
    """`x` >= 0, rounded up to a float32 whose lowest `cleared` bits are zero."""
    mask = (1 << cleared) - 1
    return (_bits(x) + mask & ~mask).view(torch.float32)


class Moments:
    """Both moments of a list of parameters, as decoded from low-bit codes: `m` and `u`, the root of v, (rows, block).

    Args:
        variant: the definition.
        shapes: the parameters' shapes.
        seed: of stochastic rounding.
    """

    def __init__(self, variant: Variant, shapes: list[torch.Size], seed: int) -> None:
        self.variant = variant
        self._shapes = shapes
        self._rows = [-(-shape.numel() // variant.block) for shape in shapes]
        self._generator = torch.Generator().manual_seed(1_000_003 * seed + 12345)
        self.m = torch.zeros(sum(self._rows), variant.block)
        self.u = torch.zeros_like(self.m)
        self._offsets = torch.rand(self.m.shape, generator=self._generator)

    def matrix(self, tensors: Iterable[Tensor]) -> Tensor:
        """Tensors of the parameters' shapes as blocks, (rows, block)."""
        block = self.variant.block
        return torch.cat([F.pad(x.reshape(-1), (0, -x.numel() % block)) for x in tensors]).view(-1, block)

    def tensors(self, matrix: Tensor) -> list[Tensor]:
        """The inverse of :meth:`matrix`."""
        parts = matrix.split(self._rows)
        return [part.reshape(-1)[: s.numel()].view(s) for part, s in zip(parts, self._shapes, strict=True)]

    def keep(self, m: Tensor, u: Tensor, t: int) -> None:
        """Quantizes the moments after step `t`."""
        if self.variant.v_levels:
            u = self._log(u, t) if self.variant.v_map == "log" else self._linear(u)
        self.u = u
        self.m = self._first(m, u) if self.variant.m_levels else m

    def _log(self, u: Tensor, t: int) -> Tensor:
        k, last = self.variant, self.variant.v_levels - 1
        top = _rounded_up(u.amax(-1, keepdim=True), k.top_bits)
        least = torch.where(u > 0, u, torch.inf).amin(-1, keepdim=True).minimum(top)
        span = (_bits(top) - _bits(least)).clamp(max=int(k.cap * OCTAVE))
        unit = 1 << k.step_bits
        step = ((span + last * unit - 1) // (last * unit)).clamp(min=1) * unit
        x = (last - (_bits(top) - _bits(u)).float() / step.float()).clamp(0, last)

        def level(q: Tensor) -> Tensor:
            return (_bits(top) - (last - q.int()) * step).view(torch.float32)

        if k.v_rounding == "nearest":
            return torch.where(u > 0, level(x.round()), 0.0)
        q = x.floor().clamp(max=last - 1)
        low, high = level(q), level(q + 1)
        power = 1 if k.v_rounding == "stochastic root" else 2
        share = (u**power - low**power) / (high**power - low**power)
        h = (
            (self._offsets + t * _GOLDEN % 1).frac()
            if k.v_rounding == "weyl"
            else torch.rand(self.m.shape, generator=self._generator)
        )
        return torch.where(u > 0, torch.where(h < share, high, low), 0.0)

    def _linear(self, u: Tensor) -> Tensor:
        """Levels 1/n to n/n of a maximum of v, to the nearest."""
        v, n = u * u, self.variant.v_levels
        top = v.amax(-1, keepdim=True).expand_as(v)
        if self.variant.v_map == "rank1":
            pairs = zip(self.tensors(v), self.tensors(top), strict=True)
            top = self.matrix(
                torch.minimum(x.amax(-1, keepdim=True), x.amax(0, keepdim=True)) if x.ndim == 2 else own
                for x, own in pairs
            )
        y = (v / top.clamp(min=1e-38) * n).round().clamp(1, n) / n
        return torch.where(top > 0, y * top, 0.0).sqrt()

    def _first(self, m: Tensor, u: Tensor) -> Tensor:
        k = self.variant
        r = torch.where(u > 0, m / u, 0.0) if k.m_relative else m
        s = _rounded_up(r.abs().amax(-1, keepdim=True).clamp(min=2.0**-120), k.s_bits)
        y, levels = r.abs() / s, magnitudes(k.m_curve, k.m_levels)
        if k.m_stochastic:
            q = (torch.bucketize(y, levels, right=True) - 1).clamp(max=len(levels) - 2)
            low, high = levels[q], levels[q + 1]
            y = torch.where(torch.rand(self.m.shape, generator=self._generator) < (y - low) / (high - low), high, low)
        elif k.m_curve == "companded":  # the nearest on the curve, as a kernel finds it
            y = levels[(2 * y / (1 + y) * (k.m_levels // 2)).round().long()]
        else:
            y = levels[torch.bucketize(y, (levels[1:] + levels[:-1]) / 2)]
        if k.m_curve == "dynamic":
            y = torch.where(r < 0, y.clamp(max=_DYNAMIC[-2]), y)
        return r.sign() * y * s * (u if k.m_relative else 1.0)


@cache
def repaid_steps(beta1: float, t: int) -> float:
    """Weight of the first moment after step `t` in all later AdamW updates: sum_{k>=1} beta1^k / (1 - beta1^(t+k))."""
    return sum(beta1**k / (1 - beta1 ** (t + k)) for k in range(1, int(-40 / math.log(beta1))))


class LowBitOptimizer(Optimizer):
    """Steps float32 weights; every parameter needs a gradient in every step.

    Args:
        params: parameters or param groups.
        variant: the definition of the state.
        seed: of stochastic rounding.
        options: hyper-parameters in place of `DEFAULTS`.
    """

    DEFAULTS: ClassVar[dict[str, Any]]

    def __init__(self, params: Iterable[Any], variant: Variant, seed: int = 0, **options: Any) -> None:
        super().__init__(params, {**self.DEFAULTS, "weight_decay": 0.0, **options})
        self._t = 0
        self._moments = [
            Moments(variant, [p.shape for p in group["params"]], seed + 17 * index)
            for index, group in enumerate(self.param_groups)
        ]

    def moments(self) -> dict[str, Tensor]:
        """Both moments as decoded, "exp_avg" and the root of "exp_avg_sq": all parameters in one row."""

        def row(name: str) -> Tensor:
            return torch.cat([x.flatten() for kept in self._moments for x in kept.tensors(getattr(kept, name))])

        return {"exp_avg": row("m"), "exp_avg_sq": row("u")}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self._t += 1
        for group, moments in zip(self.param_groups, self._moments, strict=True):
            update = self._update(group, moments, moments.matrix(p.grad for p in group["params"]))
            torch._foreach_mul_(group["params"], 1 - group["lr"] * group["weight_decay"])
            torch._foreach_sub_(group["params"], moments.tensors(group["lr"] * update))

    @abstractmethod
    def _update(self, group: dict[str, Any], moments: Moments, g: Tensor) -> Tensor:
        """The update over the learning rate, (rows, block); quantizes the moments."""


class LowBitAdamW(LowBitOptimizer):
    DEFAULTS: ClassVar[dict[str, Any]] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}

    def _update(self, group: dict[str, Any], moments: Moments, g: Tensor) -> Tensor:
        (beta1, beta2), eps, t = group["betas"], group["eps"], self._t
        m = torch.lerp(moments.m, g, 1 - beta1)
        u = moments.u.square().mul_(beta2).addcmul_(g, g, value=1 - beta2).sqrt_()
        root2 = math.sqrt(1 - beta2**t)
        update = m / (u / root2 + eps) / (1 - beta1**t)
        moments.keep(m, u, t)
        if moments.variant.repay:
            update += repaid_steps(beta1, t) * (m - moments.m) / (moments.u / root2 + eps)
        return update


class LowBitSGD(LowBitOptimizer):
    """SGD with momentum, without dampening."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"lr": 1e-3, "momentum": 0.9}

    def _update(self, group: dict[str, Any], moments: Moments, g: Tensor) -> Tensor:
        momentum = group["momentum"]
        buffer = moments.m * momentum + g
        moments.keep(buffer, moments.u, self._t)
        owed = momentum / (1 - momentum) * (buffer - moments.m) if moments.variant.repay else 0.0
        return buffer + owed


class LowBitLion(LowBitOptimizer):
    """Lion (arXiv 2302.06675)."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"lr": 1e-4, "betas": (0.9, 0.99)}

    def _update(self, group: dict[str, Any], moments: Moments, g: Tensor) -> Tensor:
        beta1, beta2 = group["betas"]
        update = torch.lerp(moments.m, g, 1 - beta1).sign()
        moments.keep(torch.lerp(moments.m, g, 1 - beta2), moments.u, self._t)
        return update
