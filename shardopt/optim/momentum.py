"""Optimizers whose only moment is a momentum: SGD, LARS, Lion and Signum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardopt.codec import Moment
from shardopt.optim.adam import CAUTIOUS, cautious_key, cautious_rules
from shardopt.optim.base import ShardedOptimizer
from shardopt.optim.interface import hyper_parameters
from shardopt.state.options import LARGEST, Options, Unpack
from shardopt.state.rule import Rule

_MOMENTUM = Rule("momentum", (Moment("momentum_buffer", signed=True),))
_PLAIN = Rule("sgd", ())


class SGD(ShardedOptimizer):
    """SGD, with momentum, dampening and Nesterov's variant (Sutskever et al., ICML 2013) as in torch.

    Bytes of state per parameter with momentum: 4 with ``codec="fp32"``, 1.031 with an 8-bit codec in blocks of 128;
    none without momentum. Other arguments and errors as for :class:`shardopt.AdamW`.

    Args:
        momentum: decay rate of the momentum buffer.
        dampening: the gradient enters the buffer with weight ``1 - dampening``, except in the first step.
        weight_decay: L2 penalty, part of the gradient.
        nesterov: use Nesterov momentum; needs momentum and no dampening.
    """

    optional_moments = _MOMENTUM.moments
    flags = ("nesterov",)

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
        super().__init__(params, hyper_parameters(locals()), options)

    def rule(self, group: Mapping[str, Any]) -> Rule:
        return _MOMENTUM if group["momentum"] else _PLAIN

    def check_group(self, group: Mapping[str, Any]) -> None:
        super().check_group(group)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov: got momentum={group['momentum']} and dampening={group['dampening']}, expected momentum > 0 "
                "and no dampening"
            )


class SGD8bit(SGD, codec="log8"):
    """:class:`SGD` with the codec log8 unless ``codec`` says otherwise."""


class LARS(ShardedOptimizer):
    """LARS (arXiv 1708.03888, algorithm 1): SGD with momentum whose learning rate follows each parameter's norm.

    The norms are those of whole parameters, exact to the last bit however they are sharded: a step takes a second pass
    over the parameters, and one all-reduce per step among the ranks that share them (with released gradients, one per
    parameter). If the norm of a parameter or of its gradient is zero, ``lr`` stays as it is. A weight that is NaN or
    infinite makes its whole parameter NaN.

    As in the paper, the momentum (``velocity`` in the state) has the learning rates in it: a new learning rate applies
    to new gradients only. LARS and SGD momentum buffers are not interchangeable.

    Bytes of state per parameter: 4 with ``codec="fp32"``, 1.031 with an 8-bit codec in blocks of 128. Other
    arguments and errors as for :class:`shardopt.AdamW`.

    Args:
        momentum: decay rate of the momentum.
        weight_decay: L2 penalty.
        trust_coefficient: norm of a gradient's update relative to the parameter's norm, at ``lr=1``.
    """

    only_rule = Rule("lars", (Moment("velocity", signed=True, own_units=True),))
    numbers = (("trust_coefficient", LARGEST),)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyper_parameters(locals()), options)


class LARS8bit(LARS, codec="log8"):
    """:class:`LARS` with the codec log8 unless ``codec`` says otherwise."""


_LION = cautious_rules(Rule("lion", (Moment("exp_avg", signed=True),)))


class Lion(ShardedOptimizer):
    """Lion (arXiv 2302.06675, algorithm 2): steps by the sign of an interpolated momentum.

    Bytes of state per parameter: 4 with ``codec="fp32"``, 1.031 with an 8-bit codec in blocks of 128. Other
    arguments and errors as for :class:`shardopt.AdamW`.

    Args:
        lr: learning rate, a float or a 0-d tensor; some 3 to 10 times below AdamW's.
        betas: weights of the momentum in the step's direction, and its decay rate.
        weight_decay: decay per unit of lr, apart from the gradient.
    """

    flags = CAUTIOUS
    decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        cautious: bool = False,
        cautious_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyper_parameters(locals()), options)

    def rule(self, group: Mapping[str, Any]) -> Rule:
        return _LION[cautious_key(group)]


class Lion8bit(Lion, codec="log8"):
    """:class:`Lion` with the codec log8 unless ``codec`` says otherwise."""


class Signum(ShardedOptimizer):
    """Signum (arXiv 1802.04434, algorithm 2): steps by the sign of an average of gradients.

    Bytes of state per parameter: 4 with ``codec="fp32"``, 1.031 with an 8-bit codec in blocks of 128. Other
    arguments and errors as for :class:`shardopt.AdamW`.

    Args:
        lr: learning rate, a float or a 0-d tensor: every element moves by it.
        momentum: decay rate of the average; 0 for the sign of the gradient.
        weight_decay: decay per unit of lr, apart from the gradient.
    """

    only_rule = Rule("lion", (Moment("momentum_buffer", signed=True),))  # Lion with one decay rate
    numbers = (("momentum", 1.0),)
    decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyper_parameters(locals()), options)

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        beta = float(group["momentum"])
        return {**super().hyper(group), "beta1": beta, "beta2": beta}


class Signum8bit(Signum, codec="log8"):
    """:class:`Signum` with the codec log8 unless ``codec`` says otherwise."""
