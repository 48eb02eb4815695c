"""State entries by name: which are quantized, which of these are never below zero, and their codes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardopt.codec import Moment
from shardopt.layout import Shard, is_quantized
from shardopt.state.options import DEFAULTS, check_options
from shardopt.state.slice_spec import SliceSpec
from shardopt.state.tensor_state import Slice, TensorState

State = dict[str, Any]

#: Averages of squares, of magnitudes or of variances, and sums of squares. Other names are signed.
UNSIGNED = {
    *("exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf", "grad_sum_sq", "fim", "hessian"),
    *("exp_avg_var", "max_exp_avg_var", "variance_ma", "max_variance_ma"),
}
#: Copies of the weights, whose errors would go straight into the weights.
WEIGHT_COPIES = {"z", "x0", "p0", "ax", "slow_params", "slow_buffer", "lookahead_params"}
#: Averages over so many steps that an 8-bit code would drop what a step adds to them: coded in 16 bits.
WIDE = {"exp_avg_slow"}
#: Sizes of Rprop's steps, which grow and shrink by factors.
STEP_SIZES = {"step_size"}
#: Of centered RMSprop, which takes the root of ``square_avg - grad_avg**2``: errors of codes would put it below zero.
CENTERED = {"grad_avg", "square_avg"}

#: The dtypes of entries that are quantized, beside the parameter's: double precision would be lost in codes.
CODED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Ends of the names of codes and scales, and of the dtype of an entry in floats that is not the parameter's.
CODING_ENDS, DTYPE = ("_codes", "_scales"), "_dtype"
#: Ends the codec's name in state dicts and checkpoints: shardopt's own optimizers code some moments in units of others.
_BY_ENTRY = " by entry"


def coded_names(state: Collection[str]) -> list[str]:
    """The names of the entries that are stored as codes and scales, sorted."""
    return sorted({key.removesuffix(end) for key in state for end in CODING_ENDS if key.endswith(end)})


def local_of(shard: Shard, x: Tensor) -> Tensor:
    """The plain tensor with this rank's part of one that may be plain already."""
    return shard.local(x) if hasattr(x, "to_local") else x


class Entries:
    """Decides by name which entries are quantized and how, so that all ranks decide alike.

    Attributes:
        options: how entries are coded, as options of a param group of shardopt's.
        unsigned: names of entries that are never below zero.
        checked: names among these whose values each step checks.
        kept: names of entries that stay as they are.
        given: names that the user gave.
    """

    def __init__(
        self, options: Mapping[str, Any], unsigned: Iterable[str], keep: Iterable[str], *, is_tested: bool = True
    ) -> None:
        self.options = {**DEFAULTS, **options}
        more, kept = frozenset(unsigned), frozenset(keep)
        self.given = more | kept
        self.unsigned = UNSIGNED | more
        self.checked = more if is_tested else self.unsigned
        self.kept = WEIGHT_COPIES | STEP_SIZES | kept

    @property
    def format(self) -> dict[str, Any]:
        """The options in the param groups of a state dict or checkpoint, without which codes cannot be decoded."""
        options = {option: self.options[option] for option in ("block_size", "min_quantized_numel")}
        return {"codec": self.options["codec"] + _BY_ENTRY, **options, "unsigned": sorted(self.unsigned)}

    def saved_options(self, saved: Mapping[str, Any], names: Collection[str], *, exact: bool = False) -> dict[str, Any]:
        """The options with which the entries of these names in a state dict or checkpoint were coded.

        Args:
            saved: the options of a param group there.
            names: the entries.
            exact: whether codec and block size must be those of this run.

        Raises:
            ValueError: the options are not those of quantize_state; or entries were coded with other signs than here,
                or for parameters of other sizes.
        """
        got, expected = {key: saved.get(key) for key in self.format}, self.format
        codec, signs = got["codec"], got["unsigned"]
        if isinstance(signs, list | tuple) and all(isinstance(name, str) for name in signs):
            got["unsigned"] = expected["unsigned"]
            other = [name for name in names if (name in signs) != (name in self.unsigned)]
            if other:
                was, now = ("unsigned" if other[0] in of else "signed" for of in (signs, self.unsigned))
                raise ValueError(
                    f"got {other[0]} saved as {was}, expected {now}; pass quantize_state the unsigned= of the run that "
                    "saved it, or load what state_dict(dequantize=True) gives"
                )
        options = {**self.options, "codec": str(codec).removesuffix(_BY_ENTRY), "block_size": got["block_size"]}
        if isinstance(codec, str) and codec.endswith(_BY_ENTRY) and not exact:
            check_options(options)
            got |= {key: expected[key] for key in ("codec", "block_size")}
        for key, value in expected.items():
            if got[key] != value:
                raise ValueError(
                    f"got state saved with {key}={got[key]!r:.80}, expected {value!r:.80}; pass quantize_state the "
                    "options of the run that saved it, or load what state_dict(dequantize=True) gives"
                )
        return options

    def spec(self, shard: Shard, names: Iterable[str], options: Mapping[str, Any] | None = None) -> SliceSpec:
        """The form of the quantized entries of these names, each in units of its own; by default coded as here."""
        moments = tuple(Moment(name, name not in self.unsigned, own_units=True, wide=name in WIDE) for name in names)
        return SliceSpec.of(shard, torch.float32, options or self.options, moments)

    def is_quantized(self, shard: Shard) -> bool:
        """Whether entries of a parameter's shape are quantized: by its global shape, and not for StableEmbedding."""
        return not shard.float32_state and is_quantized(shard.global_shape, self.options["min_quantized_numel"])

    def names(self, shard: Shard, param: Tensor, state: Mapping[str, Any]) -> list[str]:
        """The entries that are to be quantized in a state in floats, whose tensors are laid out like ``param``."""
        kept = self.kept | CENTERED if state.keys() >= CENTERED else self.kept
        return sorted(
            name
            for name, x in (state.items() if self.is_quantized(shard) else ())
            if isinstance(x, Tensor) and x.is_floating_point() and x.dtype in (*CODED_DTYPES, param.dtype)
            if x.shape == param.shape and name not in kept and not name.endswith(CODING_ENDS)
        )

    def decoded(self, shard: Shard, param: Tensor, stored: Mapping[str, Any]) -> State:
        """A state in floats, up to rounding errors of the codec; its tensors are laid out like ``param``.

        Args:
            shard: what part of a parameter ``param`` is.
            param: the parameter, or the plain local tensor of a DTensor.
            stored: the state as it is kept.
        """
        names, is_local = coded_names(stored), not hasattr(param, "to_local")
        coding = {name + end for name in names for end in (*CODING_ENDS, DTYPE)}
        kept = {key: x for key, x in stored.items() if key not in coding}
        floats = {key: local_of(shard, x) if is_local and isinstance(x, Tensor) else x for key, x in kept.items()}
        if names:
            spec, local = self.spec(shard, names), local_of(shard, param).detach()
            coded = {key: shard.local(stored[key]).to(local.device) for key in spec.moment_entries}
            for name, value in zip(names, spec.decode(coded), strict=True):
                x = value.to(stored.get(name + DTYPE, param.dtype))
                if not local.is_contiguous():  # fused kernels take elements in the order of memory
                    x = torch.empty_like(local, dtype=x.dtype).copy_(x)
                floats[name] = x if is_local else shard.like_parameter(x)
        return floats

    def encoded(self, shard: Shard, param: Tensor, floats: Mapping[str, Any], stored: Mapping[str, Any]) -> State:
        """The state to keep for one in floats, whose tensors are laid out like ``param``: the inverse of ``decoded``.

        ``stored`` is the former state, whose memory is used again.

        Raises:
            ValueError: an unsigned entry has a value below zero.
        """
        values = {name: local_of(shard, floats[name]) for name in self.names(shard, param, floats)}
        state: State = {name + DTYPE: x.dtype for name, x in values.items() if x.dtype != param.dtype}
        for key, x in floats.items():
            if key not in values:
                is_local = isinstance(x, Tensor) and not hasattr(x, "to_local") and x.dim() > 0
                state[key] = shard.like_parameter(x) if is_local and x.shape == shard.local_shape else x
            elif key in self.checked and values[key].numel() and (least := values[key].amin()) < 0:
                raise ValueError(
                    f"{key}: got {float(least):g} in a state entry that is unsigned, expected numbers >= 0; leave it "
                    f"out of unsigned=, or pass keep=({key!r},) if it is in shardopt's table"
                )
        if values:
            spec = self.spec(shard, values)
            coded = spec.encode(list(values.values()))
            state.update(self.placed(shard, param, spec, coded, stored))
        return state

    def placed(
        self, shard: Shard, param: Tensor, spec: SliceSpec, coded: Mapping[str, Tensor], stored: Mapping[str, Any]
    ) -> State:
        """Local codes and scales as they are kept: sharded like the parameter, in the memory of former ones if any."""
        if coded.keys() <= stored.keys():
            for key, local in coded.items():
                shard.local(stored[key]).copy_(local)
            return {key: stored[key] for key in coded}
        if self.options["offload"] == "state" and param.device.type != "cpu":
            coded = {k: torch.empty_like(x, device="cpu", pin_memory=True).copy_(x) for k, x in coded.items()}
        else:
            coded = {key: x.to(param.device) for key, x in coded.items()}
        return state_of(shard, spec).join([coded])


def state_of(shard: Shard, spec: SliceSpec) -> TensorState:
    """The state of a tensor that is one slice."""
    return TensorState(shard, (Slice(spec),), spec.moments, spec.weights)
