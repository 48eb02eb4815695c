"""Base class of all optimizers: a torch.optim.Optimizer with block-wise quantized state for sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import Module
from torch.optim import lr_scheduler
from torch.optim.optimizer import ParamsT

from shardopt.kernels.autograd import without_autograd
from shardopt.kernels.dispatch import LossScaling
from shardopt.kernels.weights import WeightFormat
from shardopt.layout import assigned, copies_in, number_parameters, read_model
from shardopt.layout.names import number_of, set_numbers
from shardopt.optim.interface import OptimizerInterface
from shardopt.optim.internals import Internals
from shardopt.optim.loading import HELD_ELEMENTS, WrappedState, convert_state_dict, flat_ranges, mark_held_indices
from shardopt.removed import OPTIONS, explain_removed
from shardopt.state.full_precision import check_float32_weights, float32_weights, store_float32_weights
from shardopt.state.loaded_entries import check_keys
from shardopt.state.options import (
    DEFAULTS,
    STATE_FORMAT,
    check_options,
    check_repayment,
    convert_sequences,
    refuse_misspelt,
    refuse_unknown,
)
from shardopt.state.slice_spec import ROW_MOMENTS, StateDict

#: Keys in pickles: the parameters' numbers in the model; whether :meth:`ShardedOptimizer.offload` moved the state away.
_NUMBERS, _ASLEEP = "numbers", "asleep"


class ShardedOptimizer(OptimizerInterface):
    """Base class of the optimizers, with stepping, state dicts, offload and master weights for every update rule.

    A subclass defines its update rule and moments in :meth:`rule`, and its hyper-parameters in :meth:`hyper`.

    State is created in the first step. If every lr is 0 and every gradient zero, the first step does nothing else, as
    frameworks take such a step to initialize state. An element whose gradient is NaN or Inf, or so large that its
    moments overflow, is skipped unless the option ``nonfinite`` says otherwise. torch.amp.GradScaler works unchanged:
    gradients are divided by its scale inside the step.
    """

    _takes_loss_scales = True  # until a framework sets _step_supports_amp_scaling to False

    def __init__(self, params: ParamsT, defaults: dict[str, Any], options: Mapping[str, Any]) -> None:
        self._internals = Internals(self)
        self._internals.rounding_unset = "master_weight_bits" not in options
        convert_sequences(defaults)
        known = {**defaults, **DEFAULTS, "codec": self.default_codec}
        refuse_unknown(options, known, TypeError)
        super().__init__(params, {**known, **options})

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch.amp.GradScaler passes ``grad_scale`` and ``found_inf`` to ``step`` instead of unscaling itself.

        The first of these cases decides. True while the backward pass takes steps: ``step`` then refuses a scaler.
        False after Lightning has set it so, as it clips only gradients that GradScaler has unscaled. False for flat
        shards: ShardedGradScaler makes the ranks agree on infinities only while it unscales. True with float16
        parameters, whose gradients GradScaler refuses to unscale. False if ``step`` is wrapped or has hooks, as under
        Accelerate, which counts each call as a step: GradScaler then calls ``step`` only if all gradients are finite.
        """
        released = self._internals.released
        if released is not None and not released.overlaps_forward:
            return True
        params = self._internals.params
        has_flat_shards = any(getattr(assigned(param), "holders", None) for param in params)
        if not self._takes_loss_scales or has_flat_shards:
            return False
        return not self._is_step_hooked_or_wrapped() or any(param.dtype == torch.float16 for param in params)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self._takes_loss_scales = value

    def _is_step_hooked_or_wrapped(self) -> bool:
        """Whether ``step`` has hooks or is replaced by a wrapper, other than the call counter of torch's schedulers."""
        step: Any = self.step
        while getattr(step, "__globals__", None) is vars(lr_scheduler):  # the counter is a function of that module
            step = step.__wrapped__
        is_replaced = getattr(step, "__func__", step) is not type(self).step
        return is_replaced or bool(self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks)

    @property
    def nonfinite_count(self) -> int:
        """Number of gradient elements that this rank has skipped so far, as NaN, Inf or overflowing a moment."""
        return self._internals.skipped.count(wait=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group; see :meth:`torch.optim.Optimizer.add_param_group`.

        Raises:
            ValueError: an option or hyper-parameter is out of range, not for a parameter's dtype, or other than that of
                the other param groups where all must agree.
            MemoryError: the host has too little memory for the offloaded state.
            RuntimeError: a parameter does not allow the group's ``offload``.
        """
        convert_sequences(param_group)
        names = param_group.get("param_names")
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise ValueError(f"param_names: got {names!r:.80}, expected a list of the parameters' names; leave it out")
        if advice := explain_removed(param_group.keys() & OPTIONS.keys()):
            raise ValueError(f"got a param group with options that shardopt does not have{advice}")
        completed = {**self.defaults, **param_group}
        check_options(completed)
        self.check_group(completed)
        refuse_misspelt(param_group, self.defaults)
        self._internals.rounding_unset &= "master_weight_bits" not in param_group
        super().add_param_group(param_group)
        try:
            for param in self.param_groups[-1]["params"]:
                WeightFormat.from_options(param.dtype, completed)  # raises for a dtype that the options do not allow
                check_repayment(param.dtype, completed)
            self._internals.residency.check_host_memory(self.param_groups[-1])
            self.check_parameters(len(self.param_groups) - 1)
        except Exception:  # after any error the optimizer stays as it was
            self.param_groups.pop()
            raise
        self._internals.use_numbers(self.param_groups[-1]["params"])

    @without_autograd
    def attach(self, model: Module) -> None:
        """Reads from the whole wrapped model how parameters are sharded or replicated, where tensors do not tell.

        FSDP1 (``FullyShardedDataParallel``) needs this call before the first step if the model was wrapped before
        shardopt was imported. Muon shares its work among the ranks of a DistributedDataParallel after all of them have
        called. From then on, the noise of stochastic rounding depends on a parameter's number in the model instead of
        its number in the optimizer. Other models need no call, and a call does them no harm.

        Raises:
            RuntimeError: the model is sharded in a way that shardopt does not know, or that the option ``offload`` does
                not allow.
            MemoryError: the host has too little memory for the offloaded state.
        """
        read_model(model)
        number_parameters(model)
        self._internals.use_numbers(self._internals.params)
        self._internals.set_copies(copies_in(model))
        self._internals.invalidate_steps()
        self._internals.residency.check_host_memory()

    @without_autograd
    def synchronize(self) -> None:
        """Waits until steps in worker threads are finished and offloaded state is complete in the host's memory.

        Call this before reading :attr:`state` by hand, or parameters whose steps overlap with the next forward pass
        (:func:`shardopt.release_gradients`). The optimizer's methods and checkpoints call it by themselves. If the
        model was cast to another dtype, low bits of master weights in the state are adapted or dropped.
        """
        if self._internals.released is not None:
            self._internals.released.wait()
        self._internals.residency.synchronize()
        self._internals.adapt_to_user_changes()

    @without_autograd
    def offload(self) -> None:
        """Moves all state from the devices to the host's memory, to free device memory until :meth:`reload`.

        The host's memory is page-locked and kept for the next time. Step counts, 4 bytes per parameter, stay. State
        dicts and checkpoints are saved and loaded as ever, and loading leaves the state in the host's memory. Where it
        is there already (parameters on the CPU, ``offload="state"`` or ``"step"``), and after an earlier call, nothing
        is done.

        Raises:
            MemoryError: the host has too little memory. Nothing was moved.
        """
        if self._internals.released is not None:
            self._internals.released.wait()
        self._internals.residency.sleep()

    @without_autograd
    def reload(self) -> None:
        """Moves the state back after :meth:`offload`, if there was one, with the same bits; so does a step."""
        self._internals.residency.wake()

    @without_autograd
    def reset_state(
        self,
        params: Tensor | str | Iterable[Tensor | str] | None = None,
        *,
        rows: Tensor | Iterable[int] | None = None,
    ) -> None:
        """Gives parameters, or some of their rows, the state that a new optimizer with the same options has.

        Without arguments all state is discarded, low bits of master weights and what rules keep in param groups
        (Prodigy's estimate, NAdam's product) included. With ``params`` moments are reset in place: master weights and
        param groups stay, and bits do not depend on the sharding. Where parameters are sharded all ranks must call this
        with the same arguments.

        Args:
            params: parameters, or patterns (:mod:`fnmatch`) of names in the bare model, which the param groups
                (``model.named_parameters()``) or flat tensors (DeepSpeed, FSDP1) have.
            rows: indices of the first dimension of the global parameters, as numbers or as a bool for each. Step counts
                then stay; without ``rows`` they are 0 again.

        Raises:
            ValueError: one of ``params`` is not the optimizer's, ``rows`` are not for their shape, or without ``rows``
                only some parameters of a flat tensor are given. Nothing was changed.
        """
        self.synchronize()
        if params is not None or rows is not None:
            with self._internals.open_groups():
                self._internals.reset(self._internals.params if params is None else params, rows)
            return
        self._internals.invalidate_steps()
        self.state.clear()  # also of parameters that ZeRO 3 has in no param group between steps
        for group in self.param_groups:
            self.reset_group(group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_disable_dynamo  # as torch.compiler.disable, which would import the compiler here
    @without_autograd
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes a step on every parameter that has a gradient.

        While gradients are released (:func:`shardopt.release_gradients`), the backward pass has stepped most
        parameters, and ``step`` takes the rest: usually none. With ``overlap_forward`` and ``offload="step"`` the steps
        begin here, and go on during the next forward pass.

        Args:
            closure: evaluates the model again and returns the loss, which ``step`` then returns, too.

        Raises:
            RuntimeError: a parameter or gradient has a layout, dtype or device that the kernels cannot step; or
                parameters are stepped in the backward pass, with a closure or a torch.amp.GradScaler; or in both first
                steps gradients were in parameters that replaced these; or some ranks did not take the first step.
            ValueError: a parameter's dtype does not allow the weight format in its options.
            FloatingPointError: a gradient is NaN or Inf and ``nonfinite="raise"``. Errors change nothing.
        """
        # torch.amp.GradScaler sets these attributes for the duration of the call.
        scaling = LossScaling(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        internals, released = self._internals, self._internals.released
        if released is not None and not released.overlaps_forward:
            released.check_step(closure, scaling)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if internals.pauses:  # DeepSpeed calls step() without gradients while it sets up its engine
            return loss
        if internals.may_be_dummy_step and internals.take_dummy_step(scaling):
            return loss
        if internals.rounding_unset:
            internals.warn_of_lost_updates()
        internals.warn_of_skipped()
        scaling = internals.with_clip_coefficient(scaling)
        # Gradients held in host memory are checked before any step is taken: an error then changes nothing.
        start_held_steps = None if internals.held_release is None else internals.held_release.prepare_steps(scaling)
        has_gradients = released is None or any(param.grad is not None for _, param in self._all_params())
        # Without overlap_forward all parameters are stepped when this method returns. With it the worker thread may be
        # still at the last step, but must not change state while this thread's step checks and moves it.
        if released is not None and (has_gradients or not released.overlaps_forward):
            released.wait()
        if has_gradients:
            self.prepare_groups(self.param_groups)
            stepper = internals.cached_stepper()
            stepper.prepare(self.param_groups, self.state, scaling)()
            if released is None:
                internals.missing_gradients.count_step(gradients_changed=stepper.gradients_changed)
        if start_held_steps is not None:  # the worker thread starts once this thread's step is done
            start_held_steps()
        if released is not None:
            released.next_step()
        internals.clip_coefficient = None  # not after an exception: the step may be tried again
        internals.skipped.copy_counts_to_host()
        return loss

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Frees all gradients, or sets them to zero; see :meth:`torch.optim.Optimizer.zero_grad`.

        While gradients are released (:func:`shardopt.release_gradients`), this call ends a backward pass that failed,
        so that the next one may begin. Parameters that the failed pass has stepped stay stepped, with a warning.
        """
        super().zero_grad(set_to_none)
        self._internals.clip_coefficient = None
        if self._internals.released is not None:
            self._internals.released.discard()

    @without_autograd
    def state_dict(self, *, dequantize: bool = False) -> StateDict:
        """Returns the optimizer's state and param groups as :meth:`torch.optim.Optimizer.state_dict` does.

        Args:
            dequantize: decode moments to float32 in the format of torch.optim, which the torch.optim class of the same
                name can load, and this class with any codec. Costs 4 bytes per parameter and moment. Low bits of
                master weights are left out.
        """
        self.synchronize()
        check_keys(self.state, self.param_groups)
        state_dict = super().state_dict()
        # Without empty dicts, which reading the state of a parameter that has none leaves in torch's defaultdict.
        state_dict["state"] = {key: x for key, x in state_dict["state"].items() if not isinstance(x, dict) or x}
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            if (ranges := flat_ranges(group["params"])) is not None:
                saved[HELD_ELEMENTS] = ranges
        if dequantize:
            for group in state_dict["param_groups"]:
                for option in STATE_FORMAT:
                    group.pop(option, None)
            states = state_dict["state"]
            for index, (group, param) in enumerate(self._all_params()):
                if (state := states.get(index)) is not None:
                    moments = self._internals.state_of(param, group).decode(state)
                    row_moments = {ROW_MOMENTS: state[ROW_MOMENTS].clone()} if ROW_MOMENTS in state else {}
                    states[index] = {"step": state["step"].clone(), **moments, **row_moments}
        for index, (_, param) in enumerate(self._all_params()):
            mark_held_indices(param, state_dict["state"].get(index, {}))
        return state_dict

    @without_autograd
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a state dict of this class, or of torch.optim's (AdamW's for AdamW8bit), whose moments are quantized.

        Collective if ranks hold parts of one row (FSDP1, ZeRO, tensor parallelism): RuntimeError if one does not call.

        Raises:
            ValueError: the state is of other parameters or another optimizer, was quantized in another way, or is
                damaged: options or hyper-parameters are out of range, moments or steps are not finite, or steps or
                unsigned moments are negative. Nothing was changed.
        """
        self.synchronize()
        convert = partial(convert_state_dict, self._internals)
        last_hook = self.register_load_state_dict_pre_hook(lambda _, loaded: convert(loaded))  # after the users' hooks
        try:  # what is no dict becomes {}, which convert_state_dict() refuses on all ranks together
            super().load_state_dict(dict(state_dict) if isinstance(state_dict, Mapping) else {})
        finally:
            last_hook.remove()
        for group, param in self._all_params():  # offloaded state goes to the host memory allocated for it
            if group["offload"] is not None and self.state.get(param):
                self._internals.residency.move_state(param, self._internals.state_of(param, group), self.state[param])

    @without_autograd
    def full_precision_parameters(self) -> dict[Tensor, Tensor]:
        """Returns float32 copies of the weights, with the low bits of master weights, for export and evaluation.

        Returns:
            A copy per parameter of the optimizer, sharded like the parameter: a DTensor for a DTensor, this rank's part
            of a flat one. 4 bytes per element.
        """
        self.synchronize()
        spec_of = self._internals.state_of
        return {p: float32_weights(spec_of(p, group), p, self.state.get(p, {})) for group, p in self._all_params()}

    @without_autograd
    def load_full_precision_parameters(self, weights: Mapping[Tensor, Tensor]) -> None:
        """Loads float32 weights, such as those of :meth:`full_precision_parameters`, into parameters and low bits.

        Frozen parameters without state are rounded. In a ZeroRedundancyOptimizer ``z``, call both methods on
        ``z.optim``, which has this rank's parameters only: the other ranks' copies of loaded parameters are stale until
        the next step, unless each owner broadcasts its own (``torch.distributed.broadcast``).

        Args:
            weights: for every parameter of the optimizer a float32 tensor, sharded like the parameter.

        Raises:
            ValueError: some weights are missing, unknown or of another shape, dtype or sharding. Nothing was changed.
        """
        self.synchronize()
        params = {param: group for group, param in self._all_params()}
        check_float32_weights(weights, params)
        for param, group in params.items():
            spec, state = self._internals.state_of(param, group), self.state.get(param, {})
            state = store_float32_weights(
                spec, param, state, weights[param], self._internals.residency.decide(param).state_device
            )
            if state:
                self.state[param] = state

    def __getstate__(self) -> dict[str, Any]:
        self.synchronize()
        numbers = [number_of(param) for param in self._internals.params]
        return {**super().__getstate__(), _NUMBERS: numbers, _ASLEEP: self._internals.residency.asleep}

    @without_autograd
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by ``load_state_dict``, whose tensors are wrapped, and when the optimizer is copied or unpickled."""
        state = dict(state)
        numbers, asleep = state.pop(_NUMBERS, None), state.pop(_ASLEEP, None)
        if "state" in state:
            for param, value in state["state"].items():
                if isinstance(value, WrappedState):
                    state["state"][param] = value.state
        super().__setstate__(state)
        if numbers is not None:  # a copy, whose parameters have lost their numbers in the model
            set_numbers((param for _, param in self._all_params()), numbers)
        self._internals = getattr(self, "_internals", None) or Internals(self)
        if asleep is not None:
            self._internals.residency.asleep = asleep
        self._internals.invalidate_steps(discard_gradients=True)

    def _all_params(self) -> Iterator[tuple[dict[str, Any], Tensor]]:  # with their param groups
        for group in self.param_groups:
            for param in group["params"]:
                yield group, param
