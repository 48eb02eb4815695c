"""The wrapper around a user's optimizer: a torch optimizer whose state is stored as quantized codes and scales.

A step goes through the parameters: each one's state is decoded, the inner optimizer steps it, the state is encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

from shardopt.codec import CODECS
from shardopt.kernels.autograd import without_autograd
from shardopt.layout import FlatBuffer, FlatShard, Shard, shard_of
from shardopt.optim.first_state import agree_on_dummy_step
from shardopt.optim.loading import checked_containers
from shardopt.removed import explain_removed
from shardopt.state.loaded_entries import check_keys
from shardopt.state.options import DEFAULTS, check_options
from shardopt.state.slice_spec import StateDict
from shardopt.state.warn import warn_user
from shardopt.wrapper.entries import Entries, local_if_sharded
from shardopt.wrapper.known import check_supported, check_supported_options, is_elementwise, is_known

#: Keys of a param group that hold lists with an item per parameter.
_PARAMS = frozenset(["params", "param_names"])
#: State entries that follow from the number of steps, with their values before the first step.
_COUNTS = {"step": 0, "mu_product": 1}


def quantize_state(
    optimizer: Optimizer,
    codec: str = "log8",
    block_size: int = 128,
    min_quantized_numel: int = 4096,
    unsigned: Iterable[str] = (),
    keep: Iterable[str] = (),
    **unknown: object,
) -> QuantizedState:
    """Wraps a torch optimizer, from torch.optim or elsewhere, and stores its state in 8 bits.

    Use the wrapper in place of the optimizer; both have the same param groups. State entries of the parameter's shape
    are quantized, except copies of weights; entries of other shapes (matrices, rows, scalars) stay as they are.

    Args:
        optimizer: the optimizer, best before its first step: existing state is quantized now.
        codec: "log8", "companded8" or "dynamic8"; with "companded16" state has 16 bits.
        block_size: elements that share a scale.
        min_quantized_numel: parameters with fewer elements (globally) keep their state as it is.
        unsigned: names of further state entries that are never below zero, in addition to shardopt's table. Their
            codes have the same relative error for small values as for large ones.
        keep: names of state entries that are not to be quantized, such as copies of weights.
        **unknown: must be empty; for an option of an earlier version the error says what to use instead.

    Raises:
        TypeError: the optimizer cannot be quantized, or is already; or an option has an unknown name.
        ValueError: an option is out of range, or existing state is below zero in an unsigned entry.
        RuntimeError: the optimizer cannot step parameters that are sharded in this way.
    """
    if unknown:
        raise TypeError(f"quantize_state: got unknown options {', '.join(sorted(unknown))}{explain_removed(unknown)}")
    check_supported(optimizer)
    for what, names in (("unsigned", unsigned), ("keep", keep)):
        if isinstance(names, str):
            raise TypeError(f"{what}: got {names!r}, expected names of state entries; pass ({names!r},)")
    options = {**DEFAULTS, "codec": codec, "block_size": block_size, "min_quantized_numel": min_quantized_numel}
    check_options(options)
    blockwise = [name for name, known in CODECS.items() if known.blockwise and not known.shared]
    if codec not in blockwise:
        raise ValueError(f"codec: got {codec!r}, expected one of {', '.join(map(repr, blockwise))}")
    return QuantizedState(Entries(optimizer, options, unsigned, keep))


class QuantizedState(Optimizer):
    """An optimizer whose state is quantized; made by :func:`quantize_state`.

    ``state[param]`` has ``NAME_codes`` (uint8, of the parameter's shape; slow averages have a last dimension of 2) and
    ``NAME_scales`` for each quantized entry, and the other entries as the inner optimizer has them. Register hooks on
    the wrapper: hooks of the inner optimizer run once per parameter. The wrapper has all methods of the inner
    optimizer, such as ``train()`` and ``eval()``.
    """

    #: torch.amp.GradScaler must unscale gradients by itself: the inner optimizer does not see the scale.
    _step_supports_amp_scaling = False

    def __init__(self, entries: Entries) -> None:
        self.__setstate__({"_internals": entries})
        self.check_group(*self.param_groups)
        if not is_known(self._inner):
            warn_user(
                f"got {type(self._inner).__name__}, untested with quantize_state: it must not look at several "
                "parameters together; name state entries that are never below zero in unsigned=, and copies of weights "
                "in keep=",
                UserWarning,
            )
        self._quantize_present_state()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The param groups of the inner optimizer."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The quantized state by parameter, the same object as the inner optimizer's."""
        return self._inner.state

    def __getattr__(self, name: str) -> Any:
        """Passes on the inner optimizer's public methods, but none of its other attributes."""
        if not name.startswith("_") and callable(getattr(type(self._inner), name, None)):
            return getattr(self._inner, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def synchronize(self) -> None:
        """Does nothing: no work is in flight after a step. Exists because shardopt's own optimizers have it."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group to the inner optimizer. After an error, as of :func:`quantize_state`, it is not added."""
        self._inner.add_param_group(param_group)
        try:
            self.check_group(*self.param_groups)
            self._quantize_present_state()
        except BaseException:
            for param in self.param_groups.pop()["params"]:
                self.state.pop(param, None)
            raise

    @_disable_dynamo
    @without_autograd
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Steps the parameters one after another: decodes the state of each, steps it, and encodes the state.

        If a parameter fails, those before it have been stepped, and its own state is as before the step. Weights are
        not restored: load a checkpoint to repeat the step.

        ``closure`` evaluates the model again. The step calls it once, before the first parameter, and returns its loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.check_group(*self.param_groups)  # parameters may have been sharded since the last step
        if self._internals.only_made_state:  # else this step would not begin as an optimizer's first one
            self.state.clear()
        # Collective, if all learning rates are 0.
        state_only = agree_on_dummy_step(self.param_groups, lambda: any(map(bool, self.state.values())))
        self._internals.only_made_state = state_only
        with self._inner_restored(attributes=state_only):
            numbers = _numbers_in(vars(self._inner))
            for group in self.param_groups.copy():
                self._step_group(group, numbers, state_only=state_only)
        return loss

    def state_dict(self, *, dequantize: bool = False) -> StateDict:
        """Returns the state dict: quantized entries as codes and scales, and in the param groups how to decode them.

        With ``dequantize``, has floats instead, which the inner optimizer without this wrapper can load.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        check_keys(self.state, self.param_groups)
        state_dict = self._inner.state_dict()  # some add attributes to it
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            if not dequantize:
                saved.update(self._internals.format)
                continue
            for param, index in zip(group["params"], saved["params"], strict=True):
                if stored := state_dict["state"].get(index):
                    floats = self._internals.decode_state(param, stored)
                    state_dict["state"][index] = {key: _copied(x) for key, x in floats.items()}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    @_disable_dynamo
    @without_autograd
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a state dict of this class, or quantizes one of the inner optimizer without this wrapper.

        Raises ValueError, and changes nothing, if the state is damaged, of other parameters, or quantized otherwise.
        """
        state_dict = dict(state_dict) if isinstance(state_dict, Mapping) else {}
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        self.check_group(*checked_containers(state_dict)[0])
        for_inner, states = self._internals.convert_state_dict(state_dict)
        self._inner.load_state_dict(for_inner)
        self._internals.only_made_state = False  # the next step must not drop the loaded state
        for param, entries in states.items():
            self.state[param] = {**entries, **self.state.get(param, {})}
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"_internals": self._internals}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._internals: Entries = state["_internals"]
        self._inner: Optimizer = self._internals.inner
        self.defaults = self._inner.defaults
        super().__setstate__({})  # makes the empty tables of hooks

    def check_group(self, *groups: Mapping[str, Any]) -> None:
        """Raises ValueError if an option in ``groups`` fails when parameters are stepped one at a time.

        Raises RuntimeError if the optimizer, with these options, cannot step one of its parameters as it is sharded.
        """
        check_supported_options(self._inner, groups)
        name, entries = type(self._inner).__name__, self._internals
        needs_whole = is_known(self._inner) and not is_elementwise(self._inner, groups)
        for param in (param for group in self.param_groups for param in group["params"]):
            shard, what = shard_of(param), None
            if isinstance(shard, FlatBuffer | FlatShard):
                what = "a flat shard (FSDP1, DeepSpeed's ZeRO)"
            elif needs_whole and shard.holders is not None:
                what = "sharded, while an update of this optimizer depends on all of the parameter"
            elif entries.is_quantized(shard) and entries.coded_spec(shard, ["any entry"]).has_column_cut_blocks:
                what = f"sharded by columns that end within blocks of {entries.options['block_size']} elements"
            if what is not None:
                raise RuntimeError(
                    f"quantize_state: got {name} on a parameter of shape {shard.global_shape} that is {what}, expected "
                    "whole parameters, or shards of rows with an optimizer that is element by element; use fully_shard "
                    "(FSDP2), DDP, or one of shardopt's own optimizers"
                )

    @without_autograd
    def _quantize_present_state(self) -> None:
        """Encodes all state. Codes and scales stay: they do not have the parameter's dtype and shape."""
        params = [param for group in self.param_groups for param in group["params"] if self.state.get(param)]
        self.state.update({param: self._internals.encode_state(param, self.state[param]) for param in params})

    @contextmanager
    def _inner_restored(self, *, attributes: bool) -> Iterator[None]:
        """Restores the inner optimizer's param groups after the block and, if ``attributes``, all its attributes."""
        groups, before = self.param_groups, vars(self._inner).copy()
        try:
            yield
        finally:
            if attributes:
                vars(self._inner).clear()  # also counters that the step has added
                vars(self._inner).update(before)
            self._inner.param_groups = groups

    def _step_group(self, group: dict[str, Any], numbers: Mapping[str, float], *, state_only: bool) -> None:
        """Steps the parameters of one param group that have gradients; leaves ``inner.param_groups`` changed.

        Each call of the inner ``step()`` advances counters, and all calls together must advance them once: every
        parameter begins with the same values of its param group, and of ``numbers``, the inner optimizer's attributes
        that are numbers. With ``state_only`` the parameters' state is made, but weights and counters do not change.
        """
        inner, attributes = self._inner, vars(self._inner)
        indices = [index for index, param in enumerate(group["params"]) if param.grad is not None]
        for index in indices or (None,):  # None: a step of no parameter, as counters advance without gradients, too
            for key in _numbers_in(attributes):
                del attributes[key]  # also counters that the last call added, in place of attributes of the class
            attributes.update(numbers)
            options = {key: _copied(x) for key, x in group.items() if key not in _PARAMS}
            of_param = {key: [] if index is None else [group[key][index]] for key in _PARAMS if key in group}
            inner.param_groups = [{**options, **of_param}]
            if index is None:
                inner.step()
            else:
                self._step_parameter(group["params"][index], state_only=state_only)
        for key, value in () if state_only else inner.param_groups[0].items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].copy_(value)  # schedulers keep a reference to this tensor
            elif key not in _PARAMS:
                group[key] = value

    def _step_parameter(self, param: Tensor, *, state_only: bool) -> None:
        """Steps one parameter; a failure restores its state. With ``state_only``, resets weights and step counts.

        For a DTensor, an element-wise optimizer steps the local tensor instead, with the local tensors of its state.
        """
        shard, states = shard_of(param), self.state
        is_local, target = not shard.plain and is_elementwise(self._inner, self.param_groups), param
        if is_local:
            target = Parameter(shard.local(param).detach(), requires_grad=param.requires_grad)
            assert param.grad is not None
            target.grad = shard.local_gradient(param.grad)
        weights = target.detach().clone() if state_only else None
        result = states.pop(param, {})  # to be stored after the step: the old state, unless the step succeeds
        if result:
            floats = self._internals.decode_state(param, result)
            states[target] = {key: local_if_sharded(shard, x) for key, x in floats.items()} if is_local else floats
        try:
            self._inner.param_groups[0]["params"] = [target]
            self._inner.step()
            floats = states.get(target, {})
            if weights is not None:
                target.copy_(weights)
                for key in _COUNTS.keys() & floats.keys():
                    count, zero = floats[key], _COUNTS[key]
                    floats[key] = torch.full_like(count, zero) if isinstance(count, Tensor) else type(count)(zero)
            if is_local:
                floats = {key: _sharded(shard, x) for key, x in floats.items()}
            result = self._internals.encode_state(param, floats)
        finally:
            states.pop(target, None)
            if result:
                states[param] = result


def _numbers_in(attributes: Mapping[str, Any]) -> dict[str, float]:
    """The attributes that are Python numbers, among which an optimizer's counters are."""
    return {key: x for key, x in attributes.items() if type(x) in (int, float)}


def _sharded(shard: Shard, x: Any) -> Any:
    """Wraps a tensor of the parameter's local shape as a DTensor sharded like it; other values stay unchanged."""
    return shard.like_parameter(x) if isinstance(x, Tensor) and x.dim() and x.shape == shard.local_shape else x


def _copied(value: Any) -> Any:
    """Copies a value of a state dict or param group, so that changing it in place leaves the original unchanged."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, list | dict | set) else value
