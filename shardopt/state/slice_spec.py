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
from shardopt.state.loaded_entries import checked_step, invalid_values_error
from shardopt.state.options import check_repayment

StateDict = dict[str, Any]

#: The state entry with the low bits of master weights, whose high bits are the 16-bit parameter.
LOW_BITS = "master_low_bits"

#: The state entry with the second moments of the rows of orthogonalized matrices.
ROW_MOMENTS = "second_momentum_buffer"

#: The state entry with the codes of both moments, for codecs that code two moments in one number.
SHARED_CODES = "moment_codes"

#: Entries that are not moments of single elements: they are never quantized.
NON_MOMENTS = frozenset(["step", LOW_BITS, ROW_MOMENTS])

#: The most elements that PyTorch encodes or decodes in one call: each takes about 60 bytes of temporary memory.
_MAX_CODED_NUMEL = 1 << 20


class EntryFormat(NamedTuple):
    """A state entry's shape on this rank, dtype and initial value ``fill``: one number, or one per last index."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: tuple[float, ...]

    def allocate(self, device: torch.device) -> Tensor:
        """Allocates a tensor of this format with the initial values."""
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
    For quantize_state, ``unquantized`` has the names and formats of the wrapped optimizer's other entries, its step
    count among them: those of the parameter's shape are sharded like it, all others are replicated on all ranks.

    Methods here take and return plain tensors with this rank's part; :class:`TensorSpec` converts them from and to the
    tensors in ``optimizer.state``. Only a slice of a flat buffer has ``name`` and ``number``, which are the parameter's
    in the model, and an ``offset``, at which it begins in the buffer.
    """

    shard: Shard
    grid: BlockGrid
    codec: Codec
    moments: tuple[Moment, ...]
    weights: WeightFormat
    row_grid: BlockGrid | None = None  # one block per row that has a second moment; None without these
    unquantized: tuple[tuple[str, EntryFormat], ...] | None = None
    offset: int = field(default=0, compare=False)
    name: str | None = field(default=None, compare=False)
    number: int | None = field(default=None, compare=False)

    @classmethod
    def of(cls, shard: Shard, dtype: torch.dtype, group: Mapping[str, Any], moments: tuple[Moment, ...]) -> SliceSpec:
        """Makes the spec for a slice of a parameter with this dtype, given its param group and its rule's moments.

        Raises ValueError if the group's weight format, or ``repay``, does not suit the dtype.
        """
        shape, weights = shard.global_shape, WeightFormat.from_options(dtype, group)
        check_repayment(dtype, group)
        is_coded = bool(moments) and is_quantized(shape, group["min_quantized_numel"]) and not shard.float32_state
        codec = get_codec(group["codec"] if is_coded else "fp32")
        return cls(shard, BlockGrid(shape, group["block_size"]), codec, moments, weights, _row_grid(shape, group))

    def elements(self, local: Tensor) -> Tensor:
        """A view of the slice's part of a local tensor: in a flat buffer a range of the first dimension, else all."""
        return local if self.name is None else local[self.offset : self.offset + self.shard.local_shape[0]]

    def entry_name(self, key: str) -> str:
        """An entry's name in ``optimizer.state``: a suffix tells bf16 moments in flat buffers from float32 ones."""
        is_bf16 = not self.codec.blockwise and self.codec.code_dtype != torch.float32
        has_suffix = self.name is not None and is_bf16 and key not in NON_MOMENTS
        return f"{key}_{self.codec.name}" if has_suffix else key

    @property
    def has_relative_moments(self) -> bool:
        """Whether a signed moment is divided by the root of the unsigned one before coding, as Adam's in log8."""
        return any(not m.signed for m in self.moments) and any(m.is_relative(self.codec) for m in self.moments)

    @property
    def is_random(self) -> bool:
        """Whether the step rounds weights stochastically, with bits that depend on the parameter's number."""
        return self.weights.stochastic

    @property
    def has_column_cut_blocks(self) -> bool:
        """Whether column shards cut blocks: all ranks that share a row then store the scales of the whole row."""
        return self.codec.blockwise and self.shard.block_owners(self.grid) is not None

    @cached_property
    def entries(self) -> dict[str, EntryFormat]:
        """Shape, dtype and initial values of all state entries, by name."""
        if self.unquantized is not None:
            return {**self.moment_entries, **dict(self.unquantized)}
        formats = {"step": EntryFormat((), torch.float32, (0,)), **self.moment_entries}
        if self.row_grid is not None:
            formats[ROW_MOMENTS] = EntryFormat(self.shard.scales(self.row_grid).local_shape, torch.float32, (0,))
        low_bits = self.weights.low_bits_shape(self.shard.local_shape)
        return formats if low_bits is None else {**formats, LOW_BITS: EntryFormat(low_bits, torch.int8, (0,))}

    @property
    def moment_entries(self) -> dict[str, EntryFormat]:
        """Shape, dtype and initial values of the moments' entries (codes and scales, or floats), by name."""
        formats, shape = {}, self.shard.local_shape
        for moment in self.moments:  # moments that share codes have one entry, whose initial codes are 0 for both
            codes, scales = _initial_block(self.codec, moment)
            codes_shape = shape if len(codes) == 1 else (*shape, len(codes))  # codes of 16 bits: two bytes
            formats[self.codes_name(moment)] = EntryFormat(codes_shape, codes.dtype, tuple(codes.tolist()))
            if scales is not None:
                width = moment.codec(self.codec).scales(signed=moment.signed)  # per block; a last dimension if several
                scales_shape = (*self.shard.scales(self.grid).local_shape, *((width,) if width > 1 else ()))
                formats[self.scales_name(moment)] = EntryFormat(scales_shape, torch.float32, tuple(scales.tolist()))
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

    def is_replicated(self, key: str) -> bool:
        """Whether all ranks store the same values of a state entry, which is thus not sharded."""
        if self.unquantized is None:
            return key == "step"
        entry = dict(self.unquantized).get(key)
        return entry is not None and (not entry.shape or entry.shape != self.shard.local_shape)

    def new_state(self, device: torch.device) -> StateDict:
        """Allocates the state before the first step: initial moments, and master weights equal to the parameter."""
        return {key: entry.allocate(device) for key, entry in self.entries.items()}

    def encode(self, values: Sequence[Tensor], agreed: Mapping[str, Tensor] | None = None) -> StateDict:
        """Quantizes this rank's float moments without communication; :func:`encoding.encode_slices` adds that.

        ``agreed`` has, by moment, what :meth:`extremes` returned, all-reduced over the ranks that share blocks, and 0
        for blocks that only this rank has.
        """
        local, agreed = [x.float() for x in values], agreed or {}
        if not self.codec.blockwise:
            return self.state_from_coded(encode_moments(self.codec, self.moments, local))
        state = {key: entry.allocate(local[0].device) for key, entry in self.moment_entries.items()}
        encoded = [self.codes_and_scales(state, moment) for moment in self.moments]  # views of the state
        for moment, (_, scales) in zip(self.moments, encoded, strict=True):
            if moment.name in agreed and scales is not None:  # column shards store scales of other ranks' blocks, too
                codec, extremes = moment.codec(self.codec), agreed[moment.name]
                scales.copy_(codec.scales_for(extremes, signed=moment.signed).view_as(scales))
        for rectangle in self._rectangles():
            coded, _ = self._encode_rectangle(local, rectangle, agreed)
            for whole, (codes, scales) in zip(encoded, coded, strict=True):
                self._write_blocks(whole.codes, rectangle, codes)
                if whole.scales is not None and scales is not None:
                    _block_view(whole.scales, scales.shape[-1], rectangle, scales.shape[1]).copy_(scales)
        return state

    def extremes(self, values: Sequence[Tensor], agreed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Extremes of this rank's elements in each block, by moment: int32 ``(blocks, 2)`` in the order of the scales.

        Extremes of a moment that is coded in units of another one's root are right only if ``agreed`` has the other
        one's for shared blocks, since they determine the codes of the root.
        """
        local = [x.float() for x in values]
        found = {m.name: self.zero_extremes(local[0].device) for m in self.moments if self.has_scales(m)}
        for rectangle in self._rectangles():
            for name, extremes in self._encode_rectangle(local, rectangle, agreed)[1].items():
                of_blocks = _block_view(found[name], 2, rectangle, extremes.shape[1])
                of_blocks.copy_(torch.maximum(of_blocks, extremes))  # other rectangles may have parts of these blocks
        return found

    def zero_extremes(self, device: torch.device) -> Tensor:
        """Two extremes per block of this rank: zeros, which leave a maximum as it is."""
        blocks = math.prod(self.shard.scales(self.grid).local_shape)
        return torch.zeros((blocks, 2), dtype=torch.int32, device=device)

    def _encode_rectangle(
        self, local: Sequence[Tensor], rectangle: Rectangle, agreed: Mapping[str, Tensor]
    ) -> tuple[list[Coded], dict[str, Tensor]]:
        """Quantizes one rectangle's elements; returns codes and scales per moment, and extremes by moment."""
        found: dict[str, Tensor] = {}

        def agree(moment: Moment, extremes: Tensor) -> Tensor:  # also records the result in ``found``
            if moment.name in agreed:
                of_all_ranks = _block_view(agreed[moment.name], 2, rectangle, extremes.shape[1])
                extremes = torch.maximum(extremes, of_all_ranks)
            found[moment.name] = extremes
            return extremes

        blocks = [self._padded_blocks(x, rectangle) for x in local]
        return encode_moments(self.codec, self.moments, blocks, agree=agree), found

    def decode(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        """Dequantizes this rank's moments to float32."""
        coded = [self.codes_and_scales(state, moment) for moment in self.moments]
        if not self.codec.blockwise:
            return decode_moments(self.codec, self.moments, coded).values
        moments = [torch.zeros(codes.shape, dtype=torch.float32, device=codes.device) for codes, _ in coded]
        for rectangle in self._rectangles():
            decoded = decode_moments(self.codec, self.moments, self._coded_blocks(coded, rectangle)).values
            for x, blocks in zip(moments, decoded, strict=True):
                self._write_blocks(x, rectangle, blocks)
        return moments

    def codes_and_scales(self, state: Mapping[str, Any], moment: Moment) -> Coded:
        """A moment's codes and scales as views of its state entries: codes of 16 bits are int16, not pairs of bytes."""
        scales = state[self.scales_name(moment)] if self.has_scales(moment) else None
        codes = state[self.codes_name(moment)]
        if moment.codec(self.codec).code_dtype == torch.int16 and codes.dtype == torch.uint8:
            codes = codes.view(torch.int16).squeeze(-1)
        return Coded(codes, scales)

    def check_values(self, state: Mapping[str, Any], name: str) -> None:
        """Checks this rank's part of a loaded state: the step count, all moments, and the second moments of rows.

        Raises ValueError if one is not finite, or is below zero and not signed; or if the step is no whole number.
        """
        if self.unquantized is None:  # else the step count is the wrapped optimizer's
            checked_step(state, name)
        if self.row_grid is not None and not are_finite(state[ROW_MOMENTS], signed=False):
            raise invalid_values_error(ROW_MOMENTS, name, signed=False)
        coded = [self.codes_and_scales(state, moment) for moment in self.moments]
        if not self.codec.blockwise:
            self._check_coded(coded, name)
            return
        for rectangle in self._rectangles():
            self._check_coded(self._coded_blocks(coded, rectangle), name)

    def _check_coded(self, coded: Sequence[Coded], name: str) -> None:
        """Raises ValueError if a moment decodes to a number that is not finite, or is negative though unsigned."""
        by_moment = dict(zip(self.moments, coded, strict=True))
        for moment, (codes, scales) in by_moment.items():
            checked = codes if scales is None else scales  # unquantized moments: the codes are the values
            if not moment.codec(self.codec).is_sound(codes, checked, signed=moment.signed):
                what = "" if scales is None else f" with {self.scales_name(moment)}"
                raise invalid_values_error(self.codes_name(moment) + what, name, signed=moment.signed)
        if not self.has_relative_moments:
            return
        # A relative moment decodes to its scale times the unsigned moment's root, so this product must be finite, too.
        unsigned = next(moment for moment in self.moments if not moment.signed)
        scales = by_moment[unsigned].scales
        assert scales is not None
        largest_root = self.codec.decode(self.codec.largest_codes(scales[..., :1]), scales, signed=False)
        for moment in (moment for moment in self.moments if moment.is_relative(self.codec)):
            scales = by_moment[moment].scales
            assert scales is not None
            if not are_finite(largest_root * scales[..., :1], signed=True):
                scales_names = f"{self.scales_name(moment)} and {self.scales_name(unsigned)}"
                raise invalid_values_error(f"{self.codes_name(moment)} with {scales_names}", name, signed=True)

    def _rectangles(self) -> Iterator[Rectangle]:
        """Divides the slice into rectangles of at most :data:`_MAX_CODED_NUMEL` elements, to bound temporary memory."""
        for rectangle in self.shard.rectangles(self.grid):
            if rectangle.rows * rectangle.cols:
                yield from rectangle.split(_MAX_CODED_NUMEL, self.grid.block_size)

    def state_from_coded(self, coded: Sequence[Coded]) -> StateDict:
        """Puts codes and scales, one pair per moment, under the names of their state entries."""
        state: StateDict = {}
        for moment, (codes, scales) in zip(self.moments, coded, strict=True):
            state[self.codes_name(moment)] = _as_bytes(codes) if codes.dtype == torch.int16 else codes
            if scales is not None:
                state[self.scales_name(moment)] = scales
        return state

    def _coded_blocks(self, coded: Sequence[Coded], rectangle: Rectangle) -> list[Coded]:
        """A rectangle's codes, padded to ``(rows, blocks, block_size)``, and its scales, for each moment."""
        of_rectangle = []
        for moment, (codes, scales) in zip(self.moments, coded, strict=True):
            codec = moment.codec(self.codec)
            blocks = self._padded_blocks(codes, rectangle, codec.zero_code(signed=moment.signed))
            if scales is not None:
                scales = _block_view(scales, codec.scales(signed=moment.signed), rectangle, blocks.shape[1])
            of_rectangle.append(Coded(blocks, scales))
        return of_rectangle

    def _padded_blocks(self, x: Tensor, rectangle: Rectangle, fill: int = 0) -> Tensor:
        """A rectangle's elements of ``x``, padded with ``fill`` to whole blocks: ``(rows, blocks, block_size)``."""
        rows = _matrix_view(x.reshape(-1), rectangle)
        lead = rectangle.first_col % self.grid.block_size  # elements of the first block that lie before the rectangle
        if lead:
            rows = torch.nn.functional.pad(rows, (lead, 0), value=fill)
        return to_blocks(rows, self.grid.block_size, fill=fill)

    def _write_blocks(self, x: Tensor, rectangle: Rectangle, blocks: Tensor) -> None:
        """Writes blocks, without padding, to a rectangle of ``x``: the inverse of :meth:`_padded_blocks`."""
        lead = rectangle.first_col % self.grid.block_size
        _matrix_view(x.view(-1), rectangle).copy_(from_blocks(blocks, lead + rectangle.cols)[:, lead:])


def _row_grid(shape: tuple[int, ...], group: Mapping[str, Any]) -> BlockGrid | None:
    """A grid with one block per row of the parameter's matrices, if the rule has second moments of rows; or None."""
    is_muon_by_rows = group.get("normalize") == "rows" and group["algorithm"] == "muon"  # its groups may be "adamw"
    if not is_muon_by_rows or len(shape) < 2:
        return None
    return BlockGrid(shape, math.prod(shape[2 if group["split"] == "each" else 1 :]))


@cache
def _initial_block(codec: Codec, moment: Moment) -> tuple[Tensor, Tensor | None]:
    """The code (as two bytes if it has 16 bits) of every element, and the scales of a block, before the first step."""
    moment_codec = moment.codec(codec)
    code = torch.tensor([moment_codec.zero_code(signed=moment.signed)], dtype=moment_codec.code_dtype, device="cpu")
    scales = torch.zeros(1, dtype=torch.float32, device="cpu") if moment_codec.blockwise else None
    if moment.initial:
        initial = torch.tensor([moment.initial], dtype=torch.float32, device="cpu")
        ((code, scales),) = encode_moments(codec, [moment], [initial])
    return _as_bytes(code).view(-1) if code.dtype == torch.int16 else code, scales


def _as_bytes(codes: Tensor) -> Tensor:
    """Reinterprets int16 codes as uint8 with another last dimension of 2."""
    return codes.contiguous().unsqueeze(-1).view(torch.uint8)


def _matrix_view(flat: Tensor, rectangle: Rectangle) -> Tensor:
    """A strided view ``(rows, cols)`` of a rectangle's elements in the flattened slice."""
    begin = flat.storage_offset() + rectangle.local_start
    return flat.as_strided((rectangle.rows, rectangle.cols), (rectangle.row_stride, 1), begin)


def _block_view(per_block: Tensor, width: int, rectangle: Rectangle, count: int) -> Tensor:
    """A view ``(rows, count, width)`` of the ``width`` numbers (scales, extremes) of each of a rectangle's blocks.

    ``per_block`` has the numbers of all blocks of the slice. ``count``: blocks in a row of the rectangle.
    """
    stride = rectangle.scales_row_stride if rectangle.rows > 1 else count
    rows = per_block.reshape(-1, width)[rectangle.local_block :][: (rectangle.rows - 1) * stride + count]
    return rows.as_strided((rectangle.rows, count, width), (stride * width, width, 1))
