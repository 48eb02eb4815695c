"""StateDict entries: which are quantized, their codes, how they are loaded, and what checkpoints see of them.

The functions that checkpoints call have the names that they have in :class:`shardopt.optim.internals.Internals`.
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
from shardopt.optim.loading import by_name, checked_containers, checked_entries, reading
from shardopt.state.loaded_entries import check_entry
from shardopt.state.names import listed_name
from shardopt.state.options import check_options
from shardopt.state.slice_spec import EntryFormat, SliceSpec, StateDict
from shardopt.state.tensor_spec import TensorSpec
from shardopt.wrapper.known import full_name, is_elementwise, is_known

#: Averages of squares, of magnitudes or of variances, and sums of squares. Other names are signed.
UNSIGNED = {
    *("exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf", "grad_sum_sq", "fim", "hessian"),
    *("exp_avg_var", "max_exp_avg_var", "variance_ma", "max_variance_ma"),
}
#: Copies of the weights, whose errors would go straight into the weights.
WEIGHT_COPIES = {"z", "x0", "p0", "ax", "slow_params", "slow_buffer", "lookahead_params"}
#: Averages over so many steps that an 8-bit code would drop what a step adds to them: coded in 16 bits.
WIDE = {"exp_avg_slow"}
#: Of centered RMSprop, which takes the root of ``square_avg - grad_avg**2``: errors of codes would put it below zero.
CENTERED = {"grad_avg", "square_avg"}

#: Ends of the names of codes and scales.
CODING_ENDS = ("_codes", "_scales")
#: Ends the codec's name in state dicts and checkpoints: shardopt's own optimizers code some moments in units of others.
_BY_ENTRY = " by entry"
#: Prefix of the optimizer's name in checkpoints.
OF_QUANTIZE_STATE = "quantize_state of "
#: Numbers in state are 0-d tensors in a checkpoint, with their types in the entries' names: ``step:int``.
_NUMBERS: dict[str, torch.dtype] = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}


def coded_names(state: Collection[str]) -> list[str]:
    """The names of the entries that are stored as codes and scales, sorted."""
    return sorted({key.removesuffix(end) for key in state for end in CODING_ENDS if key.endswith(end)})


def local_of(shard: Shard, x: Any) -> Any:
    """The plain tensor with this rank's part of a DTensor; anything else as it is."""
    return shard.local(x) if hasattr(x, "to_local") else x


class Entries:
    """Decides by name which entries are quantized and how, so that all ranks decide alike.

    Attributes:
        inner: the optimizer whose state this is.
        options: how entries are coded, as options of a param group of shardopt's.
        unsigned: names of entries that are never below zero.
        checked: names among these whose values each step checks.
        kept: names of entries that stay as they are.
        was_made: whether the present state is of a step that a framework took to have state made.
    """

    def __init__(
        self, inner: Optimizer, options: Mapping[str, Any], unsigned: Iterable[str], keep: Iterable[str]
    ) -> None:
        self.inner = inner
        self.options = options
        given = frozenset(unsigned)
        self.unsigned = UNSIGNED | given
        self.checked = given if is_known(inner) else self.unsigned
        self.kept = WEIGHT_COPIES | {"step_size"} | frozenset(keep)  # sizes of Rprop's steps change by factors
        self.was_made = False

    @property
    def format(self) -> dict[str, Any]:
        """The options in the param groups of a state dict or checkpoint, without which codes cannot be decoded."""
        options = {option: self.options[option] for option in ("block_size", "min_quantized_numel")}
        return {"codec": self.options["codec"] + _BY_ENTRY, **options, "unsigned": sorted(self.unsigned)}

    def saved_options(self, saved: Mapping[str, Any], names: Collection[str], *, exact: bool = False) -> dict[str, Any]:
        """The options with which the entries of these names in a state dict or checkpoint were coded.

        If ``exact``, codec and block size must be those of this run.

        Raises:
            ValueError: entries were not coded by quantize_state, or with other signs than here.
        """
        got, expected = {key: saved.get(key) for key in self.format}, self.format
        if isinstance(signs := got["unsigned"], list | tuple):  # of other entries, they may differ
            got["unsigned"] = [name for name in names if name in signs]
            expected["unsigned"] = [name for name in names if name in self.unsigned]
        codec, block_size = str(got["codec"]), got["block_size"]
        own_options = {**self.options, "codec": codec.removesuffix(_BY_ENTRY), "block_size": block_size}
        if codec.endswith(_BY_ENTRY) and not exact:
            check_options(own_options)
            expected |= {"codec": codec, "block_size": block_size}
        for key, value in expected.items():
            if got[key] != value:
                raise ValueError(
                    f"got state saved with {key}={got[key]!r:.80}, expected {value!r:.80}; pass quantize_state the "
                    "options of the run that saved it, or load what state_dict(dequantize=True) gives"
                )
        return own_options

    def coding(self, shard: Shard, names: Iterable[str], options: Mapping[str, Any] | None = None) -> TensorSpec:
        """The form of the quantized entries of these names, each in units of its own; by default coded as here."""
        moments = tuple(Moment(name, name not in self.unsigned, own_units=True, wide=name in WIDE) for name in names)
        spec = SliceSpec.of(shard, torch.float32, options or self.options, moments)
        return TensorSpec(shard, (replace(spec, kept=()),))

    def is_quantized(self, shard: Shard) -> bool:
        """Whether entries of a parameter's shape are quantized: by its global shape, and not for StableEmbedding."""
        return not shard.float32_state and is_quantized(shard.global_shape, self.options["min_quantized_numel"])

    def decoded(self, param: Tensor, stored: Mapping[str, Any]) -> StateDict:
        """The state in floats, up to rounding errors of the codec."""
        names, shard = coded_names(stored), shard_of(param)
        floats = {key: x for key, x in stored.items() if not key.endswith(CODING_ENDS)}
        local = shard.local(param).detach()
        for name, value in self.coding(shard, names).decode(stored).items() if names else ():
            # In the parameter's order of memory, in which fused kernels take elements.
            floats[name] = shard.like_parameter(torch.empty_like(local).copy_(shard.local(value)))
        return floats

    def encoded(self, param: Tensor, floats: Mapping[str, Any]) -> StateDict:
        """The state to keep for one in floats: the inverse of ``decoded``.

        Raises:
            ValueError: an unsigned entry has a value below zero.
        """
        shard = shard_of(param)
        kept = self.kept | CENTERED if floats.keys() >= CENTERED else self.kept
        values = {
            name: x
            for name, x in (sorted(floats.items()) if self.is_quantized(shard) else ())
            if isinstance(x, Tensor) and x.dtype == param.dtype and x.shape == param.shape and name not in kept
        }
        state: StateDict = {key: x for key, x in floats.items() if key not in values}
        for name in values.keys() & self.checked:
            x = shard.local(values[name])
            if x.numel() and (least := x.amin()) < 0:
                raise ValueError(
                    f"{name}: got {float(least):g} in a state entry that is unsigned, expected numbers >= 0; leave it "
                    f"out of unsigned=, or pass keep=({name!r},) if it is in shardopt's table"
                )
        return {**state, **self.coding(shard, values).encode(values)} if values else state

    @property
    def name(self) -> str:
        """The optimizer's name in a checkpoint."""
        return OF_QUANTIZE_STATE + (full_name(self.inner) if is_known(self.inner) else type(self.inner).__qualname__)

    def form(
        self, shard: Shard, dtype: torch.dtype, options: Mapping[str, Any], stored: Mapping[str, Any]
    ) -> SliceSpec:
        """The form of a parameter's state with these entries, which have global shapes, and dtypes.

        ``options`` are those of the param group. With a codec they are a checkpoint's. See :meth:`saved_options`.
        """
        names = coded_names(stored)
        coding = self.coding(shard, names, self.saved_options(options, names) if "codec" in options else None)
        kept = tuple(_kept(shard, key, x) for key, x in stored.items() if key not in coding.entries)
        return replace(coding.slices[0], kept=kept)

    def held(self, param: Tensor, group: Mapping[str, Any]) -> tuple[TensorSpec, StateDict]:
        """Form and entries of a parameter's present state: tensors. See :meth:`form`."""
        shard, state = shard_of(param), self.inner.state.get(param, {})
        tensors = dict(_packed(key, value) for key, value in state.items())
        return TensorSpec(shard, (self.form(shard, param.dtype, {}, tensors),)), tensors

    def placed(self, param: Tensor, options: Mapping[str, Any], states: Sequence[dict[str, Tensor]]) -> StateDict:
        """The new state of a parameter, on its device, from the entries that were read."""
        shard = shard_of(param)
        # The inverse of _packed.
        state: StateDict = {key.partition(":")[0]: x.item() if ":" in key else x for key, x in states[0].items()}
        form = self.coding(shard, coded_names(state))
        coded = form.join([{key: state[key].to(param.device) for key in form.entries}])
        kept = {key: _on_device(shard, param, options, key, x) for key, x in state.items() if key not in coded}
        return {**kept, **coded}

    def put(self, param: Tensor, placed: StateDict) -> None:
        """Gives a parameter its new state, which :meth:`placed` has made."""
        self.inner.state[param] = placed

    def forget_tables(self, *, anew: bool = False) -> None:
        """Ends a load: the next step goes on from the present state."""
        self.was_made = False

    def is_counter(self, key: str, value: Any) -> bool:
        """Whether a value of a param group was put there by a step."""
        return isinstance(value, int | float | Tensor) and key not in self.inner.defaults

    def adopt(self, state_dict: Mapping[str, Any]) -> tuple[StateDict, dict[Tensor, StateDict]]:
        """Divides a state dict for :meth:`QuantizedState.load_state_dict`, which names the errors.

        Returns:
            A state dict with the param groups, and of state only numbers, for the inner optimizer to load; and the
            state of all parameters, as it is kept.
        """
        saved, states = checked_containers(state_dict)
        groups, numbers, adopted = self.inner.param_groups, dict(states), {}
        saved = by_name(saved, groups)
        for number, (saved_group, group) in enumerate(zip(saved, groups, strict=True)):
            for position, (index, param) in enumerate(zip(saved_group["params"], group["params"], strict=True)):
                name = listed_name(group, number, position)
                if entries := checked_entries(states.get(index), name):
                    with reading(name):
                        adopted[param] = new = self._adopted(param, saved_group, entries, name)
                    numbers[index] = {key: x for key, x in new.items() if not isinstance(x, Tensor) or not x.dim()}
        plain = [{key: x for key, x in group.items() if key not in self.format} for group in saved]
        self.was_made = False
        return {**state_dict, "state": numbers, "param_groups": plain}, adopted

    def _adopted(self, param: Tensor, saved: Mapping[str, Any], loaded: Mapping[str, Any], name: str) -> StateDict:
        """A parameter's loaded state as it is kept."""
        shard, is_coded = shard_of(param), "codec" in saved
        names = coded_names(loaded) if is_coded else []
        if is_coded:
            self.saved_options(saved, names, exact=True)
        form = self.coding(shard, names)
        coded = {key: x for key, x in loaded.items() if key in form.entries}
        form.check_loaded(coded, name, of_torch=True)
        kept = {key: x for key, x in loaded.items() if key not in coded}
        if is_elementwise(self.inner, self.inner.param_groups):  # other optimizers have other shapes, too
            like = shard.like_parameter(torch.empty(shard.local_shape, device="meta"))
            for key, x in kept.items():
                if isinstance(x, Tensor) and x.dim():
                    check_entry(x, like, key, name)
        floats = {key: _on_device(shard, param, saved, key, x) for key, x in kept.items()}
        state = {**self.encoded(param, floats), **form.adopt(coded, param.device, name)}
        self.coding(shard, coded_names(state)).check_local(state, name)
        return state


def _kept(shard: Shard, key: str, x: Any) -> tuple[str, EntryFormat]:
    """Name and form of an entry that is not quantized; ``x`` has a dtype and a global shape.

    Raises:
        ValueError: no save wrote it, or ranks may have different ones.
    """
    (name, _, kind), shape = key.partition(":"), tuple(x.shape)
    if kind and (shape or _NUMBERS.get(kind) != x.dtype):
        raise ValueError(f"got {key!r:.80} of {x.dtype} and shape {shape}, expected a number; load another checkpoint")
    is_whole = not shape or shape != shard.global_shape
    if is_whole and shape and shard.local_shape != shard.global_shape:
        raise ValueError(
            f"got a state entry {name!r:.80} of shape {shape} for a part of a parameter of shape {shard.global_shape}, "
            "expected numbers, and tensors of the parameter's shape; use an optimizer that is element by element"
        )
    return key, EntryFormat(shape if is_whole else shard.local_shape, x.dtype, (0,))


def _packed(key: str, value: Any) -> tuple[str, Tensor]:
    """The name and the tensor that stand for an entry in a checkpoint. ValueError if none can."""
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
