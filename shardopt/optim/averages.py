"""Optimizers by momentum: SGD, LARS, Lion, Signum; and by other averages: Adan, AdEMAMix, Adagrad, RMSprop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardopt.codec import Moment
from shardopt.optim.adam import CAUTIOUS, cautious_key, cautious_rules
from shardopt.optim.base import ShardedOptimizer
from shardopt.optim.interface import hyper_parameters
from shardopt.state.options import LARGEST, Options, Unpack, is_int
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

    The norms are those of whole parameters, at the cost that :class:`StableAdamW` describes. If the norm of a parameter
    or of its gradient is zero, ``lr`` stays as it is. A weight that is NaN or infinite makes its whole parameter NaN.

    As in the paper, the momentum (``velocity`` in the state) has the learning rates in it: a new learning rate applies
    to new gradients only. LARS and SGD momentum buffers are not interchangeable.

    Bytes of state, errors and other arguments as for :class:`SGD` with momentum.

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

    Bytes of state, errors and other arguments as for :class:`SGD` with momentum.

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


_ADAN_MOMENTS = (
    Moment("exp_avg", signed=True),
    Moment("exp_avg_diff", signed=True),
    Moment("exp_avg_sq", signed=False),
    Moment("neg_pre_grad", signed=True),
)


class Adan(ShardedOptimizer):
    """Adan (arXiv 2208.06677, algorithm 1): Nesterov's momentum from differences of successive gradients.

    After a step that skipped an element (``nonfinite``), that element's difference is taken from its last gradient that
    was not skipped, or from zero if there was none.

    Bytes of state per parameter: 16 with ``codec="fp32"``, 4.156 with log8 in blocks of 128. Other arguments and
    errors as for :class:`shardopt.AdamW`.

    Args:
        betas: decay rates of the averages of gradients, of their differences and of squares; the paper writes one minus
            each.
        eps: added to the root of the average of squares.
        weight_decay: decay per unit of lr, apart from the gradient.
        no_prox: decay before the step, as AdamW does, not by a proximal step after it.
    """

    only_rule = Rule("adan", _ADAN_MOMENTS)
    beta_count = 3
    flags = ("no_prox",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        no_prox: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyper_parameters(locals()), options)


class Adan8bit(Adan, codec="log8"):
    """:class:`Adan` with the codec log8 unless ``codec`` says otherwise."""


_ADEMAMIX_MOMENTS = (
    Moment("exp_avg_fast", signed=True),
    Moment("exp_avg_slow", signed=True, wide=True),
    Moment("exp_avg_sq", signed=False),
)

#: Upper bound of warm-ups: the kernels' step counts are float32, which is exact up to this number.
MOST_STEPS = 2**24


class AdEMAMix(ShardedOptimizer):
    """AdEMAMix (arXiv 2409.03137, algorithm 1): AdamW with a second, slow average of gradients.

    Bytes of state per parameter: 12 with ``codec="fp32"``; 4.125 with log8 in blocks of 128, since the slow average is
    kept in 16 bits (companded16): 8 bits lose it within ``1 / (1 - betas[2])`` steps. Other arguments and
    errors as for :class:`shardopt.AdamW`.

    Args:
        betas: decay rates of the fast average, the second moment and the slow average.
        alpha: weight of the slow average.
        alpha_steps: steps over which ``alpha`` grows linearly from zero, in the paper the whole run; None: no warm-up.
        beta3_steps: steps over which the slow average's length grows linearly from the fast one's; None: no warm-up.
        eps: added to the root of the second moment.
        weight_decay: decay per unit of lr, apart from the gradient.
    """

    only_rule = Rule("ademamix", _ADEMAMIX_MOMENTS)
    beta_count = 3
    numbers = (("alpha", LARGEST),)
    decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        alpha_steps: int | None = None,
        beta3_steps: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyper_parameters(locals()), options)

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        """Adds the logarithms of decay rates, by which ``beta3`` is interpolated during its warm-up."""
        hyper = super().hyper(group)
        logs = {f"log_{beta}": math.log(hyper[beta]) if hyper[beta] else -math.inf for beta in ("beta1", "beta3")}
        return hyper | logs

    def check_group(self, group: Mapping[str, Any]) -> None:
        super().check_group(group)
        for name in ("alpha_steps", "beta3_steps"):
            steps = group[name]
            if steps is not None and not (is_int(steps) and 0 <= steps <= MOST_STEPS):
                raise ValueError(f"{name}: got {steps!r:.80}, expected a whole number from 0 to {MOST_STEPS}, or None")


class AdEMAMix8bit(AdEMAMix, codec="log8"):
    """:class:`AdEMAMix` with the codec log8 unless ``codec`` says otherwise."""


class Adagrad(ShardedOptimizer):
    """Adagrad (Duchi et al., JMLR 12, 2011), as in torch: gradients over the root of the sum of all their squares.

    Bytes of state per parameter: 4 with ``codec="fp32"``, 1.062 with log8 in blocks of 128. A sum above 2^126 is set to
    2^126 before the next square is added. Other arguments and errors as for :class:`shardopt.AdamW`.

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
