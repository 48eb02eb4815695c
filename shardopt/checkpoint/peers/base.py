"""Reads optimizer state of torch.optim, torchao, flashoptim and dion, under torch.optim's names of moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from shardopt.checkpoint.wording import kind_of, shown
from shardopt.codec import Codec, Moment, get_codec
from shardopt.codec.base import are_finite
from shardopt.codec.dynamic8 import dynamic_map
from shardopt.kernels.numeric import from_blocks, to_blocks
from shardopt.layout import BlockGrid

#: Entries of torch.optim's state that can be computed from the step count, and so are not imported.
DERIVED = {"mu_product"}

#: The moments that optimizers of torch.optim keep.
_MOMENTS = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf"),
    *("momentum_buffer", "square_avg", "grad_avg", "sum"),
}


class Peer:
    """Reads one package's optimizer state. The base class reads torch.optim's, whose moments are float tensors."""

    #: The package's name in errors and reports.
    name = "torch.optim"
    #: The form of the package's state, in words.
    form = "exp_avg, exp_avg_sq, momentum_buffer and the like in float"
    #: Entries of a state beside the moments that shardopt does not have, and reports as ignored.
    extra: frozenset[str] = frozenset()

    def recognizes(self, state: Mapping[str, Any]) -> bool:
        """Whether one parameter's state is from this package, by its entries, of which none is None."""
        return state.keys() <= {"step", *DERIVED, *_MOMENTS} and all(
            isinstance(state[key], Tensor) for key in _MOMENTS & set(state)
        )

    def read(
        self, state: Mapping[str, Any], group: Mapping[str, Any], expected: Sequence[Moment], name: str
    ) -> Mapping[str, Any]:
        """Renames one parameter's entries to torch.optim's names; moments become floats or a :class:`CodedMoment`.

        Args:
            state: a state of a form that :meth:`recognizes` accepts, or of torch.optim's form.
            group: the parameter's param group, as it was saved.
            expected: the moments of the optimizer that takes over the state.
            name: the parameter's name, for errors.

        Raises:
            ValueError: the state is of another kind of optimizer, or damaged.
        """
        return state

    def hyper(self, group: Mapping[str, Any], moments: Sequence[str]) -> dict[str, Any]:
        """Renames a param group's hyper-parameters to torch.optim's names, and converts their values.

        Args:
            group: the param group.
            moments: the names of the moments that the optimizer keeps.

        Raises:
            ValueError: the hyper-parameters are of another kind of optimizer.
        """
        return dict(group)


class CodedMoment(NamedTuple):
    """A quantized moment as another package keeps it: blocks of the flattened parameter, which may cross rows.

    Attributes:
        codes: uint8, the parameter's shape.
        scales: float32, ``(blocks,)``.
        block_size: elements per block.
        codec: the name of shardopt's codec with the same codes and scales; None if there is none.
        decode: function from blocks of codes ``(blocks, block_size)`` and their scales ``(blocks, 1)`` to float32.
    """

    codes: Tensor
    scales: Tensor
    block_size: int
    codec: str | None
    decode: Callable[[Tensor, Tensor], Tensor]

    def values(self) -> Tensor:
        """Decodes the moment to float32, in the parameter's shape."""
        (blocks,) = to_blocks(self.codes.reshape(1, -1), self.block_size)
        decoded = self.decode(blocks, self.scales[:, None])
        return from_blocks(decoded[None], self.codes.numel()).reshape(self.codes.shape)

    def is_of(self, codec: Codec, grid: BlockGrid) -> bool:
        """Whether codes and scales can be copied as they are: the same codec and block size, no block across rows."""
        aligned = grid.row_numel % grid.block_size == 0 or grid.rows == 1
        return self.codec == codec.name and aligned and self.block_size == grid.block_size


def of_map(codes: Tensor, scales: Tensor, values: Tensor, block_size: int, *, signed: bool) -> CodedMoment:
    """Makes a moment whose codes index a table of 256 ``values``; can be copied if the table is dynamic8's."""
    expected = dynamic_map(signed=signed).to(values.device)
    same = values.dtype == expected.dtype and torch.equal(values, expected)

    def decode(blocks: Tensor, scales: Tensor) -> Tensor:
        return values[blocks.int()] * scales

    return CodedMoment(codes, scales, block_size, "dynamic8" if same else None, decode)


def check_blocks(codes: Tensor, scales: Tensor, block_size: int, what: str) -> None:
    """Checks that there is one scale per block of codes, finite and not negative.

    Raises:
        ValueError: the number of scales is not that of the blocks, or a scale cannot be used.
    """
    blocks = -(-codes.numel() // block_size)
    if scales.shape != (blocks,):
        raise ValueError(
            f"{what}: got scales of shape {tuple(scales.shape)} for {codes.numel()} codes, expected ({blocks},) of "
            f"blocks of {block_size}"
        )
    if not are_finite(scales, signed=False):
        raise ValueError(
            f"{what}: got scales with NaN or Inf, or below zero, expected finite ones >= 0; reset this parameter's "
            "state"
        )


def is_dense(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a strided tensor of real numbers, not on the meta device."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_meta or value.is_complex())


def are_floats(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a strided tensor of a float dtype, not on the meta device."""
    return is_dense(value) and value.dtype.is_floating_point


def is_map(values: object) -> TypeGuard[Tensor]:
    """Whether a value is a float tensor that can decode 8-bit codes: one value for each of 256 codes."""
    return are_floats(values) and values.shape == (256,)


_EIGHT_BIT = "OptimState8bit"
_OTHERS = ("OptimState4bit", "OptimStateFp8")  # decoded to float: no codec of shardopt has their codes


class Torchao(Peer):
    """torchao: moments are tensor subclasses if the block size divides the parameter, else float tensors.

    The subclasses are recognized by name and attributes, so that torchao need not be installed.
    """

    name = "torchao"
    form = f"exp_avg and exp_avg_sq as {_EIGHT_BIT}, {' or '.join(_OTHERS)}"

    def recognizes(self, state: Mapping[str, Any]) -> bool:
        return any(type(value).__name__ in (_EIGHT_BIT, *_OTHERS) for value in state.values())

    def read(
        self, state: Mapping[str, Any], group: Mapping[str, Any], expected: Sequence[Moment], name: str
    ) -> Mapping[str, Any]:
        moments = {moment.name: moment for moment in expected if moment.name in state}
        return {**state, **{k: self._moment(state[k], f"{name}: {k}", m.signed) for k, m in moments.items()}}

    def _moment(self, value: Any, what: str, signed: bool) -> Any:
        kind = type(value).__name__
        if kind in _OTHERS:
            return value.dequantize()
        if kind != _EIGHT_BIT:
            return value
        codes, scales, values, of_sign = (getattr(value, key, None) for key in ("codes", "scale", "qmap", "signed"))
        if not is_dense(codes) or codes.dtype != torch.uint8 or of_sign is not signed:
            raise ValueError(
                f"{what}: got codes of {kind_of(codes)}, signed={shown(of_sign)}, expected uint8, signed={signed}"
            )
        if not are_floats(scales) or not is_map(values):
            raise ValueError(
                f"{what}: got scales of {kind_of(scales)} and a map of {kind_of(values)}, expected floats, and 256 of "
                "them in the map"
            )
        size = max(codes.numel() // max(scales.numel(), 1), 1)
        check_blocks(codes, scales, size, what)
        return of_map(codes, scales.float(), values, size, signed=signed)


_GROUP = 32
_CODES, _SCALES, _LOW_BITS = "::quantized", "::scales", "error_bits"


class Flashoptim(Peer):
    """flashoptim: int8 and uint8 codes, float16 scales of groups of 32 elements of the flattened parameter.

    ``q / 127 = 2 y / (1 + |y|)`` of ``y = m / scale``, and ``q / 255 = sqrt(v) / scale``: companded8's formulas, so
    codes and scales go over as they are. Decoded, a second moment differs by float32's rounding, which is done in
    another order. One above zero that has the code 0, which companded8 never gives, is 0 here as it is there.
    ``error_bits`` are another form of low bits than ours.
    """

    name = "flashoptim"
    form = f"exp_avg{_CODES} and exp_avg{_SCALES}"
    extra = frozenset([_LOW_BITS])

    def recognizes(self, state: Mapping[str, Any]) -> bool:
        return any(key.endswith(_CODES) for key in state) or _LOW_BITS in state

    def read(
        self, state: Mapping[str, Any], group: Mapping[str, Any], expected: Sequence[Moment], name: str
    ) -> Mapping[str, Any]:
        coded = dict.fromkeys(key.removesuffix(_CODES) for key in state if key.endswith(_CODES))
        rest = {key: value for key, value in state.items() if not key.endswith((_CODES, _SCALES))}
        moments = {m.name: self._moment(state, m, f"{name}: {m.name}") for m in expected if m.name in coded}
        return {**rest, **coded, **moments}

    def _moment(self, state: Mapping[str, Any], moment: Moment, what: str) -> CodedMoment:
        codes, scales = state[moment.name + _CODES], state.get(moment.name + _SCALES)
        dtype = torch.int8 if moment.signed else torch.uint8
        if not is_dense(codes) or codes.dtype != dtype or not are_floats(scales):
            got = "no scales" if scales is None else f"scales of {kind_of(scales)} and codes of {kind_of(codes)}"
            raise ValueError(f"{what}: got {got}, expected {dtype} codes and float16 scales")
        if scales.dtype == torch.bfloat16:  # beside bfloat16 parameters they are float16's bits under that name
            scales = scales.view(torch.float16)
        check_blocks(codes, scales, _GROUP, what)
        companded8 = get_codec("companded8")

        def decode(blocks: Tensor, scales: Tensor) -> Tensor:
            values = companded8.decode(blocks, scales, signed=moment.signed)
            return values if moment.signed else values * values

        return CodedMoment(codes.view(torch.uint8), scales.float(), _GROUP, companded8.name, decode)


_ADJUSTMENTS = {"spectral_norm": "spectral_norm", "rms_norm": "match_rms_adamw"}


class Dion(Peer):
    """The dion package's Muon: matrices have ``momentum``, a sum of gradients; AdamW's also have ``variance``."""

    name = "dion"
    form = "momentum and variance in float"

    def recognizes(self, state: Mapping[str, Any]) -> bool:
        return "momentum" in state and state.keys() <= {"momentum", "variance", "step_dev"}

    def read(
        self, state: Mapping[str, Any], group: Mapping[str, Any], expected: Sequence[Moment], name: str
    ) -> Mapping[str, Any]:
        step = {"step": torch.tensor(float(group.get("step", 0)), device="cpu")}
        if "momentum" not in state:  # another package's state: the caller refuses its entries
            return state
        if "variance" in state:
            return {**step, "exp_avg": state["momentum"], "exp_avg_sq": state["variance"]}
        if group.get("algorithm") == "lion":
            return {**step, "exp_avg": state["momentum"]}
        momentum = group.get("mu")
        if not isinstance(momentum, float) or not 0.0 <= momentum < 1.0:
            raise ValueError(
                f"{name}: got mu={shown(momentum)}, expected a decay rate below 1; save the state dict again"
            )
        total = state["momentum"]  # dion sums gradients; shardopt averages them
        return {**step, "momentum_buffer": total * (1.0 - momentum) if are_floats(total) else total}

    def hyper(self, group: Mapping[str, Any], moments: Sequence[str]) -> dict[str, Any]:
        names = {"mu": "momentum", "epsilon": "eps"}
        hyper = {names.get(key, key): value for key, value in group.items() if key not in ("beta1", "beta2", "step")}
        if {"beta1", "beta2"} <= group.keys():
            hyper["betas"] = (group["beta1"], group["beta2"])
        if group.get("algorithm") == "muon":  # there it guards a division, which is done otherwise here
            hyper.pop("eps", None)
        adjustment = hyper.pop("adjust_lr", None)
        if adjustment in _ADJUSTMENTS:
            hyper["adjust_lr_fn"] = _ADJUSTMENTS[adjustment]
        return hyper
