"""RAdam (Liu et al., arXiv 1908.03265), as in torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardopt.codec import Moment
from shardopt.optim.adam import AdamKin
from shardopt.state.options import Options, Unpack
from shardopt.state.rule import Rule

_RADAM = Rule("radam", (Moment("exp_avg", signed=True), Moment("exp_avg_sq", signed=False)))


class RAdam(AdamKin):
    """RAdam as in torch: Adam that leaves out the second moment until its variance is known.

    Bytes of state as for :class:`shardopt.AdamW`.

    Args:
        params: parameters or param groups, as for torch.optim.
        lr: learning rate, a float or a 0-d tensor.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: L2 penalty, or with ``decoupled_weight_decay`` decay per unit of lr.
        decoupled_weight_decay: keep the decay apart from the gradient.
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
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults, options)

    def rule(self, group: Mapping[str, Any]) -> Rule:
        return _RADAM


class RAdam8bit(RAdam):
    """:class:`RAdam` with the codec log8 unless ``codec`` says otherwise."""

    default_codec = "log8"
