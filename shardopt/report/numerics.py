"""Check whether the learning rate is too small for the precision of the weights."""

from __future__ import annotations

import math
import warnings
from numbers import Real

import torch
from torch.optim.optimizer import Optimizer

from shardopt.kernels.autograd import without_autograd
from shardopt.kernels.weights import WeightFormat
from shardopt.optim.base import ShardedOptimizer
from shardopt.report.memory import owner_of
from shardopt.state.names import listed_name


@without_autograd
def check_numerics(optimizer: Optimizer, lr: float | None = None) -> dict[str, float]:
    """Warns of weights that updates as large as the learning rate do not move, because rounding cancels the updates.

    An update of AdamW, Adam or Lion is about ``lr``. If it is less than half of a weight's last place, no step moves
    the weight. SGD's parameters are skipped, as its updates depend on the gradients; so are frozen parameters,
    parameters that are rounded at random, and weights that are not finite.

    Reads this rank's weights once, needs a copy of the largest parameter, and waits for the result. Call this once,
    before training.

    Args:
        optimizer: an optimizer of this package, or a ZeroRedundancyOptimizer around it, of which this rank's part is
            read.
        lr: the learning rate to judge by, such as a schedule's largest. Default: the param groups' learning rates.

    Returns:
        The share of such weights (0 to 1), by parameter; only parameters that have such weights.

    Raises:
        TypeError: the optimizer is not of this package.
        ValueError: a learning rate is not above 0, or not finite.
    """
    owner = owner_of(optimizer)
    if not isinstance(owner, ShardedOptimizer):
        raise TypeError(
            f"got {type(owner).__name__}, expected an optimizer of shardopt such as shardopt.AdamW8bit, before "
            "frameworks wrap it"
        )
    if lr is not None:
        _check_lr(lr)
    owned = {param for group in owner.param_groups for param in group["params"]}
    counts: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    for index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if param not in owned or not param.requires_grad or not owner.updates_by_lr:
                continue
            spec = owner._internals.state_of(param, group)
            if not spec.weights.stochastic:
                update = _check_lr(group["lr"]) if lr is None else float(lr)
                local = spec.shard.local(param.detach())
                finite, infinite = local.isfinite().sum(), local.isinf().sum()
                unmoved = (local.abs() > largest_moved(spec.weights, update)).sum() - infinite
                counts.append((listed_name(group, index, position), finite, unmoved))
    shares = {name: int(unmoved) / int(finite) for name, finite, unmoved in counts if int(unmoved)}
    if shares:
        number, total = sum(int(unmoved) for *_, unmoved in counts), sum(int(finite) for _, finite, _ in counts)
        worst = max(shares, key=lambda name: shares[name])
        warnings.warn(
            f"got a learning rate too small to move {number:,} of {total:,} weights in {len(shares)} parameters "
            f"({worst}: {shares[worst]:.1%}), expected at least half of their last place; use master_weight_bits=24 or "
            "32, or stochastic_rounding=True",
            RuntimeWarning,
            stacklevel=3,  # past torch's wrapper
        )
    return shares


def _check_lr(lr: float | torch.Tensor) -> float:
    if not isinstance(lr, Real | torch.Tensor) or not 0 < float(lr) < math.inf:
        raise ValueError(
            f"lr: got {lr!r}, expected a finite number above 0; give check_numerics(lr=...), such as a schedule's "
            "largest learning rate"
        )
    return float(lr)


def largest_moved(weights: WeightFormat, update: float) -> float:
    """The largest magnitude that an update of this size moves, at least downwards; -1 if it moves none.

    With p significant bits, weights in ``[2^E, 2^(E+1))`` lie ``2^(E + 1 - p)`` apart.
    """
    info = torch.finfo(weights.dtype)
    if update < info.smallest_normal * info.eps * 2.0 ** -(weights.low_bits + 1):
        return -1.0
    exponent = math.floor(math.log2(min(update, info.max)))
    significant = min(1 - round(math.log2(info.eps)) + weights.low_bits, 24)  # the step itself is in float32
    return min(2.0 ** (exponent + significant + 1), info.max)
