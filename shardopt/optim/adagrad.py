"""Adagrad (Duchi et al., JMLR 12, 2011), as in torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardopt.codec import Moment
from shardopt.optim.base import ShardedOptimizer
from shardopt.state.options import Options, Unpack, check_number
from shardopt.state.rule import Rule


class Adagrad(ShardedOptimizer):
    """Adagrad as in torch: steps by gradients over the root of the sum of all their squares.

    Bytes of state per parameter: 4 with ``codec="fp32"``, 1.062 with log8 in blocks of 128. Sums end at 2^126.

    Args:
        params: parameters or param groups, as for torch.optim.
        lr: learning rate, a float or a 0-d tensor.
        lr_decay: the learning rate is divided by ``1 + lr_decay * (steps before)``.
        weight_decay: L2 penalty, part of the gradient.
        initial_accumulator_value: the sum before the first step.
        eps: added to the root.
        **options: see :class:`shardopt.state.options.Options`.

    Raises:
        ValueError: a hyper-parameter or option is out of range.
        TypeError: there is no such option.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        super().__init__(params, defaults, options)

    def rule(self, group: Mapping[str, Any]) -> Rule:
        return Rule("adagrad", (Moment("sum", signed=False, initial=float(group["initial_accumulator_value"])),))

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        return {
            "lr": float(group["lr"]),
            "lr_decay": group["lr_decay"],
            "eps": group["eps"],
            "coupled_decay": group["weight_decay"],
        }

    def check_group(self, group: Mapping[str, Any]) -> None:
        super().check_group(group)
        check_number(group, "lr_decay")
        check_number(group, "initial_accumulator_value", most=2.0**126)


class Adagrad8bit(Adagrad):
    """:class:`Adagrad` with the codec log8 unless ``codec`` says otherwise."""

    default_codec = "log8"
