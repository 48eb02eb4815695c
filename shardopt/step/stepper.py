"""Steps a set of parameters; caches their tables between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import zip_longest
from operator import itemgetter
from typing import Any

from torch import Tensor

from shardopt.kernels.dispatch import LossScaling
from shardopt.kernels.skipped import SkippedElements
from shardopt.layout import Copies
from shardopt.state.options import DEFAULTS, PLACEMENT, check_options
from shardopt.state.residency import StateResidency
from shardopt.step.agreement import Agreement
from shardopt.step.exact_sums import TakeTotals
from shardopt.step.inputs import ParamGroups, demand_finite, describe, local_gradients, raising, ready_states
from shardopt.step.plan import plan_of
from shardopt.step.rows import Group
from shardopt.step.tables import StepTables

_options_of = itemgetter(*DEFAULTS)


class Stepper:
    """Steps some of an optimizer's parameters, again and again.

    Args:
        residency: where the state of each parameter lives.
        skipped: counts skipped elements.
        numbers: indices of the parameters among all of the model's, where the optimizer has only some of them.
        copies: the parameters of which other ranks hold copies and whose work the ranks share.
        first: index of the first parameter among all of the optimizer's.
        name: the name in errors of a single parameter that is not the param group's first.
        take_totals: takes the sums over all parameters; a stepper of a single one has no use for it.
    """

    def __init__(
        self,
        residency: StateResidency,
        skipped: SkippedElements,
        numbers: Mapping[Tensor, int],
        copies: Mapping[Tensor, Copies],
        first: int = 0,
        name: str | None = None,
        take_totals: TakeTotals = lambda totals: (),
    ) -> None:
        self.communicates = False  # whether the step that was prepared takes collectives
        self._residency, self._skipped, self._numbers, self._copies = residency, skipped, numbers, copies
        self._captured: list[object] = []  # what CUDA graphs go on using
        self._first, self._name, self._take_totals = first, name, take_totals
        self._tables: StepTables | None = None  # of the last step
        self._agreement = Agreement()
        self._raising: frozenset[int] = frozenset()  # the param groups that the ranks agreed to look at for NaN and Inf
        self._checked: list[tuple[Any, ...]] = []  # options of the param groups in the last step

    def prepare(
        self,
        param_groups: ParamGroups,
        state: Mapping[Tensor, Any],
        group_of: Callable[[Mapping[str, Any]], Group],
        scaling: LossScaling,
    ) -> Callable[[], None]:
        """Prepares a step on every parameter that has a gradient. Collectives of gradients are run here.

        Args:
            param_groups: the optimizer's, or some of its parameters in the same form.
            state: the state of these parameters.
            group_of: reads and checks a param group.
            scaling: the loss scale.

        Returns:
            Takes the step, once, with the gradients and options of now: in any thread, or with collectives
            (:attr:`communicates`) in this one. Prepare the next step only afterwards.

        Raises:
            RuntimeError: the kernels cannot step a parameter, gradient or state. Nothing was changed, but
                parameters may have got their first state.
            ValueError: an option or hyper-parameter was changed to a value that is not allowed, or not while training.
                Nothing was changed.
            FloatingPointError: a gradient is NaN or Inf and ``nonfinite="raise"``. Nothing was changed.
        """
        self._residency.wake()
        tables, self._tables = self._tables, None  # put back only after a step that went well
        changed = tables is None or tables.options_changed(param_groups)
        checked = self._check(param_groups, state) if changed else self._checked
        if tables is not None and changed:
            tables = tables if tables.set_groups([group_of(group) for group in param_groups]) else None
        # Collectives come in one order, with cached tables and new ones: gradients, what is finite, plans.
        if tables is not None and tables.read(param_groups, state):
            if scaling.found_inf is None:
                tables.demand_finite()
        else:
            tables = self._make_tables(param_groups, state, [group_of(group) for group in param_groups], scaling)
        tables.update(param_groups, scaling)
        self._agreement.agree(tables.plan)  # column shards without a gradient have left the messages
        self._agreement.open_by(tables.plan, tables.openings)
        self.communicates = tables.communicates
        self._checked = checked
        return partial(self._run, tables)

    def forget(self) -> None:
        """Has everything looked up anew by the next step."""
        self._tables = None

    def _make_tables(
        self, param_groups: ParamGroups, state: Any, groups: list[Group], scaling: LossScaling
    ) -> StepTables:
        inputs = describe(param_groups, groups, self._numbers, self._copies, self._first, self._name)
        plan = plan_of(param_groups, groups, inputs)
        if not self._agreement.was_made:  # nothing is known of other ranks: gradients may be in another order there
            self._agreement.agree(plan)
            self._raising = raising(groups)
        params = [param for group in param_groups for param in group["params"]]
        gradients = local_gradients(params, inputs)
        if scaling.found_inf is None:
            demand_finite(inputs, gradients, groups, self._raising)
        self._agreement.agree(plan)
        before, self._raising = self._raising, raising(groups)
        if scaling.found_inf is None:
            demand_finite(inputs, gradients, groups, self._raising - before)
        ready = ready_states(params, state, inputs, gradients, self._residency)
        return StepTables(
            param_groups, state, groups, inputs, ready, gradients, plan, scaling, self._skipped, self._residency,
            self._take_totals, self._captured,
        )  # fmt: skip

    def _run(self, tables: StepTables) -> None:
        tables.run()
        self._tables = tables

    def _check(self, param_groups: ParamGroups, state: Mapping[Tensor, Any]) -> list[tuple[Any, ...]]:
        """Checks the options that are not those of the last step: where only the learning rate is new, none.

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
        f"{option}: got {got!r} in a param group that was stepped with {expected!r}, expected the same; give it when "
        "the optimizer is made: make another one, and load this one's state dict"
    )
