"""Lion (Chen et al., arXiv 2302.06675)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardopt.codec import Moment
from shardopt.optim.base import ShardedOptimizer
from shardopt.optim.cautious import CautiousRules, cautious_hyper, check_cautious
from shardopt.state.options import Options, Unpack
from shardopt.state.rule import Rule

_LION = CautiousRules(Rule("lion", (Moment("exp_avg", signed=True),)))


class Lion(ShardedOptimizer):
    """Lion (arXiv 2302.06675, algorithm 2): steps by the sign of an interpolated momentum.

    Bytes of state per parameter: 4 with ``codec="fp32"``, 1.031 with an 8-bit codec in blocks of 128.

    Args:
        params: parameters or param groups, as for torch.optim.
        lr: learning rate, a float or a 0-d tensor; some 3 to 10 times below AdamW's.
        betas: weights of the momentum in the step's direction, and its decay rate.
        weight_decay: decay per unit of lr, apart from the gradient.
        cautious: as for :class:`shardopt.AdamW`.
        cautious_weight_decay: as for :class:`shardopt.AdamW`.
        **options: see :class:`shardopt.state.options.Options`.

    Raises:
        ValueError: a hyper-parameter or option is out of range.
        TypeError: there is no such option.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        cautious: bool = False,
        cautious_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "cautious": cautious,
            "cautious_weight_decay": cautious_weight_decay,
        }
        super().__init__(params, defaults, options)

    def rule(self, group: Mapping[str, Any]) -> Rule:
        return _LION.of(group)

    def check_group(self, group: Mapping[str, Any]) -> None:
        super().check_group(group)
        check_cautious(group)

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        beta1, beta2 = group["betas"]
        return {
            "lr": float(group["lr"]),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "decoupled_decay": group["weight_decay"],
            **cautious_hyper(group),
        }


class Lion8bit(Lion):
    """:class:`Lion` with the codec log8 unless ``codec`` says otherwise."""

    default_codec = "log8"
