"""LAMB (You et al., arXiv 1904.00962)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardopt.codec import Moment
from shardopt.optim.base import ShardedOptimizer
from shardopt.state.options import Options, Unpack
from shardopt.state.rule import Rule

_LAMB = Rule("lamb", (Moment("exp_avg", signed=True), Moment("exp_avg_sq", signed=False)))


class LAMB(ShardedOptimizer):
    """LAMB (arXiv 1904.00962, algorithm 2): Adam's direction, scaled to the norm of each parameter.

    Norms are of whole parameters, exact to the last bit however they are sharded: a step takes a second pass
    over the parameters, and one all-reduce per step among the ranks that share them (with released gradients, one per
    parameter). A parameter whose own norm or whose direction's is zero is not scaled. A weight that is NaN or infinite
    makes its whole parameter NaN.

    Bytes of state as for :class:`shardopt.AdamW`.

    Args:
        params: parameters or param groups, as for torch.optim.
        lr: learning rate, a float or a 0-d tensor.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: share of the parameter in its direction, before the direction is scaled.
        **options: see :class:`shardopt.state.options.Options`.

    Raises:
        ValueError: a hyper-parameter or option is out of range.
        TypeError: there is no such option.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, options)

    def rule(self, group: Mapping[str, Any]) -> Rule:
        return _LAMB

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        beta1, beta2 = group["betas"]
        return {
            "lr": float(group["lr"]),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
        }


class LAMB8bit(LAMB):
    """:class:`LAMB` with the codec log8 unless ``codec`` says otherwise."""

    default_codec = "log8"
