"""The part of an optimizer that users do not call: where its state lives, its cached steps, its released gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.dispatch import LossScaling
from shardopt.kernels.skipped import SkippedElements
from shardopt.layout import Copies, Exchange
from shardopt.optim.interface import OptimizerInterface
from shardopt.state.residency import StateResidency
from shardopt.state.tensor_state import TensorState, tensor_state_of
from shardopt.state.warn import warn_user
from shardopt.step.gradient_norm import Shares
from shardopt.step.rows import Group
from shardopt.step.stepper import Stepper


class Released(Protocol):
    """Parameters that are stepped one by one, during the backward pass or the next forward pass."""

    @property
    def overlaps_forward(self) -> bool:
        """Whether they are stepped during the next forward pass."""

    @property
    def params(self) -> Collection[Tensor]:
        """The parameters."""

    def wait(self) -> None:
        """Waits for all steps that run in another thread."""

    def check_step(self, closure: object, scaling: LossScaling) -> None:
        """Raises RuntimeError if ``step()`` gets a closure or a loss scale, which come too late for released steps."""

    def prepare_steps(self, scaling: LossScaling) -> Callable[[], None]:
        """Prepares the steps that ``step()`` is to take; gives the function that takes them."""

    def next_step(self) -> None:
        """Lets each parameter be stepped once more."""

    def discard(self) -> None:
        """Lets each parameter be stepped once more, without a ``step()`` in between."""

    def forget(self, *, anew: bool) -> None:
        """Has everything looked up anew by the next steps; ``anew``: lets each parameter be stepped once more."""

    def end(self) -> None:
        """Ends the release."""

    @property
    def held(self) -> Collection[Tensor]:
        """The parameters whose gradients are held in the host's memory until ``step()``, instead of ``.grad``."""

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory for such gradients, held now or not."""

    def take_rest(self) -> None:
        """Takes to the host what ``.grad`` has of gradients that are partly there, before their norm, or a factor."""

    def norm_shares(self, *, largest: bool) -> Shares:
        """The shares of the norm of these gradients; see :meth:`shardopt.step.gradient_norm.GradientNorm.clip`."""

    def unscale(
        self, inverse_scale: Tensor, found: dict[torch.device, Tensor], shape: torch.Size, *, allow_fp16: bool
    ) -> None:
        """Multiplies these gradients by a factor; adds to ``found``, per device, whether some are not finite."""


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
        peers: the ranks whose optimizers have the model's other parameters, if this one has only some of them.
        copies: the parameters of which other ranks hold copies and whose work the ranks share.
        released: the parameters that are stepped during the backward pass, if any.
        coefficient: factor of the gradients in the next step, float32, 0-d, which clips them; None for 1.
    """

    def __init__(self, optimizer: OptimizerInterface) -> None:
        self.optimizer = optimizer
        self.residency = StateResidency(optimizer, self.state_of)
        self.skipped = SkippedElements()
        self.model_indices: dict[Tensor, int] = {}
        self.peers: Exchange | None = None
        self.copies: dict[Tensor, Copies] = {}
        self.released: Released | None = None
        self.coefficient: Tensor | None = None
        self._pauses = 0
        self._steppers: dict[tuple[int, ...], Stepper] = {}
        self._has_stepped = False
        self._skipped_reported = 0

    def state_of(self, param: Tensor, group: Mapping[str, Any]) -> TensorState:
        """Describes the state of one of the parameters, given its param group."""
        return tensor_state_of(param, group, self.optimizer.rule(group).moments)

    @property
    def stepper(self) -> Stepper:
        """The stepper of these param groups: DeepSpeed shows the optimizer one of them at a time."""
        groups = self.optimizer.param_groups
        key = tuple(id(group["params"][0]) if group["params"] else 0 for group in groups)
        if key not in self._steppers:
            self._steppers[key] = Stepper(
                self.residency, self.skipped, self.model_indices, self.copies, take_totals=self._take_totals
            )
        return self._steppers[key]

    def _take_totals(self, totals: Tensor | None) -> Sequence[Mapping[str, float]]:
        optimizer = self.optimizer
        if totals is None:  # this rank has no parameters
            count = max(optimizer.rule(group).sums for group in optimizer.param_groups)
            totals = torch.zeros((count, _C.sum_words), dtype=torch.int64, device="cpu")
        if self.peers is not None:
            self.peers.all_reduce_sum(totals)
        return optimizer.with_totals([_C.sum_value(words.numpy()) for words in totals])

    def group_of(self, options: Mapping[str, Any]) -> Group:
        """Reads and checks a param group for a step.

        Raises:
            ValueError: a hyper-parameter is out of range.
        """
        optimizer = self.optimizer
        optimizer.check_group(options)
        lr = options["lr"]
        if isinstance(lr, Tensor) and lr.device.type != "cpu":
            # Not read here: that would wait for the device.
            return Group.of(options, optimizer.rule(options), optimizer.hyper({**options, "lr": 0.0}), lr)
        return Group.of(options, optimizer.rule(options), optimizer.hyper(options), None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, ``step()`` does nothing, for a framework that takes one without gradients to see state appear."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    @property
    def is_paused(self) -> bool:
        """Whether ``step()`` does nothing now."""
        return self._pauses > 0

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
        self._has_stepped = True  # or will have, in backward passes

    def end_release(self) -> None:
        """Ends the release of gradients, if there is one."""
        released, self.released = self.released, None
        if released is not None:
            releases.discard(released)
            released.end()

    def share(self, copies: Mapping[Tensor, Copies]) -> None:
        """Has the work on these parameters shared from now on, unless each rank has an optimizer of some of them."""
        params = {param for group in self.optimizer.param_groups for param in group["params"]}
        self.copies.clear()
        if not self.model_indices:
            self.copies.update((param, of_param) for param, of_param in copies.items() if param in params)

    def forget_tables(self, *, anew: bool = False) -> None:
        """Has shards and state looked up anew by the next step.

        Args:
            anew: whether released gradients are thrown away, as other state was loaded than they are for.
        """
        for stepper in self._steppers.values():
            stepper.forget()
        if self.released is not None:
            self.released.forget(anew=anew)

    def clipped(self, scaling: LossScaling) -> LossScaling:
        """The scaling of a step with :attr:`coefficient`, which is used up.

        Raises:
            RuntimeError: there is a coefficient, from a norm of gradients that torch.amp.GradScaler has not unscaled.
        """
        if self.coefficient is not None and scaling.grad_scale is not None:
            raise RuntimeError(
                "got clip_grad_norm_(optimizer=...) of gradients that torch.amp.GradScaler has not unscaled, expected "
                "their norm without the loss scale; call scaler.unscale_(optimizer) before clip_grad_norm_"
            )
        coefficient, self.coefficient = self.coefficient, None
        return scaling._replace(coefficient=coefficient)

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

    def warn_without_gradients(self) -> None:
        """Warns if the optimizer's first step finds no gradient, as when its parameters are no longer the model's."""
        if self._has_stepped:
            return
        self._has_stepped = True
        groups = self.optimizer.param_groups
        trained = (param for group in groups for param in group["params"] if param.requires_grad)
        # A DTensor of which this rank holds nothing never gets a gradient here.
        params = [param for param in trained if getattr(param, "_local_tensor", param).numel()]
        if params and all(param.grad is None for param in params):
            warn_user(
                f"the first step found no gradient in any of {len(params)} parameters and changed nothing; expected "
                "gradients of backward(): make the optimizer after fully_shard, parallelize_module and the like, which "
                "replace parameters",
                RuntimeWarning,
            )
