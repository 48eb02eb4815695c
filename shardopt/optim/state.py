"""The state of one parameter: its names, dtypes and shapes, and its conversion from and to float32 moments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt.codec import Codec, Coded, Moment, decode_moments, encode_moments, get_codec
from shardopt.codec.base import are_finite
from shardopt.kernels.numeric import from_blocks, to_blocks
from shardopt.kernels.weights import WeightFormat
from shardopt.layout import Band, BlockGrid, Shard, is_quantized, shard_of
from shardopt.optim.loaded_entries import check_entry, check_moment, checked_step, copy_to, step_on, unsound

StateDict = dict[str, Any]

#: The state entry with what a 16-bit parameter lacks of its master weight.
LOW_BITS = "master_low_bits"


class Part(NamedTuple):
    """One parameter, or this rank's part of it, with its state: what the kernels step.

    Attributes:
        spec: what its state looks like.
        first: where its elements begin in the local tensor of the optimizer's parameter.
        param: its elements.
        state: its state, views of the optimizer's.
        place: its place among the model's parameters, where the optimizer's parameter holds several.
    """

    spec: ParameterState
    first: int
    param: Tensor
    state: StateDict
    place: int | None = None


@dataclass(frozen=True)
class ParameterState:
    """What the state of one parameter looks like.

    A quantized moment ``exp_avg`` is two entries: ``exp_avg_codes`` (uint8, the parameter's shape) and
    ``exp_avg_scales`` (float32, ``BlockGrid.scales_shape``); otherwise it is one, ``exp_avg``. Both are sharded as the
    parameter is. ``step`` is a float32 scalar. A 16-bit parameter with a master weight has ``master_low_bits`` (int8,
    ``WeightFormat.low_bits_shape``), sharded alike.
    """

    shard: Shard
    grid: BlockGrid
    codec: Codec
    moments: tuple[Moment, ...]
    weights: WeightFormat
    exact_cut_blocks: bool

    @classmethod
    def of(cls, param: Tensor, group: Mapping[str, Any], moments: tuple[Moment, ...]) -> ParameterState:
        """The state that a parameter has in a param group.

        Raises:
            ValueError: the group's weight format is not for the parameter's dtype.
        """
        return cls.of_shard(shard_of(param), param.dtype, group, moments)

    @classmethod
    def of_shard(
        cls, shard: Shard, dtype: torch.dtype, group: Mapping[str, Any], moments: tuple[Moment, ...]
    ) -> ParameterState:
        """The state that a parameter of this shard and dtype has; see :meth:`of`."""
        quantized = bool(moments) and is_quantized(shard.global_shape, group["min_quantized_numel"])
        codec = get_codec(group["codec"] if quantized else "fp32")
        weights = WeightFormat.of(dtype, group)
        grid = BlockGrid(shard.global_shape, group["block_size"])
        return cls(shard, grid, codec, moments, weights, group["exact_cut_blocks"])

    @property
    def relative(self) -> bool:
        """Whether a signed moment is coded in units of the unsigned one beside it."""
        return self.codec.relative and any(not moment.signed for moment in self.moments)

    @property
    def state_names(self) -> frozenset[str]:
        """The entries that its state has."""
        codes = [self.codes_name(moment) for moment in self.moments]
        scales = [self.scales_name(moment) for moment in self.moments] if self.codec.blockwise else []
        low_bits = [LOW_BITS] if self.weights.low_bits else []
        return frozenset(["step", *codes, *scales, *low_bits])

    def codes_name(self, moment: Moment) -> str:
        """The state entry with a moment's codes."""
        return f"{moment.name}_codes" if self.codec.blockwise else moment.name

    def scales_name(self, moment: Moment) -> str:
        """The state entry with a moment's scales."""
        return f"{moment.name}_scales"

    def new(self, device: torch.device) -> StateDict:
        """Fresh state: all moments zero, the master weights what the parameter says, no step taken."""
        state: StateDict = {"step": torch.zeros((), dtype=torch.float32, device=device)}
        for moment in self.moments:
            codes = torch.full(
                self.shard.local_shape,
                self.codec.zero_code(signed=moment.signed),
                dtype=self.codec.code_dtype,
                device=device,
            )
            scales = None
            if self.codec.blockwise:
                shape = self._local_scales_shape(moment)
                scales = torch.zeros(shape, dtype=torch.float32, device=device)
            self._put(state, moment, Coded(codes, scales))
        return {**state, **self._new_low_bits(device)}

    def parts(self, param: Tensor, state: StateDict) -> Iterator[Part]:
        """What the kernels step, given the parameter's local tensor."""
        yield Part(self, 0, param, state)

    def encode(self, values: Mapping[str, Tensor]) -> StateDict:
        """The state entries for float moments by name, each sharded as the parameter is.

        Where blocks are cut this gathers the moments, and all ranks must call it. For flat shards with cut blocks see
        :func:`shardopt.optim.flat_state.encode_flat`.
        """
        if self.exchanges_columns:
            return self.encode_whole(self.gather(values))
        return self.encode_local([self.shard.local(values[m.name]) for m in self.moments])

    def encode_local(
        self, values: Sequence[Tensor], cut_blocks: Mapping[int, Sequence[Tensor]] | None = None
    ) -> StateDict:
        """The state entries for this rank's part of the moments.

        Args:
            values: one tensor of the part's shape per moment.
            cut_blocks: per cut block, by its number in the grid, all its elements for each moment: float32,
                ``(block_size,)``.
        """
        state: StateDict = {}
        local = [x.float() for x in values]
        if not self.codec.blockwise:
            for moment, coded in zip(self.moments, encode_moments(self.codec, self.moments, local), strict=True):
                self._put(state, moment, coded)
            return state
        size, shape = self.grid.block_size, self.shard.local_shape
        codes = [torch.empty(x.numel(), dtype=self.codec.code_dtype, device=x.device) for x in local]
        scales = [
            torch.zeros(self._local_scales_shape(m), dtype=torch.float32, device=x.device)
            for m, x in zip(self.moments, local, strict=True)
        ]
        for band in self.shard.bands(self.grid):
            numel, lead = band.rows * band.cols, band.first_col % size
            if numel == 0:
                continue
            elements = _elements(band)
            blocks = [to_blocks(_padded(x.reshape(-1)[elements].view(band.rows, -1), lead), size) for x in local]
            if cut_blocks and band.rows == 1:
                first = self.grid.block_of(self.shard.first_element + band.element)
                for number in range(blocks[0].shape[1]):
                    for x, whole in zip(blocks, cut_blocks.get(first + number, ()), strict=False):
                        x[0, number] = whole
            covered = slice(band.block, band.block + band.rows * blocks[0].shape[1])
            for k, coded in enumerate(encode_moments(self.codec, self.moments, blocks)):
                assert coded.scales is not None
                codes[k][elements] = from_blocks(coded.codes, lead + band.cols)[:, lead:].reshape(-1)
                flat = scales[k].view(-1, coded.scales.shape[-1])
                flat[covered] = coded.scales.reshape(-1, coded.scales.shape[-1])
        for moment, c, s in zip(self.moments, codes, scales, strict=True):
            self._put(state, moment, Coded(c.view(shape), s))
        return state

    def gather(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        """The whole float moments, for :meth:`encode_whole`. All ranks must call this."""
        return [self.shard.whole(values[m.name]).float() for m in self.moments]

    def encode_whole(self, whole: Sequence[Tensor]) -> StateDict:
        """:meth:`encode` where column shards cut blocks: every rank encodes whole rows and keeps its part."""
        state: StateDict = {}
        blocks = [to_blocks(x.flatten(1), self.grid.block_size) for x in whole]
        for moment, x, coded in zip(self.moments, whole, encode_moments(self.codec, self.moments, blocks), strict=True):
            assert coded.scales is not None
            codes = from_blocks(coded.codes, math.prod(x.shape[1:])).reshape(x.shape)
            scales = coded.scales.flatten(2) if coded.scales.shape[-1] > 1 else coded.scales[..., 0]
            codes, scales = self.shard.part(codes), self.shard.scales_part(scales, self.grid)
            self._put(state, moment, Coded(codes.contiguous(), scales.contiguous()))
        return state

    def decode(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """The moments as float32, each sharded as the parameter is."""
        values = self._decode([self.local_coded(state, moment) for moment in self.moments])
        return {moment.name: self.shard.like_parameter(x) for moment, x in zip(self.moments, values, strict=True)}

    def decode_local(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        """This rank's part of the moments as float32, for its part of the entries: plain tensors."""
        return self._decode([Coded(state[self.codes_name(m)], state.get(self.scales_name(m))) for m in self.moments])

    def _decode(self, local: list[Coded]) -> list[Tensor]:
        return (
            self._decode_blocks(local)
            if self.codec.blockwise
            else decode_moments(self.codec, self.moments, local).values
        )

    def local_coded(self, state: Mapping[str, Any], moment: Moment) -> Coded:
        """This rank's codes and scales of a moment."""
        codes = self.shard.local(state[self.codes_name(moment)])
        if not self.codec.blockwise:
            return Coded(codes, None)
        return Coded(codes, self.shard.local(state[self.scales_name(moment)]))

    def local_low_bits(self, state: Mapping[str, Any]) -> Tensor | None:
        """This rank's low bits of the master weights; None where the format has none.

        Raises:
            KeyError: the state has none.
        """
        return self.shard.local(state[LOW_BITS]) if self.weights.low_bits else None

    def check_loaded(self, loaded: Mapping[str, Any], name: str, *, of_torch: bool) -> None:
        """Checks entries that are to be adopted. What codes and scales stand for, :meth:`check_local` checks.

        Args:
            loaded: what :meth:`new` makes, or torch.optim's state of the parameter.
            name: the parameter's name in errors.
            of_torch: whether the state is torch.optim's: it has no low bits, and the master weights are to begin as the
                parameter's.

        Raises:
            ValueError: the entries are neither, or not those of a parameter of this shape, or floats that are not
                finite.
        """
        if "max_exp_avg_sq" in loaded:
            raise ValueError(f"{name}: got state with max_exp_avg_sq, but shardopt has no amsgrad")
        template = self.new(torch.device("meta"))
        names = {"step", LOW_BITS, *template, *(moment.name for moment in self.moments)}
        unknown = [key for key, value in loaded.items() if key not in names and isinstance(value, Tensor)]
        if unknown:
            raise ValueError(
                f"{name}: got state with {', '.join(unknown)}, expected {', '.join(template)}; was it saved by another "
                "optimizer?"
            )
        self._check_low_bits(loaded, name, of_torch=of_torch)
        wanted = self._wanted(loaded)
        if not wanted.keys() <= loaded.keys():
            raise ValueError(
                f"{name}: got state with {', '.join(loaded)}, expected {', '.join(template)}; "
                "was it saved by another optimizer, or with other quantization options?"
            )
        floats = {moment.name: moment.signed for moment in self.moments}
        for key, like in wanted.items():
            check_entry(loaded[key], like, key, name)
            if key in floats:
                check_moment(self.shard.local(loaded[key]), key, name, signed=floats[key])
            elif loaded[key].dtype != like.dtype:
                raise ValueError(f"{name}: got {key} of {loaded[key].dtype}, expected {like.dtype}")
        checked_step(loaded, name)

    def adopt(self, loaded: Mapping[str, Any], device: torch.device, name: str) -> StateDict:
        """The state for entries that :meth:`check_loaded` let pass: codes and scales as they are, floats encoded.

        All ranks must call this where column shards cut blocks and moments are floats.
        """
        state: StateDict = {key: loaded[key] for key in self._wanted(loaded)}
        low_bits = {LOW_BITS: state.pop(LOW_BITS)} if LOW_BITS in state else self._new_low_bits(device)
        if state.keys() == {moment.name for moment in self.moments}:
            state = self.encode(state)
        moved = {key: copy_to(value, device) for key, value in (state | low_bits).items()}
        return {"step": step_on(device, checked_step(loaded, name)), **moved}

    def check_local(self, state: Mapping[str, Tensor], name: str) -> None:
        """Checks what this rank's part of the state stands for.

        Args:
            state: what :func:`local_entries` gives.
            name: the parameter's name in errors.

        Raises:
            ValueError: a moment is not finite, or below zero though it is not signed; or the step is no whole number.
        """
        checked_step(state, name)
        local = [Coded(state[self.codes_name(m)], state.get(self.scales_name(m))) for m in self.moments]
        blocks = (coded for _, coded in self._blocks_of(local)) if self.codec.blockwise else iter([local])
        for coded in blocks:
            for moment, (codes, scales) in zip(self.moments, coded, strict=True):
                if not self.codec.is_sound(codes, codes if scales is None else scales, signed=moment.signed):
                    coded_as = "" if scales is None else f" with {self.scales_name(moment)}"
                    raise unsound(self.codes_name(moment) + coded_as, name, signed=moment.signed)
            if self.relative and not self._products_are_finite(coded):
                scales_of = " and ".join(self.scales_name(moment) for moment in self.moments)
                signed = next(moment for moment in self.moments if moment.signed)
                raise unsound(f"{self.codes_name(signed)} with {scales_of}", name, signed=True)

    def _products_are_finite(self, coded: Sequence[Coded]) -> bool:
        """Whether moments in units of the root beside them are finite. Decodes only blocks whose scales leave doubt."""
        largest = torch.ones(())
        for moment, (_, scales) in zip(self.moments, coded, strict=True):
            assert scales is not None
            top = torch.full_like(scales[..., :1], 255, dtype=torch.uint8)
            largest = largest.to(scales) * (
                scales[..., :1] if moment.signed else self.codec.decode(top, scales, signed=False)
            )
        doubtful = ~largest[..., 0].isfinite()
        if not doubtful.any():
            return True
        blocks = [Coded(codes[doubtful], scales[doubtful]) for codes, scales in coded if scales is not None]
        return all(are_finite(x, signed=True) for x in decode_moments(self.codec, self.moments, blocks).values)

    def _wanted(self, loaded: Mapping[str, Any]) -> StateDict:
        """The entries to adopt, without memory: float moments where all are there, else those of the state."""
        template = self.new(torch.device("meta"))
        del template["step"]
        if LOW_BITS not in loaded:
            template.pop(LOW_BITS, None)
        if not self.moments or not all(moment.name in loaded for moment in self.moments):
            return template
        for moment in self.moments:
            template.pop(self.codes_name(moment))
            template.pop(self.scales_name(moment), None)
            template[moment.name] = self.shard.like_parameter(torch.empty(self.shard.local_shape, device="meta"))
        return template

    def _new_low_bits(self, device: torch.device) -> StateDict:
        shape = self.weights.low_bits_shape(self.shard.local_shape)
        if shape is None:
            return {}
        return {LOW_BITS: self.shard.like_parameter(torch.zeros(shape, dtype=torch.int8, device=device))}

    def _check_low_bits(self, loaded: Mapping[str, Any], name: str, *, of_torch: bool) -> None:
        """Checks that low bits are there where they have to be, and nowhere else."""
        if self.weights.low_bits and not of_torch and LOW_BITS not in loaded:
            raise ValueError(
                f"{name}: got state with {', '.join(loaded)}, expected {LOW_BITS} too; was it saved with other "
                "master_weight_bits?"
            )
        if not self.weights.low_bits and LOW_BITS in loaded:
            raise ValueError(
                f"{name}: got state with {', '.join(loaded)}, expected no {LOW_BITS} for a parameter of "
                f"{self.weights.dtype}, which would lose them; load a checkpoint with "
                "shardopt.checkpoint.load(convert=True), or the weights that full_precision_parameters() gave"
            )

    @property
    def exchanges_columns(self) -> bool:
        """Whether column shards cut blocks, whose scales all owners keep."""
        return self.codec.blockwise and self.shard.local_blocks(self.grid).exchange is not None

    def like(self, key: str, local: Tensor) -> Tensor:
        """The state entry of that name whose part here is ``local``."""
        if any(key == self.scales_name(moment) for moment in self.moments):
            return self.shard.like_scales(local, self.grid)
        return self.shard.like_parameter(local)

    def _local_scales_shape(self, moment: Moment) -> tuple[int, ...]:
        shape = self.grid.scales_shape(self.codec.scales(signed=moment.signed))
        return (*self.shard.scales_shape(self.grid), *shape[2:])

    def _put(self, state: StateDict, moment: Moment, coded: Coded) -> None:
        state[self.codes_name(moment)] = self.shard.like_parameter(coded.codes)
        if coded.scales is not None:
            state[self.scales_name(moment)] = self.shard.like_scales(coded.scales, self.grid)

    def _decode_blocks(self, local: Sequence[Coded]) -> list[Tensor]:
        found = [torch.zeros(codes.numel(), dtype=torch.float32, device=codes.device) for codes, _ in local]
        for band, coded in self._blocks_of(local):
            lead = band.first_col % self.grid.block_size
            for x, values in zip(found, decode_moments(self.codec, self.moments, coded).values, strict=True):
                x[_elements(band)] = from_blocks(values, lead + band.cols)[:, lead:].reshape(-1)
        return [x.view(self.shard.local_shape) for x in found]

    def _blocks_of(self, local: Sequence[Coded]) -> Iterator[tuple[Band, list[Coded]]]:
        """This rank's codes and scales in blocks ``(rows, blocks, block_size)``, band by band."""
        size = self.grid.block_size
        for band in self.shard.bands(self.grid):
            if band.rows * band.cols == 0:
                continue
            coded = []
            for moment, (codes, scales) in zip(self.moments, local, strict=True):
                assert scales is not None
                zero = self.codec.zero_code(signed=moment.signed)
                rows = codes.reshape(-1)[_elements(band)].view(band.rows, -1)
                blocks = to_blocks(_padded(rows, band.first_col % size, zero), size, fill=zero)
                stride, count = band.blocks_stride if band.rows > 1 else blocks.shape[1], blocks.shape[1]
                width = self.codec.scales(signed=moment.signed)
                rows = scales.reshape(-1, width)[band.block :][: (band.rows - 1) * stride + count]
                per_block = rows.as_strided((band.rows, count, width), (stride * width, width, 1))
                coded.append(Coded(blocks, per_block))
            yield band, coded


def _elements(band: Band) -> slice:
    """The elements of a band in the flattened local tensor."""
    return slice(band.element, band.element + band.rows * band.cols)


def local_entries(shard: Shard, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """This rank's part of a state, as plain tensors."""
    return {key: value if key == "step" else shard.local(value) for key, value in state.items()}


def _padded(rows: Tensor, lead: int, value: float = 0) -> Tensor:
    """A matrix with ``lead`` more columns in front."""
    return torch.nn.functional.pad(rows, (lead, 0), value=value) if lead else rows
