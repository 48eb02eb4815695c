"""The optimizer that all rules share: a torch.optim.Optimizer whose state is block-wise quantized on any shard."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import Module
from torch.optim.optimizer import Optimizer, ParamsT

from shardopt.kernels.dispatch import LossScaling
from shardopt.kernels.weights import WeightFormat
from shardopt.layout import assigned, read_model
from shardopt.optim.full_precision import check_weights, joined, split_into
from shardopt.optim.loading import HELD, Adopted, adopt, held_elements
from shardopt.optim.options import STATE_FORMAT, check_hyper, check_options, warn_of_misspelt, with_defaults
from shardopt.optim.placement import StatePlaces
from shardopt.optim.released import ReleasedParameters
from shardopt.optim.rule import Rule
from shardopt.optim.slice_state import StateDict
from shardopt.optim.tensor_state import TensorState, tensor_state_of
from shardopt.optim.warn import warn_user
from shardopt.step.rows import Group
from shardopt.step.stepper import Stepper


class ShardedOptimizer(Optimizer, ABC):
    """Base class of the rules.

    A rule says in :meth:`rule` which moments it keeps and in :meth:`hyper` what its scalars are.

    State is created in the first step. An element whose gradient is NaN or Inf, or so large that its moments overflow,
    is skipped unless ``nonfinite`` says otherwise. torch.amp.GradScaler works unchanged: its scale is divided out
    inside the step.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any], options: Mapping[str, Any]) -> None:
        self._steppers: dict[tuple[int, ...], Stepper] = {}
        self.places = StatePlaces(self)
        #: Which of all parameters each is, where this optimizer has only some of them; the rest are numbered in order.
        self.numbers: dict[Tensor, int] = {}
        super().__init__(params, {**defaults, **with_defaults(options)})

    @abstractmethod
    def rule(self, group: Mapping[str, Any]) -> Rule:
        """The rule for a param group."""

    #: Whether an update is about as large as the learning rate, whatever the gradients' scale.
    updates_by_lr = False

    @abstractmethod
    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        """The rule's hyper-parameters, by the names in csrc/rules."""

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Checks the hyper-parameters in a param group.

        Raises:
            ValueError: one is out of range.
        """
        check_hyper(group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch.amp.GradScaler hands over ``grad_scale`` and ``found_inf`` instead of unscaling by itself.

        Where a rank sees its flat shards only, it does not: ShardedGradScaler lets the ranks agree only if it unscales.
        """
        shards = (assigned(param) for _, param in self._all_params())
        return all(shard is None or shard.holders is None for shard in shards)

    @property
    def nonfinite_count(self) -> int:
        """Gradient elements that were NaN or Inf, or overflowed, and were skipped by this rank so far."""
        return self._count_skipped(wait=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group; see :meth:`torch.optim.Optimizer.add_param_group`.

        Raises:
            ValueError: an option or hyper-parameter is out of range, not for a parameter's dtype, or other than that of
                the other param groups where all must agree.
            MemoryError: the host has no memory for what is to be offloaded.
            RuntimeError: what ``offload`` says is not possible for a parameter.
        """
        completed = {**self.defaults, **param_group}
        check_options(completed)
        self.check_group(completed)
        warn_of_misspelt(param_group, {*self.defaults, "params", "param_names"})
        super().add_param_group(param_group)
        try:
            for param in self.param_groups[-1]["params"]:
                WeightFormat.of(param.dtype, completed)
            self.places.check(self.param_groups[-1])
        except Exception:  # whatever it is, the optimizer stays as it was
            self.param_groups.pop()
            raise

    @classmethod
    @contextmanager
    def paused(cls) -> Iterator[None]:
        """Inside, :meth:`step` does nothing, for a framework that takes one without gradients to see state appear."""
        ShardedOptimizer._paused = True
        try:
            yield
        finally:
            ShardedOptimizer._paused = False

    def attach(self, model: Module) -> None:
        """Tells the optimizer which model its parameters belong to, where they do not say what shards they are.

        That is so under FSDP1 (``FullyShardedDataParallel``) if the model was wrapped before shardopt was imported:
        call this before the first step. Other models need no call, and lose nothing by one.

        Args:
            model: the wrapped model, whole.

        Raises:
            RuntimeError: the model is sharded in a way that shardopt does not know, or that the option ``offload`` does
                not allow.
            MemoryError: the host has no memory for what is to be offloaded.
        """
        read_model(model)
        self._forget_plans()
        self.places.check()

    def synchronize(self) -> None:
        """Waits until all steps are taken, and what was offloaded is complete in the host's memory.

        To be called before :attr:`state` is read by hand, and parameters where steps overlap with the next forward pass
        (:func:`shardopt.release_gradients`); methods and checkpoints call it by themselves.
        """
        if self._released is not None:
            self._released.wait()
        self.places.synchronize()

    def state_spec(self, param: Tensor, group: Mapping[str, Any]) -> TensorState:
        """Describes the state of one of the parameters, given its param group."""
        return tensor_state_of(param, group, self.rule(group).moments)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_disable_dynamo  # as torch.compiler.disable, which would import the compiler here
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes a step on every parameter that has a gradient.

        While gradients are released (:func:`shardopt.release_gradients`) these are the parameters that were not stepped
        during the backward pass: usually none.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            The closure's loss.

        Raises:
            RuntimeError: a parameter or gradient has a layout, dtype or device that the kernels cannot step. Nothing
                was changed. Or gradients are released, and there is a closure or a torch.amp.GradScaler.
            ValueError: a parameter's dtype is not one for the weight format that its options ask for. Nothing was
                changed.
            FloatingPointError: a gradient is NaN or Inf and ``nonfinite="raise"``. Nothing was changed.
        """
        scaling = LossScaling(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        left = self._released is None or any(param.grad is not None for _, param in self._all_params())
        if self._released is not None:
            self._released.check_step(closure, scaling)
            if left or not self._released.overlaps_forward:
                self._released.wait()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._paused:
            return loss
        self._warn_of_nonfinite()
        if left:
            self._stepper().prepare(self.param_groups, self.state, self._group, scaling)()
        if self._released is not None:
            self._released.next_step()
        return loss

    def state_dict(self, *, dequantize: bool = False) -> StateDict:
        """The optimizer's state.

        Args:
            dequantize: give float32 moments in the form of torch.optim, which the optimizer of the same name there
                loads, and so does one of this class with any codec. Costs 4 bytes per parameter and moment. Low bits of
                master weights are left out.
        """
        self.synchronize()
        state_dict = super().state_dict()
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            held = held_elements(group["params"])
            if held is not None:
                saved[HELD] = held
        if dequantize:
            for group in state_dict["param_groups"]:
                for option in STATE_FORMAT:
                    group.pop(option, None)
            state = state_dict["state"]
            for index, (group, param) in enumerate(self._all_params()):
                if index in state:
                    spec = self.state_spec(param, group)
                    state[index] = {"step": state[index]["step"], **spec.decode(state[index])}
        return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a state dict of this class, or of the torch.optim class of the same name, which is quantized.

        Raises:
            ValueError: the state is of other parameters or another optimizer, was quantized in another way, or is
                damaged: options or hyper-parameters out of range, moments or steps that are not finite or below zero
                where they must not be. Nothing was changed.
        """
        self.synchronize()
        last_hook = self.register_load_state_dict_pre_hook(lambda _, loaded: adopt(self, loaded))
        try:
            super().load_state_dict(dict(state_dict) if isinstance(state_dict, Mapping) else {})
        finally:
            last_hook.remove()
        for group, param in self._all_params():
            if group["offload"] is not None and self.state.get(param):
                self.places.put(param, self.state_spec(param, group), self.state[param])

    @torch.no_grad()
    def full_precision_parameters(self) -> dict[Tensor, Tensor]:
        """The weights as float32, with the low bits that the state has of them: for export and evaluation.

        Returns:
            By the optimizer's parameter, sharded as it is: a DTensor for a DTensor, this rank's part of a flat one.
            Copies, 4 bytes per parameter.
        """
        self.synchronize()
        return {p: joined(self.state_spec(p, group), p, self.state.get(p, {})) for group, p in self._all_params()}

    @torch.no_grad()
    def load_full_precision_parameters(self, weights: Mapping[Tensor, Tensor]) -> None:
        """Loads what :meth:`full_precision_parameters` gave, or other weights: into parameters and low bits.

        Frozen parameters without state are rounded. Of a ZeroRedundancyOptimizer ``z`` both are methods of ``z.optim``,
        which has this rank's parameters only: the other ranks' copies of what was loaded are stale until the next step,
        unless each is broadcast by its owner (``torch.distributed.broadcast``).

        Args:
            weights: float32, by the optimizer's parameter, sharded as it is; of all of them.

        Raises:
            TypeError: they are no mapping of tensors.
            ValueError: some are missing, unknown or of another shape, dtype or sharding. Nothing was changed.
        """
        self.synchronize()
        params = {param: group for group, param in self._all_params()}
        check_weights(weights, params)
        for param, group in params.items():
            spec, old = self.state_spec(param, group), self.state.get(param, {})
            state = split_into(spec, param, old, weights[param], self.places.place(param).state)
            if state:
                self.state[param] = state

    def __getstate__(self) -> dict[str, Any]:
        self.synchronize()
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "state" in state:
            for param, value in state["state"].items():
                if isinstance(value, Adopted):
                    state["state"][param] = value.state
        super().__setstate__(state)
        self._steppers = getattr(self, "_steppers", {})
        self.places = getattr(self, "places", None) or StatePlaces(self)
        self.numbers = getattr(self, "numbers", {})
        self._forget_plans()

    _paused = False
    _released: ReleasedParameters | None = None  # those that are stepped during the backward pass
    _skipped_reported = 0
    _skipped_released = 0  # elements of released gradients, of releases that were removed

    def release(self, params: Collection[Tensor], waiting_gradients: int, overlaps_forward: bool) -> ReleasedParameters:
        """Has some parameters stepped one by one by the caller; for :func:`shardopt.release_gradients`.

        Args:
            params: which.
            waiting_gradients: see there.
            overlaps_forward: whether the caller has the next forward pass wait for steps, and not :meth:`step`.

        Raises:
            RuntimeError: that is so already.
            ValueError: a param group has ``nonfinite="raise"``.
        """
        if self._released is not None:
            raise RuntimeError(
                "got an optimizer whose gradients are released already, expected one release at a time; call remove() "
                "on the first one"
            )
        self._released = ReleasedParameters(self, params, waiting_gradients, overlaps_forward)
        return self._released

    def end_release(self) -> None:
        """Ends what :meth:`release` began."""
        released, self._released = self._released, None
        if released is not None:
            try:
                released.wait()
            finally:
                self._skipped_released += released.nonfinite(wait=True)

    def _stepper(self) -> Stepper:
        """What is kept of the last step of these param groups: DeepSpeed shows the optimizer one at a time."""
        key = tuple(id(group["params"][0]) if group["params"] else 0 for group in self.param_groups)
        return self._steppers.setdefault(key, Stepper(self.places, self.numbers))

    def _forget_plans(self) -> None:
        for stepper in self._steppers.values():
            stepper.forget()
        if self._released is not None:
            self._released.forget()

    def _count_skipped(self, *, wait: bool) -> int:
        released = 0 if self._released is None else self._released.nonfinite(wait=wait)
        stepped = sum(stepper.skipped.count(wait=wait) for stepper in self._steppers.values())
        return stepped + self._skipped_released + released

    def _all_params(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        for group in self.param_groups:
            for param in group["params"]:
                yield group, param

    def _group(self, options: Mapping[str, Any]) -> Group:
        """What a step needs to know of a param group.

        Raises:
            ValueError: a hyper-parameter is out of range.
        """
        self.check_group(options)
        lr = options["lr"]
        if isinstance(lr, Tensor) and lr.device.type != "cpu":
            # Not read here: that would wait for the device.
            return Group.of(options, self.rule(options), self.hyper({**options, "lr": 0.0}), lr)
        return Group.of(options, self.rule(options), self.hyper(options), None)

    def _warn_of_nonfinite(self) -> None:
        known = self._count_skipped(wait=False)
        new = known - self._skipped_reported
        if new > 0:
            self._skipped_reported = known
            warn_user(
                f"skipped {new} gradient elements that were NaN or Inf; their parameters and state are as they were "
                "(nonfinite='raise' names the parameter)",
                RuntimeWarning,
            )
