"""The methods and attributes that an optimizer class overrides to define its update rule and hyper-parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim.optimizer import Optimizer

from shardopt import _C
from shardopt.codec import Moment, get_codec
from shardopt.state.options import DEFAULTS, check_bool, check_hyper, check_number
from shardopt.state.rule import Rule


class OptimizerInterface(Optimizer):
    """Base class of ``ShardedOptimizer``. Optimizers set ``only_rule`` or define ``rule``; all else has defaults."""

    #: The update rule of all param groups, for classes that do not define :meth:`rule`.
    only_rule: Rule | None = None

    def rule(self, group: Mapping[str, Any]) -> Rule:
        """Returns the update rule (kernel and moments) for a param group, which may depend on its hyper-parameters."""
        if self.only_rule is None:
            raise TypeError(
                f"got an optimizer {type(self).__name__} without a rule, expected one; set only_rule in the class, or "
                "define rule(group)"
            )
        return self.only_rule

    #: The codec if the user's options have none. ``class Toy8bit(Toy, codec="log8")`` sets it to "log8".
    default_codec = DEFAULTS["codec"]

    def __init_subclass__(cls, codec: str | None = None, **others: Any) -> None:
        super().__init_subclass__(**others)
        if codec is not None:
            cls.default_codec = codec

    #: How many decay rates ``betas`` has.
    beta_count = 2

    #: Moments that the rule keeps only with some hyper-parameters (SGD: with momentum). Loading ignores unneeded ones.
    optional_moments: tuple[Moment, ...] = ()

    #: Hyper-parameters that are True or False.
    flags: tuple[str, ...] = ()

    #: Names and upper bounds of hyper-parameters that are numbers of at least 0. A bound of 1 is exclusive.
    numbers: tuple[tuple[str, float], ...] = ()

    #: Whether weight decay is decoupled from the gradient as in AdamW, or the name of the flag that decides.
    decoupled: bool | str = False

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        """Translates a param group's options to the hyper-parameters of the compiled rule (csrc/rules).

        By default, options keep their names, but ``betas`` become ``beta1``, ``beta2``, ..., None becomes 0, and
        ``weight_decay`` becomes ``coupled_decay`` or ``decoupled_decay`` (:attr:`decoupled`). ``lr`` keeps its value.
        """
        names = _C.rules[self.rule(group).name]["hyper"]  # of the hyper-parameters that the rule has
        hyper = {name: float(group[name] or 0.0) for name in ("weight_decay", *names) if name in group}
        hyper.update((f"beta{number}", float(beta)) for number, beta in enumerate(group.get("betas", ()), 1))
        is_decoupled = group[self.decoupled] if isinstance(self.decoupled, str) else self.decoupled
        decay = hyper.get("weight_decay", 0.0)
        decays = {"coupled_decay": 0.0 if is_decoupled else decay, "decoupled_decay": decay if is_decoupled else 0.0}
        return hyper | {name: value for name, value in decays.items() if name in names}

    def hyper_from_totals(self, totals: Sequence[float]) -> Sequence[Mapping[str, float]]:
        """Computes hyper-parameters from sums over all parameters, for rules with ``kTotals`` (csrc/core/rule.h).

        A step calls this after the sums and before all updates. ``totals`` are the sums over all ranks, each rounded
        once; NaN if a term was NaN or infinite. Returns per param group hyper-parameters that replace those of
        :meth:`hyper` for the rest of the step. Implementations may change param groups, see ``Rule.shared``.
        """
        return [{} for _ in self.param_groups]

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Raises ValueError if an option or hyper-parameter of a param group is out of this optimizer's range."""
        check_hyper(group, self.beta_count)
        for flag in self.flags:
            check_bool(group, flag)
        for name, most in self.numbers:
            check_number(group, name, most)
        if get_codec(group["codec"]).shared and not self.rule(group).shares_codes:
            raise ValueError(
                f"codec: got {group['codec']!r} for {type(self).__name__} with the rule {self.rule(group).name!r}, "
                "expected another codec: two moments share its codes, which is for Adam and AdamW alone, without "
                "amsgrad and cautious"
            )

    def check_parameters(self, index: int) -> None:
        """Raises ValueError if this optimizer cannot step a parameter of group ``index``, which was just added."""

    def prepare_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Before each step of these groups, checks that they agree (Prodigy: ValueError), records changes (NAdam)."""

    def reset_group(self, group: dict[str, Any]) -> None:
        """Resets values that steps keep in a param group (Prodigy's ``d``) to their initial ones; options stay."""


def hyper_parameters(constructor_locals: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters among a constructor's ``locals()``, taken in its first line: all arguments but these."""
    others = ("self", "params", "options", "__class__")  # Python adds __class__ where super() is called
    return {name: value for name, value in constructor_locals.items() if name not in others}
