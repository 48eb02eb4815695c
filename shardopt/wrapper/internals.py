"""Loading, and the functions that checkpoints call, by the names that they have in shardopt.optim.internals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardopt.layout import Shard, shard_of
from shardopt.optim.loading import by_name, checked_containers, checked_entries, reading
from shardopt.state.names import listed_name
from shardopt.state.slice_spec import EntryFormat, KeptEntry, SliceSpec
from shardopt.state.tensor_state import TensorState
from shardopt.wrapper.entries import CODED_DTYPES, DTYPE, Entries, State, coded_names, local_of, state_of
from shardopt.wrapper.known import full_name, is_known

#: Prefix of the optimizer's name in checkpoints.
OF_QUANTIZE_STATE = "quantize_state of "

#: Numbers in state are 0-d tensors in a checkpoint, with their types in the entries' names: ``step:int``.
_NUMBERS: dict[str, torch.dtype] = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}


class WrapperInternals:
    """Loads state dicts, and gives checkpoints access to the state of the optimizer that quantize_state made."""

    def __init__(self, optimizer: Any, entries: Entries) -> None:
        self.optimizer, self.entries = optimizer, entries

    @property
    def name(self) -> str:
        """The optimizer's name in a checkpoint."""
        inner = self.optimizer._inner
        package = f"{full_name(inner).partition('.')[0]}." if is_known(inner) else ""
        return f"{OF_QUANTIZE_STATE}{package}{type(inner).__qualname__}"

    @property
    def format(self) -> dict[str, Any]:
        """What a checkpoint's param groups have beside the optimizer's own options."""
        return self.entries.format

    def form(
        self, shard: Shard, dtype: torch.dtype, options: Mapping[str, Any], stored: Mapping[str, Any]
    ) -> SliceSpec:
        """The form of a parameter's state with these entries, which have global shapes, and dtypes.

        ``options`` are those of the param group. With a codec they are a checkpoint's.

        Raises:
            ValueError: an entry cannot be in a checkpoint of this parameter, or was coded otherwise than here.
        """
        names = coded_names(stored)
        spec = self.entries.spec(
            shard, names, self.entries.saved_options(options, names) if "codec" in options else None
        )
        kept = tuple(_kept(shard, key, x) for key, x in stored.items() if key not in spec.moment_entries)
        return replace(spec, kept=kept)

    def held(self, param: Tensor, group: Mapping[str, Any]) -> tuple[TensorState, State]:
        """Form and entries of a parameter's present state: tensors.

        Raises:
            ValueError: a checkpoint cannot hold an entry.
        """
        shard, state = shard_of(param), self.optimizer.state.get(param, {})
        tensors = dict(_packed(key, value) for key, value in state.items())
        return state_of(shard, self.form(shard, param.dtype, {}, tensors)), tensors

    def placed(self, param: Tensor, options: Mapping[str, Any], states: Sequence[dict[str, Tensor]]) -> State:
        """The new state of a parameter, on its device, from the entries that were read."""
        ((state,), shard) = states, shard_of(param)
        spec = self.entries.spec(shard, coded_names(state))
        coded = {key: state[key] for key in spec.moment_entries}
        kept = dict(_unpacked(key, x) for key, x in state.items() if key not in coded)
        new = {key: _on_device(shard, param, options, key, value) for key, value in kept.items()}
        return {**new, **self.entries.placed(shard, param, spec, coded, {})}

    def put(self, param: Tensor, placed: State) -> None:
        """Gives a parameter its new state, which :meth:`placed` has made."""
        self.optimizer.state[param] = placed

    def forget_tables(self, *, anew: bool = False) -> None:
        """Ends a load. Nothing is cached here."""

    def is_counter(self, key: str, value: Any) -> bool:
        """Whether a value of a param group was put there by a step."""
        return isinstance(value, int | float | Tensor) and key not in self.optimizer.defaults

    def adopt(self, state_dict: Mapping[str, Any]) -> tuple[State, dict[Tensor, State]]:
        """Divides a state dict, of quantized state or of the bare optimizer, into the inner optimizer's and the rest.

        Returns:
            A state dict with the param groups, and of state only numbers, for the inner optimizer to load; and the
            state of all parameters, as it is kept.

        Raises:
            ValueError: the state was quantized in another way, is damaged, or is of other parameters.
        """
        saved, states = checked_containers(state_dict)
        groups, numbers, adopted = self.optimizer.param_groups, dict(states), {}
        saved = by_name(saved, groups)
        self.optimizer.check_group(*saved)
        for number, (saved_group, group) in enumerate(zip(saved, groups, strict=True)):
            for position, (index, param) in enumerate(zip(saved_group["params"], group["params"], strict=True)):
                name = listed_name(group, number, position)
                if entries := checked_entries(states.get(index), name):
                    with reading(name):
                        adopted[param] = new = self._adopted(param, saved_group, entries, name)
                    numbers[index] = {key: x for key, x in new.items() if not isinstance(x, Tensor) or not x.dim()}
        plain = [{key: x for key, x in group.items() if key not in self.format} for group in saved]
        return {**state_dict, "state": numbers, "param_groups": plain}, adopted

    def _adopted(self, param: Tensor, saved: Mapping[str, Any], loaded: Mapping[str, Any], name: str) -> State:
        """A parameter's loaded state as it is kept."""
        shard, is_coded = shard_of(param), "codec" in saved
        names = coded_names(loaded) if is_coded else self.entries.names(shard, param, loaded)
        if is_coded:
            self.entries.saved_options(saved, names, exact=True)
        spec = self.entries.spec(shard, names)
        mine = {*spec.moment_entries, *names}
        kept = {key: _on_device(shard, param, saved, key, x) for key, x in loaded.items() if key not in mine}
        if not names:
            return kept
        for name_ in names:
            key = name_ + DTYPE
            if is_coded and key in kept:
                _check_dtype(key, kept[key])
            elif not is_coded and loaded[name_].dtype != param.dtype:
                kept[key] = loaded[name_].dtype
        form = state_of(shard, spec)
        form.check_loaded({key: x for key, x in loaded.items() if key in mine}, name, of_torch=True)
        state = form.adopt(loaded, param.device, name)
        form.check_local(state, name)
        coded = {key: shard.local(state[key]) for key in spec.moment_entries}
        return {**kept, **self.entries.placed(shard, param, spec, coded, {})}


def _kept(shard: Shard, key: str, x: Any) -> KeptEntry:
    """The form of an entry that is not quantized; ``x`` has a dtype and a global shape.

    Raises:
        ValueError: no save wrote it, or ranks may have different ones.
    """
    (name, _, kind), shape = key.partition(":"), tuple(x.shape)
    if kind == "dtype":
        _check_dtype(name, x.dtype)
    elif kind and (shape or _NUMBERS.get(kind) != x.dtype):
        raise ValueError(f"got {key!r:.80} of {x.dtype} and shape {shape}, expected a number; load another checkpoint")
    is_whole = not shape or shape != shard.global_shape
    if is_whole and shape and shard.local_shape != shard.global_shape:
        raise ValueError(
            f"got a state entry {name!r:.80} of shape {shape} for a part of a parameter of shape {shard.global_shape}, "
            "expected numbers, and tensors of the parameter's shape; use an optimizer that is element by element"
        )
    return KeptEntry(key, EntryFormat(shape if is_whole else shard.local_shape, x.dtype, (0,)), is_whole)


def _check_dtype(key: str, dtype: object) -> None:
    if not any(dtype is coded for coded in CODED_DTYPES):
        raise ValueError(f"got {key} as {dtype}, expected torch.float32 or one of 16 bits; load an undamaged state")


def _packed(key: str, value: Any) -> tuple[str, Tensor]:
    """The name and the tensor that stand for an entry in a checkpoint.

    Raises:
        ValueError: no tensor can stand for it.
    """
    kind = type(value).__name__
    if not set(key) & set(".:"):
        if isinstance(value, Tensor):
            return key, value.detach()
        if isinstance(value, torch.dtype):
            return f"{key}:dtype", torch.zeros((), dtype=value, device="cpu")
        if kind in _NUMBERS and not (kind == "int" and abs(value) >= 2**63):
            return f"{key}:{kind}", torch.tensor(value, dtype=_NUMBERS[kind], device="cpu")
    raise ValueError(
        f"got a state entry {key!r} of {kind}, expected tensors and numbers, and no '.' and ':' in names; save "
        "optimizer.state_dict() with torch.save"
    )


def _unpacked(key: str, x: Tensor) -> tuple[str, Any]:
    """The inverse of :func:`_packed`."""
    name, _, kind = key.partition(":")
    return name, x.dtype if kind == "dtype" else x.item() if kind else x


def _on_device(shard: Shard, param: Tensor, options: Mapping[str, Any], key: str, value: Any) -> Any:
    """A copy of an entry that is not quantized, on the device and in the memory order of the parameter."""
    if not isinstance(value, Tensor):
        return value
    if key == "step":  # as in Optimizer.load_state_dict
        step = value.detach().clone()
        return step.to(param.device, torch.float32) if options.get("fused") or options.get("capturable") else step
    local, like = local_of(shard, value).detach(), local_of(shard, param)
    if not local.dim() or local.shape != like.shape:
        return local.to(param.device, copy=True)
    return shard.like_parameter(torch.empty_like(like, dtype=local.dtype).copy_(local).detach())
