"""Builds the rows of the kernels' tables, which hold addresses and sizes: one row per rectangle of a slice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardopt import _C
from shardopt.codec import Coded
from shardopt.kernels.dispatch import DTYPES
from shardopt.kernels.streamed import EXTENT
from shardopt.kernels.weights import noise_key
from shardopt.layout import BlockGrid, FlatShard, Rectangle
from shardopt.state.residency import Residency
from shardopt.state.slice_spec import LOW_BITS, SliceSpec, StateDict
from shardopt.step.cut_blocks import ExtremeAddresses
from shardopt.step.inputs import StepParameter

_NO_ADDRESSES = [0] * _C.max_moments
_PLAIN_BLOCK = 1024  # elements that a kernel handles at a time for codecs without blocks

#: A row of a step's table: the kernels' row, which csrc/core/call.h describes; sizes of the memory at its addresses;
#: the parameter's index in the step; the index of the row's first element in the parameter's local tensor, and in its
#: gradient; and a number for the slice's transfer unit, whose rows are copied together.
ROW = np.dtype(
    [("kernel_row", _C.kernel_row), ("extent", EXTENT)] + [(x, np.int64) for x in ("parameter", "element", "unit")]
)
_KERNEL_ROW = tuple(_C.kernel_row.fields or ())


def table_rows(
    parameter: StepParameter,
    param: Tensor,
    state: StateDict,
    residency: Residency,
    seed: int,
    extreme_addresses: ExtremeAddresses,
) -> Iterator[tuple[Any, ...]]:
    """Generates a parameter's table rows, of the dtype :data:`ROW`; each step fills in the gradients' addresses.

    ``param`` is this rank's shard of the parameter, ``seed`` the option ``stochastic_rounding_seed``, and
    ``extreme_addresses`` has :attr:`CutBlocks.extreme_addresses` of all blocks that flat shards cut.

    Raises:
        RuntimeError: an entry of the state has another dtype, size, device or layout.
    """
    assert parameter.spec is not None
    _check(parameter.name, "step", state["step"], torch.float32, 1, residency.step_device)
    for index, (spec, slice_state) in enumerate(zip(parameter.spec.slices, parameter.spec.split(state), strict=True)):
        elements = spec.elements(param)
        moments = _checked_moments(parameter.name, spec, elements, slice_state, residency)
        low_bytes = spec.weights.low_bits // 8  # of master weights, per element
        low_bits = slice_state[LOW_BITS] if low_bytes else None
        if low_bits is not None:
            numel = elements.numel() * low_bytes
            _check(parameter.name, LOW_BITS, low_bits, torch.int8, numel, residency.state_device)
        widths = [moment.codec(spec.codec).scales(signed=moment.signed) for moment in spec.moments]
        of_slice = {
            "gradient": 0,  # Batch.fill writes the address
            "step": slice_state["step"].data_ptr(),
            "sums": parameter.sum_addresses.get(index, 0),
            "numel": float(math.prod(spec.shard.global_shape)),
            "noise_key": noise_key(seed, parameter.number if spec.number is None else spec.number),
            "block_size": _block_size(spec),
            "weight_format": spec.weights.index,
            "gradient_dtype": DTYPES[param.dtype],
            "codec": spec.codec.index,
            "group": parameter.group,
        }
        pieces_in = Counter[int]()  # pieces of cut columns so far, by the block's index in scales
        for rectangle, unit in _rectangles(spec, elements, residency, parameter.matrix_begins.get(index, ())):
            scales = [moment.scales for moment in moments]
            extremes = _NO_ADDRESSES
            if rectangle.cut and parameter.columns is not None:  # a column shard, with buffers for all its blocks
                piece = pieces_in[rectangle.local_block]
                pieces_in[rectangle.local_block] += 1
                buffers = [buffer[piece] for buffer in parameter.columns.extremes]
                extremes = _addresses(buffers, rectangle.local_block, [2] * len(buffers))
                if piece:  # the step of the first piece may have replaced the block's scales
                    scales = [x if x is None else x[piece - 1] for x in parameter.columns.old_scales]
            elif rectangle.cut:  # a flat shard
                key = spec.shard, spec.grid.block_of(rectangle.first_element)
                extremes = extreme_addresses.get(key, _NO_ADDRESSES)
            kernel_row = {
                **of_slice,
                "param": _address(elements, rectangle.local_start),
                "low_bits": 0 if low_bits is None else _address(low_bits, rectangle.local_start * low_bytes),
                "codes": _addresses([moment.codes for moment in moments], rectangle.local_start, [1] * len(moments)),
                "scales": _addresses(scales, rectangle.local_block, widths),
                "extremes": extremes,
                "rows": rectangle.rows,
                "cols": rectangle.cols,
                "row_stride": rectangle.row_stride,
                "scales_row_stride": rectangle.scales_row_stride,
                "first_element": rectangle.first_element,
                "global_row_numel": rectangle.global_row_numel,
                "cut": any(extremes),
            }
            fields = tuple(kernel_row[name] for name in _KERNEL_ROW)
            extent = _extent(spec, rectangle, param, moments, widths)
            unit_number = index << 32 | unit  # unique in the parameter
            yield fields, extent, parameter.index, spec.offset + rectangle.local_start, unit_number


def _extent(
    spec: SliceSpec, rectangle: Rectangle, param: Tensor, moments: Sequence[Coded], widths: Sequence[int]
) -> tuple[Any, ...]:
    """The size, per operand, of the memory from a rectangle's first to its last element, as ``EXTENT``.

    Includes the elements between the rows of a rectangle that is narrower than this rank's part. ``widths`` are the
    scales per block, by moment.
    """
    numel, size = (rectangle.rows - 1) * rectangle.row_stride + rectangle.cols, _block_size(spec)
    blocks = -(-(rectangle.first_col % size + rectangle.cols) // size)
    blocks += (rectangle.rows - 1) * rectangle.scales_row_stride
    codes = [numel * moment.codes.element_size() for moment in moments]
    scales = [4 * blocks * width if spec.codec.blockwise else 0 for width in widths]
    return numel * param.element_size(), numel, numel * spec.weights.low_bits // 8, _padded(codes), _padded(scales)


def _checked_moments(name: str, spec: SliceSpec, param: Tensor, state: StateDict, residency: Residency) -> list[Coded]:
    """Checks this rank's codes and scales and returns them, per moment."""
    moments = []
    for moment in spec.moments:
        coded, codec = spec.codes_and_scales(state, moment), moment.codec(spec.codec)
        _check(name, spec.codes_name(moment), coded.codes, codec.code_dtype, param.numel(), residency.state_device)
        if coded.scales is not None:
            numel = math.prod(spec.shard.scales(spec.grid).local_shape) * codec.scales(signed=moment.signed)
            _check(name, spec.scales_name(moment), coded.scales, torch.float32, numel, residency.state_device)
        moments.append(coded)
    return moments


def _block_size(spec: SliceSpec) -> int:
    return spec.grid.block_size if spec.codec.blockwise else _PLAIN_BLOCK


def _rectangles(
    spec: SliceSpec, param: Tensor, residency: Residency, matrix_begins: Sequence[int]
) -> Iterator[tuple[Rectangle, int]]:
    """Divides a slice into the rectangles of its table rows; yields each with the number of its transfer unit.

    Splits at transfer units, where Muon's matrices begin, and around cut blocks, which get rectangles of their own.
    """
    may_cut_blocks = spec.codec.blockwise and (spec.has_column_cut_blocks or isinstance(spec.shard, FlatShard))
    for unit, of_unit in enumerate(_units(spec, param, residency)):
        for of_matrix in of_unit.split_before(matrix_begins):
            for rectangle in of_matrix.separate_cut_blocks(spec.grid) if may_cut_blocks else (of_matrix,):
                if rectangle.rows * rectangle.cols:
                    yield rectangle, unit


def _units(spec: SliceSpec, param: Tensor, residency: Residency) -> list[Rectangle]:
    """The slice as rectangles; if it is offloaded, split into transfer units, each of which is copied at once."""
    shard, size = spec.shard, _block_size(spec)
    if spec.codec.blockwise:
        rectangles = shard.rectangles(spec.grid)
    # Without blocks, a part is one long row. Only random bits need each element's index in the whole parameter.
    elif shard.first_element is not None or not (spec.is_random or spec.codec.random):
        cols = param.numel()
        rectangles = [Rectangle(0, shard.first_element or 0, 1, cols, cols, shard.row_numel, 0, -(-cols // size))]
    else:
        rectangles = shard.rectangles(BlockGrid(shard.global_shape, 1))
    if residency.offload is None:
        return rectangles
    limit = residency.unit_numel(spec, param)
    if any(rectangle.row_stride > rectangle.cols for rectangle in rectangles):  # rows interleave with other rectangles'
        # Units of several rows would overlap in memory, and copy back each other's old values.
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


def _addresses(tensors: Sequence[Tensor | None], index: int, widths: Sequence[int]) -> list[int]:
    """Per moment, the address of the element at ``index * width``; 0 without a tensor."""
    return _padded([0 if t is None else _address(t, index * width) for t, width in zip(tensors, widths, strict=True)])


def _padded(values: Sequence[int]) -> list[int]:
    """Values per moment, padded with zeros to the table's width."""
    return [*values, *[0] * (_C.max_moments - len(values))]
