"""The options ``cautious`` and ``cautious_weight_decay`` of rules that have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardopt.state.options import check_flag
from shardopt.state.rule import Rule

FLAGS = ("cautious", "cautious_weight_decay")


def is_cautious(group: Mapping[str, Any]) -> bool:
    """Whether a param group asks for either."""
    return any(group[flag] for flag in FLAGS)


class CautiousRules:
    """A rule and its cautious kin.

    Args:
        rule: one that csrc/rules/cautious.h knows.
    """

    def __init__(self, rule: Rule) -> None:
        kin = f"cautious_{rule.name}"
        self._rule, self._with_sums = rule, Rule(kin, rule.moments)
        self._without = Rule(kin, rule.moments, has_sums=False)  # whose decay alone is cautious

    def of(self, group: Mapping[str, Any]) -> Rule:
        """The rule that a param group's flags ask for."""
        if not is_cautious(group):
            return self._rule
        return self._with_sums if group["cautious"] else self._without


def cautious_hyper(group: Mapping[str, Any]) -> dict[str, float]:
    """Hyper-parameters of the cautious kin beside the rule's own."""
    return {flag: float(group[flag]) for flag in FLAGS}


def check_cautious(group: Mapping[str, Any]) -> None:
    """Checks both options.

    Raises:
        ValueError: one is no bool.
    """
    for flag in FLAGS:
        check_flag(group, flag)
