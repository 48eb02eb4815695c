"""Whether the learning rate is too small for the precision of the weights."""

from __future__ import annotations

import math
import warnings

import torch

from shardopt.kernels.weights import WeightFormat
from shardopt.optim.base import ShardedOptimizer
from shardopt.optim.planning import listed_name


@torch.no_grad()
def check_numerics(optimizer: ShardedOptimizer, lr: float | None = None) -> dict[str, float]:
    """Warns of weights that updates as large as the learning rate do not move: they are rounded away.

    An update of AdamW, Adam or Lion is about ``lr``. Where that is less than half of a weight's last place, the weight
    stays what it is, in every step. SGD's updates depend on the gradients: its parameters are not looked at, nor are
    those that are rounded at random.

    Reads this rank's weights once, needs a byte per element of the largest parameter, and waits for the result. It is
    meant to be called once, before training.

    Args:
        optimizer: one of this package's.
        lr: the learning rate to judge by, such as a schedule's largest. Default: each param group's own.

    Returns:
        By parameter, the share of such weights (0 to 1), where there are any.
    """
    counts: list[tuple[str, int, torch.Tensor]] = []
    for index, group in enumerate(optimizer.param_groups):
        update = float(group["lr"]) if lr is None else lr
        for position, param in enumerate(group["params"]):
            spec = optimizer.state_spec(param, group)
            local = spec.shard.local(param.detach())
            if optimizer.updates_by_lr and not spec.weights.stochastic and update > 0:
                unmoved = (local.abs() > largest_moved(spec.weights, update)).sum()
                counts.append((listed_name(group, index, position), local.numel(), unmoved))
    found = {name: int(unmoved) / numel for name, numel, unmoved in counts if int(unmoved)}
    if found:
        number, total = sum(int(unmoved) for *_, unmoved in counts), sum(numel for _, numel, _ in counts)
        worst = max(found, key=lambda name: found[name])
        warnings.warn(
            f"got a learning rate too small to move {number:,} of {total:,} weights in {len(found)} parameters "
            f"({worst}: {found[worst]:.1%}), expected at least half of their last place; use master_weight_bits=24 or "
            "32, or stochastic_rounding=True",
            RuntimeWarning,
            stacklevel=3,  # past torch's wrapper
        )
    return found


def largest_moved(weights: WeightFormat, update: float) -> float:
    """The largest magnitude that such an update moves, at least downwards; -1 if there is none.

    With p significant bits, weights in ``[2^E, 2^(E+1))`` lie ``2^(E + 1 - p)`` apart.
    """
    info = torch.finfo(weights.dtype)
    if update < info.smallest_normal * info.eps * 2.0 ** -(weights.low_bits + 1):
        return -1.0
    significant = min(1 - round(math.log2(info.eps)) + weights.low_bits, 24)  # the step itself is in float32
    return min(2.0 ** (math.floor(math.log2(update)) + significant + 1), info.max)
