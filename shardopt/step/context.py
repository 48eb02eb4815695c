"""The interface through which a step uses its optimizer: options, numbers and replicas of parameters, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from shardopt.kernels.skipped import SkippedElements
from shardopt.layout import RankGroup
from shardopt.state.residency import StateResidency
from shardopt.step.groups import Group


class StepContext(Protocol):
    """The optimizer's data and methods that its steps use; ``optimizer._internals`` implements them.

    Attributes:
        residency: decides on which device the state of each parameter is kept, and moves the state there.
        skipped: counts the gradient elements that kernels skipped as NaN or Inf.
        model_indices: inside ZeroRedundancyOptimizer, the parameters' indices among all ranks' parameters; else empty.
        is_numbered: whether a parameter has, or once had, a number by its place in the model, which seeds its noise.
        copies: replicated parameters that the ranks orthogonalize only once, each with the ranks that hold copies.
        captured: objects whose memory captured CUDA graphs use in replays; kept alive, so that the list only grows.
    """

    residency: StateResidency
    skipped: SkippedElements
    model_indices: dict[Tensor, int]
    is_numbered: bool
    copies: dict[Tensor, RankGroup]
    captured: list[object]

    def group_of(self, options: Mapping[str, Any]) -> Group:
        """Checks the options of a param group, normalizes them there, and returns them in the form that a step uses."""

    def take_totals(self, totals: Tensor | None) -> Sequence[Mapping[str, float]]:
        """Computes hyper-parameters from sums over all parameters: int64, (sums, words); None if this rank has no sums.

        Collective if other ranks' optimizers have the model's other parameters (ZeroRedundancyOptimizer). Returns, per
        param group, those that replace the group's own in the current step.
        """
