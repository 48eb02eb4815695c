"""Sweeps over several parameters: by default each value meets each value of the others, and with ``--all`` all meet."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any

import pytest

from helpers import USUAL_RULES

Pair = tuple[int, str, int, str]


def pairwise(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Marks slow the cases that no pair of values needs.

    Args:
        cases: of ``pytest.mark.parametrize``, a tuple per case, such as ``itertools.product`` makes them.

    Returns:
        All cases, in their order. Of those that are not slow, each pair of values that stands in a case stands in one.
    """
    listed = list(cases)
    pairs = [_pairs(case) for case in listed]
    values_of = [set(enumerate(map(repr, case))) for case in listed]
    missing = set().union(*pairs)
    kept: set[int] = set()
    # Few suffice if the next one is always that with the most new pairs; of several, the one least like the others.
    while missing:
        values = {value for place in kept for value in values_of[place]}
        best = max(range(len(listed)), key=lambda i: (len(pairs[i] & missing), -len(values & values_of[i]), -i))
        kept.add(best)
        missing -= pairs[best]
    return [case if place in kept else pytest.param(*case, marks=pytest.mark.slow) for place, case in enumerate(listed)]


def by_passes(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """As :func:`pairwise`, but unusual rules meet log8 and one more codec, in turn, unless all cases are run.

    The CPU steps these by passes that are compiled for a rule or for a codec (csrc/step/cpu_passes.h), and usual rules
    by kernels of both.

    Args:
        cases: rule, codec, and further values.
    """
    listed = list(cases)
    rules, codecs = (list(dict.fromkeys(case[place] for case in listed)) for place in (0, 1))
    others = [codec for codec in codecs if codec != "log8"]
    second = {rule: others[index % len(others)] for index, rule in enumerate(rules)}
    few = [case for case in listed if case[0] in USUAL_RULES or case[1] in ("log8", second[case[0]])]
    return [*pairwise(few), *slow(case for case in listed if case not in few)]


def slow(cases: Iterable[tuple[Any, ...]], besides: Iterable[tuple[Any, ...]] = ()) -> list[Any]:
    """Cases of ``pytest.mark.parametrize`` that only ``--all`` runs: those given, without those listed ``besides``."""
    fast = list(besides)
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases if case not in fast]


def in_turn(first: Iterable[tuple[Any, ...]], second: Iterable[tuple[Any, ...]]) -> list[Any]:
    """All cases of both; marks those slow in which a value of the first does not meet its turn of the second."""
    firsts, seconds = list(first), list(second)
    assert len(firsts) >= len(seconds), "each value of the second has to have a turn"
    kept = [(*case, *seconds[place % len(seconds)]) for place, case in enumerate(firsts)]
    return [*kept, *slow(case for a in firsts for b in seconds if (case := (*a, *b)) not in kept)]


def _pairs(case: tuple[Any, ...]) -> set[Pair]:
    return {(a, repr(case[a]), b, repr(case[b])) for a, b in combinations(range(len(case)), 2)}


def of_usual_rules(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Marks slow the cases of other rules, given first, that :func:`by_passes` would; codecs are given second."""
    listed = list(cases)
    others = [case for case in listed if case[0] not in USUAL_RULES]
    return [case for case in listed if case[0] in USUAL_RULES] + (by_passes(others) if others else [])
