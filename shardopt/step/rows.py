"""Rows of the kernel tables: one per rectangle of a parameter's slice, and one per param group."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.dispatch import DTYPES
from shardopt.kernels.streamed import EXTENT
from shardopt.kernels.weights import noise_key
from shardopt.layout import BlockGrid, FlatShard, Rectangle
from shardopt.state.options import TABLE_FORMAT
from shardopt.state.residency import Residency
from shardopt.state.rule import Rule, hyper_row
from shardopt.state.slice_spec import LOW_BITS, SliceSpec, StateDict
from shardopt.state.tensor_state import TensorState
from shardopt.step.cut_blocks import CutParameter, FlatCuts

_PLAIN_BLOCK = 1024  # elements that a kernel handles at a time for codecs without blocks

#: A step's table: the columns of :class:`Row`.
ROW = np.dtype(
    [("kernel_row", _C.kernel_row), ("extent", EXTENT), ("tensor", np.int64), ("element", np.int64), ("unit", np.int64)]
)


class KernelRow(NamedTuple):
    """A row of ``_C.kernel_row``, whose columns csrc/core/call.h describes. Lists have a value per moment."""

    param: int
    gradient: int
    step: int
    low_bits: int
    codes: list[int]
    scales: list[int]
    extremes: list[int]
    sums: int
    numel: float
    rows: int
    cols: int
    row_stride: int
    scales_row_stride: int
    first_element: int
    global_row_numel: int
    noise_key: int
    block_size: int
    weight_format: int
    gradient_dtype: int
    codec: int
    group: int
    cut: bool


class Extent(NamedTuple):
    """A row of :data:`shardopt.kernels.streamed.EXTENT`: the memory behind each address of a kernel row."""

    param: int
    gradient: int
    low_bits: int
    codes: list[int]
    scales: list[int]


class Row(NamedTuple):
    """A row of a step's table, in the order of :data:`ROW`.

    Attributes:
        kernel_row: the kernels' part, with the gradient's address and dtype yet to be filled in.
        extent: memory behind each address of the kernel row: elements for the gradient, else bytes.
        tensor: index of the optimizer's parameter.
        element: index of the row's first element in the parameter's local tensor, and in its gradient.
        unit: number of the transfer unit within the parameter: rows of a transfer unit are copied together.
    """

    kernel_row: KernelRow
    extent: Extent
    tensor: int
    element: int
    unit: int


class GroupRow(NamedTuple):
    """A row of ``_C.group_row``, which csrc/core/call.h describes."""

    hyper: list[float]
    lr: int
    gradient_scale: float
    rule: int
    nonfinite: int


class Group(NamedTuple):
    """Options that all parameters of a param group share in a step.

    Attributes:
        rule: the update.
        table_format: values of the options in :data:`shardopt.state.options.TABLE_FORMAT`.
        hyper: the rule's hyper-parameters.
        lr: the learning rate if it is on a device; ``hyper["lr"]`` is then 0.
        gradient_sign: -1 to ascend.
        nonfinite: the option ``nonfinite``.
    """

    rule: Rule
    table_format: tuple[Any, ...]
    hyper: dict[str, float]
    lr: Tensor | None
    gradient_sign: float
    nonfinite: str

    @classmethod
    def of(cls, options: Mapping[str, Any], rule: Rule, hyper: dict[str, float], lr: Tensor | None) -> Group:
        """The group with these options."""
        table_format = tuple(options[name] for name in TABLE_FORMAT)
        return cls(rule, table_format, hyper, lr, -1.0 if options["maximize"] else 1.0, options["nonfinite"])

    def row(self, lr: Tensor | None, scale: float | None = None) -> GroupRow:
        """The group as a row of ``_C.group_row``.

        Args:
            lr: a float32 scalar on the kernels' device that replaces the learning rate in ``hyper``; or None.
            scale: factor of the learning rate in the pass that moves parameters by orthogonalized directions.
        """
        rule, hyper, sign = self.rule.name, self.hyper, self.gradient_sign
        if scale is not None:
            assert self.rule.orthogonalized is not None
            rule, hyper, sign = self.rule.orthogonalized.apply, {**hyper, "scale": scale}, 1.0
        policy = _C.NonFinite.propagate if self.nonfinite == "propagate" else _C.NonFinite.skip
        address = 0 if lr is None else lr.data_ptr()
        return GroupRow(hyper_row(rule, hyper), address, sign, rule=int(_C.rules[rule]["index"]), nonfinite=int(policy))


class Part(NamedTuple):
    """A slice with its elements and state entries: this rank's plain tensors, views of the optimizer's."""

    spec: SliceSpec
    param: Tensor
    state: StateDict


class SliceOfStep(NamedTuple):
    """A slice's data in a step, beside its state.

    Attributes:
        flat_cuts: blocks that the boundaries of flat shards cut, whose extremes are exchanged together.
        sums: address of the sums over the slice's parameter; 0 if its rule needs none.
        begins: indices in the slice at which a matrix begins. Rows of the table end there.
    """

    flat_cuts: FlatCuts
    sums: int
    begins: Sequence[int]


def rows_of(
    name: str,
    spec: TensorState,
    param: Tensor,
    state: StateDict,
    residency: Residency,
    slices: Sequence[SliceOfStep],
    seed_and_number: tuple[int, int],
    indices: tuple[int, int],
) -> tuple[list[Row], CutParameter | None]:
    """The rows of one of the optimizer's parameters.

    Args:
        name: the parameter's name in errors.
        spec: describes the parameter's state.
        param: this rank's part of the parameter.
        state: the parameter's state.
        residency: where the state lives.
        slices: the step's data of each slice.
        seed_and_number: ``stochastic_rounding_seed``, and the parameter's index among all of the model's.
        indices: the parameter's index in the step, and its param group's.

    Returns:
        The rows; and the exchange of cut blocks, if the parameter is a column shard that cuts blocks.

    Raises:
        RuntimeError: the state lacks an entry, or an entry has another dtype, size, device or layout.
    """
    for key in spec.state_names:
        if key not in state:
            raise RuntimeError(
                f"{name}: got state without {key}, expected {', '.join(sorted(spec.state_names))}; set the options "
                f"when the optimizer is made, or load a state that has {key}"
            )
    _check(name, "step", state["step"], torch.float32, 1, residency.steps)
    rows: list[Row] = []
    cut = None
    for slice_, slice_state, of_step in zip(spec.slices, spec.split(state), slices, strict=True):
        part = Part(slice_, slice_.elements(param), slice_state)
        cut = _cut_parameter(part)
        seed, number = seed_and_number
        key_of_noise = noise_key(seed, number if slice_.number is None else slice_.number)
        first_unit = rows[-1].unit + 1 if rows else 0
        rows += _rows_of_part(name, part, cut, of_step, residency, key_of_noise, indices, first_unit)
    return rows, cut


def _rows_of_part(
    name: str,
    part: Part,
    cut: CutParameter | None,
    of_step: SliceOfStep,
    residency: Residency,
    key_of_noise: int,
    indices: tuple[int, int],
    first_unit: int,
) -> Iterator[Row]:
    spec, param, grid = part.spec, part.param, part.spec.grid
    codes, scales = _checked_moments(name, part, residency)
    low_bits, low_bytes = spec.local_low_bits(part.state), spec.weights.low_bits // 8
    if low_bits is not None:
        _check(name, LOW_BITS, low_bits, torch.int8, param.numel() * low_bytes, residency.state)
    widths = [moment.codec(spec.codec).scales(signed=moment.signed) for moment in spec.moments]
    size = grid.block_size if spec.codec.blockwise else _PLAIN_BLOCK
    pieces_in: Counter[int] = Counter()  # pieces so far, by the block's index in the scales
    divides = spec.codec.blockwise and (cut is not None or isinstance(spec.shard, FlatShard))
    for unit, whole in enumerate(_units(part, residency), first_unit):
        pieces = whole.ended(of_step.begins)
        for rectangle in chain.from_iterable(uncut.divided(grid) for uncut in pieces) if divides else pieces:
            if rectangle.rows * rectangle.cols == 0:
                continue
            extremes, scales_here = _addresses([], 0), scales
            if rectangle.cut and cut is not None:
                piece = pieces_in[rectangle.block]
                pieces_in[rectangle.block] += 1
                extremes = _addresses([x[piece] for x in cut.extremes], rectangle.block, [2] * len(cut.extremes))
                scales_here = [x if x is None else x[piece - 1] for x in cut.old_scales] if piece else scales
            elif rectangle.cut:
                extremes = of_step.flat_cuts.addresses(spec, grid.block_of(rectangle.first)) or extremes
            numel = (rectangle.rows - 1) * rectangle.row_stride + rectangle.cols
            lead = rectangle.first_col % size
            blocks = (rectangle.rows - 1) * rectangle.blocks_stride + -(-(lead + rectangle.cols) // size)
            yield Row(
                KernelRow(
                    param=_address(param, rectangle.element),
                    gradient=0,
                    step=part.state["step"].data_ptr(),
                    low_bits=0 if low_bits is None else low_bits.data_ptr() + rectangle.element * low_bytes,
                    codes=_addresses(codes, rectangle.element),
                    scales=_addresses(scales_here, rectangle.block, widths),
                    extremes=extremes,
                    sums=of_step.sums,
                    numel=float(math.prod(spec.shard.global_shape)),
                    rows=rectangle.rows,
                    cols=rectangle.cols,
                    row_stride=rectangle.row_stride,
                    scales_row_stride=rectangle.blocks_stride,
                    first_element=rectangle.first,
                    global_row_numel=rectangle.stride,
                    noise_key=key_of_noise,
                    block_size=size,
                    weight_format=spec.weights.index,
                    gradient_dtype=DTYPES[param.dtype],
                    codec=spec.codec.index,
                    group=indices[1],
                    cut=any(extremes),
                ),
                Extent(
                    param=numel * param.element_size(),
                    gradient=numel,
                    low_bits=numel * low_bytes,
                    codes=_padded([numel * c.element_size() for c in codes]),
                    scales=_padded([4 * blocks * width if spec.codec.blockwise else 0 for width in widths]),
                ),
                tensor=indices[0],
                element=spec.offset + rectangle.element,
                unit=unit,
            )


def _checked_moments(name: str, part: Part, residency: Residency) -> tuple[list[Tensor], list[Tensor | None]]:
    """This rank's codes and scales, per moment."""
    spec = part.spec
    codes, scales = [], []
    for moment in spec.moments:
        coded = spec.local_coded(part.state, moment)
        codec = moment.codec(spec.codec)
        _check(name, spec.codes_name(moment), coded.codes, codec.code_dtype, part.param.numel(), residency.state)
        if coded.scales is not None:
            numel = math.prod(spec.shard.scales(spec.grid).local_shape) * codec.scales(signed=moment.signed)
            _check(name, spec.scales_name(moment), coded.scales, torch.float32, numel, residency.state)
        codes.append(coded.codes)
        scales.append(coded.scales)
    return codes, scales


def _cut_parameter(part: Part) -> CutParameter | None:
    """The exchange among the owners of a column shard; None if the shard cuts no blocks."""
    spec, device = part.spec, part.param.device
    exchange = spec.shard.block_owners(spec.grid) if spec.codec.blockwise else None
    if exchange is None:
        return None
    scales = [spec.local_coded(part.state, moment).scales for moment in spec.moments]
    return CutParameter.of(spec, exchange, scales, device)


def _units(part: Part, residency: Residency) -> list[Rectangle]:
    """The slice as matrices, which are transfer units if the slice is offloaded."""
    spec, shard = part.spec, part.spec.shard
    size = spec.grid.block_size if spec.codec.blockwise else _PLAIN_BLOCK
    if spec.codec.blockwise:
        rectangles = shard.rectangles(spec.grid)
    elif shard.range_start is not None or not spec.is_random:  # one long row: columns matter for noise only
        cols = part.param.numel()
        rectangles = [Rectangle(0, shard.range_start or 0, 1, cols, cols, shard.row_numel, 0, -(-cols // size))]
    else:
        rectangles = shard.rectangles(BlockGrid(shard.global_shape, 1))
    if residency.offload is None:
        return rectangles
    limit = residency.unit_numel(spec, part.param)
    if any(rectangle.row_stride > rectangle.cols for rectangle in rectangles):  # units must not overlap
        limit = min(limit, min(rectangle.cols for rectangle in rectangles))
    return [unit for rectangle in rectangles for unit in rectangle.split(limit, size)]


def _check(name: str, key: str, tensor: Tensor, dtype: torch.dtype, numel: int, device: torch.device) -> None:
    """Checks a state entry, which the user may have replaced: the kernels do not check."""
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
    """Addresses of the elements at ``index``, per moment. ``widths``: elements per index, 1 by default."""
    widths = [1] * len(tensors) if widths is None else widths
    return _padded([0 if t is None else _address(t, index * width) for t, width in zip(tensors, widths, strict=True)])


def _padded(values: Sequence[int]) -> list[int]:
    """Values per moment, padded with zeros to the table's width."""
    return [*values, *[0] * (_C.max_moments - len(values))]
