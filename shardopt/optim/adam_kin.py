"""Optimizers derived from Adam: Adamax, RAdam, ADOPT, StableAdamW, LAMB and NAdam."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardopt.codec import Moment
from shardopt.kernels.autograd import without_autograd
from shardopt.optim.adam import ADAM_MOMENTS, AdamKin
from shardopt.optim.base import ShardedOptimizer
from shardopt.optim.interface import hyper_parameters
from shardopt.optim.loading import checked_containers
from shardopt.state.options import LARGEST, Options, Unpack, check_number, is_int
from shardopt.state.rule import Rule
from shardopt.state.slice_spec import StateDict


class Adamax(ShardedOptimizer):
    """Adamax (arXiv 1412.6980, algorithm 2), as in torch: Adam that divides by a decayed maximum of gradients.

    Bytes of state, errors and other arguments as for :class:`shardopt.AdamW`.

    Args:
        betas: decay rates of the first moment and of the maximum of gradient magnitudes.
        eps: added to the gradient's magnitude.
        weight_decay: L2 penalty, part of the gradient.
    """

    only_rule = Rule("adamax", (Moment("exp_avg", signed=True), Moment("exp_inf", signed=False, magnitude=True)))

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyper_parameters(locals()), options)


class Adamax8bit(Adamax, codec="log8"):
    """:class:`Adamax` with the codec log8 unless ``codec`` says otherwise."""


class RAdam(AdamKin):
    """RAdam (arXiv 1908.03265), as in torch: Adam without second moment in the first steps, when it varies too much.

    Bytes of state, errors and other arguments as for :class:`shardopt.AdamW`.

    Args:
        weight_decay: L2 penalty, or with ``decoupled_weight_decay`` decay per unit of lr.
        decoupled_weight_decay: keep the decay apart from the gradient.
    """

    only_rule = Rule("radam", ADAM_MOMENTS)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyper_parameters(locals()), options)


class RAdam8bit(RAdam, codec="log8"):
    """:class:`RAdam` with the codec log8 unless ``codec`` says otherwise."""


class ADOPT(AdamKin):
    """ADOPT (arXiv 2411.02853, algorithm 2): normalizes each gradient by the second moment of earlier gradients.

    The first step only initializes the second moment. Normalized gradients are clipped at ``(step - 1) ** 0.25``.

    Bytes of state, errors and other arguments as for :class:`shardopt.AdamW`.

    Args:
        betas: decay rates of the average of normalized gradients and of the second moment.
        eps: the least root of the second moment to divide by.
        weight_decay: L2 penalty, or with ``decoupled_weight_decay`` decay per unit of lr.
        decoupled_weight_decay: keep the decay apart from the gradient.
    """

    only_rule = Rule("adopt", (Moment("exp_avg", signed=True, own_units=True), Moment("exp_avg_sq", signed=False)))

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.9999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyper_parameters(locals()), options)


class ADOPT8bit(ADOPT, codec="log8"):
    """:class:`ADOPT` with the codec log8 unless ``codec`` says otherwise."""


class StableAdamW(ShardedOptimizer):
    """StableAdamW (arXiv 2304.13013, algorithm 2): AdamW with Adafactor's clipping of updates.

    The learning rate of a parameter, and with it the decay, is divided by the root mean square of gradient over root of
    the second moment, if that is above 1. The mean runs over the whole parameter, exact to the last bit however it is
    sharded: a step takes a second pass over the parameters, and one all-reduce per step among the ranks that share them
    (with released gradients, one per parameter).

    Bytes of state, errors and other arguments as for :class:`shardopt.AdamW`.
    """

    only_rule = Rule("stable_adamw", ADAM_MOMENTS)
    decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyper_parameters(locals()), options)


class StableAdamW8bit(StableAdamW, codec="log8"):
    """:class:`StableAdamW` with the codec log8 unless ``codec`` says otherwise."""


class LAMB(ShardedOptimizer):
    """LAMB (arXiv 1904.00962, algorithm 2): Adam's direction, scaled to the norm of each parameter.

    Norms are those of whole parameters, at the cost that :class:`StableAdamW` describes. If the norm of a parameter or
    of its direction is zero, the direction is not scaled. A weight that is NaN or infinite makes its parameter NaN.

    Bytes of state, errors and other arguments as for :class:`shardopt.AdamW`.

    Args:
        weight_decay: ``weight_decay`` times the parameter is added to its direction before the direction is scaled.
    """

    only_rule = Rule("lamb", ADAM_MOMENTS)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyper_parameters(locals()), options)


class LAMB8bit(LAMB, codec="log8"):
    """:class:`LAMB` with the codec log8 unless ``codec`` says otherwise."""


#: ``past_mu`` before the first step: no steps, the product of no decay rates, and None for a ``betas[0]`` not yet read.
_NO_PAST: tuple[int, float, float | None] = (0, 1.0, None)


class NAdam(AdamKin):
    """NAdam (Dozat, ICLR workshop 2016), as in torch: Nesterov's momentum, whose decay rate rises to ``betas[0]``.

    Bytes of state, errors and other arguments as for :class:`shardopt.AdamW`.

    torch's ``mu_product``, the product of the decay rates of all steps, follows from the step count and ``betas[0]``.
    Param groups record changes of ``betas[0]`` by a scheduler in ``past_mu``: the number of steps before the last
    change, their product, and the value since. A parameter with fewer steps than that is stepped as if ``betas[0]`` had
    never changed.

    Args:
        weight_decay: L2 penalty, or with ``decoupled_weight_decay`` decay per unit of lr.
        momentum_decay: how soon the first decay rate rises.
        decoupled_weight_decay: keep the decay apart from the gradient.
    """

    only_rule = Rule("nadam", ADAM_MOMENTS)
    numbers = (("momentum_decay", LARGEST),)

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
        super().__init__(params, {**hyper_parameters(locals()), "past_mu": _NO_PAST}, options)

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        steps, product, _ = group["past_mu"]
        past = {"past_steps": float(steps), "past_product": float(product)}
        return {**super().hyper(group), "decay_base": _decay_base(group), **past}

    def prepare_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Updates ``past_mu`` of param groups in which ``betas[0]`` has changed, from the steps taken before.

        Counts the steps of parameters with elements on this rank. Where FSDP1 leaves a rank none of a group's elements,
        ``past_mu`` may differ between ranks: steps do not use it there, but a checkpoint refuses the group.
        """
        for group in groups:
            beta1, (steps, product, last_beta1) = float(group["betas"][0]), group["past_mu"]
            if last_beta1 is None:  # first step, also after a load of torch's mu_product
                group["past_mu"] = (steps, product, beta1)
            elif beta1 != last_beta1:
                states = (self.state.get(param) for param in group["params"])
                steps = max((int(state["step"]) for state in states if state), default=0)
                group["past_mu"] = (steps, _mu_product(group, steps), beta1)

    def reset_group(self, group: dict[str, Any]) -> None:
        group["past_mu"] = _NO_PAST

    def check_group(self, group: Mapping[str, Any]) -> None:
        super().check_group(group)
        past = group["past_mu"]
        if not isinstance(past, tuple) or len(past) != 3 or not is_int(past[0]) or past[0] < 0:
            raise ValueError(
                f"past_mu: got {past!r:.80}, expected steps, a product, and None or betas[0]; leave it out"
            )
        for value in (past[1], past[2] or 0.0):
            check_number({"past_mu": value}, "past_mu")

    @without_autograd
    def state_dict(self, *, dequantize: bool = False) -> StateDict:
        """See :meth:`ShardedOptimizer.state_dict`; ``dequantize`` gives torch's ``mu_product``, too."""
        state_dict = super().state_dict(dequantize=dequantize)
        for group in state_dict["param_groups"] if dequantize else ():
            for entries in filter(None, map(state_dict["state"].get, group["params"])):
                step = entries["step"]
                entries["mu_product"] = torch.full_like(step, _mu_product(group, int(step)))
        return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """See :meth:`ShardedOptimizer.load_state_dict`; torch's ``mu_product`` becomes ``past_mu``."""
        with suppress(ValueError):  # else refused below, by all ranks together, unless the user's hooks mend it
            saved, states = checked_containers(state_dict)
            state_dict = {**state_dict, "param_groups": [_with_past_mu(group, states) for group in saved]}
        super().load_state_dict(state_dict)


def _with_past_mu(group: Mapping[str, Any], states: Mapping[Any, Any]) -> Mapping[str, Any]:
    """A saved param group with ``past_mu``, read from the parameter with the most steps, if it has ``mu_product``."""
    entries = [x for x in map(states.get, group["params"]) if isinstance(x, Mapping) and "mu_product" in x]
    try:
        past = [max((int(x.get("step", 0)), float(x["mu_product"])) for x in entries)] if entries else []
    except (TypeError, ValueError, RuntimeError):  # not numbers: refused by check_group, on all ranks
        past = [(-1, math.nan)]
    return {"past_mu": (*past[0], None), **group} if past else group


def _decay_base(group: Mapping[str, Any]) -> float:
    """The number ``base`` of which ``beta1 * (1 - 0.5 * base**t)`` is the first moment's decay rate in step ``t``."""
    return float(0.96 ** group["momentum_decay"])


def _mu_product(group: Mapping[str, Any], steps: int) -> float:
    """NAdam's ``mu_product``: the product of ``beta1 * (1 - 0.5 * 0.96 ** (t * momentum_decay))`` over t = 1 to steps.

    Starts from ``past_mu``: the number of steps before the last change of beta1, their product, and beta1 since then.
    """
    past_steps, product, beta1 = group["past_mu"]
    if steps < past_steps:  # a parameter that was stepped less often: as if beta1 had never changed
        past_steps, product = 0, 1.0
    base = _decay_base(group)
    decay = base**past_steps
    for _ in range(past_steps, steps):
        decay *= base
        product *= (float(group["betas"][0]) if beta1 is None else beta1) * (1 - 0.5 * decay)
        if product < 2.0**-150:  # zero in float32
            break
    return float(product)


class NAdam8bit(NAdam, codec="log8"):
    """:class:`NAdam` with the codec log8 unless ``codec`` says otherwise."""
