"""Chooses which state entries of a wrapped optimizer are quantized, and encodes, decodes, loads and saves them.

:class:`Entries` has the methods of :class:`shardopt.optim.internals.Internals` that shardopt.checkpoint calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from shardopt.codec import Moment
from shardopt.layout import Shard, is_quantized, shard_of
from shardopt.optim.loading import as_value_error, checked_containers, checked_entries, reorder_groups
from shardopt.state.loaded_entries import check_entry
from shardopt.state.names import param_name
from shardopt.state.options import check_options
from shardopt.state.slice_spec import EntryFormat, SliceSpec, StateDict
from shardopt.state.tensor_spec import TensorSpec
from shardopt.wrapper.known import full_name, is_elementwise, is_known

#: Entries that are never negative: averages of squares, magnitudes or variances, and sums of squares.
UNSIGNED = {
    *("exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf", "grad_sum_sq", "fim", "hessian"),
    *("exp_avg_var", "max_exp_avg_var", "variance_ma", "max_variance_ma"),
}
#: Copies of the weights, never quantized: the optimizer writes them, or mixes of them, back into the weights.
WEIGHT_COPIES = {"z", "x0", "p0", "ax", "slow_params", "slow_buffer", "lookahead_params"}
#: Averages over so many steps that 8 bits would round a step's small change away: coded in 16 bits.
WIDE = {"exp_avg_slow"}
#: Kept in floats if both exist: rounding could make centered RMSprop's ``square_avg - grad_avg**2`` negative.
CENTERED = {"grad_avg", "square_avg"}

#: Suffixes that mark the two stored entries, codes and scales, of one quantized entry.
CODING_ENDS = ("_codes", "_scales")
#: Suffix of the saved codec's name: every entry has scales of its own, unlike in shardopt's own optimizers.
_BY_ENTRY = " by entry"
#: Prefix of the optimizer's name in checkpoints.
WRAPPED_PREFIX = "quantize_state of "
#: Checkpoints store Python numbers as 0-d tensors of these dtypes, with the type in the entry's name: ``step:int``.
_NUMBERS: dict[str, torch.dtype] = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}


def quantized_names(state: Collection[str]) -> list[str]:
    """Sorted names of the quantized entries: ``exp_avg`` for stored ``exp_avg_codes`` and ``exp_avg_scales``."""
    return sorted({key.removesuffix(end) for key in state for end in CODING_ENDS if key.endswith(end)})


def local_if_sharded(shard: Shard, x: Any) -> Any:
    """Returns a DTensor's local tensor on this rank; any other value, such as a step count, unchanged."""
    return shard.local(x) if hasattr(x, "to_local") else x


class Entries:
    """Decides by an entry's name, shape and dtype whether and how to quantize it, so that all ranks decide alike.

    Attributes:
        options: codec, block size and the other options that a param group of shardopt's own optimizers has.
        unsigned: names of entries that are never below zero.
        checked: names to check for negative numbers: all ``unsigned``, or of a tested optimizer only the user's.
        never_quantized: names of entries that stay as they are.
        only_made_state: whether the last step was a dummy step, which only creates state: the next step drops it.
    """

    def __init__(
        self, inner: Optimizer, options: Mapping[str, Any], unsigned: Iterable[str], keep: Iterable[str]
    ) -> None:
        self.inner = inner
        self.options = options
        given = frozenset(unsigned)
        self.unsigned = UNSIGNED | given
        self.checked = given if is_known(inner) else self.unsigned
        self.never_quantized = WEIGHT_COPIES | {"step_size"} | frozenset(keep)  # Rprop's step sizes change by factors
        self.only_made_state = False

    @property
    def format(self) -> dict[str, Any]:
        """Options that every saved param group of a state dict or checkpoint gets, as decoding codes needs them."""
        return self._format(self.options)

    def _format(self, options: Mapping[str, Any]) -> dict[str, Any]:
        plain = {option: options[option] for option in ("block_size", "min_quantized_numel")}
        return {"codec": options["codec"] + _BY_ENTRY, **plain, "unsigned": sorted(self.unsigned)}

    def check_format(self, saved: Mapping[str, Any], names: Collection[str], options: Mapping[str, Any]) -> None:
        """Raises ValueError unless ``saved``, the param group of entries ``names``, has the format of ``options``."""
        for key, expected in self._format(options).items():
            got = saved.get(key)
            if key == "unsigned" and isinstance(got, list | tuple):  # the signs of entries not in ``names`` may differ
                got, expected = ([name for name in names if name in unsigned] for unsigned in (got, expected))
            if got != expected:
                raise ValueError(
                    f"got state saved with {key}={got!r:.80}, expected {expected!r:.80}; pass quantize_state the "
                    "options of the run that saved it, or load what state_dict(dequantize=True) gives"
                )

    def checkpoint_options(self, saved: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
        """This run's options, but with the codec and block size of a checkpoint, which a load can convert.

        Raises ValueError if quantize_state did not save the entries, or if other options differ.
        """
        codec, options = str(saved.get("codec")), self.options
        if codec.endswith(_BY_ENTRY):
            options = {**options, "codec": codec.removesuffix(_BY_ENTRY), "block_size": saved.get("block_size")}
            check_options(options)
        self.check_format(saved, names, options)
        return options

    def coded_spec(self, shard: Shard, names: Iterable[str], options: Mapping[str, Any] | None = None) -> TensorSpec:
        """Spec of the named quantized entries, each with its own scales. ``options`` overrides codec and block size."""
        moments = tuple(Moment(name, name not in self.unsigned, own_units=True, wide=name in WIDE) for name in names)
        spec = SliceSpec.of(shard, torch.float32, options or self.options, moments)
        return TensorSpec(shard, (replace(spec, unquantized=()),))

    def is_quantized(self, shard: Shard) -> bool:
        """Whether state of this global shape is quantized, and not marked to stay in floats (StableEmbedding)."""
        return not shard.float32_state and is_quantized(shard.global_shape, self.options["min_quantized_numel"])

    def decode_state(self, param: Tensor, stored: Mapping[str, Any]) -> StateDict:
        """Returns a parameter's state with quantized entries decoded to its dtype, and other entries unchanged."""
        names, shard = quantized_names(stored), shard_of(param)
        floats = {key: x for key, x in stored.items() if not key.endswith(CODING_ENDS)}
        local = shard.local(param).detach()
        for name, value in self.coded_spec(shard, names).decode(stored).items() if names else ():
            # With the parameter's strides: fused kernels walk through both in memory order.
            floats[name] = shard.like_parameter(torch.empty_like(local).copy_(shard.local(value)))
        return floats

    def encode_state(self, param: Tensor, floats: Mapping[str, Any]) -> StateDict:
        """Quantizes the entries of a parameter's shape and dtype, for storage: the inverse of :meth:`decode_state`.

        Raises ValueError if an unsigned entry has a value below zero.
        """
        shard = shard_of(param)
        never = self.never_quantized | (CENTERED if floats.keys() >= CENTERED else set())
        values = {}
        for name, x in sorted(floats.items()) if self.is_quantized(shard) else ():
            is_alike = isinstance(x, Tensor) and x.dtype == param.dtype and x.shape == param.shape
            if is_alike and name not in never:
                values[name] = x
        state: StateDict = {key: x for key, x in floats.items() if key not in values}
        for name in values.keys() & self.checked:
            x = shard.local(values[name])
            if x.numel() and (least := x.amin()) < 0:
                raise ValueError(
                    f"{name}: got {float(least):g} in a state entry that is unsigned, expected numbers >= 0; leave it "
                    f"out of unsigned=, or pass keep=({name!r},) if it is in shardopt's table"
                )
        return {**state, **self.coded_spec(shard, values).encode(values)} if values else state

    @property
    def name(self) -> str:
        """The name under which a checkpoint records this optimizer; a load compares it."""
        return WRAPPED_PREFIX + (full_name(self.inner) if is_known(self.inner) else type(self.inner).__qualname__)

    def spec_of_entries(
        self, shard: Shard, dtype: torch.dtype, options: Mapping[str, Any], entries: Mapping[str, Any]
    ) -> SliceSpec:
        """Spec of a parameter's state that has these entries, of which names, global shapes and dtypes are read.

        ``options`` are those with which a checkpoint's state was quantized; without a codec in them, this run's apply.
        """
        names = quantized_names(entries)
        saved_options = self.checkpoint_options(options, names) if "codec" in options else None
        quantized = self.coded_spec(shard, names, saved_options)
        others = {key: _unquantized_format(shard, key, x) for key, x in entries.items() if key not in quantized.entries}
        return replace(quantized.slices[0], unquantized=tuple(others.items()))

    def current_state(self, param: Tensor, group: Mapping[str, Any]) -> tuple[TensorSpec, StateDict]:
        """Spec and entries of a parameter's present state as a checkpoint saves it: Python numbers become tensors."""
        shard, state = shard_of(param), self.inner.state.get(param, {})
        tensors = dict(_checkpoint_entry(key, value) for key, value in state.items())
        return TensorSpec(shard, (self.spec_of_entries(shard, param.dtype, {}, tensors),)), tensors

    def state_from_checkpoint(
        self, param: Tensor, options: Mapping[str, Any], states: Sequence[dict[str, Tensor]]
    ) -> StateDict:
        """Makes a parameter's new state, on its device, from a checkpoint's entries: the only item of ``states``."""
        shard = shard_of(param)
        # Entries such as "step:int" become Python numbers again: undoes _checkpoint_entry.
        state: StateDict = {key.partition(":")[0]: x.item() if ":" in key else x for key, x in states[0].items()}
        spec = self.coded_spec(shard, quantized_names(state))
        quantized = spec.join([{key: state[key].to(param.device) for key in spec.entries}])
        others = {key: x for key, x in state.items() if key not in quantized}
        return {**{key: _copy_to_device(shard, param, options, key, x) for key, x in others.items()}, **quantized}

    def install(self, param: Tensor, made: StateDict) -> None:
        """Replaces a parameter's state by the result of :meth:`state_from_checkpoint`."""
        self.inner.state[param] = made

    def invalidate_steps(self, *, discard_gradients: bool = False) -> None:
        """Called after a load, so that the next step keeps the loaded state. There are no gradients to discard."""
        self.only_made_state = False

    def is_set_by_steps(self, key: str, value: Any) -> bool:
        """Whether steps added this number to the param group; a load removes it if the checkpoint lacks it."""
        return isinstance(value, int | float | Tensor) and key not in self.inner.defaults

    def convert_state_dict(self, state_dict: Mapping[str, Any]) -> tuple[StateDict, dict[Tensor, StateDict]]:
        """Checks and converts a state dict for :meth:`QuantizedState.load_state_dict`, which documents the errors.

        Returns a state dict for the inner optimizer, which has only the numbers of the state, as the inner optimizer
        would cast codes to the parameters' dtype; and the state to store for each parameter, with entries quantized.
        """
        saved, states = checked_containers(state_dict)
        groups, numbers, converted = self.inner.param_groups, dict(states), {}
        saved = reorder_groups(saved, groups)
        for number, (saved_group, group) in enumerate(zip(saved, groups, strict=True)):
            for position, (index, param) in enumerate(zip(saved_group["params"], group["params"], strict=True)):
                name = param_name(group, number, position)
                if entries := checked_entries(states.get(index), name):
                    with as_value_error(name):
                        converted[param] = new = self._convert(param, saved_group, entries, name)
                    numbers[index] = {key: x for key, x in new.items() if not isinstance(x, Tensor) or not x.dim()}
        plain = [{key: x for key, x in group.items() if key not in self.format} for group in saved]
        return {**state_dict, "state": numbers, "param_groups": plain}, converted

    def _convert(self, param: Tensor, saved: Mapping[str, Any], loaded: Mapping[str, Any], name: str) -> StateDict:
        """Checks a parameter's loaded entries and returns its state to store: floats are quantized, codes are kept."""
        shard, names = shard_of(param), []
        if "codec" in saved:  # else the inner optimizer's own state dict, which has no codes
            names = quantized_names(loaded)
            self.check_format(saved, names, self.options)
        spec = self.coded_spec(shard, names)
        quantized = {key: x for key, x in loaded.items() if key in spec.entries}
        spec.check_loaded(quantized, name, may_lack_low_bits=True)
        others = {key: x for key, x in loaded.items() if key not in quantized}
        if is_elementwise(self.inner, self.inner.param_groups):  # other optimizers have entries of other shapes, too
            like = shard.like_parameter(torch.empty(shard.local_shape, device="meta"))
            for key, x in others.items():
                if isinstance(x, Tensor) and x.dim():
                    check_entry(x, like, key, name)
        floats = {key: _copy_to_device(shard, param, saved, key, x) for key, x in others.items()}
        state = {**self.encode_state(param, floats), **spec.state_from_loaded(quantized, param.device, name)}
        self.coded_spec(shard, quantized_names(state)).check_values(state, name)
        return state


def _unquantized_format(shard: Shard, key: str, x: Any) -> EntryFormat:
    """Format of an unquantized entry of a checkpoint, given dtype and global shape of ``x``.

    Raises ValueError if ``step:int``, say, is no integer, or a sharded parameter has an entry of another shape.
    """
    (name, _, kind), shape = key.partition(":"), tuple(x.shape)
    if kind and (shape or _NUMBERS.get(kind) != x.dtype):
        raise ValueError(f"got {key!r:.80} of {x.dtype} and shape {shape}, expected a number; load another checkpoint")
    if shape == shard.global_shape:
        return EntryFormat(shard.local_shape, x.dtype, (0,))
    if shape and shard.local_shape != shard.global_shape:
        raise ValueError(
            f"got a state entry {name!r:.80} of shape {shape} for a part of a parameter of shape {shard.global_shape}, "
            "expected numbers, and tensors of the parameter's shape; use an optimizer that is element by element"
        )
    return EntryFormat(shape, x.dtype, (0,))


def _checkpoint_entry(key: str, value: Any) -> tuple[str, Tensor]:
    """A checkpoint's name and tensor for a state entry. Raises ValueError if it is neither tensor nor number."""
    kind = type(value).__name__
    if not set(key) & set(".:"):
        if isinstance(value, Tensor):
            return key, value.detach()
        if kind in _NUMBERS and not (kind == "int" and abs(value) >= 2**63):
            return f"{key}:{kind}", torch.tensor(value, dtype=_NUMBERS[kind], device="cpu")
    raise ValueError(
        f"got a state entry {key!r} of {kind}, expected tensors and numbers, and no '.' and ':' in names; save "
        "optimizer.state_dict() with torch.save"
    )


def _copy_to_device(shard: Shard, param: Tensor, options: Mapping[str, Any], key: str, value: Any) -> Any:
    """Copies a loaded, unquantized entry to the parameter's device; one of the parameter's shape gets its strides."""
    if not isinstance(value, Tensor):
        return value
    if key == "step":  # stays where it is unless the param group (``options``) is fused or capturable, as in torch
        step = value.detach().clone()
        return step.to(param.device, torch.float32) if options.get("fused") or options.get("capturable") else step
    local, like = local_if_sharded(shard, value).detach(), local_if_sharded(shard, param)
    if not local.dim() or local.shape != like.shape:
        return local.to(param.device, copy=True)
    return shard.like_parameter(torch.empty_like(like, dtype=local.dtype).copy_(local).detach())
