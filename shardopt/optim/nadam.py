"""NAdam (Dozat, ICLR workshop 2016), as in torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardopt.codec import Moment
from shardopt.optim.adam import AdamKin
from shardopt.state.options import Options, Unpack, check_number, is_whole
from shardopt.state.rule import Rule

_NADAM = Rule("nadam", (Moment("exp_avg", signed=True), Moment("exp_avg_sq", signed=False)))

#: ``past_mu`` before the first step.
_NO_PAST: tuple[int, float, float | None] = (0, 1.0, None)


class NAdam(AdamKin):
    """NAdam as in torch: Adam with Nesterov's momentum, whose decay rate rises to ``betas[0]``.

    Bytes of state as for :class:`shardopt.AdamW`. torch's ``mu_product``, the product of the decay rates of all steps,
    follows from the step count and ``betas[0]``. Param groups record changes of ``betas[0]`` by a scheduler in
    ``past_mu``: the number of steps before the last change, their product, and the value since. A parameter with fewer
    steps than that is stepped as if ``betas[0]`` had never changed.

    Args:
        params: parameters or param groups, as for torch.optim.
        lr: learning rate, a float or a 0-d tensor.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: L2 penalty, or with ``decoupled_weight_decay`` decay per unit of lr.
        momentum_decay: how soon the first decay rate rises.
        decoupled_weight_decay: keep the decay apart from the gradient.
        **options: see :class:`shardopt.state.options.Options`.

    Raises:
        ValueError: a hyper-parameter or option is out of range.
        TypeError: there is no such option.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum_decay": momentum_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "past_mu": _NO_PAST,
        }
        super().__init__(params, defaults, options)

    def rule(self, group: Mapping[str, Any]) -> Rule:
        return _NADAM

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        steps, product, _ = group["past_mu"]
        past = {"past_steps": float(steps), "past_product": float(product)}
        return {**super().hyper(group), "decay_base": _decay_base(group), **past}

    def begin_step(self, group: dict[str, Any]) -> None:
        beta1, (_, _, last) = float(group["betas"][0]), group["past_mu"]
        if last is None:
            group["past_mu"] = (*group["past_mu"][:2], beta1)
        elif beta1 != last:
            states = (self.state.get(param) for param in group["params"])
            taken = max((int(state["step"]) for state in states if state), default=0)
            group["past_mu"] = (taken, _product(group, taken), beta1)

    def reset_group(self, group: dict[str, Any]) -> None:
        group["past_mu"] = _NO_PAST

    def adopt_derived(self, group: dict[str, Any], saved: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
        if "past_mu" not in saved and "mu_product" in entries:
            step, product = int(entries.get("step", 0)), float(entries["mu_product"])
            if step >= group["past_mu"][0]:
                group["past_mu"] = (step, product, float(group["betas"][0]))

    def check_group(self, group: Mapping[str, Any]) -> None:
        super().check_group(group)
        check_number(group, "momentum_decay")
        past = group["past_mu"]
        if not isinstance(past, tuple) or len(past) != 3 or not is_whole(past[0]) or past[0] < 0:
            raise ValueError(
                f"past_mu: got {past!r:.80}, expected steps, a product, and None or betas[0]; leave it out"
            )
        for value in (past[1], past[2] or 0.0):
            check_number({"past_mu": value}, "past_mu")

    def derived_state(self, group: Mapping[str, Any], step: Tensor) -> dict[str, Tensor]:
        """``mu_product``: the product of the first decay rates of all steps so far."""
        return {"mu_product": torch.full_like(step, _product(group, int(step)))}


def _decay_base(group: Mapping[str, Any]) -> float:
    return float(0.96 ** group["momentum_decay"])


def _product(group: Mapping[str, Any], steps: int) -> float:
    """The product of the first decay rates of this many steps."""
    past, product, beta1 = group["past_mu"]
    if steps < past:
        past, product = 0, 1.0
    base = _decay_base(group)
    decay = base**past
    for _ in range(past, steps):
        decay *= base
        product *= (float(group["betas"][0]) if beta1 is None else beta1) * (1 - 0.5 * decay)
        if product < 2.0**-150:  # zero in float32
            break
    return float(product)


class NAdam8bit(NAdam):
    """:class:`NAdam` with the codec log8 unless ``codec`` says otherwise."""

    default_codec = "log8"
