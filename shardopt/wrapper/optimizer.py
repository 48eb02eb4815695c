"""The wrapper around a user's optimizer: torch's optimizer protocol, with the state in codes.

A step takes one parameter after another: its state is decoded, the optimizer steps it alone, and its state is encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

from shardopt.codec import CODECS
from shardopt.kernels.autograd import without_autograd
from shardopt.layout import FlatBuffer, FlatShard, Shard, shard_of
from shardopt.optim.first_state import only_makes_state
from shardopt.optim.loading import checked_containers
from shardopt.removed import explained
from shardopt.state.loaded_entries import check_keys
from shardopt.state.options import DEFAULTS, check_options
from shardopt.state.slice_spec import StateDict
from shardopt.state.warn import warn_user
from shardopt.wrapper.entries import Entries, local_of
from shardopt.wrapper.known import is_elementwise, is_known, refuse, refuse_options

#: Keys of a param group that each parameter has its own of.
_PARAMS = frozenset(["params", "param_names"])
#: State entries that count steps, with their values before the first one.
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
    """Keeps the state of a torch optimizer in 8 bits: any of torch.optim's, or one from elsewhere.

    Use the result in place of the optimizer; both have the same param groups. Entries of the parameter's shape are
    quantized; copies of weights, matrices, rows and scalars stay as they are.

    Args:
        optimizer: the optimizer, best before its first step: existing state is quantized now.
        codec: "log8", "companded8" or "dynamic8".
        block_size: elements that share a scale.
        min_quantized_numel: parameters with fewer elements (globally) keep their state as it is.
        unsigned: names of state entries that are never below zero, beside those in shardopt's table, which are coded
            with the same relative error for small values as for large ones.
        keep: names of state entries that are not to be quantized, such as copies of weights.
        **unknown: none; options of earlier versions are refused with what to use in their place.

    Raises:
        TypeError: the optimizer cannot be quantized, or is already; or an option has an unknown name.
        ValueError: an option is out of range, or existing state is below zero in an unsigned entry.
        RuntimeError: the optimizer cannot step parameters that are sharded in this way.
    """
    if unknown:
        raise TypeError(f"quantize_state: got unknown options {', '.join(sorted(unknown))}{explained(unknown)}")
    refuse(optimizer)
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
        if not name.startswith("_") and callable(getattr(type(self._inner), name, None)):
            return getattr(self._inner, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def synchronize(self) -> None:
        """Waits for nothing: a step leaves its state complete."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group to the inner optimizer.

        Raises:
            ValueError: for the reasons of :func:`quantize_state`; nothing was added.
            RuntimeError: for the reasons of :func:`quantize_state`; nothing was added.
        """
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
        """Takes a step, one parameter after another.

        After a failure, the parameters before the failing one are stepped, and the failing one has its former codes.
        The weights stay where the inner optimizer has left them: load a checkpoint to repeat the step.

        Args:
            closure: evaluates the model again and returns the loss, once.

        Returns:
            The closure's loss.

        Raises:
            ValueError: an unsigned state entry has a value below zero.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.check_group(*self.param_groups)  # parameters may have been sharded since
        if self._internals.was_made:
            self.state.clear()
        self._internals.was_made = only_makes_state(self.param_groups, lambda: any(map(bool, self.state.values())))
        self._step_all(counts=not self._internals.was_made)
        return loss

    def state_dict(self, *, dequantize: bool = False) -> StateDict:
        """The optimizer's state.

        Args:
            dequantize: give the state in floats, in the form that the bare optimizer loads.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        check_keys(self.state, self.param_groups)
        state_dict = self._inner.state_dict()  # some add attributes to it
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            if not dequantize:
                saved.update(self._internals.format)
                continue
            for param, index in zip(group["params"], saved["params"], strict=True):
                if stored := state_dict["state"].get(index):
                    floats = self._internals.decoded(param, stored)
                    state_dict["state"][index] = {key: _copied(x) for key, x in floats.items()}
        for after in self._optimizer_state_dict_post_hooks.values():
            state_dict = after(self, state_dict) or state_dict
        return state_dict

    @_disable_dynamo
    @without_autograd
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a state dict of this class, or of the bare optimizer, which is quantized.

        Raises:
            ValueError: the state was quantized in another way, is damaged, or is of other parameters. Nothing was
                changed.
        """
        state_dict = dict(state_dict) if isinstance(state_dict, Mapping) else {}
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self.check_group(*checked_containers(state_dict)[0])
        for_inner, states = self._internals.adopt(state_dict)
        self._inner.load_state_dict(for_inner)
        for param, entries in states.items():
            self.state[param] = {**entries, **self.state.get(param, {})}
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"_internals": self._internals}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._internals: Entries = state["_internals"]
        self._inner: Optimizer = self._internals.inner
        self.defaults = self._inner.defaults
        super().__setstate__({})  # hooks

    def check_group(self, *groups: Mapping[str, Any]) -> None:
        """Checks the options in param groups, and whether the inner optimizer with these can step the parameters.

        Raises:
            ValueError: an option does not go with one parameter at a time.
            RuntimeError: the parameters are sharded in a way that the optimizer cannot step.
        """
        refuse_options(self._inner, groups)
        name, entries = type(self._inner).__name__, self._internals
        by_parameter = is_known(self._inner) and not is_elementwise(self._inner, groups)
        for param in (param for group in self.param_groups for param in group["params"]):
            shard, what = shard_of(param), None
            if isinstance(shard, FlatBuffer | FlatShard):
                what = "a flat shard (FSDP1, DeepSpeed's ZeRO)"
            elif by_parameter and shard.holders is not None:
                what = "sharded, while an update of this optimizer depends on all of the parameter"
            elif entries.is_quantized(shard) and entries.coding(shard, ["exp_avg"]).exchanges_columns:
                what = f"sharded by columns that end within blocks of {entries.options['block_size']} elements"
            if what is not None:
                raise RuntimeError(
                    f"quantize_state: got {name} on a parameter of shape {shard.global_shape} that is {what}, expected "
                    "whole parameters, or shards of rows with an optimizer that is element by element; use fully_shard "
                    "(FSDP2), DDP, or one of shardopt's own optimizers"
                )

    @without_autograd
    def _quantize_present_state(self) -> None:
        params = [param for group in self.param_groups for param in group["params"] if self.state.get(param)]
        self.state.update({param: self._internals.encoded(param, self.state[param]) for param in params})

    def _step_all(self, *, counts: bool) -> None:
        """Takes a step of all parameters that have gradients. Unless it ``counts``, it leaves nothing but state.

        Each call of the inner ``step()`` advances counters, and all calls together must advance them once: every
        parameter begins with the same values of its param group, and of the numbers among the optimizer's attributes.
        """
        inner, groups, attributes = self._inner, self.param_groups, vars(self._inner)
        before = attributes.copy()
        numbers = {key: x for key, x in attributes.items() if type(x) in (int, float)}
        try:
            for group in groups:
                positions = [at for at, param in enumerate(group["params"]) if param.grad is not None]
                for at in positions or (None,):  # steps without gradients are counted, too
                    for key in [key for key, x in attributes.items() if type(x) in (int, float)]:
                        del attributes[key]  # a counter may have begun as an attribute of the class
                    attributes.update(numbers)
                    alone = {key: _copied(x) for key, x in group.items() if key not in _PARAMS}
                    of_param = {key: [] if at is None else [group[key][at]] for key in _PARAMS if key in group}
                    inner.param_groups = [{**alone, **of_param}]
                    if at is None:
                        inner.step()
                    else:
                        self._step_parameter(group["params"][at], counts)
                    alone = {key: x for key, x in inner.param_groups[0].items() if key not in _PARAMS}
                for key, value in alone.items() if counts else ():
                    if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                        group[key].copy_(value)  # schedulers hold on to the tensor
                    else:
                        group[key] = value
        finally:
            inner.param_groups = groups
            if not counts:
                attributes.clear()  # also counters that the step has added
                attributes.update(before)

    def _step_parameter(self, param: Tensor, counts: bool) -> None:
        """Steps one parameter. If that fails, its state is as it was. Unless it ``counts``, weights and counts stay.

        An optimizer that is element by element steps the local tensor of a DTensor, with local tensors of its state.
        """
        shard, states = shard_of(param), self.state
        is_local, target = not shard.plain and is_elementwise(self._inner, self.param_groups), param
        if is_local:
            target = Parameter(shard.local(param).detach(), requires_grad=param.requires_grad)
            assert param.grad is not None
            target.grad = shard.local_gradient(param.grad)
        weights = None if counts else target.detach().clone()
        stored = new = states.pop(param, {})
        if stored:
            floats = self._internals.decoded(param, stored)
            states[target] = {key: local_of(shard, x) for key, x in floats.items()} if is_local else floats
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
            new = self._internals.encoded(param, floats)
        finally:
            states.pop(target, None)
            if new:
                states[param] = new


def _sharded(shard: Shard, x: Any) -> Any:
    """The DTensor with this local part, if it is a tensor of the parameter's local shape; anything else as it is."""
    return shard.like_parameter(x) if isinstance(x, Tensor) and x.dim() and x.shape == shard.local_shape else x


def _copied(value: Any) -> Any:
    """A copy of a param group's value that a step may change in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, list | dict | set) else value
