"""Rules that need sums over a parameter or over all of them, in PyTorch, as :mod:`reference_rules` has the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reference_rules import Scalars, Updated, adam, add_scaled, averages, decayed, lion, power, quotient
from shardopt.kernels.numeric import float32, fma, reciprocal, square_root


class Terms(NamedTuple):
    """Numbers whose squares a rule adds up, a tensor per sum, and the new moments. y: what to multiply by instead."""

    x: list[Tensor]
    moments: list[Tensor]
    y: list[Tensor] | None = None


class Sums(NamedTuple):
    """The sums of squares over a parameter, rounded once, and the number of its elements."""

    totals: list[float]
    numel: int


def _lamb_direction(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int) -> Updated:
    m, v, root = averages(g, *moments, hyper)
    scaled = quotient(float32(1 / (1 - power(hyper["beta1"], step))) * m, root, hyper, step)
    return Updated(add_scaled(hyper["weight_decay"], p, scaled), [m, v], [root])


def lamb_terms(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int) -> Terms:
    new = _lamb_direction(p, g, moments, hyper, step)
    return Terms([p, new.param], new.moments)


def lamb(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int, sums: Sums) -> Updated:
    """LAMB (arXiv 1904.00962, algorithm 2)."""
    new, rate = _lamb_direction(p, g, moments, hyper, step), float32(hyper["lr"])
    weights, directions = sums.totals
    if weights and directions:
        rate = float32(float(rate) * (math.sqrt(weights) / math.sqrt(directions)))
    return new._replace(param=fma(-rate, new.param, p))


def lars_terms(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int) -> Terms:
    return Terms([p, g], list(moments))


def lars(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int, sums: Sums) -> Updated:
    """LARS (arXiv 1708.03888, algorithm 1)."""
    (buffer,), rate = moments, float32(hyper["lr"])
    weight, gradient = (math.sqrt(total) for total in sums.totals)
    if weight and gradient:
        trust, decay = float(float32(hyper["trust_coefficient"])), float(float32(hyper["weight_decay"]))
        rate = float32(float(rate) * (trust * weight / (gradient + decay * weight)))
    buffer = fma(float32(hyper["momentum"]), buffer, rate * add_scaled(hyper["weight_decay"], p, g))
    return Updated(p - buffer, [buffer], [])


def stable_adamw_terms(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int) -> Terms:
    new = adam(p, g, moments, hyper, step)
    denominator = new.roots[0] * float32(1 / math.sqrt(1 - power(hyper["beta2"], step)))
    denominator = torch.where(denominator > float32(hyper["eps"]), denominator, float32(hyper["eps"]))
    ratio = torch.where(denominator < 2.0**-126, 0.0, g * reciprocal(denominator))
    return Terms([ratio], new.moments)


def stable_adamw(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int, sums: Sums) -> Updated:
    """StableAdamW (arXiv 2304.13013, algorithm 2)."""
    rms = math.sqrt(sums.totals[0] / max(sums.numel, 1))
    return adam(p, g, moments, hyper, step, divisor=rms if rms > 1 else 1.0)


def _change(rule: Callable[..., Updated], p: Tensor, g: Tensor, moments: Any, hyper: Scalars, step: int) -> Updated:
    """Returns the change of a parameter without weight decay."""
    without_decay = {**hyper, "coupled_decay": 0.0, "decoupled_decay": 0.0}
    return rule(torch.zeros_like(p), g, moments, without_decay, step)


def cautious_terms(
    rule: Callable[..., Updated], p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int
) -> Terms:
    g = add_scaled(hyper.get("coupled_decay", 0.0), p, g)
    new = _change(rule, p, g, moments, hyper, step)
    return Terms([(torch.sign(new.param) * torch.sign(g) < 0).float()], new.moments)


def cautious(
    rule: Callable[..., Updated],
    p: Tensor,
    g: Tensor,
    moments: Sequence[Tensor],
    hyper: Scalars,
    step: int,
    sums: Sums | None,
) -> Updated:
    """Cautious optimizers (arXiv 2411.16085) and cautious weight decay (arXiv 2510.12402)."""
    g = add_scaled(hyper.get("coupled_decay", 0.0), p, g)
    new = _change(rule, p, g, moments, hyper, step)
    change, kept = new.param, decayed(p, hyper["lr"] * hyper["decoupled_decay"])
    if hyper["cautious_weight_decay"]:
        kept = torch.where(torch.sign(change) * torch.sign(p) > 0, p, kept)
    if hyper["cautious"]:
        assert sums is not None
        scale = float32(sums.numel / (sums.totals[0] + 1))
        change = torch.where(torch.sign(change) * torch.sign(g) < 0, scale, 0.0) * change
    return new._replace(param=kept + change)


def _prodigy_average(
    p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int
) -> tuple[Tensor, list[Tensor]]:
    """The gradient with the coupled decay, and the new moments."""
    lr, d, takes_part = hyper["lr"], hyper["d"], float(hyper["lr"] != 0)
    rate = lr * d * hyper["bias_correction"]
    slow_rate = d / hyper["d0"] * (takes_part * d if hyper["safeguard_warmup"] else rate)
    m, v, s, p0 = moments
    g = add_scaled(hyper["coupled_decay"], p, g)
    scaled = float32(takes_part * d) * g
    m = add_scaled(takes_part * (1 - hyper["beta1"]), scaled - m, m)
    v = add_scaled(takes_part * (1 - hyper["beta2"]), fma(scaled, scaled, -v), v)
    s = add_scaled(slow_rate, g, add_scaled(-takes_part * (1 - hyper["beta3"]), s, s))
    return g, [m, v, s, p.clone() if step == 1 else p0]


def prodigy_terms(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int) -> Terms:
    g, new = _prodigy_average(p, g, moments, hyper, step)
    x = [g, new[2].abs()] if hyper["lr"] else [torch.zeros_like(g)] * 2
    return Terms(x, new, [new[3] - p, torch.ones_like(p)])


def prodigy(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int) -> Updated:
    """Prodigy (arXiv 2306.06101, algorithm 4). eps: times the estimate after the step."""
    rate = hyper["lr"] * hyper["d"] * hyper["bias_correction"]
    _, new = _prodigy_average(p, g, moments, hyper, step)
    root = square_root(new[1])
    change = new[0] * reciprocal(root + float32(hyper["eps"]))
    return Updated(add_scaled(-rate, change, decayed(p, rate * hyper["decoupled_decay"])), new, [root])


#: The terms of rules with sums, by name.
TERMS: dict[str, Callable[..., Terms]] = {
    "lamb": lamb_terms,
    "lars": lars_terms,
    "stable_adamw": stable_adamw_terms,
    "cautious_adam": partial(cautious_terms, adam),
    "cautious_lion": partial(cautious_terms, lion),
    "prodigy": prodigy_terms,
}

SUM_RULES: dict[str, Callable[..., Updated]] = {
    "lamb": lamb,
    "lars": lars,
    "stable_adamw": stable_adamw,
    "cautious_adam": partial(cautious, adam),
    "cautious_lion": partial(cautious, lion),
    "prodigy": prodigy,
}
