"""The reference step: pure PyTorch, one whole parameter at a time. Every kernel must equal it bit for bit.

It is written for reading, with the operations in the order and the rounding that the kernels have (csrc/rules). Codecs
are handed in, since this layer lies below them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt.kernels.numeric import float32, fma, from_blocks, reciprocal, square_root, to_blocks
from shardopt.kernels.weights import StoredWeights, WeightFormat, noise

Scalars = Mapping[str, float]


class Updated(NamedTuple):
    """Result of a rule for a parameter: float32 tensors of one shape."""

    param: Tensor
    moments: list[Tensor]
    root: Tensor | None


class Stepped(NamedTuple):
    """The outcome of :func:`step`: new tensors; nothing was changed in place."""

    param: Tensor
    low_bits: Tensor | None
    coded: list[Any]
    nonfinite: int


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


def adam(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int) -> Updated:
    """Adam (arXiv 1412.6980, algorithm 1) and AdamW (arXiv 1711.05101, algorithm 2)."""
    beta1, beta2, lr = hyper["beta1"], hyper["beta2"], hyper["lr"]
    m, v = moments
    g = add_scaled(hyper["coupled_decay"], p, g)
    m = fma(float32(1 - beta1), g - m, m)
    v = fma(float32(1 - beta2), fma(g, g, -v), v)
    root = square_root(v)
    inverse_root_correction2 = float32(1 / math.sqrt(1 - power(beta2, step)))
    denominator = fma(root, inverse_root_correction2, float32(hyper["eps"]))
    rate = float32(lr / (1 - power(beta1, step)))
    p = fma(-rate, m * reciprocal(denominator), decayed(p, lr * hyper["decoupled_decay"]))
    return Updated(p, [m, v], root)


def lion(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int) -> Updated:
    """Lion (arXiv 2302.06675, algorithm 2)."""
    (m,) = moments
    difference = g - m
    direction = fma(float32(1 - hyper["beta1"]), difference, m)
    p = decayed(p, hyper["lr"] * hyper["decoupled_decay"]) - torch.sign(direction) * float32(hyper["lr"])
    return Updated(p, [fma(float32(1 - hyper["beta2"]), difference, m)], None)


def momentum(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int) -> Updated:
    """SGD with momentum, as torch.optim.SGD defines it: no dampening in the first step."""
    (buffer,) = moments
    mu, lr = float32(hyper["momentum"]), float32(hyper["lr"])
    g = add_scaled(hyper["coupled_decay"], p, g)
    gradient_weight = float32(1.0 if step <= 1 else 1 - hyper["dampening"])
    buffer = fma(mu, buffer, gradient_weight * g)
    direction = fma(mu, buffer, g) if hyper["nesterov"] else buffer
    return Updated(fma(-lr, direction, p), [buffer], None)


def sgd(p: Tensor, g: Tensor, moments: Sequence[Tensor], hyper: Scalars, step: int) -> Updated:
    """Plain SGD."""
    g = add_scaled(hyper["coupled_decay"], p, g)
    return Updated(fma(-float32(hyper["lr"]), g, p), [], None)


#: Below this magnitude no gradient overflows the moments (csrc/core/rule.h).
LARGE_GRADIENT = 2.0**63


def lost(g: Tensor, new: Updated) -> Tensor:
    """Where an update is to be undone: the gradient is NaN or Inf, or so large that the update overflows."""
    finite = torch.isfinite(g) & torch.isfinite(new.param)
    for moment in new.moments:
        finite &= torch.isfinite(moment)
    return ~(g.abs() < LARGE_GRADIENT) & ~finite


RULES: dict[str, Callable[..., Updated]] = {
    "adam": adam,
    "lion": lion,
    "momentum": momentum,
    "sgd": sgd,
}


def step(
    rule: str,
    moments: Sequence[Any],
    codec: Any,
    coding: Any,
    *,
    param: Tensor,
    gradient: Tensor,
    coded: Sequence[Any],
    hyper: Scalars,
    step: int,
    block_size: int,
    gradient_scale: float = 1.0,
    nonfinite: str = "skip",
    weights: WeightFormat | None = None,
    low_bits: Tensor | None = None,
    noise_key: int = 0,
) -> Stepped:
    """One step of one whole parameter.

    Args:
        rule: a name in :data:`RULES`.
        moments: the rule's moments (:class:`shardopt.codec.Moment`).
        codec: the codec of the state (:class:`shardopt.codec.Codec`).
        coding: the module with ``encode_moments`` and ``decode_moments``: :mod:`shardopt.codec`.
        param: float32, bfloat16 or float16, any shape.
        gradient: ``param.shape``, any of the same dtypes.
        coded: one :class:`shardopt.codec.Coded` per moment: codes of ``param.shape`` and scales of
            ``(shape[0], blocks per row[, scales per block])``.
        hyper: the rule's hyper-parameters by name.
        step: the step's number, from 1.
        block_size: elements per block.
        gradient_scale: the gradient is multiplied by it, in float32.
        nonfinite: ``"skip"`` or ``"propagate"``.
        weights: how the parameter's weights are kept; None for its dtype alone.
        low_bits: of the master weights, where the format has some.
        noise_key: :func:`shardopt.kernels.weights.noise_key`, for stochastic rounding.

    Returns:
        The new parameter in its dtype, the new low bits and moments, and the number of gradient elements skipped.
    """
    rows = param.shape[0] if codec.blockwise else 1
    cols = param.numel() // max(rows, 1)
    size = block_size if codec.blockwise else max(cols, 1)

    def blocks_of(x: Tensor) -> Tensor:
        return to_blocks(x.reshape(rows, cols), size)

    def as_blocks(state: Any, moment: Any) -> Any:
        if state.scales is None:
            return type(state)(blocks_of(state.codes), None)
        zero = codec.zero_code(signed=moment.signed)
        codes = to_blocks(state.codes.reshape(rows, cols), size, fill=zero)
        scales = state.scales.reshape(*codes.shape[:2], codec.scales(signed=moment.signed))
        return type(state)(codes, scales)

    weights = WeightFormat(param.dtype) if weights is None else weights
    p, g = (
        blocks_of(weights.load(StoredWeights(param, low_bits))),
        blocks_of(gradient.float()) * float32(gradient_scale),
    )
    old = coding.decode_moments(codec, moments, [as_blocks(s, m) for s, m in zip(coded, moments, strict=True)])
    new = RULES[rule](p, g, old.values, hyper, step)
    skip = lost(g, new) if nonfinite == "skip" else torch.zeros_like(g, dtype=torch.bool)
    kept = [torch.where(skip, o, n) for o, n in zip(old.values, new.moments, strict=True)]
    root = None if new.root is None else torch.where(skip, old.root, new.root)
    stored = coding.encode_moments(codec, moments, kept, root)

    def flat(x: Tensor) -> Tensor:
        return from_blocks(x, cols).reshape(param.shape)

    elements = torch.arange(param.numel()).reshape(param.shape) if weights.stochastic else None
    stored_weights = weights.store(
        flat(torch.where(skip, p, new.param)), None if elements is None else noise(noise_key, step, elements)
    )
    return Stepped(
        *stored_weights,
        [
            type(s)(flat(s.codes), None if s.scales is None else s.scales.reshape(old_s.scales.shape))
            for s, old_s in zip(stored, coded, strict=True)
        ],
        int(skip.sum()),
    )
