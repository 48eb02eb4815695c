"""NAdam (Dozat, ICLR workshop 2016), as in torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardopt.codec import Moment
from shardopt.optim.adam import AdamKin
from shardopt.state.options import Options, Unpack, check_number
from shardopt.state.rule import Rule

_NADAM = Rule("nadam", (Moment("exp_avg", signed=True), Moment("exp_avg_sq", signed=False)))


class NAdam(AdamKin):
    """NAdam as in torch: Adam with Nesterov's momentum, whose decay rate rises to ``betas[0]``.

    Bytes of state as for :class:`shardopt.AdamW`. torch's ``mu_product`` follows from the step count and is not kept.

    Args:
        params: parameters or param groups, as for torch.optim.
        lr: learning rate, a float or a 0-d tensor.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: L2 penalty, or with ``decoupled_weight_decay`` decay per unit of lr.
        momentum_decay: how soon the first decay rate rises.
        decoupled_weight_decay: keep the decay apart from the gradient.
        **options: see :class:`shardopt.state.options.Options`.

    Raises:
        ValueError: a hyper-parameter or option is out of range.
        TypeError: there is no such option.
    """

    updates_by_lr = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum_decay": momentum_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults, options)

    def rule(self, group: Mapping[str, Any]) -> Rule:
        return _NADAM

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        return {**super().hyper(group), "decay_base": _decay_base(group)}

    def check_group(self, group: Mapping[str, Any]) -> None:
        super().check_group(group)
        check_number(group, "momentum_decay")

    def derived_state(self, group: Mapping[str, Any], step: Tensor) -> dict[str, Tensor]:
        """``mu_product``: the product of the first decay rates of all steps so far."""
        product, decay, base = 1.0, 1.0, _decay_base(group)
        for _ in range(int(step)):
            decay *= base
            product *= float(group["betas"][0]) * (1 - 0.5 * decay)
            if product < 2.0**-150:  # zero in float32
                break
        return {"mu_product": torch.full_like(step, product)}


def _decay_base(group: Mapping[str, Any]) -> float:
    return float(0.96 ** group["momentum_decay"])


class NAdam8bit(NAdam):
    """:class:`NAdam` with an 8-bit codec, log8 unless ``codec`` says otherwise."""
