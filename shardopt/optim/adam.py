"""Adam (Kingma & Ba, arXiv 1412.6980) and AdamW (Loshchilov & Hutter, arXiv 1711.05101)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardopt.codec import Moment, get_codec
from shardopt.optim.base import ShardedOptimizer
from shardopt.optim.interface import hyper_parameters
from shardopt.state.options import Options, Unpack, check_bool, repays
from shardopt.state.rule import Rule

#: Options of Adam, AdamW and Lion, of which any makes a rule cautious.
CAUTIOUS = ("cautious", "cautious_weight_decay")


def cautious_key(group: Mapping[str, Any]) -> tuple[bool, ...]:
    """Reads the options ``cautious`` and ``cautious_weight_decay``, as a key into :func:`cautious_rules`."""
    return tuple(bool(group[flag]) for flag in CAUTIOUS)


def cautious_rules(rule: Rule) -> dict[tuple[bool, ...], Rule]:
    """A rule and its cautious variants (csrc/rules/cautious.h), by the flags (cautious, cautious_weight_decay)."""
    name, moments = f"cautious_{rule.name}", rule.moments
    cautious_decay = Rule(name, moments, has_sums=False)  # scales no update, so counts no kept elements
    cautious = Rule(name, moments)
    return {(False, False): rule, (False, True): cautious_decay, (True, False): cautious, (True, True): cautious}


ADAM_MOMENTS = (Moment("exp_avg", signed=True), Moment("exp_avg_sq", signed=False))
_ADAM = cautious_rules(Rule("adam", ADAM_MOMENTS))
_REPAID = Rule("repaid_adam", ADAM_MOMENTS)
_MAX_SQUARES = Moment("max_exp_avg_sq", signed=False)
_AMSGRAD = Rule("amsgrad", (*ADAM_MOMENTS, _MAX_SQUARES))


class AdamW(ShardedOptimizer):
    """AdamW (arXiv 1711.05101, algorithm 2): Adam with decoupled weight decay.

    Bytes of state per parameter: 8 with ``codec="fp32"``, 4 with "bf16", and with 8-bit codecs in blocks of 128::

        exp_avg_codes      1        exp_avg_scales      4 / 128
        exp_avg_sq_codes   1        exp_avg_sq_scales   8 / 128 (log8), 4 / 128 (others)

    that is 2.094 with "log8". With "log4" both moments have one byte::

        moment_codes       1        exp_avg_scales      4 / 128        exp_avg_sq_scales   8 / 128

    that is 1.094. A 16-bit parameter with ``master_weight_bits`` has, whatever the codec, also::

        master_low_bits    1 (24 bits), 2 (32 bits)

    that is 3.094 or 4.094 with "log8", 2.094 or 3.094 with "log4".

    Args:
        params: parameters or param groups, as for torch.optim.
        lr: learning rate, a float or a 0-d tensor.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decay per unit of lr.
        amsgrad: divide by the largest second moment so far (arXiv 1904.09237), which is a third moment.
        cautious: leave out elements whose update goes against their gradient, and multiply the others by
            ``numel / (kept + 1)`` (arXiv 2411.16085, algorithm 1). Kept elements are counted over the whole parameter,
            however it is sharded: a step takes a second pass, and one all-reduce among the ranks that share parameters.
        cautious_weight_decay: decay only elements that the update does not move away from zero (arXiv 2510.12402).
        repay: compensate for rounding of the first moment: the updates that all later steps would have made with the
            part lost to rounding are added to the weight now. Needs float32 parameters or ``master_weight_bits``, and
            the codec "log4" or "log8". None: True for "log4" only. Applies to elements with skipped gradients, too.
            Loading a checkpoint of :mod:`shardopt.checkpoint` leaves this option as it is.
        **options: see :class:`shardopt.state.options.Options`.

    Raises:
        ValueError: a hyper-parameter or option is out of range.
        TypeError: there is no such option.
    """

    optional_moments = (_MAX_SQUARES,)
    flags = ("amsgrad", *CAUTIOUS)
    decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        cautious: bool = False,
        cautious_weight_decay: bool = False,
        repay: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, hyper_parameters(locals()), options)

    def rule(self, group: Mapping[str, Any]) -> Rule:
        if group["amsgrad"]:
            return _AMSGRAD
        flags = cautious_key(group)
        # check_group() calls this before it refuses repay beside a cautious option.
        return _REPAID if repays(group) and not any(flags) else _ADAM[flags]

    def check_group(self, group: Mapping[str, Any]) -> None:
        super().check_group(group)
        if group["amsgrad"] and any(cautious_key(group)):
            raise ValueError("amsgrad: got True beside cautious or cautious_weight_decay, expected one or the other")
        if group["repay"] is not None:
            check_bool(group, "repay")
        if repays(group) and (group["amsgrad"] or any(cautious_key(group))):
            raise ValueError("repay: got True beside amsgrad or a cautious option, expected one or the other")
        if repays(group) and not get_codec(group["codec"]).relative:
            raise ValueError(f"repay: got True with codec {group['codec']!r}, expected 'log4' or 'log8'")


class AdamKin(ShardedOptimizer):
    """Base class of optimizers with Adam's hyper-parameters and the option ``decoupled_weight_decay``."""

    flags = ("decoupled_weight_decay",)
    decoupled = "decoupled_weight_decay"


class Adam(AdamW):
    """Adam (arXiv 1412.6980, algorithm 1), whose weight decay is an L2 penalty, added to the gradient.

    Arguments, errors and bytes are those of :class:`AdamW`, except that there is no ``cautious_weight_decay``.
    """

    decoupled = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        cautious: bool = False,
        repay: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, cautious=cautious, repay=repay, **options)

    def check_group(self, group: Mapping[str, Any]) -> None:
        super().check_group(group)
        for name in ("cautious_weight_decay", "decoupled_weight_decay"):  # a torch.optim state dict has the latter
            if group.get(name):
                raise ValueError(f"{name}: got True for Adam, whose weight decay is L2; use AdamW")


class AdamW8bit(AdamW, codec="log8"):
    """:class:`AdamW` with the codec log8 unless ``codec`` says otherwise."""


class Adam8bit(Adam, codec="log8"):
    """:class:`Adam` with the codec log8 unless ``codec`` says otherwise."""


class AdamW4bit(AdamW, codec="log4"):
    """:class:`AdamW` with the codec log4 unless ``codec`` says otherwise: both moments in one byte."""


class Adam4bit(Adam, codec="log4"):
    """:class:`Adam` with the codec log4 unless ``codec`` says otherwise: both moments in one byte."""
