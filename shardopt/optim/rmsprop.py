"""RMSprop (Tieleman & Hinton, Coursera lecture 6.5, 2012), plain, centered and with momentum, as in torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardopt.codec import Moment
from shardopt.optim.base import ShardedOptimizer
from shardopt.state.options import Options, Unpack, check_flag, check_number
from shardopt.state.rule import Rule

_SQUARES = Moment("square_avg", signed=False)
_MEAN = Moment("grad_avg", signed=True)
_BUFFER = Moment("momentum_buffer", signed=True, own_units=True)  # sums up gradients over their root mean square
_LEAST_VARIANCE = 2.0**-10  # of the mean square
_RULES = {
    (False, False): Rule("rmsprop", (_SQUARES,)),
    (False, True): Rule("rmsprop_momentum", (_SQUARES, _BUFFER)),
    (True, False): Rule("centered_rmsprop", (_SQUARES, _MEAN)),
    (True, True): Rule("centered_rmsprop_momentum", (_SQUARES, _MEAN, _BUFFER)),
}


class RMSprop(ShardedOptimizer):
    """RMSprop as in torch: steps by gradients over the root of their mean square, or of their variance.

    Bytes of state per parameter in blocks of 128: 1.062 with log8, and 1.031 more for each of ``centered`` and
    ``momentum``; 4 each with ``codec="fp32"``.

    Args:
        params: parameters or param groups, as for torch.optim.
        lr: learning rate, a float or a 0-d tensor.
        alpha: decay rate of the averages.
        eps: added to the root.
        weight_decay: L2 penalty, part of the gradient.
        momentum: decay rate of the momentum buffer.
        centered: divide by the root of the variance (Graves, arXiv 1308.0850). The variance is the difference of two
            averages, and rounding spoils small differences: unless ``codec="fp32"``, it is at least 2^-10 of the mean
            square.
        **options: see :class:`shardopt.state.options.Options`.

    Raises:
        ValueError: a hyper-parameter or option is out of range.
        TypeError: there is no such option.
    """

    optional_moments = (_MEAN, _BUFFER)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "centered": centered,
        }
        super().__init__(params, defaults, options)

    def rule(self, group: Mapping[str, Any]) -> Rule:
        return _RULES[bool(group["centered"]), group["momentum"] > 0]

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        return {
            "lr": float(group["lr"]),
            "alpha": group["alpha"],
            "eps": group["eps"],
            "coupled_decay": group["weight_decay"],
            "momentum": group["momentum"],
            "least_variance": 0.0 if group["codec"] == "fp32" else _LEAST_VARIANCE,
        }

    def check_group(self, group: Mapping[str, Any]) -> None:
        super().check_group(group)
        check_number(group, "alpha", most=1.0)
        check_flag(group, "centered")


class RMSprop8bit(RMSprop):
    """:class:`RMSprop` with the codec log8 unless ``codec`` says otherwise."""

    default_codec = "log8"
