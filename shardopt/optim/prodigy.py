"""Prodigy, AdamW with an estimated learning rate (Mishchenko & Defazio, arXiv 2306.06101)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from operator import itemgetter
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardopt import _C
from shardopt.codec import Moment
from shardopt.optim.base import ShardedOptimizer
from shardopt.optim.interface import hyper_parameters
from shardopt.state.options import LARGEST, REMEDY, Options, Unpack, check_number, convert_sequences, is_int
from shardopt.state.rule import Rule

#: Options of the estimate ``d``, in which all param groups must agree.
_ESTIMATE_OPTIONS = ("d0", "d_coef", "growth_rate", "use_bias_correction", "safeguard_warmup")
_PLAIN = frozenset([float, int, bool, tuple, type(None)])  # neither change in place nor fail to be compared
_AGREED = itemgetter("lr", "beta3", "betas", *_ESTIMATE_OPTIONS)


class Prodigy(ShardedOptimizer):
    """Prodigy (arXiv 2306.06101, algorithm 4): AdamW that finds its own learning rate.

    The rate is ``d``, an estimate of the distance from the first weights to the solution, times ``lr``, which is left
    at 1 or at a schedule from 1 down. ``d`` follows from two sums over all parameters, exact to the last bit however
    these are sharded: a step takes a second pass over the parameters and one all-reduce of 368 bytes among the ranks
    that share them, and the host reads the sums, for which it waits for the device. Gradients cannot be released, nor
    a step be captured into a CUDA graph.

    All param groups have the same ``d`` (``group["d"]``), along with the estimate's other numbers (``d_max``,
    ``d_numerator``, ``k``): state dicts and checkpoints carry them. A param group with ``lr=0`` stays as it is and
    takes no part in the sums; the other groups must have the same ``lr``. Skipped elements (``nonfinite``) take no
    part, either; if a sum is NaN or infinite, ``d`` stays as it is.

    ``d`` is common to the ranks that share parameters. Ranks with other parameters, such as pipeline stages, have a
    ``d`` of their own.

    State and signature are those of the authors' ``prodigyopt`` (https://github.com/konstmish/prodigy), but for its
    ``slice_p``. Bytes of state per parameter: 16 with ``codec="fp32"``; 8.125 with log8 in blocks of 128, since the
    slow average ``s`` has 16 bits (companded16), and ``p0``, the weights before the first step, float32.

    Other arguments and errors as for :class:`shardopt.AdamW`.

    Args:
        lr: factor of the estimated learning rate, a float or a 0-d tensor.
        beta3: decay rate of the estimate's sums; None for the root of ``betas[1]``.
        eps: added to the root of the second moment, times ``d``.
        weight_decay: decay per unit of ``d * lr``, or L2 penalty if not ``decouple``.
        decouple: whether weight decay is apart from the gradient, as in AdamW.
        use_bias_correction: whether to correct the moments' bias as Adam does.
        safeguard_warmup: leave ``lr`` out of the slow average, for a schedule with a warm-up.
        d0: the estimate to begin with.
        d_coef: factor of the estimate: 0.5 for smaller steps, 2 for larger ones.
        growth_rate: largest factor by which ``d`` may grow in a step, after its first growth.
    """

    only_rule = Rule(
        "prodigy",
        (
            Moment("exp_avg", signed=True),
            Moment("exp_avg_sq", signed=False),
            Moment("s", signed=True, wide=True),
            Moment("p0", signed=True, exact=True),
        ),
        shared=("d", "bias_correction"),
    )
    flags = ("decouple", "use_bias_correction", "safeguard_warmup")
    decoupled = "decouple"
    _agreed: Sequence[tuple[Any, ...]] = ()  # options of the param groups that agreed in the last step

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        beta3: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0,
        decouple: bool = True,
        use_bias_correction: bool = False,
        safeguard_warmup: bool = False,
        d0: float = 1e-6,
        d_coef: float = 1.0,
        growth_rate: float = math.inf,
        **options: Unpack[Options],
    ) -> None:
        hyper = hyper_parameters(locals())
        super().__init__(params, {**hyper, "d": d0, "d_max": d0, "d_numerator": 0.0, "k": 0}, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group, whose estimate begins with its ``d0``; see :meth:`ShardedOptimizer.add_param_group`."""
        if "d0" in param_group:
            for name in ("d", "d_max"):
                param_group.setdefault(name, param_group["d0"])
        super().add_param_group(param_group)

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        first = self.param_groups[0]
        of_first = {"d": first["d"], "bias_correction": _bias_correction(first)}
        return {**super().hyper(group), **of_first, "beta3": _beta3(group), "eps": first["d"] * group["eps"]}

    def prepare_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raises ValueError unless all param groups lead to the same estimate; makes their values plain numbers."""
        values_of = [_AGREED(group) for group in groups]
        if all(type(x) in _PLAIN for values in values_of for x in values) and values_of == self._agreed:
            return
        for group in groups:  # schedulers may have set values that cannot be compared
            convert_sequences(group)
            self.check_group(group)
        for name in ("lr", "beta3", *_ESTIMATE_OPTIONS):
            values = dict.fromkeys(_beta3(group) if name == "beta3" else group[name] for group in groups)
            if name == "lr":  # groups with 0 stay as they are
                values = dict.fromkeys(sorted({*map(float, values)} - {0.0}))
            if len(values) > 1:
                raise ValueError(
                    f"{name}: got {' and '.join(map(repr, values))} in different param groups, expected the same"
                    f"{' or 0' if name == 'lr' else ''}: d is one for all; {REMEDY}"
                )
        self._agreed = [_AGREED(group) for group in groups]

    def hyper_from_totals(self, totals: Sequence[float]) -> Sequence[Mapping[str, float]]:
        """Estimates ``d`` for the next step, as prodigyopt does, and writes it into all param groups.

        The present step uses the old ``d``, but its ``eps`` is multiplied by the new one: see csrc/rules/prodigy.h.
        """
        groups, first = self.param_groups, self.param_groups[0]  # all have the same estimate
        lr = max(float(group["lr"]) for group in groups)  # the same in all groups, or 0
        distance, s_norm = totals  # <g, p0 - p> and the 1-norm of s
        if s_norm == 0.0:  # no gradient yet: with d=0 the step changes no weight
            return [{"d": 0.0} for _ in groups]
        d, beta3 = first["d"], _beta3(first)
        numerator = beta3 * first["d_numerator"] + d / first["d0"] * d * lr * _bias_correction(first) * distance
        estimate = first["d_coef"] * numerator / s_norm
        new = {"d": d, "d_max": first["d_max"], "d_numerator": first["d_numerator"], "k": first["k"] + 1}
        if abs(estimate) <= LARGEST:  # and not NaN
            if d == first["d0"]:  # the first growth is not limited by growth_rate
                d = max(d, estimate)
            new["d_max"] = max(first["d_max"], estimate)
            new["d"] = min(new["d_max"], d * first["growth_rate"])
            new["d_numerator"] = numerator
        for group in groups:
            group.update(new)
        return [{"eps": new["d"] * group["eps"]} for group in groups]

    def reset_group(self, group: dict[str, Any]) -> None:
        group.update(d=group["d0"], d_max=group["d0"], d_numerator=0.0, k=0)

    def check_group(self, group: Mapping[str, Any]) -> None:
        super().check_group(group)
        if group["beta3"] is not None:
            check_number(group, "beta3", 1.0)
        for name in ("eps", "d0", "d", "d_max", "d_coef"):
            _check(name, group[name], lambda x: 0.0 < x <= LARGEST, "above 0 that float32 can hold")
        _check("growth_rate", group["growth_rate"], lambda x: x >= 1, ">= 1")
        _check("d_numerator", group["d_numerator"], lambda x: abs(x) <= sys.float_info.max, "that is finite")
        if not is_int(group["k"]) or group["k"] < 0:
            raise ValueError(f"k: got {group['k']!r:.80}, expected a whole number >= 0; {REMEDY}")


def _beta3(group: Mapping[str, Any]) -> float:  # the option, or the root of betas[1] if it is None
    beta3 = group["beta3"]
    return math.sqrt(group["betas"][1]) if beta3 is None else float(beta3)


def _bias_correction(group: Mapping[str, Any]) -> float:
    """The factor of the learning rate that corrects the bias of both moments, as in Adam; 1 without the option."""
    if not group["use_bias_correction"]:
        return 1.0
    beta1, beta2 = map(float, group["betas"])
    step = int(group["k"]) + 1
    return math.sqrt(1.0 - _C.power(beta2, step)) / (1.0 - _C.power(beta1, step))


def _check(name: str, value: Any, is_allowed: Callable[[Any], bool], expected: str) -> None:
    if not (type(value) is float or isinstance(value, Real)) or isinstance(value, bool) or not is_allowed(value):
        raise ValueError(f"{name}: got {value!r:.80}, expected a number {expected}; {REMEDY}")


class Prodigy8bit(Prodigy, codec="log8"):
    """:class:`Prodigy` with the codec log8 unless ``codec`` says otherwise."""
