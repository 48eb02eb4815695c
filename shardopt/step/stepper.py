"""Prepares and runs the steps of a set of parameters, and caches the kernels' tables between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any

from torch import Tensor

from shardopt.kernels.dispatch import LossScaling
from shardopt.layout import meet
from shardopt.state.options import DEFAULTS, PLACEMENT, check_options
from shardopt.step.agreement import StepPlan
from shardopt.step.context import StepContext
from shardopt.step.inputs import ParamGroups, demand_finite, describe_parameters, local_gradients, prepare_states
from shardopt.step.plan import plan_of
from shardopt.step.tables import StepTables

_options_of = itemgetter(*DEFAULTS)


class Stepper:
    """Runs the steps of all or some of an optimizer's parameters; keeps the kernels' tables from step to step.

    Args:
        first_index: index of the first of these parameters among all parameters of the optimizer.
        name: the name in errors of a parameter that is updated alone, during the backward pass; otherwise None.
    """

    def __init__(self, context: StepContext, first_index: int = 0, name: str | None = None) -> None:
        self.communicates = False  # whether the prepared step calls collectives when it runs
        self.gradients_changed = True  # whether the set of parameters with a gradient may differ from the last step's
        self._context, self._first_index, self._name = context, first_index, name
        self._tables: StepTables | None = None  # kept from the last step
        self._agreed: StepPlan | None = None  # the last plan that the ranks agreed on
        self._checked_options: list[tuple[Any, ...]] = []  # of the param groups in the last step

    def prepare(
        self,
        param_groups: ParamGroups,
        state: Mapping[Tensor, Any],
        scaling: LossScaling,
        host_gradient: Tensor | None = None,
    ) -> Callable[[], None]:
        """Checks and prepares a step of all parameters that have a gradient. May run collectives, changes no weights.

        ``param_groups`` are the optimizer's, or groups with their options and some of their parameters. For a step of a
        single parameter, ``host_gradient`` is this rank's shard of its gradient, if that is in the host's memory.

        Returns:
            A function that takes the step, once, with the current gradients and options: in any thread, or in this one
            if the step runs collectives (:attr:`communicates`). Prepare the next step only afterwards.

        Raises:
            RuntimeError: the kernels cannot step a parameter, gradient or state.
            ValueError: an option or hyper-parameter was changed to a value that is not allowed, or not while training.
            FloatingPointError: a gradient is NaN or Inf and ``nonfinite="raise"``.
            After any error nothing was changed; after a RuntimeError, parameters may have got their first state.
        """
        if self._context.residency.asleep:
            self._context.residency.wake()
        tables, self._tables = self._tables, None  # restored only after a successful step
        changed = None if tables is None else tables.watched.changed_groups(param_groups)
        which = range(len(param_groups)) if changed is None else [index for index, lr in changed.items() if lr is None]
        options = self._check_options(param_groups, state, which)
        if tables is not None and changed != {}:
            groups = {index: self._context.group_of(param_groups[index]) for index in which}
            tables = tables if changed is not None and tables.groups.replace(groups, changed) else None
        gradients = None if host_gradient is None else {0: host_gradient}
        if tables is not None and tables.take_gradients(param_groups, state, gradients):
            self.gradients_changed = tables.update(param_groups, state, scaling)
            self._agreed = tables.plan.agree(self._agreed)
            demand_finite(tables.parameters, tables.gradients, tables.groups.groups, scaling.found_inf)
        else:
            tables = self._make_tables(param_groups, state, scaling, host_gradient)
            self.gradients_changed = tables.update(param_groups, state, scaling)
        self.communicates, self._checked_options = tables.communicates, options
        return partial(self._run, tables)

    def forget(self) -> None:
        """Drops the tables, so that the next step makes new ones."""
        self._tables = None

    def _make_tables(
        self, param_groups: ParamGroups, state: Any, scaling: LossScaling, host_gradient: Tensor | None
    ) -> StepTables:
        """Makes tables: describes and checks all inputs, has ranks agree on their plans, and creates missing state.

        Sets ``_agreed``. Other ranks may have cached tables: this one must call collectives in the order of prepare().
        """
        groups = list(map(self._context.group_of, param_groups))
        on_host = host_gradient is not None
        parameters = describe_parameters(param_groups, groups, self._context, self._first_index, self._name, on_host)
        is_first, is_single = self._agreed is None, self._name is not None
        if is_first and not is_single:  # before groups are made; ranks may step single parameters in different orders
            meet(filter(None, (part.shard.holders for each in parameters for part in each.slices)), "step", once=True)
        plan = plan_of(param_groups, groups, parameters, is_single=is_single)
        if is_first:  # before collectives of gradients, which do not match if ranks have parameters in different orders
            meet(plan.sets, "step", once=is_single)
            self._agreed = plan.agree(self._agreed)
        params = [param for group in param_groups for param in group["params"]]
        gradients = local_gradients(params, parameters, host_gradient)
        if not is_first:  # after them, as prepare() does with cached tables
            self._agreed = plan.agree(self._agreed)
        demand_finite(parameters, gradients, groups, scaling.found_inf)
        ready = prepare_states(params, state, parameters, gradients, self._context.residency)
        return StepTables(param_groups, state, groups, parameters, ready, gradients, plan, self._context)

    def _run(self, tables: StepTables) -> None:
        """Runs the prepared step. After an error the tables are not kept: the next step checks everything again."""
        tables.run()
        self._tables = tables

    def _check_options(self, param_groups: ParamGroups, state: Any, which: Iterable[int]) -> list[tuple[Any, ...]]:
        """Checks those of the param groups whose options changed since the last step; returns the options of all.

        ``offload`` must not change: neither since the last step, nor since a parameter's state was made or loaded.
        """
        checked = [*self._checked_options, *[()] * len(param_groups)][: len(param_groups)]  # (): the group was added
        for index in which:
            group, last = param_groups[index], checked[index]
            checked[index] = options = _options_of(group)
            if options == last:
                continue
            check_options(group)
            for name, now, before in zip(DEFAULTS, options, last or options, strict=True):
                if name in PLACEMENT and now != before:
                    raise _placement_error(name, now, before)
            for param in group["params"]:
                present = self._context.residency.decide(param).offload if state.get(param) else None
                if present not in (None, group["offload"]):
                    raise _placement_error("offload", group["offload"], present)
        return checked


def _placement_error(option: str, got: object, expected: object) -> ValueError:
    """The error for an option of ``PLACEMENT`` that changed."""
    return ValueError(
        f"{option}: got {got!r} in a param group that was stepped with {expected!r}, expected no change; make another "
        f"optimizer with the new {option}, and load this one's state dict"
    )
