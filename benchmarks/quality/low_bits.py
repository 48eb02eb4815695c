"""AdamW with log8 state whose second moment is rounded at random, emulated in plain PyTorch: no kernel does that yet.

State is kept as the float32 numbers that its codes decode to. Blocks lie along the flattened parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

BLOCK = 128
LEVELS_M, LEVELS_V = 255, 254  # of the first moment, zero among them; of the second moment above zero
CAP = 32  # largest range of the second moment's levels, octaves of its root
OCTAVE = 1 << 23  # a factor of 2, in the bits of a float32

#: Options in the study's lines of this optimizer.
OPTIONS = {
    "variant": "log8, v stochastic",
    "settings": "Variant(m_levels=255, v_levels=254, block=128, m_curve='log8', m_relative=True, m_stochastic=False, "
    "repay=False, s_bits=0, v_map='log', v_rounding='stochastic', cap=32, top_bits=0, step_bits=0)",
}


def _magnitudes() -> Tensor:
    """Magnitudes of the first moment's levels in units of the block's largest: float32, ((LEVELS_M + 1) / 2,)."""
    z = torch.linspace(0, 1, LEVELS_M // 2 + 1, dtype=torch.float64)
    return ((1.7 - (1.7**2 - 2.8 * z).sqrt()) / 1.4).float()


MAGNITUDES = _magnitudes()


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _root_at_random(u: Tensor, generator: torch.Generator) -> Tensor:
    """Roots of second moments on log8's levels, (rows, BLOCK); the rounding is unbiased in the second moment."""
    last = LEVELS_V - 1
    top = u.amax(-1, keepdim=True)
    least = torch.where(u > 0, u, torch.inf).amin(-1, keepdim=True).minimum(top)
    span = (_bits(top) - _bits(least)).clamp(max=CAP * OCTAVE)
    step = ((span + last - 1) // last).clamp(min=1)
    level = (last - (_bits(top) - _bits(u)).float() / step.float()).clamp(0, last).floor().clamp(max=last - 1)
    low, high = ((_bits(top) - (last - q.int()) * step).view(torch.float32) for q in (level, level + 1))
    share = (u**2 - low**2) / (high**2 - low**2)
    at_random = torch.rand(u.shape, generator=generator) < share
    return torch.where(u > 0, torch.where(at_random, high, low), 0.0)


def _first_to_nearest(m: Tensor, u: Tensor) -> Tensor:
    """First moments on log8's levels, in units of the decoded roots `u`: (rows, BLOCK)."""
    ratio = torch.where(u > 0, m / u, 0.0)
    scale = ratio.abs().amax(-1, keepdim=True).clamp(min=2.0**-120)
    middles = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
    return ratio.sign() * MAGNITUDES[torch.bucketize(ratio.abs() / scale, middles)] * scale * u


class EmulatedAdamW(Optimizer):
    """Steps float32 weights; every parameter needs a gradient in every step.

    Args:
        params: parameters.
        options: hyper-parameters in place of AdamW's defaults.
    """

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, **options})
        self._t = 0
        self._generator = torch.Generator().manual_seed(12345)
        (group,) = self.param_groups
        self._params: list[Tensor] = group["params"]
        self._m = torch.zeros_like(self._rows(self._params))
        self._u = torch.zeros_like(self._m)  # the root of the second moment

    def moments(self) -> dict[str, Tensor]:
        """Both moments as decoded, "exp_avg" and the root of "exp_avg_sq": all parameters in one row."""
        kept = {"exp_avg": self._m, "exp_avg_sq": self._u}
        return {name: torch.cat([x.flatten() for x in self._tensors(rows)]) for name, rows in kept.items()}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self._t += 1
        (group,) = self.param_groups
        (beta1, beta2), lr = group["betas"], group["lr"]
        gradients = self._rows(param.grad for param in self._params if param.grad is not None)
        m = torch.lerp(self._m, gradients, 1 - beta1)
        u = self._u.square().mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2).sqrt_()
        update = m / (u / math.sqrt(1 - beta2**self._t) + group["eps"]) / (1 - beta1**self._t)
        self._u = _root_at_random(u, self._generator)
        self._m = _first_to_nearest(m, self._u)
        torch._foreach_mul_(self._params, 1 - lr * group["weight_decay"])
        torch._foreach_sub_(self._params, self._tensors(lr * update))

    def _rows(self, tensors: Iterable[Tensor]) -> Tensor:
        """Tensors of the parameters' shapes as blocks, (rows, BLOCK)."""
        padded = [F.pad(x.detach().reshape(-1), (0, -x.numel() % BLOCK)) for x in tensors]
        return torch.cat(padded).view(-1, BLOCK)

    def _tensors(self, rows: Tensor) -> list[Tensor]:
        """The inverse of :meth:`_rows`."""
        parts = rows.split([-(-param.numel() // BLOCK) for param in self._params])
        pairs = zip(parts, self._params, strict=True)
        return [part.reshape(-1)[: param.numel()].view(param.shape) for part, param in pairs]
