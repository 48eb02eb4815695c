"""Adan (Xie et al., arXiv 2208.06677)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardopt.codec import Moment
from shardopt.optim.base import ShardedOptimizer
from shardopt.state.options import Options, Unpack, check_flag
from shardopt.state.rule import Rule

_ADAN = Rule(
    "adan",
    (
        Moment("exp_avg", signed=True),
        Moment("exp_avg_diff", signed=True),
        Moment("exp_avg_sq", signed=False),
        Moment("neg_pre_grad", signed=True),
    ),
)


class Adan(ShardedOptimizer):
    """Adan (arXiv 2208.06677, algorithm 1): Nesterov's momentum from differences of successive gradients.

    After a step that skipped an element (``nonfinite``), that element's difference is taken from its last gradient that
    was not skipped, or from zero if there was none.

    Bytes of state per parameter: 16 with ``codec="fp32"``, 4.156 with log8 in blocks of 128.

    Args:
        params: parameters or param groups, as for torch.optim.
        lr: learning rate, a float or a 0-d tensor.
        betas: decay rates of the averages of gradients, of their differences and of squares; the paper writes one minus
            each.
        eps: added to the root of the average of squares.
        weight_decay: decay per unit of lr, apart from the gradient.
        no_prox: decay before the step, as AdamW does, not by a proximal step after it.
        **options: see :class:`shardopt.state.options.Options`.

    Raises:
        ValueError: a hyper-parameter or option is out of range.
        TypeError: there is no such option.
    """

    beta_count = 3

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        no_prox: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "no_prox": no_prox}
        super().__init__(params, defaults, options)

    def rule(self, group: Mapping[str, Any]) -> Rule:
        return _ADAN

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        beta1, beta2, beta3 = map(float, group["betas"])
        return {
            "lr": float(group["lr"]),
            "beta1": beta1,
            "beta2": beta2,
            "beta3": beta3,
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "no_prox": float(group["no_prox"]),
        }

    def check_group(self, group: Mapping[str, Any]) -> None:
        super().check_group(group)
        check_flag(group, "no_prox")


class Adan8bit(Adan):
    """:class:`Adan` with the codec log8 unless ``codec`` says otherwise."""

    default_codec = "log8"
