"""The rules in PyTorch, one whole parameter at a time, with the operations in the kernels' order and rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardopt.kernels.numeric import float32, fma, reciprocal, square_root

Scalars = Mapping[str, float]


class Updated(NamedTuple):
    """A rule's results: float32 tensors of one shape, with the roots of the moments that are coded by theirs."""

    param: Tensor
    moments: list[Tensor]
    roots: list[Tensor]


def power(base: float, exponent: int) -> float:
    """``base ** exponent`` by squaring, in the order of csrc/core/rule.h."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def add_scaled(factor: float, x: Tensor, y: Tensor) -> Tensor:
    """``factor * x + y`` rounded once; the very bits of ``y`` where the factor is zero in float32."""
    return fma(float32(factor), x, y) if float32(factor) != 0 else y


def decayed(p: Tensor, decay: float) -> Tensor:
    """Decoupled weight decay of a parameter."""
    return add_scaled(-decay, p, p)


def averages(g: Tensor, m: Tensor, v: Tensor, hyper: Scalars) -> tuple[Tensor, Tensor, Tensor]:
    """Adam's new moments, and the root of the second."""
    m = fma(float32(1 - hyper["beta1"]), g - m, m)
    v = fma(float32(1 - hyper["beta2"]), fma(g, g, -v), v)
    return m, v, square_root(v)


def quotient(m: Tensor, root: Tensor, hyper: Scalars, step: int) -> Tensor:
    """A moment over the corrected root of the second one."""
    correction = float32(1 / math.sqrt(1 - power(hyper["beta2"], step)))
    return m * reciprocal(fma(root, correction, float32(hyper["eps"])))


def corrected_rate(hyper: Scalars, step: int) -> float:
    return hyper["lr"] / (1 - power(hyper["beta1"], step))


def adam(
    p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int, *, divisor: float = 1.0
) -> Updated:
    """Adam (arXiv 1412.6980, algorithm 1) and AdamW (arXiv 1711.05101, algorithm 2). divisor: of the learning rate."""
    m, v, root = averages(add_scaled(hyper["coupled_decay"], p, g), *moments, hyper)
    rate, decay = float32(corrected_rate(hyper, step)), hyper["lr"] * hyper["decoupled_decay"]
    if divisor != 1.0:
        rate, decay = float32(float(rate) / divisor), float(float32(decay)) / divisor
    return Updated(fma(-rate, quotient(m, root, hyper, step), decayed(p, decay)), [m, v], [root])


def repaid_adam(p: Tensor, error: Tensor, root: Tensor, hyper: Scalars, step: int) -> Tensor:
    """Moves parameters for the error of the coded first moment. root: of the second, as coded."""
    beta1 = hyper["beta1"]
    total, weight, decay = 0.0, 1.0, beta1
    while weight * decay > 1e-9 * total:
        total += weight * (decay / (1 - decay))
        weight *= power(beta1, step)
        decay *= beta1
    moved = fma(-float32(hyper["lr"] * total), quotient(error, root, hyper, step), p)
    return torch.where(error != 0, moved, p)


def lion(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int) -> Updated:
    """Lion (arXiv 2302.06675, algorithm 2)."""
    (m,) = moments
    difference = g - m
    direction = fma(float32(1 - hyper["beta1"]), difference, m)
    p = decayed(p, hyper["lr"] * hyper["decoupled_decay"]) - torch.sign(direction) * float32(hyper["lr"])
    return Updated(p, [fma(float32(1 - hyper["beta2"]), difference, m)], [])


def momentum(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int) -> Updated:
    """SGD with momentum, as torch.optim.SGD defines it: no dampening in the first step."""
    (buffer,) = moments
    mu, lr = float32(hyper["momentum"]), float32(hyper["lr"])
    g = add_scaled(hyper["coupled_decay"], p, g)
    gradient_weight = float32(1.0 if step <= 1 else 1 - hyper["dampening"])
    buffer = fma(mu, buffer, gradient_weight * g)
    direction = fma(mu, buffer, g) if hyper["nesterov"] else buffer
    return Updated(fma(-lr, direction, p), [buffer], [])


def sgd(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int) -> Updated:
    """Plain SGD."""
    g = add_scaled(hyper["coupled_decay"], p, g)
    return Updated(fma(-float32(hyper["lr"]), g, p), [], [])


def muon_direction(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int) -> Updated:
    """Muon (Jordan et al., 2024): the momentum, and in the parameter's place the direction to orthogonalize."""
    (m,) = moments
    m = fma(float32(1 - hyper["momentum"]), g - m, m)
    ahead = 1 - float(float32(hyper["momentum"])) if hyper["nesterov"] else 0.0
    return Updated(add_scaled(ahead, g - m, m), [m], [])


def muon_apply(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int) -> Updated:
    """Muon's second pass: the gradient is the orthogonalized direction."""
    p = decayed(p, hyper["lr"] * hyper["weight_decay"])
    return Updated(fma(-float32(hyper["lr"] * hyper["scale"]), g, p), [], [])


def amsgrad(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int) -> Updated:
    """AMSGrad (arXiv 1904.09237, algorithm 2)."""
    m, v, largest = moments
    m, v, root = averages(add_scaled(hyper["coupled_decay"], p, g), m, v, hyper)
    largest = torch.where(largest > v, largest, v)
    change = quotient(m, square_root(largest), hyper, step)
    p = fma(-float32(corrected_rate(hyper, step)), change, decayed(p, hyper["lr"] * hyper["decoupled_decay"]))
    return Updated(p, [m, v, largest], [root, square_root(largest)])


def nadam(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int) -> Updated:
    """NAdam (Dozat, ICLR workshop 2016)."""
    beta1, lr, base = hyper["beta1"], hyper["lr"], hyper["decay_base"]
    product, decay, i = 1.0, 1.0, 1
    while i <= step and product > 2.0**-60:
        decay *= base
        product *= beta1 * (1 - 0.5 * decay)
        i += 1
    mu, following = (beta1 * (1 - 0.5 * power(base, t)) for t in (step, step + 1))
    g = add_scaled(hyper["coupled_decay"], p, g)
    m, v, root = averages(g, *moments, hyper)
    gradient_rate = float32(lr * (1 - mu) / (1 - product))
    direction = fma(float32(lr * following / (1 - product * following)), m, gradient_rate * g)
    inverse = quotient(torch.ones_like(g), root, hyper, step)
    return Updated(fma(-direction, inverse, decayed(p, lr * hyper["decoupled_decay"])), [m, v], [root])


def radam(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int) -> Updated:
    """RAdam (arXiv 1908.03265, algorithm 2)."""
    beta2, rate, root_weight, floor = hyper["beta2"], corrected_rate(hyper, step), 0.0, 1.0
    power2, longest = power(beta2, step), 2 / (1 - beta2) - 1
    length = longest - 2 * step * power2 / (1 - power2)
    if length > 5:
        above, below = (length - 4) * (length - 2) * longest, (longest - 4) * (longest - 2) * length
        rate, root_weight, floor = rate * (math.sqrt(above / below) * math.sqrt(1 - power2)), 1.0, hyper["eps"]
    m, v, root = averages(add_scaled(hyper["coupled_decay"], p, g), *moments, hyper)
    change = m * reciprocal(fma(root, float32(root_weight), float32(floor)))
    p = fma(-float32(rate), change, decayed(p, hyper["lr"] * hyper["decoupled_decay"]))
    return Updated(p, [m, v], [root])


def adamax(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int) -> Updated:
    """Adamax (arXiv 1412.6980, algorithm 2)."""
    m, largest = moments
    g = add_scaled(hyper["coupled_decay"], p, g)
    m = fma(float32(1 - hyper["beta1"]), g - m, m)
    decayed_largest, magnitude = float32(hyper["beta2"]) * largest, g.abs() + float32(hyper["eps"])
    largest = torch.where(decayed_largest > magnitude, decayed_largest, magnitude)
    return Updated(fma(-float32(corrected_rate(hyper, step)), m * reciprocal(largest), p), [m, largest], [])


def exponential(x: float) -> float:
    """``e ** x`` for ``x <= 0``, in the order of csrc/core/rule.h."""
    if x < -745:
        return 0.0
    halvings = 0
    while x < -0.5:
        x *= 0.5
        halvings += 1
    total = term = 1.0
    for n in range(1, 18):
        term *= x / n
        total += term
    for _ in range(halvings):
        total *= total
    return total


def ademamix(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int) -> Updated:
    """AdEMAMix (arXiv 2409.03137, algorithm 1)."""
    lr, alpha, beta3 = hyper["lr"], hyper["alpha"], hyper["beta3"]
    if step < hyper["alpha_steps"]:
        alpha *= step / hyper["alpha_steps"]
    if step < hyper["beta3_steps"]:
        done = step / hyper["beta3_steps"]
        beta3 = min(beta3, exponential(1 / ((1 - done) / hyper["log_beta1"] + done / hyper["log_beta3"])))
    fast, slow, v = moments
    fast, v, root = averages(g, fast, v, hyper)
    slow = fma(float32(1 - beta3), g - slow, slow)
    direction = fma(float32(lr * alpha), slow, float32(corrected_rate(hyper, step)) * fast)
    change = add_scaled(lr * hyper["decoupled_decay"], p, quotient(direction, root, hyper, step))
    return Updated(p - change, [fast, slow, v], [root])


def adopt(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int) -> Updated:
    """ADOPT (arXiv 2411.02853, algorithm 2)."""
    m, v = moments
    first = step <= 1
    largest = float32(0.0 if first else math.sqrt(math.sqrt(step - 1)))
    g = add_scaled(hyper["coupled_decay"], p, g)
    root, eps = square_root(v), float32(hyper["eps"])
    normalized = g * reciprocal(torch.where(root < eps, eps, root))
    low = torch.where(normalized > largest, largest, normalized)
    clipped = torch.where(low < -largest, -largest, low)
    m = fma(float32(1 - hyper["beta1"]), clipped - m, m)
    v = fma(float32(1 if first else 1 - hyper["beta2"]), fma(g, g, -v), v)
    decay = 0.0 if first else hyper["lr"] * hyper["decoupled_decay"]
    p = fma(-float32(0.0 if first else hyper["lr"]), m, decayed(p, decay))
    return Updated(p, [m, v], [square_root(v)])


def adan(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int) -> Updated:
    """Adan (arXiv 2208.06677, algorithm 1)."""
    lr, beta1, beta2, beta3 = (hyper[name] for name in ("lr", "beta1", "beta2", "beta3"))
    m, d, n, last = moments
    decay = lr * hyper["weight_decay"]
    before, after = (decay, 0.0) if hyper["no_prox"] else (0.0, decay / (1 + decay))
    difference = g + last if step > 1 else torch.zeros_like(g)
    ahead = fma(float32(beta2), difference, g)
    m = fma(float32(1 - beta1), g - m, m)
    d = fma(float32(1 - beta2), difference - d, d)
    n = fma(float32(1 - beta3), fma(ahead, ahead, -n), n)
    root = square_root(n)
    denominator = fma(root, float32(1 / math.sqrt(1 - power(beta3, step))), float32(hyper["eps"]))
    gradient_rate = float32(lr / (1 - power(beta1, step)))
    direction = fma(float32(lr * beta2 / (1 - power(beta2, step))), d, gradient_rate * m)
    p = decayed(fma(-direction, reciprocal(denominator), decayed(p, before)), after)
    return Updated(p, [m, d, n, -g], [root])


def adagrad(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int) -> Updated:
    """Adagrad (JMLR 12, 2011)."""
    (total,) = moments
    g = add_scaled(hyper["coupled_decay"], p, g)
    most = float32(2.0**126)
    total = fma(g, g, torch.where(total < most, total, most))
    root = square_root(total)
    rate = float32(hyper["lr"] / (1 + (step - 1) * hyper["lr_decay"]))
    return Updated(fma(-rate, g * reciprocal(root + float32(hyper["eps"])), p), [total], [root])


def rmsprop(
    p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int, *, centered: bool, momentum: bool
) -> Updated:
    """RMSprop, as torch.optim.RMSprop defines it."""
    share = float32(1 - hyper["alpha"])
    v, *others = moments
    g = add_scaled(hyper["coupled_decay"], p, g)
    v = fma(share, fma(g, g, -v), v)
    root = deviation = square_root(v)
    new = [v]
    if centered:
        mean = fma(share, g - others[0], others[0])
        variance = fma(-mean, mean, v)
        least = float32(hyper["least_variance"]) * v
        deviation = square_root(torch.where(variance > least, variance, least))
        new.append(mean)
    change = g * reciprocal(deviation + float32(hyper["eps"]))
    if momentum:
        change = fma(float32(hyper["momentum"]), others[-1], change)
        new.append(change)
    return Updated(fma(-float32(hyper["lr"]), change, p), new, [root])


ELEMENT_RULES: dict[str, Callable[..., Updated]] = {
    "adam": adam,
    "repaid_adam": adam,
    "lion": lion,
    "momentum": momentum,
    "sgd": sgd,
    "muon_direction": muon_direction,
    "muon_apply": muon_apply,
    "amsgrad": amsgrad,
    "nadam": nadam,
    "radam": radam,
    "adamax": adamax,
    "ademamix": ademamix,
    "adopt": adopt,
    "adan": adan,
    "adagrad": adagrad,
    "rmsprop": partial(rmsprop, centered=False, momentum=False),
    "rmsprop_momentum": partial(rmsprop, centered=False, momentum=True),
    "centered_rmsprop": partial(rmsprop, centered=True, momentum=False),
    "centered_rmsprop_momentum": partial(rmsprop, centered=True, momentum=True),
}

#: Updates of rules whose parameters make up for what codes lose of the first moment.
REPAID: dict[str, Callable[..., Tensor]] = {"repaid_adam": repaid_adam}
