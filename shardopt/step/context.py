"""The parts of an optimizer that the steps of all its parameters use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from shardopt.kernels.skipped import SkippedElements
from shardopt.layout import RankGroup
from shardopt.state.residency import StateResidency
from shardopt.step.groups import Group


class StepContext(Protocol):
    """An optimizer as its steps see it: ``optimizer._internals``.

    Attributes:
        residency: where the state of each parameter lives.
        skipped: the counter of skipped elements.
        model_indices: indices of the parameters among all of the model's, if the optimizer has only some of them.
        is_numbered: whether some of the parameters have, or had, numbers in the model.
        copies: the parameters of which other ranks hold copies and whose work the ranks share.
        captured: objects that CUDA graphs keep using: the list grows.
    """

    residency: StateResidency
    skipped: SkippedElements
    model_indices: dict[Tensor, int]
    is_numbered: bool
    copies: dict[Tensor, RankGroup]
    captured: list[object]

    def group_of(self, options: Mapping[str, Any]) -> Group:
        """Reads and checks a param group."""

    def take_totals(self, totals: Tensor | None) -> Sequence[Mapping[str, float]]:
        """Takes the sums over all parameters: int64, (sums, words), or None without any on this rank.

        Returns:
            Per param group, the hyper-parameters that follow from the sums.
        """
