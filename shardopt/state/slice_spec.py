"""Which state entries one slice of a model parameter has on this rank, and their conversion from and to float32."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt.codec import Codec, Coded, Moment, decode_moments, encode_moments, get_codec
from shardopt.codec.base import are_finite
from shardopt.kernels.numeric import from_blocks, to_blocks
from shardopt.kernels.weights import WeightFormat
from shardopt.layout import BlockGrid, Rectangle, Shard, is_quantized
from shardopt.state.loaded_entries import checked_step, unsound
from shardopt.state.options import check_repayment

StateDict = dict[str, Any]

#: The state entry with the low bits of master weights, whose high bits are the 16-bit parameter.
LOW_BITS = "master_low_bits"

#: The state entry with the second moments of the rows of orthogonalized matrices.
ROW_MOMENTS = "second_momentum_buffer"

#: The state entry with the codes of both moments, for codecs that code two moments in one number.
SHARED_CODES = "moment_codes"

#: Entries that are not moments of single elements: they are never quantized.
BESIDE_MOMENTS = frozenset(["step", LOW_BITS, ROW_MOMENTS])

#: Elements that PyTorch encodes or decodes at a time, which bounds temporary memory to about 60 bytes for each.
CODED_AT_A_TIME = 1 << 20


class EntryFormat(NamedTuple):
    """A state entry's shape on this rank, its dtype, and its initial values.

    ``fill`` has one value for all elements, or one per index of the last dimension.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: tuple[float, ...]

    def new(self, device: torch.device) -> Tensor:
        """Allocates the entry with its initial values."""
        if len(self.fill) == 1:
            return torch.full(self.shape, self.fill[0], dtype=self.dtype, device=device)
        return torch.tensor(self.fill, dtype=self.dtype, device=device).expand(self.shape).contiguous()


@dataclass(frozen=True)
class SliceSpec:
    """Describes the state of this rank's slice of one model parameter: all of it, a shard, or a part of a flat buffer.

    A quantized moment ``exp_avg`` has two entries: ``exp_avg_codes`` (uint8, the slice's shape; codes of 16 bits have a
    last dimension of 2 for their bytes, as collectives do not take int16) and ``exp_avg_scales`` (float32, a scale or
    more per block). Two moments that share their codes have one ``moment_codes`` for both. Any other moment, even an
    exact one beside quantized ones, has one entry, ``exp_avg``. ``step`` is a float32 scalar. A 16-bit parameter with a
    master weight has ``master_low_bits`` (int8, ``WeightFormat.low_bits_shape``). With ``normalize="rows"``,
    ``second_momentum_buffer`` has one float32 per row of a matrix, sharded like the scales of one block per row.
    For quantize_state, ``kept`` lists the wrapped optimizer's unquantized entries, which take the place of ``step``:
    those of the parameter's shape are sharded like it, all others are replicated on all ranks.

    Tensors here are plain tensors with this rank's part; :class:`TensorSpec` has those in ``optimizer.state``. In a
    flat buffer, a slice has the parameter's name and number in the model, and begins at index ``offset``.
    """

    shard: Shard
    grid: BlockGrid
    codec: Codec
    moments: tuple[Moment, ...]
    weights: WeightFormat
    row_grid: BlockGrid | None = None  # one block per row that has a second moment; None without these
    kept: tuple[tuple[str, EntryFormat], ...] | None = None
    offset: int = field(default=0, compare=False)
    name: str | None = field(default=None, compare=False)
    number: int | None = field(default=None, compare=False)

    @classmethod
    def of(cls, shard: Shard, dtype: torch.dtype, group: Mapping[str, Any], moments: tuple[Moment, ...]) -> SliceSpec:
        """Makes the spec for a slice of a parameter with this dtype, given its param group and its rule's moments.

        Raises:
            ValueError: the group's weight format, or ``repay``, does not suit the dtype.
        """
        large = is_quantized(shard.global_shape, group["min_quantized_numel"])
        quantized = bool(moments) and large and not shard.float32_state
        codec = get_codec(group["codec"] if quantized else "fp32")
        weights = WeightFormat.of(dtype, group)
        check_repayment(dtype, group)
        grid = BlockGrid(shard.global_shape, group["block_size"])
        row_grid = _row_grid(shard.global_shape, group)
        return cls(shard, grid, codec, moments, weights, row_grid)

    def elements(self, local: Tensor) -> Tensor:
        """A view of the slice's part of a local tensor: in a flat buffer a range of the first dimension, else all."""
        return local if self.name is None else local[self.offset : self.offset + self.shard.local_shape[0]]

    def entry_name(self, key: str) -> str:
        """The name of an entry in ``optimizer.state``: flat buffers tell bf16 moments from float32 ones by a suffix."""
        renamed = self.name is not None and not self.codec.blockwise and self.codec.code_dtype != torch.float32
        return f"{key}_{self.codec.name}" if renamed and key not in BESIDE_MOMENTS else key

    @property
    def relative(self) -> bool:
        """Whether a signed moment is coded in units of the unsigned moment's root, as Adam's first in the second's."""
        return any(not m.signed for m in self.moments) and any(m.is_relative(self.codec) for m in self.moments)

    @property
    def is_random(self) -> bool:
        """Whether the step rounds weights stochastically, with bits that depend on the parameter's number."""
        return self.weights.stochastic

    @property
    def exchanges_columns(self) -> bool:
        """Whether columns are sharded within blocks: all ranks that own a row then store all scales of the row."""
        return self.codec.blockwise and self.shard.block_owners(self.grid) is not None

    @cached_property
    def entries(self) -> dict[str, EntryFormat]:
        """Shape, dtype and initial values of all state entries, by name."""
        if self.kept is not None:
            return {**self.moment_entries, **dict(self.kept)}
        formats = {"step": EntryFormat((), torch.float32, (0,)), **self.moment_entries}
        if self.row_grid is not None:
            formats[ROW_MOMENTS] = EntryFormat(self.shard.scales(self.row_grid).local_shape, torch.float32, (0,))
        low_bits = self.weights.low_bits_shape(self.shard.local_shape)
        return formats if low_bits is None else {**formats, LOW_BITS: EntryFormat(low_bits, torch.int8, (0,))}

    @property
    def moment_entries(self) -> dict[str, EntryFormat]:
        """Shape, dtype and initial values of the moments' entries (codes and scales, or floats), by name."""
        formats, shape = {}, self.shard.local_shape
        for moment in self.moments:
            dtype, code, scales = _first_codes(self.codec, moment)
            codes_shape = shape if len(code) == 1 else (*shape, len(code))
            formats[self.codes_name(moment)] = EntryFormat(codes_shape, dtype, code)
            if self.has_scales(moment):
                formats[self.scales_name(moment)] = EntryFormat(self._scales_shape(moment), torch.float32, scales)
        return formats

    def codes_name(self, moment: Moment) -> str:
        """The name of the state entry with a moment's codes, or its floats if it is not quantized."""
        if self.codec.shared:
            return SHARED_CODES
        return f"{moment.name}_codes" if self.has_scales(moment) else moment.name

    def has_scales(self, moment: Moment) -> bool:
        """Whether a moment is quantized in blocks, and so has scales."""
        return moment.codec(self.codec).blockwise

    def scales_name(self, moment: Moment) -> str:
        """The name of the state entry with a moment's scales."""
        return f"{moment.name}_scales"

    def grid_of(self, key: str) -> BlockGrid | None:
        """The block grid of an entry with numbers per block (scales, second moments of rows); None for others."""
        if key == ROW_MOMENTS:
            return self.row_grid
        is_scales = any(key == self.scales_name(moment) for moment in self.moments if self.has_scales(moment))
        return self.grid if is_scales else None

    def is_whole(self, key: str) -> bool:
        """Whether a state entry is replicated on all ranks, not sharded."""
        if self.kept is None:
            return key == "step"
        entry = dict(self.kept).get(key)
        return entry is not None and (not entry.shape or entry.shape != self.shard.local_shape)

    def new(self, device: torch.device) -> StateDict:
        """Allocates new state: initial moments, master weights equal to the parameter, no steps taken."""
        return {key: entry.new(device) for key, entry in self.entries.items()}

    def encode(
        self,
        values: Sequence[Tensor],
        agreed: Mapping[str, Tensor] | None = None,
        found: Mapping[str, Tensor] | None = None,
    ) -> StateDict:
        """Quantizes this rank's float moments without communication; :func:`encoding.encode_slices` adds that.

        Extremes of blocks, from which scales follow, are int32 ``(blocks, 2)`` in the order of the scales, by moment.

        Args:
            values: one tensor of the slice's shape per moment.
            agreed: all-reduced extremes; 0 for blocks that are on this rank alone.
            found: tensors that receive the extremes of this rank's elements, to be all-reduced.
        """
        local, agreed, found = [x.float() for x in values], agreed or {}, found or {}
        if not self.codec.blockwise:
            return self.coded_entries(encode_moments(self.codec, self.moments, local))
        new: list[Coded] = []
        for moment, x in zip(self.moments, local, strict=True):
            codec, scales = moment.codec(self.codec), None
            if self.has_scales(moment):
                scales = torch.zeros(self._scales_shape(moment), dtype=torch.float32, device=x.device)
                if moment.name in agreed:  # column shards store scales of all blocks of a row, also of other ranks'
                    scales.copy_(codec.scales_for(agreed[moment.name], signed=moment.signed).view_as(scales))
            new.append(Coded(torch.empty_like(x, dtype=codec.code_dtype).contiguous(), scales))
        for rectangle in self._rectangles():

            def agree(moment: Moment, extremes: Tensor, rectangle: Rectangle = rectangle) -> Tensor:
                if moment.name in agreed:
                    known = _per_block(agreed[moment.name], 2, rectangle, extremes.shape[1])
                    extremes = torch.maximum(extremes, known)
                if moment.name in found:
                    seen = _per_block(found[moment.name], 2, rectangle, extremes.shape[1])
                    seen.copy_(torch.maximum(seen, extremes))
                return extremes

            blocks = [self._blocks(x, rectangle) for x in local]
            coded = encode_moments(self.codec, self.moments, blocks, agree=agree)
            for entries, (codes, scales) in zip(new, coded, strict=True):
                self._put(entries.codes, rectangle, codes)
                if entries.scales is not None and scales is not None:
                    _per_block(entries.scales, scales.shape[-1], rectangle, scales.shape[1]).copy_(scales)
        return self.coded_entries(new)

    def decode(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        """Dequantizes this rank's moments to float32."""
        local = [self.local_coded(state, moment) for moment in self.moments]
        if not self.codec.blockwise:
            return decode_moments(self.codec, self.moments, local).values
        moments = [torch.zeros(codes.shape, dtype=torch.float32, device=codes.device) for codes, _ in local]
        for rectangle in self._rectangles():
            coded = self._coded_blocks(local, rectangle)
            for x, values in zip(moments, decode_moments(self.codec, self.moments, coded).values, strict=True):
                self._put(x, rectangle, values)
        return moments

    def local_coded(self, state: Mapping[str, Any], moment: Moment) -> Coded:
        """Views of a moment's codes, with 16-bit codes as int16 instead of pairs of bytes, and of its scales."""
        scales = state[self.scales_name(moment)] if self.has_scales(moment) else None
        codes = state[self.codes_name(moment)]
        if moment.codec(self.codec).code_dtype == torch.int16 and codes.dtype == torch.uint8:
            codes = codes.view(torch.int16).squeeze(-1)
        return Coded(codes, scales)

    def check_local(self, state: Mapping[str, Any], name: str) -> None:
        """Checks the values of the step count and all moments of this rank.

        Raises:
            ValueError: a moment is not finite, or is below zero and not signed; or the step is no whole number.
        """
        if self.kept is None:
            checked_step(state, name)
        if self.row_grid is not None and not are_finite(state[ROW_MOMENTS], signed=False):
            raise unsound(ROW_MOMENTS, name, signed=False)
        local = [self.local_coded(state, moment) for moment in self.moments]
        if not self.codec.blockwise:
            self._check_coded(local, name)
            return
        for rectangle in self._rectangles():
            self._check_coded(self._coded_blocks(local, rectangle), name)

    def _check_coded(self, coded: Sequence[Coded], name: str) -> None:
        """Raises ValueError if a moment decodes to a number that is not finite, or is negative though unsigned."""
        by_moment = dict(zip(self.moments, coded, strict=True))
        for moment, (codes, scales) in by_moment.items():
            if not moment.codec(self.codec).is_sound(codes, codes if scales is None else scales, signed=moment.signed):
                what = "" if scales is None else f" with {self.scales_name(moment)}"
                raise unsound(self.codes_name(moment) + what, name, signed=moment.signed)
        if not self.relative:
            return
        # Relative codes decode to multiples of their unit, whose largest value times their scale must be finite, too.
        unit = next(moment for moment in self.moments if not moment.signed)
        scales = by_moment[unit].scales
        assert scales is not None
        largest = self.codec.decode(self.codec.largest_codes(scales[..., :1]), scales, signed=False)
        for moment in (moment for moment in self.moments if moment.is_relative(self.codec)):
            scales = by_moment[moment].scales
            assert scales is not None
            if not are_finite(largest * scales[..., :1], signed=True):
                of_scales = f"{self.scales_name(moment)} and {self.scales_name(unit)}"
                raise unsound(f"{self.codes_name(moment)} with {of_scales}", name, signed=True)

    def _rectangles(self) -> Iterator[Rectangle]:
        """Divides the slice into matrices (rows or parts of rows) of at most :data:`CODED_AT_A_TIME` elements."""
        for rectangle in self.shard.rectangles(self.grid):
            if rectangle.rows * rectangle.cols:
                yield from rectangle.split(CODED_AT_A_TIME, self.grid.block_size)

    def _scales_shape(self, moment: Moment) -> tuple[int, ...]:
        width = moment.codec(self.codec).scales(signed=moment.signed)
        return (*self.shard.scales(self.grid).local_shape, *((width,) if width > 1 else ()))

    def coded_entries(self, coded: Sequence[Coded]) -> StateDict:
        """Puts codes and scales, one pair per moment, under the names of their state entries."""
        state: StateDict = {}
        for moment, (codes, scales) in zip(self.moments, coded, strict=True):
            state[self.codes_name(moment)] = _as_bytes(codes) if codes.dtype == torch.int16 else codes
            if scales is not None:
                state[self.scales_name(moment)] = scales
        return state

    def _coded_blocks(self, local: Sequence[Coded], rectangle: Rectangle) -> list[Coded]:
        """A rectangle's codes, padded to ``(rows, blocks, block_size)``, and its scales, for each moment."""
        coded = []
        for moment, (codes, scales) in zip(self.moments, local, strict=True):
            codec = moment.codec(self.codec)
            blocks = self._blocks(codes, rectangle, codec.zero_code(signed=moment.signed))
            if scales is not None:
                scales = _per_block(scales, codec.scales(signed=moment.signed), rectangle, blocks.shape[1])
            coded.append(Coded(blocks, scales))
        return coded

    def _blocks(self, x: Tensor, rectangle: Rectangle, fill: int = 0) -> Tensor:
        """A rectangle's elements of ``x``, padded with ``fill`` to whole blocks: ``(rows, blocks, block_size)``."""
        rows = _matrix(x.reshape(-1), rectangle)
        if lead := rectangle.first_col % self.grid.block_size:  # elements of the first block that are before it
            rows = torch.nn.functional.pad(rows, (lead, 0), value=fill)
        return to_blocks(rows, self.grid.block_size, fill=fill)

    def _put(self, x: Tensor, rectangle: Rectangle, blocks: Tensor) -> None:
        """Writes blocks, without padding, to a rectangle of ``x``, of the slice's shape: undoes :meth:`_blocks`."""
        lead = rectangle.first_col % self.grid.block_size
        _matrix(x.view(-1), rectangle).copy_(from_blocks(blocks, lead + rectangle.cols)[:, lead:])


def _row_grid(shape: tuple[int, ...], group: Mapping[str, Any]) -> BlockGrid | None:
    """A grid with one block per row of the parameter's matrices, if the rule has second moments of rows; or None."""
    if group.get("normalize") != "rows" or group["algorithm"] != "muon" or len(shape) < 2:
        return None
    return BlockGrid(shape, math.prod(shape[2 if group["split"] == "each" else 1 :]))


@cache
def _first_codes(codec: Codec, moment: Moment) -> tuple[torch.dtype, tuple[float, ...], tuple[float, ...]]:
    """Initial state of a moment: its codes' stored dtype, an element's code (bytes if it has two), a block's scales."""
    dtype, zero = moment.codec(codec).code_dtype, moment.codec(codec).zero_code(signed=moment.signed)
    code, scales = torch.tensor(zero, dtype=dtype, device="cpu"), (0.0,)
    if moment.initial:
        initial = torch.tensor([moment.initial], dtype=torch.float32, device="cpu")
        (coded,) = encode_moments(codec, [moment], [initial])
        code, scales = coded.codes[0], tuple([] if coded.scales is None else coded.scales.tolist())
    if dtype != torch.int16:
        return dtype, (code.item(),), scales
    return torch.uint8, tuple(_as_bytes(code).tolist()), scales


def _as_bytes(codes: Tensor) -> Tensor:
    """Reinterprets int16 codes as uint8 with another last dimension of 2."""
    return codes.contiguous().unsqueeze(-1).view(torch.uint8)


def _matrix(flat: Tensor, rectangle: Rectangle) -> Tensor:
    """A strided view ``(rows, cols)`` of a rectangle's elements in the flattened slice."""
    begin = flat.storage_offset() + rectangle.element
    return flat.as_strided((rectangle.rows, rectangle.cols), (rectangle.row_stride, 1), begin)


def _per_block(entry: Tensor, width: int, rectangle: Rectangle, count: int) -> Tensor:
    """A view ``(rows, count, width)`` of the numbers of a rectangle's blocks, ``width`` each and ``count`` in a row."""
    stride = rectangle.blocks_stride if rectangle.rows > 1 else count
    rows = entry.reshape(-1, width)[rectangle.block :][: (rectangle.rows - 1) * stride + count]
    return rows.as_strided((rectangle.rows, count, width), (stride * width, width, 1))
