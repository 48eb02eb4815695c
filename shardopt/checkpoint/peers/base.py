"""The interface to another package's optimizer state, and the moments in codes of such packages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from shardopt.codec import Moment, get_codec
from shardopt.codec.base import are_finite
from shardopt.codec.dynamic8 import dynamic_map
from shardopt.kernels.numeric import from_blocks, to_blocks
from shardopt.layout import BlockGrid

#: Entries of torch.optim's state that follow from the step count.
DERIVED = {"mu_product"}

#: The moments that optimizers of torch.optim keep.
_MOMENTS = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf"),
    *("momentum_buffer", "square_avg", "grad_avg", "sum"),
}


class Peer:
    """Base class of the packages; the base itself reads torch.optim's names, with moments in float."""

    #: The package's name in errors and reports.
    name = "torch.optim"
    #: The form of the package's state, in words.
    form = "exp_avg, exp_avg_sq, momentum_buffer and the like in float"
    #: Entries that a state may have beside the moments, which shardopt does not have.
    extra: frozenset[str] = frozenset()

    def recognizes(self, state: Mapping[str, Any]) -> bool:
        """Whether the state of one parameter, without entries that are None, is of this form."""
        return state.keys() <= {"step", *DERIVED, *_MOMENTS} and all(
            isinstance(state[key], Tensor) for key in _MOMENTS & set(state)
        )

    def check_together(self, states: Collection[Mapping[str, Any]]) -> None:
        """Checks the states of all parameters for a kind of optimizer that only all of them tell.

        Raises:
            ValueError: shardopt has no such optimizer.
        """

    def read(
        self, state: Mapping[str, Any], group: Mapping[str, Any], expected: Sequence[Moment], name: str
    ) -> Mapping[str, Any]:
        """The entries of one parameter under torch.optim's names, each moment in float or as a :class:`CodedMoment`.

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
        """The hyper-parameters of a param group under torch.optim's names.

        Args:
            group: the param group.
            moments: the names of the moments that the optimizer keeps.

        Raises:
            ValueError: the hyper-parameters are of another kind of optimizer.
        """
        return dict(group)


class CodedMoment(NamedTuple):
    """A moment in blocks of consecutive elements of the flattened parameter, which may cross rows.

    Attributes:
        codes: uint8, the parameter's shape.
        scales: float32, ``(blocks,)``.
        block_size: elements per block.
        codec: shardopt's codec with the same codes and scales; None if no codec has them.
        decode: function from blocks of codes ``(blocks, block_size)`` and their scales ``(blocks, 1)`` to float32.
    """

    codes: Tensor
    scales: Tensor
    block_size: int
    codec: str | None
    decode: Callable[[Tensor, Tensor], Tensor]

    def values(self) -> Tensor:
        """The moment in float32, the parameter's shape."""
        (blocks,) = to_blocks(self.codes.reshape(1, -1), self.block_size)
        decoded = self.decode(blocks, self.scales[:, None])
        return from_blocks(decoded[None], self.codes.numel()).reshape(self.codes.shape)

    def is_laid_out_as(self, grid: BlockGrid) -> bool:
        """Whether the blocks are those of a grid: no block crosses a row."""
        aligned = grid.row_numel % grid.block_size == 0 or grid.rows == 1
        return aligned and self.block_size == grid.block_size


def of_map(codes: Tensor, scales: Tensor, values: Tensor, block_size: int, *, signed: bool) -> CodedMoment:
    """A moment whose codes are indices into a map of 256 values, dynamic8's or another."""
    expected = dynamic_map(signed=signed).to(values.device)
    same = values.dtype == expected.dtype and torch.equal(values, expected)

    def decode(blocks: Tensor, scales: Tensor) -> Tensor:
        return values[blocks.int()] * scales

    return CodedMoment(codes, scales, block_size, "dynamic8" if same else None, decode)


def of_companding(codes: Tensor, scales: Tensor, block_size: int, *, signed: bool) -> CodedMoment:
    """A moment in companded8's codes: int8 of the companded value, or uint8 of the root."""
    codec = get_codec("companded8")

    def decode(blocks: Tensor, scales: Tensor) -> Tensor:
        values = codec.decode(blocks, scales, signed=signed)
        return values if signed else values * values

    return CodedMoment(codes.view(torch.uint8), scales.float(), block_size, codec.name, decode)


def check_blocks(codes: Tensor, scales: Tensor, block_size: int, what: str) -> None:
    """Checks that there is one usable scale for each block.

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
    """Whether a value is a tensor with all its elements, real numbers, in memory."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_meta or value.is_complex())


def are_floats(value: object) -> TypeGuard[Tensor]:
    """Whether a value is such a tensor of a float dtype."""
    return is_dense(value) and value.dtype.is_floating_point


def is_map(values: object) -> TypeGuard[Tensor]:
    """Whether a value has a number for each of 256 codes."""
    return are_floats(values) and values.shape == (256,)
