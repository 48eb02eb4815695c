"""The reference step: pure PyTorch, one whole parameter at a time. Every kernel must equal it bit for bit.

This file is written for reading, with the operations in the order and the rounding that the kernels have (csrc/rules).
Codecs are handed in, since this layer lies below them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reference_rules import ELEMENT_RULES, REPAID, Scalars, Updated
from reference_sums import SUM_RULES, TERMS, Sums, Terms
from shardopt.kernels.numeric import bits, float32, float_from_bits, from_blocks, reciprocal, to_bf16, to_blocks
from shardopt.kernels.weights import WeightFormat
from shardopt.kernels.weights import noise_key as key_of_noise

RULES = {**ELEMENT_RULES, **SUM_RULES}


class Stepped(NamedTuple):
    """The outcome of :func:`step`: new tensors; nothing was changed in place."""

    param: Tensor
    low_bits: Tensor | None
    coded: list[Any]
    nonfinite: int


#: Below this magnitude the square of a number does not overflow the moments (csrc/core/rule.h).
LARGE = 2.0**63


def lost(rule: str, hyper: Scalars, p: Tensor, g: Tensor, new: Updated) -> Tensor:
    """Where an update is to be undone: the gradient is NaN or Inf, or it or the parameter so large that it overflows.

    Rules that square more than the gradient and its coupled decay undo all that are large.
    """
    gain = {"adan": 4.0, "prodigy": max(1.0, hyper.get("d", 0.0))}.get(rule)
    param_gain = 8 * float32(hyper.get("coupled_decay", 0.0)) * float32(gain or 1.0)
    large = ~((g * float32(gain or 1.0)).abs() < LARGE)
    if param_gain != 0:
        large |= ~((p * param_gain).abs() < LARGE)
    finite = torch.isfinite(g) & torch.isfinite(new.param)
    for moment in new.moments:
        finite &= torch.isfinite(moment)
    return large & (~finite if gain is None else torch.ones_like(large))


def noise(key: int, step: int, elements: Tensor) -> Tensor:
    """The random bits of elements, given by their indices in the flattened parameter: 32 each, int64 (csrc/core)."""
    word = 2**32 - 1
    mixed = key_of_noise(key_of_noise(key, step), 0)
    x = (elements + (mixed & word)) & word
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & word
    x = x ^ (mixed >> 32)
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & word
    return x ^ (x >> 16)


def dither(step: int, elements: Tensor) -> Tensor:
    """The random bits by which codes are chosen, as :func:`noise` for the step alone (csrc/core/dither.h)."""
    word = 2**32 - 1
    mixed = key_of_noise(step, 0)
    return (elements * (mixed >> 32) + (mixed & word)) & word


def bf16_at_random(x: Tensor, random: Tensor) -> Tensor:
    """The next bfloat16 below or above in magnitude; above with the probability that makes the mean exact."""
    b = bits(x).long()
    rounded = (b & 0xFFFFFFFF) + (random & 0xFFFF) & 0xFFFF0000
    return torch.where(x.isfinite(), float_from_bits(rounded.int()).bfloat16(), to_bf16(x))


def products_of(rule: str, hyper: Scalars, terms: Terms, p: Tensor, g: Tensor, nonfinite: str) -> list[list[float]]:
    """The terms of each sum, one per element: 0 for skipped updates, and NaN alone if another one is not finite."""
    found = []
    for x, y in zip(terms.x, terms.y or [None] * len(terms.x), strict=True):
        is_lost = lost(rule, hyper, p, g, Updated(x, terms.moments, []))
        x = torch.where(is_lost, 0.0, x) if nonfinite == "skip" else x
        product = x.double() * (x if y is None else y).double()
        found.append(product.flatten().tolist() if torch.isfinite(product).all() else [math.nan])
    return found


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
    products_only: bool = False,
) -> Any:
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
        noise_key: :func:`shardopt.kernels.weights.noise_key`, for what is rounded at random.
        products_only: of a rule with sums over all parameters: return what each element adds to each sum.

    Returns:
        A :class:`Stepped`: the new parameter in its dtype, the new low bits and moments, and the number of gradient
        elements skipped.
    """
    rows = param.shape[0] if codec.blockwise else 1
    cols = param.numel() // max(rows, 1)
    size = block_size if codec.blockwise else max(cols, 1)

    def blocks_of(x: Tensor) -> Tensor:
        return to_blocks(x.reshape(rows, cols), size)

    def as_blocks(state: Any, moment: Any) -> Any:
        if state.scales is None:
            return type(state)(blocks_of(state.codes), None)
        own = moment.codec(codec)
        codes = to_blocks(state.codes.reshape(rows, cols), size, fill=own.zero_code(signed=moment.signed))
        scales = state.scales.reshape(*codes.shape[:2], own.scales(signed=moment.signed))
        return type(state)(codes, scales)

    weights = WeightFormat(param.dtype) if weights is None else weights
    p, g = (
        blocks_of(weights.load(param, low_bits)),
        blocks_of(gradient.float()) * float32(gradient_scale),
    )
    old = coding.decode_moments(codec, moments, [as_blocks(s, m) for s, m in zip(coded, moments, strict=True)])
    more: dict[str, Any] = {}
    if rule in TERMS:
        terms = TERMS[rule](p, g, old.values, hyper, step)
        exists = blocks_of(torch.ones_like(param, dtype=torch.bool))
        terms = terms._replace(x=[torch.where(exists, x, 0.0) for x in terms.x])
        products = products_of(rule, hyper, terms, p, g, nonfinite)
        if products_only:
            return products
        if terms.y is None:
            more["sums"] = Sums([math.fsum(each) for each in products], param.numel())
    new = RULES[rule](p, g, old.values, hyper, step, **more)
    skip = lost(rule, hyper, p, g, new) if nonfinite == "skip" else torch.zeros_like(g, dtype=torch.bool)
    exists = blocks_of(torch.ones_like(param, dtype=torch.bool))
    taken = [torch.where(skip, o, n) for o, n in zip(old.values, new.moments, strict=False)]
    taken = [n if m.exact else t for m, n, t in zip(moments, new.moments, taken, strict=False)]
    roots = [torch.where(skip, o, n) for o, n in zip(old.roots, new.roots, strict=False)]
    kept = [[torch.where(exists, x, 0.0) for x in each] for each in (taken, roots)]
    elements = torch.arange(param.numel()).reshape(param.shape)
    stored = coding.encode_moments(codec, moments, *kept, random=dither(step, blocks_of(elements)))

    def flat(x: Tensor) -> Tensor:
        return from_blocks(x, cols).reshape(param.shape)

    p = torch.where(skip, p, new.param)
    if rule in REPAID and codec.relative:
        m, (coded_m, coded_v) = kept[0][0], stored
        unit = codec.decode(coded_v.codes, coded_v.scales, signed=False)
        in_units = torch.where(unit > 0, m * reciprocal(unit), 0.0)
        error = (in_units - codec.decode(coded_m.codes, coded_m.scales, signed=True)) * unit
        p = REPAID[rule](p, error, unit, hyper, step)
    stored_weights = weights.store(flat(p))
    if weights.stochastic:
        stored_weights = bf16_at_random(flat(p), noise(noise_key, step, elements)), None
    return Stepped(
        *stored_weights,
        [
            type(s)(flat(s.codes), None if s.scales is None else s.scales.reshape(old_s.scales.shape))
            for s, old_s in zip(stored, coded, strict=True)
        ],
        int(skip.sum()),
    )
