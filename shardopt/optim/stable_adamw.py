"""StableAdamW (Wortsman et al., arXiv 2304.13013)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardopt.codec import Moment
from shardopt.optim.adam import adam_hyper
from shardopt.optim.base import ShardedOptimizer
from shardopt.state.options import Options, Unpack
from shardopt.state.rule import Rule

_STABLE_ADAMW = Rule("stable_adamw", (Moment("exp_avg", signed=True), Moment("exp_avg_sq", signed=False)))


class StableAdamW(ShardedOptimizer):
    """StableAdamW (arXiv 2304.13013, algorithm 2): AdamW with Adafactor's clipping of updates.

    The learning rate of a parameter, and with it the decay, is divided by the root mean square of gradient over root of
    the second moment, if that is above 1. The mean runs over the whole parameter, exact to the last bit however it is
    sharded: a step takes a second pass over the parameters, and one all-reduce per step among the ranks that share them
    (with released gradients, one per parameter).

    Bytes of state as for :class:`shardopt.AdamW`.

    Args:
        params: parameters or param groups, as for torch.optim.
        lr: learning rate, a float or a 0-d tensor.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decay per unit of lr, apart from the gradient.
        **options: see :class:`shardopt.state.options.Options`.

    Raises:
        ValueError: a hyper-parameter or option is out of range.
        TypeError: there is no such option.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, options)

    def rule(self, group: Mapping[str, Any]) -> Rule:
        return _STABLE_ADAMW

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        return adam_hyper(group, decoupled=True)


class StableAdamW8bit(StableAdamW):
    """:class:`StableAdamW` with the codec log8 unless ``codec`` says otherwise."""

    default_codec = "log8"
