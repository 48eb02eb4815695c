"""Adamax (Kingma & Ba, arXiv 1412.6980, algorithm 2), as in torch."""

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

_ADAMAX = Rule("adamax", (Moment("exp_avg", signed=True), Moment("exp_inf", signed=False, magnitude=True)))


class Adamax(ShardedOptimizer):
    """Adamax as in torch: Adam with the largest recent gradient in place of the second moment's root.

    Bytes of state as for :class:`shardopt.AdamW`.

    Args:
        params: parameters or param groups, as for torch.optim.
        lr: learning rate, a float or a 0-d tensor.
        betas: decay rates of the first moment and of the largest gradient.
        eps: added to the gradient's magnitude.
        weight_decay: L2 penalty, part of the gradient.
        **options: see :class:`shardopt.state.options.Options`.

    Raises:
        ValueError: a hyper-parameter or option is out of range.
        TypeError: there is no such option.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, options)

    def rule(self, group: Mapping[str, Any]) -> Rule:
        return _ADAMAX

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        return adam_hyper(group, decoupled=False)


class Adamax8bit(Adamax):
    """:class:`Adamax` with the codec log8 unless ``codec`` says otherwise."""

    default_codec = "log8"
