"""The rows of a step's tables: what the kernels are told of a parameter and of a param group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.dispatch import DTYPES
from shardopt.kernels.weights import noise_key
from shardopt.layout import Band, FlatShard, Rectangle, rectangles
from shardopt.optim.cut_blocks import CutParameter, FlatCuts
from shardopt.optim.options import TABLE_FORMAT
from shardopt.optim.placement import Offload, Place
from shardopt.optim.rule import Rule
from shardopt.optim.slice_state import LOW_BITS, StateDict
from shardopt.optim.tensor_state import Part, TensorState

_PLAIN_BLOCK = 1024  # elements that a kernel handles at a time where there are no blocks


class Group(NamedTuple):
    """What all parameters of a param group share in a step.

    Attributes:
        rule: the update.
        table_format: the options that decide what the tables look like.
        hyper: the rule's hyper-parameters.
        lr: the learning rate where it is on a device; ``hyper["lr"]`` is then 0.
        gradient_sign: -1 to ascend.
        nonfinite: what a NaN or Inf in a gradient does.
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

    def row(self, lr: float | None, lr_on_device: Tensor | None) -> tuple[object, ...]:
        """The group as a row of ``_C.group_entry``.

        Args:
            lr: stands for the learning rate in ``hyper``, if given.
            lr_on_device: so does this float32 scalar on the kernels' device.
        """
        hyper = self.hyper if lr is None else {**self.hyper, "lr": lr}
        policy = _C.NonFinite.propagate if self.nonfinite == "propagate" else _C.NonFinite.skip
        address = 0 if lr_on_device is None else lr_on_device.data_ptr()
        return (self.rule.hyper_row(hyper), address, self.gradient_sign, self.rule.index, int(policy))


class PlannedParameter(NamedTuple):
    """This rank's part of a parameter in the tables.

    Attributes:
        name: how errors name it.
        group: the index of its param group.
        spec: what its state looks like.
        device: where it lives.
        rows: of ``_C.tensor_entry``, with the gradient's address and dtype left open.
        extents: of ``EXTENT``, one per row.
        pieces: per row, which of the parameter's pieces it belongs to.
        first_elements: per row, the gradient's element with which it begins.
        step: its step count.
        cut: what its owners exchange, where a column shard cuts blocks.
        offload: what is copied for its step, if anything.
    """

    name: str
    group: int
    spec: TensorState
    device: torch.device
    rows: list[tuple[object, ...]]
    extents: list[tuple[object, ...]]
    pieces: list[int]
    first_elements: list[int]
    step: Tensor
    cut: CutParameter | None
    offload: Offload

    @classmethod
    def of(
        cls,
        name: str,
        group: int,
        spec: TensorState,
        param: Tensor,
        state: StateDict,
        noise: Noise,
        flat_cuts: FlatCuts,
        place: Place,
    ) -> PlannedParameter:
        """The rows for ``param``, this rank's part, and its state.

        Raises:
            RuntimeError: the state is not what the kernels can step with this parameter.
        """
        _check(name, "step", state["step"], torch.float32, 1, place.steps)
        for key in spec.state_names:
            if key not in state:
                raise RuntimeError(
                    f"{name}: got state without {key}, expected {', '.join(sorted(spec.state_names))}; set the options "
                    "when the optimizer is made, or load a state that has it"
                )
        rows: list[tuple[object, ...]] = []
        extents: list[tuple[object, ...]] = []
        pieces: list[int] = []
        first_elements: list[int] = []
        cut = None
        for part in spec.parts(param, state):
            entries, cut = _entries_of(name, part, flat_cuts, place)
            noise_of = noise_key(noise.seed, noise.place if part.place is None else part.place)
            rows += [_row(part, entry, noise_of, group) for entry in entries]
            extents += [_extent(part, entry) for entry in entries]
            first_piece = pieces[-1] + 1 if pieces else 0
            pieces += [first_piece + entry.piece for entry in entries]
            first_elements += [part.first + entry.element for entry in entries]
        device, step = param.device, state["step"]
        return cls(name, group, spec, device, rows, extents, pieces, first_elements, step, cut, place.offload)


class Noise(NamedTuple):
    """What the noise of stochastic rounding depends on, for one parameter: the option, and its place among all."""

    seed: int
    place: int


class _Entry(NamedTuple):
    """What the kernels step in one go: elements of a part that form a matrix, of whole blocks or of cut ones.

    Attributes:
        element: index of the first in the part.
        first_element: the same in the flattened global parameter.
        rows: how many.
        cols: how many.
        row_stride: elements from row to row.
        codes: per moment.
        scales: addresses, per moment.
        extremes: addresses, per moment.
        blocks_stride: blocks from row to row.
        block_size: elements per block.
        low_bits: address.
        cut: whether other ranks hold parts of its blocks.
        blocks: how many a row has.
        piece: what of the part it belongs to; see :meth:`Band.split`.
    """

    element: int
    first_element: int
    rows: int
    cols: int
    row_stride: int
    codes: list[int]
    scales: list[int]
    extremes: list[int]
    blocks_stride: int
    block_size: int
    low_bits: int
    cut: bool
    blocks: int
    piece: int


def _extent(part: Part, entry: _Entry) -> tuple[object, ...]:
    """A row of ``EXTENT``."""
    spec = part.spec
    numel = (entry.rows - 1) * entry.row_stride + entry.cols
    blocks = (entry.rows - 1) * entry.blocks_stride + entry.blocks
    codes = [numel * spec.codec.code_dtype.itemsize for _ in spec.moments]
    scales = [4 * blocks * spec.codec.scales(signed=m.signed) if spec.codec.blockwise else 0 for m in spec.moments]
    rest = [0] * (_C.max_moments - len(spec.moments))
    low_bits = numel * spec.weights.low_bits // 8
    return (numel * part.param.element_size(), numel, low_bits, codes + rest, scales + rest)


def _row(part: Part, entry: _Entry, key: int, group: int) -> tuple[object, ...]:
    """A row of ``_C.tensor_entry``."""
    spec = part.spec
    return (
        _address(part.param, entry.element),
        0,
        part.state["step"].data_ptr(),
        entry.low_bits,
        entry.codes,
        entry.scales,
        entry.extremes,
        entry.rows,
        entry.cols,
        entry.row_stride,
        entry.blocks_stride,
        entry.first_element,
        spec.shard.row_numel,
        key,
        entry.block_size,
        spec.weights.index,
        DTYPES[part.param.dtype],
        spec.codec.index,
        group,
        entry.cut,
    )


def _entries_of(name: str, part: Part, flat_cuts: FlatCuts, place: Place) -> tuple[list[_Entry], CutParameter | None]:
    """Divides a part into what the kernels can step in one go.

    Returns:
        The entries; and what its owners exchange, if it is a column shard that cuts blocks.
    """
    spec, _, param, state, _ = part
    shard, size = spec.shard, spec.grid.block_size
    coded = [spec.local_coded(state, moment) for moment in spec.moments]
    widths = [spec.codec.scales(signed=moment.signed) for moment in spec.moments]
    low_bits = spec.local_low_bits(state)
    for moment, (codes, scales), width in zip(spec.moments, coded, widths, strict=True):
        _check(name, spec.codes_name(moment), codes, spec.codec.code_dtype, param.numel(), place.state)
        if scales is not None:
            numel = math.prod(shard.scales_shape(spec.grid)) * width
            _check(name, spec.scales_name(moment), scales, torch.float32, numel, place.state)
    if low_bits is not None:
        _check(name, LOW_BITS, low_bits, torch.int8, param.numel() * spec.weights.low_bits // 8, place.state)
    cut: CutParameter | None = None
    if spec.codec.blockwise:
        bands = shard.bands(spec.grid)
        covered = shard.local_blocks(spec.grid)
        if covered.exchange is not None:
            scales_of = [c.scales for c in coded if c.scales is not None]
            shape = (shard.rows, covered.per_row, 2)
            extremes = [torch.zeros(shape, dtype=torch.int32, device=param.device) for _ in scales_of]
            cut = CutParameter(spec, covered, scales_of, extremes)
    else:
        size = _PLAIN_BLOCK
        rows, cols = shard.rows, shard.cols
        if shard.is_range or not spec.weights.stochastic:  # all that the shard holds is then one long row
            rows, cols = 1, param.numel()
        bands = [Band(0, rows, 0, cols, 0, -(-cols // size))]
    first = shard.first_element if spec.weights.stochastic or isinstance(shard, FlatShard) else 0
    entries: list[_Entry] = []
    if place.offload is not None:
        limit = place.piece_numel(spec, param)
        bands = [smaller for band in bands for smaller in band.split(limit, size)]
    for number, band in enumerate(bands):
        pieces = [Rectangle(0, band.cols, band.first_col // size, cut=False)]
        if spec.codec.blockwise and (cut is not None or isinstance(shard, FlatShard)):
            pieces = rectangles(spec.grid, band.first_col, band.cols)
        for piece in pieces:
            if band.rows * piece.cols == 0:
                continue
            element, block = band.element + piece.col, band.block + piece.block - band.first_col // size
            row = 0 if shard.is_range else element // shard.cols
            in_global = first + element + row * (shard.row_numel - shard.cols)
            first_col = band.first_col + piece.col
            shared: list[int] = []
            if piece.cut and cut is not None:
                shared = _addresses(cut.extremes, block, [2] * len(cut.extremes))
            elif piece.cut:
                shared = flat_cuts.addresses(spec, spec.grid.block_of(in_global))
            entries.append(
                _Entry(
                    element,
                    in_global,
                    band.rows,
                    piece.cols,
                    band.cols,
                    _addresses([c.codes for c in coded], element),
                    _addresses([c.scales for c in coded], block, widths),
                    shared or _addresses([], 0),
                    band.blocks_stride,
                    size,
                    0 if low_bits is None else low_bits.data_ptr() + element * spec.weights.low_bits // 8,
                    bool(shared),
                    (first_col + piece.cols - 1) // size - first_col // size + 1,
                    number,
                )
            )
    return entries, cut


def _check(name: str, key: str, tensor: Tensor, dtype: torch.dtype, numel: int, device: torch.device) -> None:
    """Checks a state entry, which may have been put there by hand: the kernels do not look."""
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
    """Addresses of the elements at ``index``, filled up to the table's width. ``widths``: elements per index."""
    found = [
        0 if tensor is None else _address(tensor, index * (1 if widths is None else widths[k]))
        for k, tensor in enumerate(tensors)
    ]
    return found + [0] * (_C.max_moments - len(found))
