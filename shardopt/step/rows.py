"""Builds the rows of the kernels' tables, which hold addresses and sizes: one row per rectangle of a slice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.dispatch import DTYPES
from shardopt.kernels.streamed import EXTENT
from shardopt.kernels.weights import noise_key
from shardopt.layout import BlockGrid, FlatShard, Rectangle, Shard
from shardopt.state.residency import Residency
from shardopt.state.slice_spec import LOW_BITS, SliceSpec, StateDict
from shardopt.step.inputs import Input

_PLAIN_BLOCK = 1024  # elements that a kernel handles at a time for codecs without blocks

#: A row of a step's table: the kernels' row, which csrc/core/call.h describes; the memory behind each of its addresses;
#: the parameter's index in the step; the index of the row's first element in the parameter's local tensor, and in its
#: gradient; and a number for the slice's transfer unit, whose rows are copied together.
ROW = np.dtype(
    [("kernel_row", _C.kernel_row), ("extent", EXTENT), ("tensor", np.int64), ("element", np.int64), ("unit", np.int64)]
)

Row = tuple[Any, ...]


def rows_of(
    parameter: Input,
    param: Tensor,
    state: StateDict,
    residency: Residency,
    seed: int,
    extremes_of: Mapping[tuple[Shard, int], list[int]],
) -> Iterator[Row]:
    """Generates a parameter's table rows, of the dtype :data:`ROW`; each step fills in the gradients' addresses.

    Args:
        parameter: the parameter's description.
        param: this rank's shard of the parameter.
        state: the parameter's state.
        residency: the devices of the state and of the step count, and whether they are offloaded.
        seed: the option ``stochastic_rounding_seed``.
        extremes_of: by shard and block number, the addresses of the extremes of each block that flat shards cut.

    Raises:
        RuntimeError: an entry of the state has another dtype, size, device or layout.
    """
    columns = parameter.columns
    assert parameter.spec is not None
    _check(parameter.name, "step", state["step"], torch.float32, 1, residency.steps)
    for place, (spec, of_slice) in enumerate(zip(parameter.spec.slices, parameter.spec.split(state), strict=True)):
        elements, size = spec.elements(param), _block_size(spec)
        codes, scales, low_bits = _checked(parameter.name, spec, elements, of_slice, residency)
        low_bytes = spec.weights.low_bits // 8
        key = noise_key(seed, parameter.number if spec.number is None else spec.number)
        widths = [moment.codec(spec.codec).scales(signed=moment.signed) for moment in spec.moments]
        pieces_in = Counter[int]()  # pieces so far, by the block's index in scales
        for rectangle, unit in _rectangles(spec, elements, residency, parameter.begins.get(place, ())):
            extremes, scales_here = _addresses([], 0), scales
            if rectangle.cut and columns is not None:
                piece = pieces_in[rectangle.block]
                pieces_in[rectangle.block] += 1
                extremes = _addresses([x[piece] for x in columns.extremes], rectangle.block, [2] * len(spec.moments))
                scales_here = [x if x is None else x[piece - 1] for x in columns.old_scales] if piece else scales
            elif rectangle.cut:
                extremes = extremes_of.get((spec.shard, spec.grid.block_of(rectangle.first)), extremes)
            numel = (rectangle.rows - 1) * rectangle.row_stride + rectangle.cols
            blocks = -(-(rectangle.first_col % size + rectangle.cols) // size)
            blocks += (rectangle.rows - 1) * rectangle.blocks_stride
            kernel_row = {
                "param": _address(elements, rectangle.element),
                "gradient": 0,
                "step": of_slice["step"].data_ptr(),
                "low_bits": 0 if low_bits is None else low_bits.data_ptr() + rectangle.element * low_bytes,
                "codes": _addresses(codes, rectangle.element),
                "scales": _addresses(scales_here, rectangle.block, widths),
                "extremes": extremes,
                "sums": parameter.sums.get(place, 0),
                "numel": float(math.prod(spec.shard.global_shape)),
                "rows": rectangle.rows,
                "cols": rectangle.cols,
                "row_stride": rectangle.row_stride,
                "scales_row_stride": rectangle.blocks_stride,
                "first_element": rectangle.first,
                "global_row_numel": rectangle.stride,
                "noise_key": key,
                "block_size": size,
                "weight_format": spec.weights.index,
                "gradient_dtype": DTYPES[param.dtype],
                "codec": spec.codec.index,
                "group": parameter.group,
                "cut": any(extremes),
            }
            extent = (
                numel * param.element_size(),
                numel,
                numel * low_bytes,
                _padded([numel * x.element_size() for x in codes]),
                _padded([4 * blocks * width if spec.codec.blockwise else 0 for width in widths]),
            )
            first = spec.offset + rectangle.element
            yield tuple(kernel_row[name] for name in _KERNEL_ROW), extent, parameter.index, first, place << 32 | unit


_KERNEL_ROW = tuple(_C.kernel_row.fields or ())


def _checked(
    name: str, spec: SliceSpec, param: Tensor, state: StateDict, residency: Residency
) -> tuple[list[Tensor], list[Tensor | None], Tensor | None]:
    """Checks this rank's state tensors and returns them: codes and scales per moment, and the weights' low bits."""
    codes, scales = [], []
    for moment in spec.moments:
        coded, codec = spec.local_coded(state, moment), moment.codec(spec.codec)
        _check(name, spec.codes_name(moment), coded.codes, codec.code_dtype, param.numel(), residency.state)
        if coded.scales is not None:
            numel = math.prod(spec.shard.scales(spec.grid).local_shape) * codec.scales(signed=moment.signed)
            _check(name, spec.scales_name(moment), coded.scales, torch.float32, numel, residency.state)
        codes.append(coded.codes)
        scales.append(coded.scales)
    low_bits = state[LOW_BITS] if spec.weights.low_bits else None
    if low_bits is not None:
        _check(name, LOW_BITS, low_bits, torch.int8, param.numel() * spec.weights.low_bits // 8, residency.state)
    return codes, scales, low_bits


def _block_size(spec: SliceSpec) -> int:
    return spec.grid.block_size if spec.codec.blockwise else _PLAIN_BLOCK


def _rectangles(
    spec: SliceSpec, param: Tensor, residency: Residency, begins: Sequence[int]
) -> Iterator[tuple[Rectangle, int]]:
    """Divides a slice into the rectangles of its table rows; yields each with the number of its transfer unit."""
    divides = spec.codec.blockwise and (spec.exchanges_columns or isinstance(spec.shard, FlatShard))
    for unit, whole in enumerate(_units(spec, param, residency)):
        pieces = whole.cut_before(begins)
        for rectangle in chain.from_iterable(uncut.divided(spec.grid) for uncut in pieces) if divides else pieces:
            if rectangle.rows * rectangle.cols:
                yield rectangle, unit


def _units(spec: SliceSpec, param: Tensor, residency: Residency) -> list[Rectangle]:
    """The slice as rectangles; if it is offloaded, split into transfer units, each copied to the device at once."""
    shard, size = spec.shard, _block_size(spec)
    if spec.codec.blockwise:
        rectangles = shard.rectangles(spec.grid)
    elif shard.range_start is not None or not (spec.is_random or spec.codec.random):
        cols = param.numel()
        rectangles = [Rectangle(0, shard.range_start or 0, 1, cols, cols, shard.row_numel, 0, -(-cols // size))]
    else:
        rectangles = shard.rectangles(BlockGrid(shard.global_shape, 1))
    if residency.offload is None:
        return rectangles
    limit = residency.unit_numel(spec, param)
    if any(rectangle.row_stride > rectangle.cols for rectangle in rectangles):  # units must not overlap
        limit = min(limit, min(rectangle.cols for rectangle in rectangles))
    return [unit for rectangle in rectangles for unit in rectangle.split(limit, size)]


def _check(name: str, key: str, tensor: Tensor, dtype: torch.dtype, numel: int, device: torch.device) -> None:
    """Checks a state entry before kernels get its address, as the user may have replaced the tensor."""
    if tensor.dtype == dtype and tensor.numel() == numel and tensor.device == device and tensor.is_contiguous():
        return
    layout = "a contiguous" if tensor.is_contiguous() else "a strided"
    raise RuntimeError(
        f"{name}: got state {key} as {layout} tensor of {tensor.numel()} elements of {tensor.dtype} on "
        f"{tensor.device}, expected a contiguous one of {numel} of {dtype} on {device}; move it back, or load it with "
        "load_state_dict"
    )


def _address(tensor: Tensor, index: int) -> int:
    return tensor.data_ptr() + index * tensor.element_size()


def _addresses(tensors: Sequence[Tensor | None], index: int, widths: Sequence[int] | None = None) -> list[int]:
    """Per moment, the address of the element at ``index * width``, with widths of 1 by default; 0 without a tensor."""
    widths = [1] * len(tensors) if widths is None else widths
    return _padded([0 if t is None else _address(t, index * width) for t, width in zip(tensors, widths, strict=True)])


def _padded(values: Sequence[int]) -> list[int]:
    """Values per moment, padded with zeros to the table's width."""
    return [*values, *[0] * (_C.max_moments - len(values))]
