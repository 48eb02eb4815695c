"""The private part of an optimizer: placement of its state, cached steps, released gradients, and clip coefficient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from itertools import islice
from types import MappingProxyType
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor

from shardopt import _C
from shardopt.codec.base import are_finite
from shardopt.kernels.dispatch import LossScaling
from shardopt.kernels.skipped import SkippedElements
from shardopt.layout import FlatBuffer, FlatShard, RankGroup, Shard, assigned, number_of, shard_of, use_numbers
from shardopt.layout.names import bare_name
from shardopt.optim.first_state import agree_on_dummy_step
from shardopt.optim.interface import OptimizerInterface
from shardopt.optim.missing_gradients import MissingGradients
from shardopt.optim.param_groups import check_patterns
from shardopt.state.full_precision import float32_weights, reset_stale_low_bits
from shardopt.state.names import param_name
from shardopt.state.options import TABLE_FORMAT, convert_sequences
from shardopt.state.residency import StateResidency
from shardopt.state.slice_spec import LOW_BITS, SliceSpec
from shardopt.state.tensor_spec import TensorSpec, tensor_spec_of
from shardopt.state.warn import warn_user
from shardopt.step.groups import Group
from shardopt.step.stepper import Stepper

#: Number of gradients whose versions are compared between clipping and the step. Comparing all would slow small steps.
_SAMPLED_GRADIENTS = 16

_CPU = torch.device("cpu")

#: All releases of gradients (shardopt/release/backward.py) in this process that have begun and not ended.
releases: WeakSet[Any] = WeakSet()


def wait_for_steps(params: Iterable[Tensor]) -> None:
    """Waits until worker threads have finished all steps of these parameters, whichever optimizers they belong to."""
    wanted = set(params)
    for released in tuple(releases):
        if not wanted.isdisjoint(released.params):
            released.wait()


class Internals:
    """Attributes and methods of an optimizer for other packages of shardopt, which use it as ``optimizer._internals``.

    Attributes:
        optimizer: the optimizer that this object belongs to.
        residency: on which device the state of each parameter is stored.
        skipped: counts the gradient elements that steps skip: NaN, Inf, or overflowing a moment.
        model_indices: each parameter's index in the whole model, if this rank's optimizer has only some parameters;
            parameters that are not in the dict are numbered by their order in the optimizer.
        is_numbered: whether any parameter has, or had, a number in the model, which seeds stochastic rounding.
        peers: the ranks whose optimizers have the model's other parameters, if this one has only some of them.
        copies: parameters replicated on several ranks, with the ranks that divide the work of their steps (Muon).
        released: the gradient release (:func:`shardopt.release_gradients`) that steps parameters, if there is one.
        clip_coefficient: the coefficient by which the next step multiplies gradients, float32, 0-d; None for 1.
        captured: objects that captured CUDA graphs use, kept alive for as long as the optimizer.
        missing_gradients: warns of parameters that get no gradients.
        open_groups: makes a context in which all parameters are in the param groups, as ZeRO 3's are in steps only.
        pauses: number of active :meth:`paused` blocks; while it is not 0, ``step()`` does nothing.
        may_be_dummy_step: whether the next step may only serve to create state: at first, after invalidate_steps().
        rounding_unset: whether ``master_weight_bits`` was never given, so that the first step warns of lost updates.
    """

    def __init__(self, optimizer: OptimizerInterface) -> None:
        self.optimizer = optimizer
        self.residency = StateResidency(optimizer, self.state_of)
        self.skipped = SkippedElements()
        self.model_indices: dict[Tensor, int] = {}
        self.peers: RankGroup | None = None
        self.copies: dict[Tensor, RankGroup] = {}
        self.released: Any = None  # a BackwardRelease, of shardopt/release/backward.py
        self.clip_coefficient: Tensor | None = None
        self._clip_samples: list[tuple[ref[Tensor], ref[Tensor], int]] = []  # parameters, gradients, their versions
        self.rounding_unset = False
        self.may_be_dummy_step = True
        self.open_groups: Callable[[], AbstractContextManager[object]] = nullcontext
        self.pauses = 0
        self._steppers: dict[int, tuple[ref[Tensor] | None, Stepper]] = {}
        self.is_numbered = False
        self.captured: list[object] = []
        self.missing_gradients = MissingGradients(optimizer)
        self._skipped_reported = 0

    @property
    def held_release(self) -> Any:
        """The release with ``overlap_forward``, which keeps gradients until ``step()``, or None (overlapped.py)."""
        return self.released if self.released is not None and self.released.overlaps_forward else None

    @property
    def params(self) -> list[Tensor]:
        """All parameters, in the order of the param groups."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def state_of(self, param: Tensor, group: Mapping[str, Any]) -> TensorSpec:
        """Computes names, shapes and dtypes of a parameter's state entries, given the options of its param group."""
        return tensor_spec_of(param, group, self.optimizer.rule(group).moments)

    @property
    def name(self) -> str:
        """The name under which a checkpoint stores this optimizer's state: its class name."""
        return type(self.optimizer).__name__

    #: Entries that checkpoints add to the options of each param group.
    format: Mapping[str, Any] = MappingProxyType({})

    def spec_of_entries(
        self, shard: Shard, dtype: torch.dtype, options: Mapping[str, Any], entries: Mapping[str, Any]
    ) -> SliceSpec:
        """Describes the state of one shard, given its options; a checkpoint's ``entries`` matter to wrappers only."""
        return SliceSpec.of(shard, dtype, options, self.optimizer.rule(options).moments)

    def current_state(self, param: Tensor, group: Mapping[str, Any]) -> tuple[TensorSpec, Mapping[str, Any]]:
        """Returns the spec and the entries of a parameter's present state, for a checkpoint to save."""
        return self.state_of(param, group), self.optimizer.state.get(param, {})

    def state_from_checkpoint(
        self, param: Tensor, options: Mapping[str, Any], states: Sequence[dict[str, Tensor]]
    ) -> tuple[TensorSpec, dict[str, Any]]:
        """Copies state that a checkpoint has read to the parameter's devices; returns its spec and its entries.

        ``states`` has a dict of entries for each slice of the parameter, empty if the slice was saved without state.
        """
        spec, (_, state_device, step_device) = self.state_of(param, options), self.residency.decide(param)
        of_slices = [state or each.new_state(_CPU) for state, each in zip(states, spec.slices, strict=True)]
        return spec, spec.join(
            [{k: x.to(step_device if k == "step" else state_device) for k, x in state.items()} for state in of_slices]
        )

    def install(self, param: Tensor, made: tuple[TensorSpec, dict[str, Any]]) -> None:
        """Replaces a parameter's state by the result of :meth:`state_from_checkpoint`."""
        spec, state = made
        self.optimizer.state[param] = state
        self.residency.move_state(param, spec, state)

    def is_set_by_steps(self, key: str, value: Any) -> bool:
        """Whether steps add this param group entry, so that loading a checkpoint without it removes it. False here."""
        return False

    def cached_stepper(self) -> Stepper:
        """Returns the stepper of the present parameters; makes and caches one if the first parameter is another.

        Several stay cached only for flat buffers, as DeepSpeed puts several in turn into the same param group.
        """
        first = next((param for group in self.optimizer.param_groups for param in group["params"]), None)
        reference, stepper = self._steppers.get(id(first), (None, None))
        if stepper is not None and (reference is None or reference() is first):  # else another tensor had this id
            return stepper
        stepper = Stepper(self)
        if first is not None and isinstance(assigned(first), FlatBuffer):
            self._steppers = {key: (x, y) for key, (x, y) in self._steppers.items() if x is None or x() is not None}
        else:
            self._steppers.clear()
        self._steppers[id(first)] = None if first is None else ref(first), stepper
        return stepper

    def use_numbers(self, params: Sequence[Tensor]) -> None:
        """From now on, the parameters' numbers in the model, as they were given last, seed stochastic rounding."""
        use_numbers(params)
        self.is_numbered |= any(number_of(param) is not None for param in params)

    def take_totals(self, totals: Tensor | None) -> Sequence[Mapping[str, float]]:
        """All-reduces sums over all parameters, and computes hyper-parameters from them; see ``StepContext``."""
        optimizer = self.optimizer
        if totals is None:  # this rank has no parameters
            count = max(optimizer.rule(group).sum_count for group in optimizer.param_groups)
            totals = torch.zeros((count, _C.sum_words), dtype=torch.int64, device="cpu")
        if self.peers is not None:  # the model's other parameters are in their optimizers
            self.peers.all_reduce_sum(totals)
        return optimizer.hyper_from_totals([_C.sum_value(words.numpy()) for words in totals])

    def group_of(self, options: Mapping[str, Any]) -> Group:
        """Normalizes and checks a param group's options (ValueError), and reads its rule and hyper-parameters."""
        optimizer = self.optimizer
        if isinstance(options, dict):
            convert_sequences(options)
        optimizer.check_group(options)
        lr = options["lr"]
        lr_on_device = lr if isinstance(lr, Tensor) and lr.device.type != "cpu" else None
        # The kernels read such a rate: the host would have to wait for the device.
        hyper = optimizer.hyper(options if lr_on_device is None else {**options, "lr": 0.0})
        table_format = {name: options[name] for name in TABLE_FORMAT}
        sign = -1.0 if options["maximize"] else 1.0
        return Group(optimizer.rule(options), table_format, hyper, lr_on_device, sign, options["nonfinite"])

    def adapt_to_user_changes(self) -> None:
        """Normalizes option values in param groups, and fits low bits in the state to the weights' present dtype."""
        for group in self.optimizer.param_groups:
            convert_sequences(group)
            for param in group["params"]:
                state = self.optimizer.state.get(param)
                if state and (group["master_weight_bits"] is not None or LOW_BITS in state):
                    device = self.residency.decide(param).state_device
                    reset_stale_low_bits(self.state_of(param, group), param, state, device)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Disables ``step()`` inside the block, for frameworks that call it without gradients to initialize state."""
        self.pauses += 1
        try:
            yield
        finally:
            self.pauses -= 1

    def take_dummy_step(self, scaling: LossScaling) -> bool:
        """Collective: if a step is only taken to create state, creates it without updating weights and returns True.

        Otherwise returns False, and later steps do not ask again (:attr:`may_be_dummy_step`).
        """
        groups, state = self.optimizer.param_groups, self.optimizer.state

        def has_begun() -> bool:  # a function, as reading step counts may wait for devices, and lr decides most often
            has_held_gradients = self.held_release is not None and bool(self.held_release.host_gradients)
            step_counts = [entries.get("step", 0) for entries in state.values() if isinstance(entries, Mapping)]
            return has_held_gradients or any(map(float, step_counts))

        # Frameworks take dummy steps without a GradScaler or clipping.
        is_scaled = self.clip_coefficient is not None or any(scalar is not None for scalar in scaling)
        if is_scaled or not agree_on_dummy_step(groups, has_begun, self.peers):
            self.may_be_dummy_step = False
            return False
        params = self.params
        if self.released is None or any(param.grad is not None for param in params):  # the same condition as in step()
            self.cached_stepper().prepare(groups, state, scaling)  # creates state; the prepared step is not run
        for param in params:
            shard = shard_of(param)
            has_no_elements_here = isinstance(shard, FlatShard) and shard.start == shard.end
            if has_no_elements_here:  # frameworks make a gradient for it, but FSDP1 never does: it never gets state
                state.pop(param, None)
        return True

    def begin_release(self, released: Any) -> None:
        """Registers a release (:func:`shardopt.release_gradients`); RuntimeError if there is one already."""
        if self.released is not None:
            raise RuntimeError("got an optimizer whose gradients are released already; call remove() on that release")
        self.released = released
        releases.add(released)
        self.missing_gradients.reset()  # the backward pass frees gradients, so that step() finds none

    def end_release(self) -> None:
        """Ends the release of gradients, if there is one, and waits for its steps: ``step()`` then steps all again."""
        released, self.released = self.released, None
        if released is not None:
            releases.discard(released)
            released.end()

    def set_copies(self, copies: Mapping[Tensor, RankGroup]) -> None:
        """Lets ranks divide the steps of these replicated parameters, as far as this optimizer has the parameters."""
        params = set(self.params)
        self.copies.clear()
        if not self.model_indices:  # else the other ranks' optimizers have other parameters, and could not take part
            self.copies.update((param, ranks) for param, ranks in copies.items() if param in params)

    def invalidate_steps(self, *, discard_gradients: bool = False) -> None:
        """Invalidates cached steps, so that the next step looks up shards and state again, and may be a dummy step.

        ``discard_gradients`` also discards those that a release holds: after a load they are of other weights.
        """
        self.may_be_dummy_step = True
        for _, stepper in self._steppers.values():
            stepper.forget()
        if self.released is not None:
            if discard_gradients:
                self.clip_coefficient = None  # which is of these gradients
            self.released.invalidate_steps(discard_gradients=discard_gradients)

    def set_clip_coefficient(self, coefficient: Tensor) -> None:
        """Sets the coefficient by which the next step multiplies gradients, and records some gradients' versions."""
        self.clip_coefficient = coefficient
        params = self.params
        stride = -(-len(params) // _SAMPLED_GRADIENTS)
        evenly_spread = (param for first in range(stride) for param in params[first::stride])
        sampled = (
            (ref(param), ref(gradient), gradient._version)
            for param in evenly_spread
            if (gradient := param.grad) is not None and not gradient.is_inference()  # which has no version
        )
        self._clip_samples = list(islice(sampled, _SAMPLED_GRADIENTS))

    def with_clip_coefficient(self, scaling: LossScaling) -> LossScaling:
        """A step's scaling with :attr:`clip_coefficient`, unless clipped gradients were changed or are all gone.

        Warns of this if some of the clipped ones are still there: otherwise, as after ``model.zero_grad()``, the user
        has discarded them. Raises RuntimeError if torch.amp.GradScaler has not unscaled the gradients of the norm.
        """
        if self.clip_coefficient is None:
            return scaling
        if scaling.grad_scale is not None:
            raise RuntimeError(
                "got clip_grad_norm_(optimizer=...) of gradients that torch.amp.GradScaler has not unscaled, expected "
                "their norm without the loss scale; call scaler.unscale_(optimizer) before clip_grad_norm_"
            )
        with_gradient = same = unchanged = 0
        for param_ref, gradient_ref, version in self._clip_samples:
            param = param_ref()
            if param is None or param.grad is None:
                continue
            with_gradient += 1
            if param.grad is gradient_ref():
                same += 1
                unchanged += param.grad._version == version
        # Without samples all gradients were on the host, or had no version: they count as unchanged.
        all_gone = bool(self._clip_samples) and with_gradient == 0
        if unchanged == with_gradient and not all_gone:
            return scaling._replace(coefficient=self.clip_coefficient)
        if same:
            warn_user(
                "gradients were changed or replaced between clip_grad_norm_(optimizer=...) and step(), which therefore "
                "clips none of them; clip right before step()",
                RuntimeWarning,
            )
        return scaling

    def warn_of_skipped(self) -> None:
        """Warns the user if gradient elements were skipped since the last warning; the first one names parameters."""
        total = self.skipped.count(wait=False)  # elements that kernels in flight skip are reported by a later step
        new, is_first = total - self._skipped_reported, self._skipped_reported == 0
        if new > 0:
            self._skipped_reported = total
            names = [
                param_name(group, index, position)
                for index, group in enumerate(self.optimizer.param_groups if is_first else ())
                for position, param in enumerate(group["params"])
                if _has_nonfinite_gradient(param)
            ]
            where = f"; this step has some again, in {', '.join(names[:5] + ['...'] * (len(names) > 5))}"
            warn_user(
                f"skipped {new} gradient elements that were NaN or Inf; their parameters and state are as they were"
                f"{where if names else ''} (nonfinite='raise' names the parameter)",
                RuntimeWarning,
            )

    def reset(self, params: Tensor | str | Iterable[Tensor | str], rows: Tensor | Iterable[int] | None) -> None:
        """Resets state of parameters, or of rows, in place; see :meth:`ShardedOptimizer.reset_state`."""
        given = [params] if isinstance(params, str | Tensor) else list(params)
        patterns, wanted = [x for x in given if isinstance(x, str)], {id(x) for x in given if not isinstance(x, str)}
        if not wanted <= set(map(id, [*self.params, *self.model_indices])):
            raise ValueError(
                "params: got a tensor that is in no param group, expected some of the optimizer's parameters; pass "
                "these, such as list(module.parameters()), or patterns of names"
            )
        where = slice(None) if rows is None else rows.cpu() if isinstance(rows, Tensor) else list(rows)
        known: list[str] = []
        chosen: list[tuple[Tensor, TensorSpec, list[Tensor]]] = []  # with a mask of rows per slice
        for group in self.optimizer.param_groups:
            all_names = group.get("param_names") or []
            for index, param in enumerate(group["params"]):
                own_name = bare_name(all_names[index]) if len(all_names) == len(group["params"]) else ""
                spec = self.state_of(param, group)
                names = [slice_.name or own_name for slice_ in spec.slices]
                known += filter(None, names)
                matches = [id(param) in wanted or any(fnmatchcase(x, each) for each in patterns) for x in names]
                if rows is None and any(matches) and not all(matches):
                    raise ValueError(
                        f"params: got some of {', '.join(names):.80}, which are one flat tensor with one step count, "
                        "expected all; pass rows=, which leaves step counts as they are"
                    )
                shapes = zip([slice_.shard.global_shape for slice_ in spec.slices], matches, strict=True)
                chosen.append((param, spec, [_row_mask(shape, where if match else []) for shape, match in shapes]))
        check_patterns(patterns, known)
        for param, spec, masks in chosen:  # only from here on anything changes
            state = self.optimizer.state.get(param)
            if state and any(mask.any() for mask in masks):
                has_exact = any(moment.exact for moment in spec.moments)
                spec.reset_rows(state, masks, float32_weights(spec, param, state) if has_exact else param)
                if rows is None:
                    state["step"].zero_()

    def warn_of_lost_updates(self) -> None:
        """Warns once, in the first step, of trained 16-bit weights to which small updates are lost by rounding."""
        self.rounding_unset = False
        rounded = [
            param.dtype
            for group in self.optimizer.param_groups
            for param in group["params"]
            if param.dtype in (torch.bfloat16, torch.float16) and param.requires_grad
            if group["master_weight_bits"] is None and not group["stochastic_rounding"]
        ]
        if rounded:
            warn_user(
                f"got {len(rounded)} parameters of {rounded[0]} without master weights: updates smaller than half of a "
                "weight's last place are lost; set master_weight_bits=24 (1 byte per parameter), or for bfloat16 "
                "stochastic_rounding=True, or master_weight_bits=None to accept it",
                RuntimeWarning,
            )


def _row_mask(shape: Sequence[int], rows: Any) -> Tensor:
    """Whether each row of a parameter of this global shape is among ``rows``: bool, on the CPU."""
    mask = torch.zeros(shape[0] if shape else 1, dtype=torch.bool, device="cpu")
    try:  # a list is converted first, as floats in it would count as numbers of rows
        mask[torch.as_tensor(rows, device="cpu") if isinstance(rows, list) and rows else rows] = True
    except (IndexError, TypeError, RuntimeError):
        raise ValueError(
            f"rows: got {rows!r:.80} for a parameter of shape {tuple(shape)}, expected the numbers of its rows, or a "
            "bool for each of them; give rows of the global parameter, and other shapes in another call"
        ) from None
    return mask


def _has_nonfinite_gradient(param: Tensor) -> bool:
    """Whether a parameter's gradient on this rank has NaN or Inf; False while a CUDA graph is captured."""
    gradient = getattr(param.grad, "_local_tensor", param.grad)
    if gradient is None or (gradient.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return not are_finite(gradient, signed=True)
