"""The part of an optimizer that users do not call: where its state lives, its cached steps, its released gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from types import MappingProxyType
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.dispatch import LossScaling
from shardopt.kernels.skipped import SkippedElements
from shardopt.layout import (
    FlatBuffer,
    FlatShard,
    RankGroup,
    Shard,
    assigned,
    number_of,
    shard_of,
    use_numbers,
)
from shardopt.optim.first_state import only_makes_state
from shardopt.optim.interface import OptimizerInterface
from shardopt.optim.untrained import Untrained
from shardopt.state.full_precision import fit_low_bits
from shardopt.state.options import TABLE_FORMAT, make_plain
from shardopt.state.residency import StateResidency
from shardopt.state.slice_spec import LOW_BITS, SliceSpec
from shardopt.state.tensor_spec import TensorSpec, tensor_spec_of
from shardopt.state.warn import warn_user
from shardopt.step.groups import Group
from shardopt.step.stepper import Stepper

#: Gradients that are looked at before a clip coefficient is used: all would take a tenth of a step of small tensors.
_WATCHED = 16

_CPU = torch.device("cpu")


class Released(Protocol):
    """Released parameters as their optimizer sees them: see ``ReleasedParameters`` in shardopt/release."""

    @property
    def overlaps_forward(self) -> bool: ...
    @property
    def params(self) -> Collection[Tensor]: ...
    def wait(self) -> None: ...
    def check_step(self, closure: object, scaling: LossScaling) -> None: ...
    def next_step(self) -> None: ...
    def discard(self) -> None: ...
    def forget(self, *, anew: bool) -> None: ...
    def end(self) -> None: ...


#: All releases that have begun and not ended.
releases: WeakSet[Released] = WeakSet()


def wait_for_steps(params: Iterable[Tensor]) -> None:
    """Waits for all steps of these parameters that are in flight in another thread, whichever optimizers they have."""
    wanted = set(params)
    for released in tuple(releases):
        if not wanted.isdisjoint(released.params):
            released.wait()


class Internals:
    """The part of an optimizer that other packages of shardopt use, as ``optimizer._internals``.

    Attributes:
        optimizer: the optimizer around it.
        residency: where the state of each parameter lives.
        skipped: counts the gradient elements that steps skip.
        model_indices: indices of the parameters among all of the model's, if the optimizer has only some of them;
            others are counted in order.
        is_numbered: whether some of the parameters have, or had, numbers in the model.
        peers: the ranks whose optimizers have the model's other parameters, if this one has only some of them.
        copies: the parameters of which other ranks hold copies and whose work the ranks share.
        released: the parameters that are stepped during the backward pass, if any.
        coefficient: factor of the gradients in the next step, float32, 0-d, which clips them; None for 1.
        captured: objects that CUDA graphs keep using: the list grows.
        pauses: while it is not 0, ``step()`` does nothing.
        may_make_state: whether the next step may be one that only makes state: the first, or the first after a load.
    """

    def __init__(self, optimizer: OptimizerInterface) -> None:
        self.optimizer = optimizer
        self.residency = StateResidency(optimizer, self.state_of)
        self.skipped = SkippedElements()
        self.model_indices: dict[Tensor, int] = {}
        self.peers: RankGroup | None = None
        self.copies: dict[Tensor, RankGroup] = {}
        self.released: Released | None = None
        self.coefficient: Tensor | None = None
        self._clipped: list[tuple[ref[Tensor], ref[Tensor], int]] = []  # parameters, gradients that it is for, versions
        self.may_make_state = True
        self.pauses = 0
        self._steppers: dict[int, tuple[ref[Tensor] | None, Stepper]] = {}
        self.is_numbered = False
        self.captured: list[object] = []
        self.untrained = Untrained(optimizer)
        self._skipped_reported = 0

    @property
    def held_release(self) -> Any:
        """The release, if it holds gradients until ``step()``: :class:`shardopt.release.held.HeldParameters`."""
        return self.released if self.released is not None and self.released.overlaps_forward else None

    @property
    def params(self) -> list[Tensor]:
        """All parameters, in the order of the param groups."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def state_of(self, param: Tensor, group: Mapping[str, Any]) -> TensorSpec:
        """Describes the state of one of the parameters, given its param group."""
        return tensor_spec_of(param, group, self.optimizer.rule(group).moments)

    @property
    def name(self) -> str:
        """The optimizer's name in a checkpoint."""
        return type(self.optimizer).__name__

    #: Entries of a checkpoint's param groups beside the optimizer's own options.
    format: Mapping[str, Any] = MappingProxyType({})

    def form(
        self, shard: Shard, dtype: torch.dtype, options: Mapping[str, Any], stored: Mapping[str, Any]
    ) -> SliceSpec:
        """The form of a parameter's state with these options, whatever entries a checkpoint has."""
        return SliceSpec.of(shard, dtype, options, self.optimizer.rule(options).moments)

    def held(self, param: Tensor, group: Mapping[str, Any]) -> tuple[TensorSpec, Mapping[str, Any]]:
        """Spec and entries of a parameter's present state."""
        return self.state_of(param, group), self.optimizer.state.get(param, {})

    def placed(
        self, param: Tensor, options: Mapping[str, Any], states: Sequence[dict[str, Tensor]]
    ) -> tuple[TensorSpec, dict[str, Any]]:
        """Moves a parameter's loaded state to its devices; returns its spec, and the entries of ``state[param]``.

        ``states`` has the entries of each slice, as they were read; none for a slice that was saved without state.
        """
        spec, where = self.state_of(param, options), self.residency.of(param)
        of_slices = [state or each.new(_CPU) for state, each in zip(states, spec.slices, strict=True)]
        return spec, spec.join(
            [{k: x.to(where.steps if k == "step" else where.state) for k, x in state.items()} for state in of_slices]
        )

    def put(self, param: Tensor, placed: tuple[TensorSpec, dict[str, Any]]) -> None:
        """Gives a parameter its new state, which :meth:`placed` has made."""
        spec, state = placed
        self.optimizer.state[param] = state
        self.residency.put(param, spec, state)

    def is_counter(self, key: str, value: Any) -> bool:
        """Whether a value of a param group was put there by a step, and goes if a checkpoint has none: none is."""
        return False

    @property
    def stepper(self) -> Stepper:
        """The stepper of these param groups, by their first parameter: DeepSpeed shows its flat buffers by turns."""
        first = next((param for group in self.optimizer.param_groups for param in group["params"]), None)
        reference, stepper = self._steppers.get(id(first), (None, None))
        if stepper is not None and (reference is None or reference() is first):  # not an id that is used again
            return stepper
        stepper = Stepper(self)
        if first is not None and isinstance(assigned(first), FlatBuffer):
            self._steppers = {key: (x, y) for key, (x, y) in self._steppers.items() if x is None or x() is not None}
        else:  # another parameter was put in the place of the first one
            self._steppers.clear()
        self._steppers[id(first)] = None if first is None else ref(first), stepper
        return stepper

    def use_numbers(self, params: Sequence[Tensor]) -> None:
        """Has steps use the numbers in the model that were stored with parameters last."""
        use_numbers(params)
        self.is_numbered |= any(number_of(param) is not None for param in params)

    def take_totals(self, totals: Tensor | None) -> Sequence[Mapping[str, float]]:
        """Takes the sums over all parameters; see :class:`shardopt.step.context.StepContext`."""
        optimizer = self.optimizer
        if totals is None:  # this rank has no parameters
            count = max(optimizer.rule(group).sums for group in optimizer.param_groups)
            totals = torch.zeros((count, _C.sum_words), dtype=torch.int64, device="cpu")
        if self.peers is not None:
            self.peers.all_reduce_sum(totals)
        return optimizer.hyper_from_totals([_C.sum_value(words.numpy()) for words in totals])

    def group_of(self, options: Mapping[str, Any]) -> Group:
        """Reads and checks a param group for a step.

        Raises:
            ValueError: a hyper-parameter is out of range.
        """
        optimizer = self.optimizer
        if isinstance(options, dict):
            make_plain(options)
        optimizer.check_group(options)
        lr = options["lr"]
        on_device = lr if isinstance(lr, Tensor) and lr.device.type != "cpu" else None
        read = options if on_device is None else {**options, "lr": 0.0}  # reading it would wait for the device
        table_format = {name: options[name] for name in TABLE_FORMAT}
        sign = -1.0 if options["maximize"] else 1.0
        return Group(
            optimizer.rule(options), table_format, optimizer.hyper(read), on_device, sign, options["nonfinite"]
        )

    def fit_to_changes(self) -> None:
        """Makes param groups plain, and has state fit the weights' dtype, as users may have changed both."""
        for group in self.optimizer.param_groups:
            make_plain(group)
            for param in group["params"]:
                state = self.optimizer.state.get(param)
                if state and (group["master_weight_bits"] is not None or LOW_BITS in state):
                    fit_low_bits(self.state_of(param, group), param, state, self.residency.of(param).state)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, ``step()`` does nothing, for a framework that takes one without gradients to see state appear."""
        self.pauses += 1
        try:
            yield
        finally:
            self.pauses -= 1

    def make_state(self, scaling: LossScaling) -> bool:
        """Makes the parameters' first state if a step is only there for that; returns whether it was."""
        groups, state = self.optimizer.param_groups, self.optimizer.state

        def has_begun() -> bool:
            holds = self.held_release is not None and bool(self.held_release.held)
            taken = [entries.get("step", 0) for entries in state.values() if isinstance(entries, Mapping)]
            return holds or any(map(float, taken))

        is_plain = self.coefficient is None and all(x is None for x in scaling)
        if is_plain and only_makes_state(groups, has_begun, self.peers):
            params = self.params
            if self.released is None or any(param.grad is not None for param in params):
                self.stepper.prepare(groups, state, scaling)  # and does not run the step
            for param in params:
                shard = shard_of(param)
                if isinstance(shard, FlatShard) and shard.start == shard.end:  # FSDP1 gives it no gradient, so no state
                    state.pop(param, None)
            return True
        self.may_make_state = False
        return False

    def begin_release(self, released: Released) -> None:
        """Begins a release of gradients.

        Raises:
            RuntimeError: gradients are released already.
        """
        if self.released is not None:
            raise RuntimeError(
                "got an optimizer whose gradients are released already, expected one release at a time; call remove() "
                "on the first release"
            )
        self.released = released
        releases.add(released)
        self.untrained.skip()

    def end_release(self) -> None:
        """Ends the release of gradients, if there is one."""
        released, self.released = self.released, None
        if released is not None:
            releases.discard(released)
            released.end()

    def share(self, copies: Mapping[Tensor, RankGroup]) -> None:
        """Has the work on these parameters shared from now on, unless each rank has an optimizer of some of them."""
        params = set(self.params)
        self.copies.clear()
        if not self.model_indices:
            self.copies.update((param, of_param) for param, of_param in copies.items() if param in params)

    def forget_tables(self, *, anew: bool = False) -> None:
        """Has the next step look up shards and state again.

        ``anew`` also drops released gradients, as other state was loaded than they are for.
        """
        self.may_make_state = True
        for _, stepper in self._steppers.values():
            stepper.forget()
        if self.released is not None:
            self.released.forget(anew=anew)

    def clip(self, coefficient: Tensor) -> None:
        """Has the next step multiply the present gradients by a coefficient."""
        self.coefficient = coefficient
        params = self.params
        stride = -(-len(params) // _WATCHED)
        spread = (param for first in range(stride) for param in params[first::stride])
        found = ((param, x) for param in spread if (x := param.grad) is not None and not x.is_inference())
        self._clipped = [(ref(param), ref(x), x._version) for param, x in islice(found, _WATCHED)]

    def clipped(self, scaling: LossScaling) -> LossScaling:
        """The scaling of a step with :attr:`coefficient`; without, and with a warning, if gradients were changed.

        Raises:
            RuntimeError: there is a coefficient, from a norm of gradients that torch.amp.GradScaler has not unscaled.
        """
        if self.coefficient is None:
            return scaling
        if scaling.grad_scale is not None:
            raise RuntimeError(
                "got clip_grad_norm_(optimizer=...) of gradients that torch.amp.GradScaler has not unscaled, expected "
                "their norm without the loss scale; call scaler.unscale_(optimizer) before clip_grad_norm_"
            )
        versions = [  # before and now, of the gradients that are left
            (version if param.grad is gradient() else None, param.grad._version)
            for reference, gradient, version in self._clipped
            if (param := reference()) is not None and param.grad is not None
        ]
        if all(before == now for before, now in versions) and (versions or not self._clipped):
            return scaling._replace(coefficient=self.coefficient)
        if any(before is not None for before, _ in versions):
            warn_user(
                "gradients were changed or replaced between clip_grad_norm_(optimizer=...) and step(), which therefore "
                "clips none of them; clip right before step()",
                RuntimeWarning,
            )
        return scaling

    def warn_of_skipped(self) -> None:
        """Warns of gradient elements that were skipped since the last warning."""
        known = self.skipped.count(wait=False)
        new = known - self._skipped_reported
        if new > 0:
            self._skipped_reported = known
            warn_user(
                f"skipped {new} gradient elements that were NaN or Inf; their parameters and state are as they were "
                "(nonfinite='raise' names the parameter)",
                RuntimeWarning,
            )
