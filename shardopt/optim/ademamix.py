"""AdEMAMix (Pagliardini et al., arXiv 2409.03137)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardopt.codec import Moment
from shardopt.optim.base import ShardedOptimizer
from shardopt.state.options import Options, Unpack, check_number, is_whole
from shardopt.state.rule import Rule

_ADEMAMIX = Rule(
    "ademamix",
    (
        Moment("exp_avg_fast", signed=True),
        Moment("exp_avg_slow", signed=True, wide=True),
        Moment("exp_avg_sq", signed=False),
    ),
)

#: The kernels count steps in float32.
MOST_STEPS = 2**24


class AdEMAMix(ShardedOptimizer):
    """AdEMAMix (arXiv 2409.03137, algorithm 1): AdamW with a second, slow average of gradients.

    Bytes of state per parameter: 12 with ``codec="fp32"``; 4.125 with log8 in blocks of 128, since the slow average is
    kept in 16 bits (companded16): 8 bits lose it within ``1 / (1 - betas[2])`` steps.

    Args:
        params: parameters or param groups, as for torch.optim.
        lr: learning rate, a float or a 0-d tensor.
        betas: decay rates of the fast average, the second moment and the slow average.
        alpha: weight of the slow average.
        alpha_steps: steps over which ``alpha`` grows linearly from zero, in the paper the whole run; None for at once.
        beta3_steps: steps over which the slow average's length grows linearly from the fast one's; None for at once.
        eps: added to the root of the second moment.
        weight_decay: decay per unit of lr, apart from the gradient.
        **options: see :class:`shardopt.state.options.Options`.

    Raises:
        ValueError: a hyper-parameter or option is out of range.
        TypeError: there is no such option.
    """

    beta_count = 3

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
        defaults = {
            "lr": lr,
            "betas": betas,
            "alpha": alpha,
            "alpha_steps": alpha_steps,
            "beta3_steps": beta3_steps,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults, options)

    def rule(self, group: Mapping[str, Any]) -> Rule:
        return _ADEMAMIX

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        beta1, beta2, beta3 = map(float, group["betas"])
        return {
            "lr": float(group["lr"]),
            "beta1": beta1,
            "beta2": beta2,
            "beta3": beta3,
            "eps": group["eps"],
            "alpha": group["alpha"],
            "decoupled_decay": group["weight_decay"],
            "alpha_steps": float(group["alpha_steps"] or 0),
            "beta3_steps": float(group["beta3_steps"] or 0),
            "log_beta1": math.log(beta1) if beta1 else -math.inf,
            "log_beta3": math.log(beta3) if beta3 else -math.inf,
        }

    def check_group(self, group: Mapping[str, Any]) -> None:
        super().check_group(group)
        check_number(group, "alpha")
        for name in ("alpha_steps", "beta3_steps"):
            steps = group[name]
            if steps is not None and not (is_whole(steps) and 0 <= steps <= MOST_STEPS):
                raise ValueError(f"{name}: got {steps!r:.80}, expected a whole number from 0 to {MOST_STEPS}, or None")


class AdEMAMix8bit(AdEMAMix):
    """:class:`AdEMAMix` with the codec log8 unless ``codec`` says otherwise."""

    default_codec = "log8"
