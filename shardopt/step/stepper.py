"""The stepper of a set of parameters, which caches their tables between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import zip_longest
from operator import itemgetter
from typing import Any

from torch import Tensor

from shardopt.kernels.dispatch import LossScaling
from shardopt.layout import Replicas
from shardopt.state.options import DEFAULTS, PLACEMENT, check_options
from shardopt.step.agreement import Agreement
from shardopt.step.batch import StepContext
from shardopt.step.groups import Group
from shardopt.step.inputs import (
    ParamGroups,
    demand_finite,
    describe,
    local_gradients,
    raising,
    ready_states,
)
from shardopt.step.plan import plan_of
from shardopt.step.tables import StepTables

_options_of = itemgetter(*DEFAULTS)


class Stepper:
    """Steps some of an optimizer's parameters, again and again.

    Args:
        context: what all steps use.
        numbers: indices of the parameters among all of the model's, if the optimizer has only some of them.
        copies: the parameters of which other ranks hold copies and whose work the ranks share.
        first: index of the first parameter among all of the optimizer's.
        name: the name in errors of a parameter that is stepped by itself, when its gradient is complete.
    """

    def __init__(
        self,
        context: StepContext,
        numbers: Mapping[Tensor, int],
        copies: Mapping[Tensor, Replicas],
        first: int = 0,
        name: str | None = None,
    ) -> None:
        self.communicates = False  # whether the step that was prepared takes collectives
        self.gradients_changed = True  # whether other parameters may have a gradient than in the step before
        self.context, self._residency, self._numbers, self._copies = context, context.residency, numbers, copies
        self._first, self._name = first, name
        self._tables: StepTables | None = None  # of the last step
        self._agreement = Agreement(context.captured)
        self._raising: frozenset[int] = frozenset()  # the param groups that the ranks agreed to check for NaN and Inf
        self._checked: list[tuple[Any, ...]] = []  # options of the param groups in the last step

    def prepare(
        self,
        param_groups: ParamGroups,
        state: Mapping[Tensor, Any],
        group_of: Callable[[Mapping[str, Any]], Group],
        scaling: LossScaling,
        on_host: Tensor | None = None,
    ) -> Callable[[], None]:
        """Prepares a step on every parameter that has a gradient. May run collectives of gradients.

        Args:
            param_groups: the optimizer's param groups, or similar ones of some of its parameters.
            state: the state of these parameters.
            group_of: reads and checks a param group.
            scaling: the loss scale.
            on_host: this rank's part of the gradient of a single parameter, in the host's memory.

        Returns:
            A function that takes the step, once, with the current gradients and options: in any thread, or in this one
            if the step takes collectives (:attr:`communicates`). Prepare the next step only afterwards.

        Raises:
            RuntimeError: the kernels cannot step a parameter, gradient or state. Nothing was changed, but
                parameters may have got their first state.
            ValueError: an option or hyper-parameter was changed to a value that is not allowed, or not while training.
                Nothing was changed.
            FloatingPointError: a gradient is NaN or Inf and ``nonfinite="raise"``. Nothing was changed.
        """
        if self._residency.asleep:
            self._residency.wake()
        tables, self._tables = self._tables, None  # restored only after a successful step
        changed = tables is None or tables.options_changed(param_groups)
        checked = self._check(param_groups, state) if changed else self._checked
        if tables is not None and changed:
            tables = tables if tables.set_groups([group_of(group) for group in param_groups]) else None
        # Collectives have one order with cached and with new tables: gradients, finiteness, plans.
        parts = None if on_host is None else {0: on_host}
        is_agreed = False
        if tables is not None and tables.read(param_groups, state, parts):
            if scaling.found_inf is None:
                tables.demand_finite()
        else:
            groups = [group_of(group) for group in param_groups]
            tables = self._make_tables(param_groups, state, groups, scaling, on_host)
            is_agreed = True
        self.gradients_changed = tables.update(param_groups, state, scaling)
        if not is_agreed:
            self._agreement.agree(tables.plan)
        self.communicates = tables.communicates
        self._checked = checked
        return partial(self._run, tables)

    def forget(self) -> None:
        """Drops the tables, so that the next step makes new ones."""
        self._tables = None

    def _make_tables(
        self,
        param_groups: ParamGroups,
        state: Any,
        groups: list[Group],
        scaling: LossScaling,
        on_host: Tensor | None,
    ) -> StepTables:
        is_on_host = on_host is not None
        inputs = describe(param_groups, groups, self._numbers, self._copies, self._first, self._name, is_on_host)
        plan = plan_of(param_groups, groups, inputs, single=self._name is not None)
        is_first = not self._agreement.was_made
        if is_first:  # before collectives of gradients: the ranks' parameters may be in different orders
            self._agreement.agree(plan)
            self._raising = raising(groups)
        params = [param for group in param_groups for param in group["params"]]
        gradients = local_gradients(params, inputs, on_host)
        if scaling.found_inf is None:
            demand_finite(inputs, gradients, groups, self._raising)
        if not is_first:
            self._agreement.agree(plan)
        before, self._raising = self._raising, raising(groups)
        if scaling.found_inf is None:
            demand_finite(inputs, gradients, groups, self._raising - before)
        ready = ready_states(params, state, inputs, gradients, self._residency)
        return StepTables(param_groups, state, groups, inputs, ready, gradients, plan, self.context)

    def _run(self, tables: StepTables) -> None:
        tables.run()
        self._tables = tables

    def _check(self, param_groups: ParamGroups, state: Mapping[Tensor, Any]) -> list[tuple[Any, ...]]:
        """Checks the param groups whose options differ from the last step's.

        Returns:
            The options of each param group.
        """
        options_now = [_options_of(group) for group in param_groups]
        for group, options, last in zip_longest(param_groups, options_now, self._checked[: len(options_now)]):
            if options == last:
                continue
            check_options(group)
            for name, now, before in zip(DEFAULTS, options, last or options, strict=True):
                if name in PLACEMENT and now != before:
                    raise _changed_place(name, now, before)
            for param in group["params"]:
                decided = self._residency.of(param).offload if state.get(param) else None
                if decided not in (None, group["offload"]):
                    raise _changed_place("offload", group["offload"], decided)
        return options_now


def _changed_place(option: str, got: object, expected: object) -> ValueError:
    return ValueError(
        f"{option}: got {got!r} in a param group that was stepped with {expected!r}, expected no change; make another "
        f"optimizer with the new {option}, and load this one's state dict"
    )
