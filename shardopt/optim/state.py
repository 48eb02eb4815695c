"""The state of one parameter: its names, dtypes and shapes, and its conversion from and to float32 moments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardopt.codec import Codec, Coded, Moment, decode_moments, encode_moments, get_codec
from shardopt.kernels.numeric import from_blocks, to_blocks
from shardopt.kernels.weights import WeightFormat
from shardopt.layout import BlockGrid, Shard, is_quantized, shard_of

StateDict = dict[str, Any]

#: The state entry with what a bfloat16 parameter lacks of its master weight.
LOW_BITS = "master_low_bits"


@dataclass(frozen=True)
class ParameterState:
    """What the state of one parameter looks like.

    A quantized moment ``exp_avg`` is two entries: ``exp_avg_codes`` (uint8, the parameter's shape) and
    ``exp_avg_scales`` (float32, ``BlockGrid.scales_shape``); otherwise it is one, ``exp_avg``. Both are sharded as the
    parameter is. ``step`` is a float32 scalar. A bfloat16 parameter with a master weight has ``master_low_bits`` (int8,
    ``WeightFormat.low_bits_shape``), sharded alike.
    """

    shard: Shard
    grid: BlockGrid
    codec: Codec
    moments: tuple[Moment, ...]
    weights: WeightFormat

    @classmethod
    def of(cls, param: Tensor, group: Mapping[str, Any], moments: tuple[Moment, ...]) -> ParameterState:
        """The state that a parameter has in a param group.

        Raises:
            ValueError: the group's weight format is not for the parameter's dtype.
        """
        shard = shard_of(param)
        quantized = bool(moments) and is_quantized(shard.global_shape, group["min_quantized_numel"])
        codec = get_codec(group["codec"] if quantized else "fp32")
        weights = WeightFormat.of(param.dtype, group)
        return cls(shard, BlockGrid(shard.global_shape, group["block_size"]), codec, moments, weights)

    @property
    def relative(self) -> bool:
        """Whether a signed moment is coded in units of the unsigned one beside it."""
        return self.codec.relative and any(not moment.signed for moment in self.moments)

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

    def encode(self, values: Mapping[str, Tensor]) -> StateDict:
        """The state entries for float moments by name, each sharded as the parameter is.

        Where blocks are cut this gathers the moments, and all ranks must call it.
        """
        state: StateDict = {}
        if not self.codec.blockwise:
            local = [self.shard.local(values[m.name]).float() for m in self.moments]
            for moment, coded in zip(self.moments, encode_moments(self.codec, self.moments, local), strict=True):
                self._put(state, moment, coded)
            return state
        gathered = self._exchanges
        take = self.shard.whole if gathered else self.shard.local
        parts = [take(values[m.name]).float() for m in self.moments]
        blocks = [to_blocks(x.flatten(1), self.grid.block_size) for x in parts]
        for moment, part, coded in zip(
            self.moments, parts, encode_moments(self.codec, self.moments, blocks), strict=True
        ):
            assert coded.scales is not None
            codes = from_blocks(coded.codes, math.prod(part.shape[1:])).reshape(part.shape)
            scales = coded.scales.flatten(2) if coded.scales.shape[-1] > 1 else coded.scales[..., 0]
            if gathered:
                codes = self.shard.part(codes)
                scales = self.shard.scales_part(scales, self.grid)
            self._put(state, moment, Coded(codes.contiguous(), scales.contiguous()))
        return state

    def decode(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """The moments as float32, each sharded as the parameter is."""
        local = [self.local_coded(state, moment) for moment in self.moments]
        if not self.codec.blockwise:
            values = decode_moments(self.codec, self.moments, local).values
        else:
            values = self._decode_blocks(local)
        return {moment.name: self.shard.like_parameter(x) for moment, x in zip(self.moments, values, strict=True)}

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

    def adopt(self, loaded: Mapping[str, Any], device: torch.device, name: str, *, of_torch: bool) -> StateDict:
        """The state for entries that were loaded: own codes and scales as they are, float moments encoded.

        Args:
            loaded: what :meth:`new` makes, or torch.optim's state of the parameter.
            device: where the state is to live.
            name: the parameter's name in errors.
            of_torch: whether the state is torch.optim's: it has no low bits, and the master weights are to begin as the
                parameter's.

        Raises:
            ValueError: the entries are neither, or not those of a parameter of this shape.
        """
        if "max_exp_avg_sq" in loaded:
            raise ValueError(f"{name}: got state with max_exp_avg_sq, but shardopt has no amsgrad")
        template = self.new(torch.device("meta"))
        low_bits = template.pop(LOW_BITS, None)
        if low_bits is not None and not of_torch and LOW_BITS not in loaded:
            raise ValueError(
                f"{name}: got state with {', '.join(loaded)}, expected {LOW_BITS} too; was it saved with other "
                "master_weight_bits?"
            )
        floats = {m.name: loaded[m.name] for m in self.moments if m.name in loaded}
        if self.codec.blockwise and self.moments and len(floats) == len(self.moments):
            for moment in self.moments:
                self._check(floats[moment.name], template[self.codes_name(moment)], moment.name, name)
            state = self.encode(floats)
        else:
            missing = [key for key in template if key != "step" and key not in loaded]
            if missing:
                raise ValueError(
                    f"{name}: got state with {', '.join(loaded)}, expected {', '.join(template)}; "
                    "was it saved by another optimizer, or with other quantization options?"
                )
            state = {key: loaded[key] for key in template if key != "step"}
            for key, value in state.items():
                self._check(value, template[key], key, name)
                same = value.dtype == template[key].dtype
                if not same and (self.codec.blockwise or not value.dtype.is_floating_point):
                    raise ValueError(f"{name}: got {key} of {value.dtype}, expected {template[key].dtype}")
            if not self.codec.blockwise:
                state = self.encode(state)
        moved = {key: _copy(value, device) for key, value in state.items()}
        if low_bits is not None:
            moved |= self._adopt_low_bits(loaded, low_bits, device, name)
        step = loaded.get("step", 1.0)  # torch's SGD counts none: it has a momentum buffer, so it took one
        return {"step": torch.as_tensor(step, dtype=torch.float32).clone().to(device), **moved}

    def _new_low_bits(self, device: torch.device) -> StateDict:
        shape = self.weights.low_bits_shape(self.shard.local_shape)
        if shape is None:
            return {}
        return {LOW_BITS: self.shard.like_parameter(torch.zeros(shape, dtype=torch.int8, device=device))}

    def _adopt_low_bits(
        self, loaded: Mapping[str, Any], expected: Tensor, device: torch.device, name: str
    ) -> StateDict:
        if LOW_BITS not in loaded:
            return self._new_low_bits(device)
        found = loaded[LOW_BITS]
        self._check(found, expected, LOW_BITS, name)
        if found.dtype != expected.dtype:
            raise ValueError(f"{name}: got {LOW_BITS} of {found.dtype}, expected {expected.dtype}")
        return {LOW_BITS: _copy(found, device)}

    @property
    def _exchanges(self) -> bool:
        return self.shard.local_blocks(self.grid).exchange is not None

    def _local_scales_shape(self, moment: Moment) -> tuple[int, ...]:
        shape = self.grid.scales_shape(self.codec.scales(signed=moment.signed))
        return (self.shard.rows, self.shard.local_blocks(self.grid).per_row, *shape[2:])

    def _put(self, state: StateDict, moment: Moment, coded: Coded) -> None:
        state[self.codes_name(moment)] = self.shard.like_parameter(coded.codes)
        if coded.scales is not None:
            state[self.scales_name(moment)] = self.shard.like_scales(coded.scales, self.grid)

    def _decode_blocks(self, local: list[Coded]) -> list[Tensor]:
        size, shard = self.grid.block_size, self.shard
        if shard.rows * shard.cols == 0:
            return [torch.zeros_like(codes, dtype=torch.float32) for codes, _ in local]
        covered = shard.local_blocks(self.grid)
        lead = shard.first_col % size
        first = shard.first_col // size - covered.first
        coded = []
        for moment, (codes, scales) in zip(self.moments, local, strict=True):
            assert scales is not None
            zero = self.codec.zero_code(signed=moment.signed)
            padded = torch.nn.functional.pad(codes.reshape(shard.rows, shard.cols), (lead, 0), value=zero)
            blocks = to_blocks(padded, size, fill=zero)
            per_block = scales.reshape(shard.rows, covered.per_row, -1)
            coded.append(Coded(blocks, per_block[:, first : first + blocks.shape[1]]))
        values = decode_moments(self.codec, self.moments, coded).values
        return [from_blocks(x, lead + shard.cols)[:, lead:].reshape(shard.local_shape) for x in values]

    @staticmethod
    def _check(value: Any, expected: Tensor, key: str, name: str) -> None:
        alike = (
            isinstance(value, Tensor)
            and type(value) is type(expected)
            and value.shape == expected.shape
            and getattr(value, "placements", None) == getattr(expected, "placements", None)
        )
        if not alike:
            got = f"{type(value).__name__} {tuple(getattr(value, 'shape', ()))}"
            raise ValueError(
                f"{name}: got {key} as {got}, expected {type(expected).__name__} {tuple(expected.shape)}; load a "
                "sharded optimizer with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            )


def _copy(value: Tensor, device: torch.device) -> Tensor:
    copy = value.detach().clone()
    return copy if copy.device == device else copy.to(device)
