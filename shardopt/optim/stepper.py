"""A step of some of an optimizer's parameters, and what is kept of it for the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import zip_longest
from operator import itemgetter
from typing import Any

from torch import Tensor

from shardopt.kernels.dispatch import LossScaling
from shardopt.kernels.skipped import SkippedElements
from shardopt.optim.entries import Group
from shardopt.optim.options import DEFAULTS, PLACEMENT, check_options
from shardopt.optim.placement import StatePlaces
from shardopt.optim.plan import Plan
from shardopt.optim.planning import demand_finite, make_plan

ParamGroups = list[dict[str, Any]]

_options_of = itemgetter(*DEFAULTS)


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
        self._checked: list[tuple[Any, ...]] = []  # options of the param groups in the last step

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
            ValueError: an option or hyper-parameter was changed, to what is not allowed or not while training.
        """
        plan, self._plan = self._plan, None  # put back only after a step that went well
        changed = plan is not None and plan.options_changed(param_groups)
        checked = self._check(param_groups, state) if plan is None or changed else self._checked
        if plan is not None and changed:
            plan = plan if plan.set_groups([group_of(group) for group in param_groups]) else None
        if plan is None or not plan.refresh(param_groups, state):
            groups = [group_of(group) for group in param_groups]
            plan = make_plan(param_groups, state, groups, scaling, self.skipped, *self._where)
        elif scaling.found_inf is None:
            demand_finite(plan.gradients_of("raise"))
        plan.prepare(param_groups, scaling)
        self._checked = checked
        return partial(self._run, plan)

    def _run(self, plan: Plan) -> None:
        plan.run()
        self._plan = plan

    def _check(self, param_groups: ParamGroups, state: Mapping[Tensor, Any]) -> list[tuple[Any, ...]]:
        """Checks the options that are not those of the last step: where only the learning rate is new, none.

        Returns:
            The options of each param group.
        """
        found = [_options_of(group) for group in param_groups]
        for group, options, last in zip_longest(param_groups, found, self._checked[: len(found)]):
            if options == last:
                continue
            check_options(group)
            for name, now, before in zip(DEFAULTS, options, last or options, strict=True):
                if name in PLACEMENT and now != before:
                    raise _changed_place(name, now, before)
            for param in group["params"]:
                decided = self._where[0].place(param).offload if state.get(param) else None
                if decided not in (None, group["offload"]):
                    raise _changed_place("offload", group["offload"], decided)
        return found

    def forget(self) -> None:
        """Has everything looked up anew by the next step."""
        self._plan = None


def _changed_place(option: str, got: object, expected: object) -> ValueError:
    return ValueError(
        f"{option}: got {got!r} in a param group that was stepped with {expected!r}, expected the same; give it when "
        "the optimizer is made: make another one, and load this one's state dict"
    )
