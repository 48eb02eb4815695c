"""Optimizers that divide gradients by the root of averages or sums of squared gradients: Adagrad and RMSprop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardopt.codec import Moment
from shardopt.optim.base import ShardedOptimizer
from shardopt.optim.interface import hyper_parameters
from shardopt.state.options import LARGEST, Options, Unpack
from shardopt.state.rule import Rule


class Adagrad(ShardedOptimizer):
    """Adagrad (Duchi et al., JMLR 12, 2011), as in torch: gradients over the root of the sum of all their squares.

    Bytes of state per parameter: 4 with ``codec="fp32"``, 1.062 with log8 in blocks of 128. A sum above 2^126 is set to
    2^126 before the next square is added.
    Other arguments and errors as for :class:`shardopt.AdamW`.

    Args:
        lr_decay: the learning rate is divided by ``1 + lr_decay * (steps before)``.
        weight_decay: L2 penalty, part of the gradient.
        initial_accumulator_value: the sum before the first step.
        eps: added to the root.
    """

    numbers = (("lr_decay", LARGEST), ("initial_accumulator_value", 2.0**126))

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
        super().__init__(params, hyper_parameters(locals()), options)

    def rule(self, group: Mapping[str, Any]) -> Rule:
        return Rule("adagrad", (Moment("sum", signed=False, initial=float(group["initial_accumulator_value"])),))


class Adagrad8bit(Adagrad, codec="log8"):
    """:class:`Adagrad` with the codec log8 unless ``codec`` says otherwise."""


_SQUARES = Moment("square_avg", signed=False)
_MEAN = Moment("grad_avg", signed=True)
_BUFFER = Moment("momentum_buffer", signed=True, own_units=True)  # sums up gradients over their root mean square
_LEAST_VARIANCE = 2.0**-10  # as a share of the mean square: below it, quantization decides the difference
_RULES = {
    (False, False): Rule("rmsprop", (_SQUARES,)),
    (False, True): Rule("rmsprop_momentum", (_SQUARES, _BUFFER)),
    (True, False): Rule("centered_rmsprop", (_SQUARES, _MEAN)),
    (True, True): Rule("centered_rmsprop_momentum", (_SQUARES, _MEAN, _BUFFER)),
}


class RMSprop(ShardedOptimizer):
    """RMSprop (Tieleman & Hinton, Coursera lecture 6.5, 2012), as in torch, plain, centered and with momentum.

    Divides gradients by the root of an average of their squares, or of their variance (``centered``).

    Bytes of state per parameter in blocks of 128: 1.062 with log8, and 1.031 more for each of ``centered`` and
    ``momentum``; 4 each with ``codec="fp32"``. Other arguments and errors as for :class:`shardopt.AdamW`.

    Args:
        alpha: decay rate of the averages.
        eps: added to the root.
        weight_decay: L2 penalty, part of the gradient.
        momentum: decay rate of the momentum buffer.
        centered: divide by the root of the variance (Graves, arXiv 1308.0850). The variance is the difference of two
            averages, and rounding spoils small differences: unless ``codec="fp32"``, it is at least 2^-10 of the mean
            square.
    """

    optional_moments = (_MEAN, _BUFFER)
    flags = ("centered",)
    numbers = (("alpha", 1.0),)

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
        super().__init__(params, hyper_parameters(locals()), options)

    def rule(self, group: Mapping[str, Any]) -> Rule:
        return _RULES[bool(group["centered"]), group["momentum"] > 0]

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        least = 0.0 if group["codec"] == "fp32" else _LEAST_VARIANCE
        return {**super().hyper(group), "least_variance": least}


class RMSprop8bit(RMSprop, codec="log8"):
    """:class:`RMSprop` with the codec log8 unless ``codec`` says otherwise."""
