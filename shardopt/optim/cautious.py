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


def cautious_rule(rule: Rule, group: Mapping[str, Any]) -> Rule:
    """The rule, or its cautious kin where the param group asks for that."""
    return Rule(f"cautious_{rule.name}", rule.moments, has_sums=group["cautious"]) if is_cautious(group) else rule


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
