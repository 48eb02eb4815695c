"""Signum (Bernstein et al., arXiv 1802.04434)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardopt.codec import Moment
from shardopt.optim.base import ShardedOptimizer
from shardopt.state.options import Options, Unpack, check_number
from shardopt.state.rule import Rule

_SIGNUM = Rule("lion", (Moment("momentum_buffer", signed=True),))  # Lion with one decay rate


class Signum(ShardedOptimizer):
    """Signum (arXiv 1802.04434, algorithm 2): steps by the sign of an average of gradients.

    Bytes of state per parameter: 4 with ``codec="fp32"``, 1.031 with an 8-bit codec in blocks of 128.

    Args:
        params: parameters or param groups, as for torch.optim.
        lr: learning rate, a float or a 0-d tensor: every element moves by it.
        momentum: decay rate of the average; 0 for the sign of the gradient.
        weight_decay: decay per unit of lr, apart from the gradient.
        **options: see :class:`shardopt.state.options.Options`.

    Raises:
        ValueError: a hyper-parameter or option is out of range.
        TypeError: there is no such option.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, options)

    def rule(self, group: Mapping[str, Any]) -> Rule:
        return _SIGNUM

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        return {
            "lr": float(group["lr"]),
            "beta1": group["momentum"],
            "beta2": group["momentum"],
            "decoupled_decay": group["weight_decay"],
        }

    def check_group(self, group: Mapping[str, Any]) -> None:
        super().check_group(group)
        check_number(group, "momentum", most=1.0)


class Signum8bit(Signum):
    """:class:`Signum` with the codec log8 unless ``codec`` says otherwise."""

    default_codec = "log8"
