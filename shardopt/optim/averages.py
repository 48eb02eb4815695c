"""Optimizers that keep several averages of gradients: Adan and AdEMAMix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardopt.codec import Moment
from shardopt.optim.base import ShardedOptimizer
from shardopt.optim.interface import hyper_parameters
from shardopt.state.options import LARGEST, Options, Unpack, is_int
from shardopt.state.rule import Rule

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
