"""The methods and attributes by which each optimizer describes itself, such as its rule and its hyper-parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim.optimizer import Optimizer

from shardopt import _C
from shardopt.codec import Moment, get_codec
from shardopt.state.options import DEFAULTS, check_flag, check_hyper, check_number
from shardopt.state.rule import Rule


class OptimizerInterface(Optimizer):
    """Base class of ``ShardedOptimizer``: subclasses must say what their rule is, and may define the rest."""

    #: The rule of all param groups, unless :meth:`rule` says otherwise.
    only_rule: Rule | None = None

    def rule(self, group: Mapping[str, Any]) -> Rule:
        """The rule for a param group."""
        if self.only_rule is None:
            raise TypeError(
                f"got an optimizer {type(self).__name__} without a rule, expected one; set only_rule in the class, or "
                "define rule(group)"
            )
        return self.only_rule

    #: The codec where the options name none; ``class Toy8bit(Toy, codec="log8")`` sets it.
    default_codec = DEFAULTS["codec"]

    def __init_subclass__(cls, codec: str | None = None, **others: Any) -> None:
        super().__init_subclass__(**others)
        if codec is not None:
            cls.default_codec = codec

    #: How many decay rates ``betas`` has.
    beta_count = 2

    #: Moments that only some settings of the hyper-parameters keep. Loading ignores those that these settings do not.
    optional_moments: tuple[Moment, ...] = ()

    #: Hyper-parameters that are True or False.
    flags: tuple[str, ...] = ()

    #: Hyper-parameters that are numbers from 0, and up to which; below 1 if that is 1.
    numbers: tuple[tuple[str, float], ...] = ()

    #: Whether weight decay is apart from the gradient, or the name of the flag that says so.
    decoupled: bool | str = False

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        """The rule's hyper-parameters, by the names in csrc/rules.

        By default those in the param group: ``betas`` become ``beta1``, ``beta2``, ..., None becomes 0, and
        ``weight_decay`` is ``coupled_decay`` or ``decoupled_decay`` where the rule has these (see :attr:`decoupled`).
        """
        names = _C.rules[self.rule(group).name]["hyper"]
        hyper = {name: float(group[name] or 0.0) for name in ("weight_decay", *names) if name in group}
        hyper.update((f"beta{number}", float(beta)) for number, beta in enumerate(group.get("betas", ()), 1))
        is_decoupled = group[self.decoupled] if isinstance(self.decoupled, str) else self.decoupled
        decay = hyper.get("weight_decay", 0.0)
        decays = {"coupled_decay": 0.0 if is_decoupled else decay, "decoupled_decay": decay if is_decoupled else 0.0}
        return hyper | {name: value for name, value in decays.items() if name in names}

    def hyper_from_totals(self, totals: Sequence[float]) -> Sequence[Mapping[str, float]]:
        """Takes the sums over all parameters, if the rule has some (``kTotals`` in csrc/core/rule.h).

        A step calls this before it computes anything but the sums: param groups may be changed here.

        Args:
            totals: the sums, each rounded once; NaN if a term was NaN or infinite.

        Returns:
            Per param group, the hyper-parameters that change for the rest of the step.
        """
        return [{} for _ in self.param_groups]

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Checks the hyper-parameters in a param group.

        Raises:
            ValueError: one is out of range.
        """
        check_hyper(group, self.beta_count)
        for flag in self.flags:
            check_flag(group, flag)
        for name, most in self.numbers:
            check_number(group, name, most)
        if get_codec(group["codec"]).shared and not self.rule(group).shares_codes:
            raise ValueError(
                f"codec: got {group['codec']!r} for {type(self).__name__} with the rule {self.rule(group).name!r}, "
                "expected another codec: two moments share its codes, which is for Adam and AdamW alone, without "
                "amsgrad and cautious"
            )

    def check_parameters(self, index: int) -> None:
        """Checks the parameters of the param group ``index``, which was just added.

        Raises:
            ValueError: this optimizer cannot step one of the parameters.
        """

    def begin_step(self, groups: Sequence[dict[str, Any]]) -> None:
        """Called before a step of parameters of these param groups, which it checks together, or changes."""

    def reset_group(self, group: dict[str, Any]) -> None:
        """Sets what steps change in a param group to what it begins with; options stay."""


def hyper_parameters(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters among the arguments of an optimizer's constructor, which gives its ``locals()``."""
    return {key: x for key, x in arguments.items() if key not in ("self", "params", "options", "__class__")}
