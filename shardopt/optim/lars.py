"""LARS (You et al., arXiv 1708.03888)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardopt.codec import Moment
from shardopt.optim.base import ShardedOptimizer
from shardopt.state.options import Options, Unpack, check_number
from shardopt.state.rule import Rule

_LARS = Rule("lars", (Moment("velocity", signed=True, own_units=True),))


class LARS(ShardedOptimizer):
    """LARS (arXiv 1708.03888, algorithm 1): SGD with momentum whose learning rate follows each parameter's norm.

    The norms are those of whole parameters, exact to the last bit however they are sharded: a step takes a second pass
    over the parameters, and one all-reduce per step among the ranks that share them (with released gradients, one per
    parameter). If the norm of a parameter or of its gradient is zero, ``lr`` stays as it is. A weight that is NaN or
    infinite makes its whole parameter NaN.

    As in the paper, the momentum (``velocity`` in the state) has the learning rates in it: a new learning rate applies
    to new gradients only. LARS and SGD momentum buffers are not interchangeable.

    Bytes of state per parameter: 4 with ``codec="fp32"``, 1.031 with an 8-bit codec in blocks of 128.

    Args:
        params: parameters or param groups, as for torch.optim.
        lr: learning rate, a float or a 0-d tensor.
        momentum: decay rate of the momentum.
        weight_decay: L2 penalty.
        trust_coefficient: share of a parameter's norm that a gradient moves it by, at ``lr=1``.
        **options: see :class:`shardopt.state.options.Options`.

    Raises:
        ValueError: a hyper-parameter or option is out of range.
        TypeError: there is no such option.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
        }
        super().__init__(params, defaults, options)

    def rule(self, group: Mapping[str, Any]) -> Rule:
        return _LARS

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        names = ("momentum", "weight_decay", "trust_coefficient")
        return {"lr": float(group["lr"]), **{name: group[name] for name in names}}

    def check_group(self, group: Mapping[str, Any]) -> None:
        super().check_group(group)
        check_number(group, "trust_coefficient")


class LARS8bit(LARS):
    """:class:`LARS` with the codec log8 unless ``codec`` says otherwise."""

    default_codec = "log8"
