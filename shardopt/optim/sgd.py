"""Stochastic gradient descent with momentum, as torch.optim.SGD defines it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardopt.codec import Moment
from shardopt.optim.base import ShardedOptimizer
from shardopt.state.options import Options, Unpack, check_flag
from shardopt.state.rule import Rule

_MOMENTUM = Rule("momentum", (Moment("momentum_buffer", signed=True),))
_PLAIN = Rule("sgd", ())


class SGD(ShardedOptimizer):
    """SGD, with momentum, dampening and Nesterov's variant (Sutskever et al., ICML 2013) as in torch.

    Bytes of state per parameter with momentum: 4 with ``codec="fp32"``, 1.031 with an 8-bit codec in blocks of 128;
    none without momentum.

    Args:
        params: parameters or param groups, as for torch.optim.
        lr: learning rate, a float or a 0-d tensor.
        momentum: decay rate of the momentum buffer.
        dampening: the gradient enters the buffer with weight ``1 - dampening``, except in the first step.
        weight_decay: L2 penalty, part of the gradient.
        nesterov: look ahead; needs momentum and no dampening.
        **options: see :class:`shardopt.state.options.Options`.

    Raises:
        ValueError: a hyper-parameter or option is out of range.
        TypeError: there is no such option.
    """

    optional_moments = _MOMENTUM.moments

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, options)

    def rule(self, group: Mapping[str, Any]) -> Rule:
        return _MOMENTUM if group["momentum"] else _PLAIN

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        return {
            "lr": float(group["lr"]),
            "momentum": group["momentum"],
            "dampening": group["dampening"],
            "coupled_decay": group["weight_decay"],
            "nesterov": float(group["nesterov"]),
        }

    def check_group(self, group: Mapping[str, Any]) -> None:
        super().check_group(group)
        check_flag(group, "nesterov")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov: got momentum={group['momentum']} and dampening={group['dampening']}, expected momentum > 0 "
                "and no dampening"
            )


class SGD8bit(SGD):
    """:class:`SGD` with the codec log8 unless ``codec`` says otherwise."""

    default_codec = "log8"
