"""The wrapper around a user's optimizer: torch's optimizer protocol, with the state in codes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer

from shardopt.codec import CODECS
from shardopt.kernels.autograd import without_autograd
from shardopt.layout import FlatBuffer, FlatShard, shard_of
from shardopt.optim.first_state import only_makes_state
from shardopt.optim.loading import checked_containers
from shardopt.state.loaded_entries import check_keys
from shardopt.state.options import DEFAULTS, check_options
from shardopt.state.warn import warn_user
from shardopt.wrapper.entries import DTYPE, Entries, State, coded_names
from shardopt.wrapper.known import is_elementwise, is_known, refuse, refuse_options
from shardopt.wrapper.step import make_state, step_all


def quantize_state(
    optimizer: Optimizer,
    codec: str = "log8",
    block_size: int = 128,
    min_quantized_numel: int = 4096,
    unsigned: Iterable[str] = (),
    keep: Iterable[str] = (),
) -> QuantizedState:
    """Keeps the state of a torch optimizer in 8 bits: any of torch.optim's, or one from elsewhere.

    A step takes one parameter after another: it decodes the parameter's state, lets the optimizer step this parameter
    alone, and encodes the state. Use the result in place of the optimizer; both have the same param groups.

    State entries of the parameter's shape are quantized if the parameter has ``min_quantized_numel`` elements and rows
    of 32 at least. Copies of weights, matrices, rows and scalars stay as they are; slow averages have 16 bits.

    Args:
        optimizer: the optimizer, best before its first step: existing state is quantized now.
        codec: "log8", "companded8" or "dynamic8".
        block_size: elements that share a scale.
        min_quantized_numel: parameters with fewer elements (globally) keep their state as it is.
        unsigned: names of state entries that are never below zero, beside those in shardopt's table: averages of
            squares. Unsigned entries are coded with the same relative error for small values as for large ones.
        keep: names of state entries that are not to be quantized, such as copies of weights.

    Raises:
        TypeError: the optimizer cannot be quantized, or is already.
        ValueError: an option is out of range, or existing state is below zero in an unsigned entry.
        RuntimeError: the optimizer cannot step parameters that are sharded in this way.
    """
    refuse(optimizer)
    for what, names in (("unsigned", unsigned), ("keep", keep)):
        if isinstance(names, str):
            raise TypeError(f"{what}: got {names!r}, expected names of state entries; pass ({names!r},)")
    options = {"codec": codec, "block_size": block_size, "min_quantized_numel": min_quantized_numel}
    check_options({**DEFAULTS, **options})
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

    _entries: Entries
    _inner: Optimizer
    _is_first_step: bool

    def __init__(self, entries: Entries) -> None:
        self.__setstate__({"_entries": entries})
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
        if self._is_first_step:
            self.check_group(*self.param_groups)  # parameters may have been sharded since
        elementwise, entries = is_elementwise(self._inner, self.param_groups), self._entries
        if entries.may_make_state:
            has_begun = not entries.was_made and any(bool(state) for state in self.state.values())
            entries.may_make_state = only_makes_state(self.param_groups, lambda: has_begun)
            if entries.was_made:
                self.state.clear()
            entries.was_made = entries.may_make_state
            if entries.was_made:
                make_state(entries, elementwise=elementwise)
                return loss
        step_all(entries, elementwise=elementwise)
        if self._is_first_step and self.state:
            self._is_first_step = False
            self._warn_of_unknown_names()
        return loss

    def state_dict(self, *, dequantize: bool = False) -> State:
        """The optimizer's state.

        Args:
            dequantize: give the state in floats, in the form that the bare optimizer loads.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        check_keys(self.state, self.param_groups)
        state_dict = self._inner.state_dict()
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            if not dequantize:
                saved.update(self._entries.format)
                continue
            for param, index in zip(group["params"], saved["params"], strict=True):
                stored = state_dict["state"].get(index, {})
                floats = self._entries.decoded(shard_of(param), param, stored)
                if stored:
                    state_dict["state"][index] = {
                        key: x.detach().clone() if isinstance(x, Tensor) and key in stored else x
                        for key, x in floats.items()
                    }
        for after in self._optimizer_state_dict_post_hooks.values():
            state_dict = after(self, state_dict) or state_dict
        return state_dict

    @_disable_dynamo
    @without_autograd
    def load_state_dict(self, state_dict: State) -> None:
        """Loads a state dict of this class, or of the bare optimizer, which is quantized.

        Raises:
            ValueError: the state was quantized in another way, is damaged, or is of other parameters. Nothing was
                changed.
        """
        state_dict = dict(state_dict) if isinstance(state_dict, Mapping) else {}
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self.check_group(*checked_containers(state_dict)[0])
        for_inner, states = self._entries.adopt(state_dict)
        self._inner.load_state_dict(for_inner)
        for param, entries in states.items():
            self.state[param] = {**entries, **self.state.get(param, {})}
        self._entries.forget_tables()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"_entries": self._entries}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._entries = self._internals = state["_entries"]
        self._inner = self._entries.inner
        self._is_first_step = True
        self.defaults = self._inner.defaults
        super().__setstate__({})  # hooks

    def check_group(self, *groups: Mapping[str, Any]) -> None:
        """Checks the options in param groups, and whether the inner optimizer with these can step the parameters.

        Raises:
            ValueError: an option does not go with one parameter at a time.
            RuntimeError: the parameters are sharded in a way that the optimizer cannot step.
        """
        refuse_options(self._inner, groups)
        name, entries = type(self._inner).__name__, self._entries
        by_parameter = is_known(self._inner) and not is_elementwise(self._inner, groups)
        for param in (param for group in self.param_groups for param in group["params"]):
            shard, what = shard_of(param), None
            if isinstance(shard, FlatBuffer | FlatShard):
                what = "a flat shard (FSDP1, DeepSpeed's ZeRO)"
            elif by_parameter and shard.holders is not None:
                what = "sharded, while an update of this optimizer depends on all of the parameter"
            elif entries.is_quantized(shard) and entries.spec(shard, ["exp_avg"]).exchanges_columns:
                what = f"sharded by columns that end within blocks of {entries.options['block_size']} elements"
            if what is not None:
                raise RuntimeError(
                    f"quantize_state: got {name} on a parameter of shape {shard.global_shape} that is {what}, expected "
                    "whole parameters, or shards of rows with an optimizer that is element by element; use fully_shard "
                    "(FSDP2), DDP, or one of shardopt's own optimizers"
                )

    def _warn_of_unknown_names(self) -> None:
        """Warns of names in ``keep`` and ``unsigned`` that no state entry has; once."""
        keys = {key for entries in self.state.values() if isinstance(entries, Mapping) for key in entries}
        names = {*coded_names(keys), *(key for key in keys if not key.endswith(("_codes", "_scales", DTYPE)))}
        if not self._entries.given <= names:
            warn_user(
                f"quantize_state: got {', '.join(map(repr, sorted(self._entries.given - names)))} in keep= or "
                f"unsigned=, expected names of state entries, such as {', '.join(sorted(names))}; correct them unless "
                "these entries come later",
                UserWarning,
            )

    @without_autograd
    def _quantize_present_state(self) -> None:
        new: dict[Tensor, State] = {}
        for param in [param for group in self.param_groups for param in group["params"] if self.state.get(param)]:
            state = self.state[param]
            new[param] = self._entries.encoded(shard_of(param), param, dict(state), state)
        self.state.update(new)
