"""A step of some of an optimizer's parameters, and what is kept of it for the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from shardopt.kernels.dispatch import LossScaling
from shardopt.kernels.skipped import SkippedElements
from shardopt.optim.entries import Group
from shardopt.optim.placement import StatePlaces
from shardopt.optim.plan import Plan
from shardopt.optim.planning import demand_finite, make_plan

ParamGroups = list[dict[str, Any]]


class Stepper:
    """Steps some of an optimizer's parameters, again and again.

    Args:
        places: where the state of each parameter lives.
        numbers: which of all parameters each is, where the optimizer has only some of them.
        first_place: the first parameter's place among all that the optimizer has.
        name: how errors name the parameter, if it is a single one that is not the param group's first.
    """

    def __init__(
        self, places: StatePlaces, numbers: Mapping[Tensor, int], first_place: int = 0, name: str | None = None
    ) -> None:
        self.skipped = SkippedElements()
        self._where = (places, numbers, first_place, name)
        self._plan: Plan | None = None  # of the last step

    def prepare(
        self,
        param_groups: ParamGroups,
        state: Mapping[Tensor, Any],
        group_of: Callable[[dict[str, Any]], Group],
        scaling: LossScaling,
    ) -> Callable[[], None]:
        """Prepares a step on every parameter that has a gradient. Collectives of gradients are run here.

        Args:
            param_groups: the optimizer's, or some of its parameters in the same form.
            state: the state of these parameters.
            group_of: what a step needs to know of a param group.
            scaling: the loss scale.

        Returns:
            Takes the step, once, in any thread: gradients and options are those of now. The next one is to be prepared
            only afterwards.

        Raises:
            RuntimeError, ValueError, FloatingPointError: as :func:`make_plan`. Nothing was changed.
        """
        plan, self._plan = self._plan, None  # put back only after a step that went well
        if plan is not None and plan.options_changed(param_groups):
            plan = plan if plan.set_groups([group_of(group) for group in param_groups]) else None
        if plan is None or not plan.refresh(param_groups, state):
            groups = [group_of(group) for group in param_groups]
            plan = make_plan(param_groups, state, groups, scaling, self.skipped, *self._where)
        elif scaling.found_inf is None:
            demand_finite(plan.gradients_of("raise"))
        plan.prepare(scaling)
        return partial(self._run, plan)

    def _run(self, plan: Plan) -> None:
        plan.run()
        self._plan = plan

    def forget(self) -> None:
        """Has everything looked up anew by the next step."""
        self._plan = None
