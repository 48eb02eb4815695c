"""The wrapper around a user's optimizer: torch's optimizer protocol, with the state in codes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer

from shardopt.codec import CODECS
from shardopt.kernels.autograd import without_autograd
from shardopt.kernels.overlap import sharing_memory
from shardopt.optim.first_state import only_makes_state
from shardopt.optim.loading import HELD, checked_containers, held_elements
from shardopt.state.loaded_entries import check_keys
from shardopt.state.options import DEFAULTS, bytes_of, check_options
from shardopt.state.warn import warn_user
from shardopt.wrapper.chunks import TransferUnit, chunks_of, units_of
from shardopt.wrapper.coding import State, coded_names, coding_keys, encoded
from shardopt.wrapper.entries import Entries
from shardopt.wrapper.loading import adopted, dequantized, format_of, unwrapped
from shardopt.wrapper.step import Counters, step_chunks
from shardopt.wrapper.tested import Kind, is_tested, kind_of, refuse, refuse_options


def quantize_state(
    optimizer: Optimizer,
    codec: str = "log8",
    block_size: int = 128,
    min_quantized_numel: int = 4096,
    unsigned: Iterable[str] = (),
    keep: Iterable[str] = (),
    working_memory: int | str | None = "256MiB",
    offload: str | None = None,
) -> QuantizedState:
    """Keeps the state of a torch optimizer in 8 bits: any of torch.optim's, or one from elsewhere.

    A step takes chunks of parameters one after another: it decodes a chunk's state, lets the optimizer step these
    parameters alone, and encodes the state. Use the result in place of the optimizer; both have the same param groups.

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
        working_memory: bytes for the decoded state and temporaries of a chunk, as 268435456 or "256MiB". The largest
            parameter is stepped even if it takes more (32 bytes per element). The codec takes up to 64 MiB beside it.
            None: all parameters are stepped together, for optimizers that look at all of them; a step then takes as
            much memory as state that is not quantized.
        offload: None, or "state": codes and scales of parameters on a GPU live in the host's memory.

    Raises:
        TypeError: the optimizer cannot be quantized, or is already.
        ValueError: an option is out of range; the optimizer has to step all parameters together, and
            ``working_memory`` is not None; or existing state is below zero in an unsigned entry.
        RuntimeError: the optimizer cannot step parameters that are sharded in this way.
    """
    refuse(optimizer)
    for what, names in (("unsigned", unsigned), ("keep", keep)):
        if isinstance(names, str):
            raise TypeError(f"{what}: got {names!r}, expected names of state entries; pass ({names!r},)")
    options = {"codec": codec, "block_size": block_size, "min_quantized_numel": min_quantized_numel, "offload": offload}
    check_options({**DEFAULTS, **options})
    blockwise = [name for name, known in CODECS.items() if known.blockwise and not known.shared]
    if codec not in blockwise:
        raise ValueError(f"codec: got {codec!r}, expected one of {', '.join(map(repr, blockwise))}")
    if offload not in (None, "state"):
        raise ValueError(
            f"offload: got {offload!r}, expected None or 'state'; the optimizer itself steps on the device"
        )
    try:
        memory = None if working_memory is None else bytes_of(working_memory)
    except ValueError as error:
        raise ValueError(f"working_memory: {error}") from None
    return QuantizedState(optimizer, Entries(options, unsigned, keep), memory)


#: State entries that count steps, with their values before the first.
_COUNTS = {"step": 0, "mu_product": 1}


class QuantizedState(Optimizer):
    """An optimizer whose state is quantized; made by :func:`quantize_state`.

    ``state[param]`` has ``NAME_codes`` (uint8, of the parameter's shape; slow averages have a last dimension of 2) and
    ``NAME_scales`` for each quantized entry, and the other entries as the inner optimizer has them. Register hooks on
    the wrapper: hooks of the inner optimizer run once per chunk. The wrapper has all methods of the inner optimizer,
    such as ``train()`` and ``eval()``.
    """

    #: torch.amp.GradScaler must unscale gradients by itself: the inner optimizer does not see the scale.
    _step_supports_amp_scaling = False
    _seen: Sequence[int] = ()  # the ids of the parameters whose memory was checked last

    def __init__(self, optimizer: Optimizer, entries: Entries, working_memory: int | None) -> None:
        self._inner = optimizer
        self._entries = entries
        self._working_memory = working_memory
        self._first_step = True
        self._is_paused = False
        self._may_make_state = True
        self._made: set[str] | None = None
        kind = self._checked_kind(optimizer.param_groups)
        if not is_tested(optimizer):
            entries.looks_for_copies = True
            self._warn_untested()
        self._is_elementwise = kind is Kind.ELEMENTWISE
        self.defaults = optimizer.defaults
        super().__setstate__({})  # hooks
        self._quantize_present_state()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The param groups of the inner optimizer."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The quantized state by parameter, the same object as the inner optimizer's."""
        return self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self._inner.state = state

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and callable(getattr(type(self._inner), name, None)):
            return getattr(self._inner, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def is_elementwise(self) -> bool:
        """Whether the inner optimizer is known to update each element by itself, so that it can step flat tensors."""
        return self._is_elementwise

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self._inner!r}"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group to the inner optimizer.

        Raises:
            ValueError: for the reasons of :func:`quantize_state`; nothing was added.
            RuntimeError: for the reasons of :func:`quantize_state`; nothing was added.
        """
        self._inner.add_param_group(param_group)
        try:
            kind = self._checked_kind(self.param_groups)
            self._quantize_present_state()
        except BaseException:
            for param in self.param_groups.pop()["params"]:
                self.state.pop(param, None)
            raise
        self._is_elementwise = kind is Kind.ELEMENTWISE

    @_disable_dynamo
    @without_autograd
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes a step, chunk by chunk.

        After a failure, the chunks before the failing one are stepped, and the failing chunk has its former codes. The
        chunk's weights and other state, and counters, stay where the inner optimizer has left them: load a checkpoint
        to repeat the step.

        Args:
            closure: evaluates the model again and returns the loss, once.

        Returns:
            The closure's loss.

        Raises:
            ValueError: an unsigned state entry has a value below zero, or ranks have different state entries.
            RuntimeError: another rank failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_paused:
            return loss
        if self._may_make_state:
            entries = self.state.values()  # some optimizers keep tensors beside the parameters' dicts
            has_begun = self._made is None and any(not isinstance(entry, Mapping) or entry for entry in entries)
            self._may_make_state = only_makes_state(self.param_groups, lambda: has_begun)
            self._drop_made_state()
            if self._may_make_state:
                self._make_state()
                return loss
        chunks = self._chunks()
        if self._first_step:
            self._first_step = False
            self._warn_if_nothing_is_quantized(chunks)
        step_chunks(self._inner, self._entries, chunks)
        if self._entries.given and self.state:
            self._warn_of_unknown_names()
        return loss

    def _make_state(self) -> None:
        """Makes the state that a framework wants to see before the first step, which begins without it.

        The inner optimizer takes a step of the zero gradients, from which only its state is left, with counts of zero.
        """
        kept, counters, weights = set(self._entries.kept), Counters(self._inner), {}
        for group in self.param_groups:
            weights.update({param: param.detach().clone() for param in group["params"] if param.grad is not None})
        step_chunks(self._inner, self._entries, self._chunks())
        counters.restore()
        for param, before in weights.items():
            param.copy_(before)
        for unit in self._units():
            state = unit.state_in(self.state.get(unit.param, {}))
            for key, value in _COUNTS.items():
                if key in state:
                    old = state[key]
                    state[key] = torch.full_like(old, value) if isinstance(old, Tensor) else type(old)(value)
            if state:
                unit.put_state(self.state, state)
        self._made = kept

    def _drop_made_state(self) -> None:
        """Drops the state that :meth:`_make_state` made, unless other state was loaded since."""
        if self._made is not None:
            self.state.clear()
            self._entries.kept, self._made = self._made, None

    def _expect_first_step(self) -> None:
        """Takes the present state for the run's own; the next step may be one that only makes state."""
        self._may_make_state, self._made = True, None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, ``step()`` does nothing; DeepSpeed takes such steps to allocate state."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def state_dict(self, *, dequantize: bool = False) -> State:
        """The optimizer's state.

        Args:
            dequantize: give the state in floats, in the form that the bare optimizer loads.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        check_keys(self.state, self.param_groups)
        state_dict = self._inner.state_dict()
        if dequantize:
            state_dict = dequantized(state_dict, self._entries, self._units())
        else:
            for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
                held = held_elements(group["params"])
                saved.update({**format_of(self._entries), **({} if held is None else {HELD: held})})
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
        groups, _ = checked_containers(state_dict)
        kind = self._checked_kind(groups)
        kept = set(self._entries.kept)
        try:
            for_inner, flat = adopted(state_dict, self.param_groups, self._entries, self._chunks())
            self._inner.load_state_dict(for_inner)
        except BaseException:
            self._entries.kept = kept
            raise
        self._is_elementwise = kind is Kind.ELEMENTWISE
        self._expect_first_step()
        for param, entries in self.state.items():
            if isinstance(entries, dict):
                self.state[param] = unwrapped(entries)
        self.state.update(flat)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        if any(unit.segment is not None for unit in units_of(self.param_groups, local=True)):
            raise RuntimeError(
                "got a copy of an optimizer of flat parameters, whose copies would not say what they are made of, "
                "expected state_dict(); load that into an optimizer of the wrapped copy of the model"
            )
        names = ("_inner", "_entries", "_working_memory", "_is_elementwise", "_first_step", "_may_make_state", "_made")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "_is_paused": False})
        self.defaults = self._inner.defaults
        super().__setstate__({})

    def _checked_kind(self, groups: Sequence[Mapping[str, Any]]) -> Kind:
        """The kind of the inner optimizer with these param groups.

        Raises:
            ValueError: an option cannot be quantized, or the optimizer has to step all parameters together.
            RuntimeError: the optimizer cannot step the parameters' shards.
        """
        refuse_options(groups)
        kind, name = kind_of(self._inner, groups), type(self._inner).__name__
        if kind is Kind.TOGETHER and self._working_memory is not None:
            raise ValueError(
                f"working_memory: got {self._working_memory} bytes for {name}, expected None, as it looks at all "
                "parameters together; pass working_memory=None, which decodes all state during a step, or leave out "
                "max_grad_norm where it is set and clip before the step"
            )
        for unit in units_of(self.param_groups, local=False):
            if kind is not Kind.ELEMENTWISE and unit.segment is not None:
                raise RuntimeError(
                    f"got {name} on a flat tensor of several parameters, expected an optimizer that is known to be "
                    "element by element, as others would take the tensor for one parameter; wrap the model with "
                    "fully_shard"
                )
            if kind in (Kind.BY_PARAMETER, Kind.TOGETHER) and unit.shard.holders is not None:
                raise RuntimeError(
                    f"got {name} on a sharded parameter of shape {unit.shard.global_shape}, expected whole parameters, "
                    "as its update of an element depends on others of the parameter, and so on the sharding; use an "
                    "optimizer that computes element by element, or DDP"
                )
        return kind

    def _warn_untested(self) -> None:
        hidden = ["in state that is there already"] if self.state else []
        if any(unit.shard.holders is not None for unit in units_of(self.param_groups, local=False)):
            hidden.append("on shards")
        undetected = f", as they are not detected {' or '.join(hidden)}" if hidden else ""
        warn_user(
            f"got {type(self._inner).__name__}, untested with quantize_state: pass working_memory=None if it looks at "
            "several parameters together, and name state entries that are never below zero in unsigned=, and copies of "
            f"weights in keep={undetected}",
            UserWarning,
        )

    def _warn_if_nothing_is_quantized(self, chunks: Sequence[Sequence[TransferUnit]]) -> None:
        units = [u for chunk in chunks for u in chunk if not u.shard.float32_state and u.segment is None]
        numel, least = sum(unit.local.numel() for unit in units), self._entries.options["min_quantized_numel"]
        if numel >= max(least, 1) and not any(self._entries.is_quantized(unit.shard) for unit in units):
            warn_user(
                f"quantize_state: got {len(units)} tensors with {numel} elements and none to quantize, expected "
                f"tensors of two dimensions, with {least} elements and rows of 32; import shardopt before a framework "
                "flattens the parameters, or lower min_quantized_numel",
                UserWarning,
            )

    def _warn_of_unknown_names(self) -> None:
        """Warns of names in ``keep`` and ``unsigned`` that no state entry has; once, when there is state."""
        states = [unit.state_in(self.state.get(unit.param, {})) for unit in self._units()]
        names = {name for state in states for name in (*coded_names(state), *(state.keys() - coding_keys(state)))}
        if not names:
            return
        given, self._entries.given = self._entries.given, frozenset()
        if not given <= names:
            warn_user(
                f"quantize_state: got {', '.join(map(repr, sorted(given - names)))} in keep= or unsigned=, expected "
                f"names of state entries, such as {', '.join(sorted(names))}; correct them unless these entries come "
                "later",
                UserWarning,
            )

    def _units(self) -> list[TransferUnit]:
        params = [param for group in self.param_groups for param in group["params"]]
        if (ids := [id(param) for param in params]) != self._seen:
            found = sharing_memory([getattr(param, "_local_tensor", param) for param in params])
            if found is not None:
                raise RuntimeError(
                    f"got parameters {found[0]} and {found[1]} (counted over all param groups) in the same memory, "
                    "expected memory of its own for each; give each parameter once, and make views of a .clone()"
                )
            self._seen = ids
        return units_of(self.param_groups, local=self._is_elementwise)

    def _chunks(self) -> list[list[TransferUnit]]:
        return chunks_of(self._units(), self._working_memory)

    @without_autograd
    def _quantize_present_state(self) -> None:
        before = {param: state for param, state in self.state.items() if isinstance(param, Tensor)}
        new: dict[Tensor, State] = {}
        for chunk in self._chunks():
            states = [unit.present_in(before.get(unit.param, {})) for unit in chunk]
            for unit, state in zip(chunk, encoded(self._entries, chunk, states, [{}] * len(chunk)), strict=True):
                if state is not None:
                    unit.put_state(new, state)
        self.state.update(new)
