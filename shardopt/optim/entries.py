"""The rows of a step's tables: what the kernels are told of a parameter and of a param group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.dispatch import DTYPES
from shardopt.layout import LocalBlocks, Rectangle, rectangles
from shardopt.optim.cut_blocks import CutParameter
from shardopt.optim.options import TABLE_FORMAT
from shardopt.optim.rule import Rule
from shardopt.optim.state import LOW_BITS, ParameterState, StateDict

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
        first_elements: per row, the gradient's element with which it begins.
        step: its step count.
        cut: what its owners exchange, where blocks are cut.
    """

    name: str
    group: int
    spec: ParameterState
    device: torch.device
    rows: list[tuple[object, ...]]
    first_elements: list[int]
    step: Tensor
    cut: CutParameter | None

    @classmethod
    def of(
        cls, name: str, group: int, spec: ParameterState, param: Tensor, state: StateDict, noise_key: int
    ) -> PlannedParameter:
        """The rows for ``param``, this rank's part, and its state.

        Raises:
            RuntimeError: the state is not what the kernels can step with this parameter.
        """
        device, shard, stochastic = param.device, spec.shard, spec.weights.stochastic
        coded = [spec.local_coded(state, moment) for moment in spec.moments]
        widths = [spec.codec.scales(signed=moment.signed) for moment in spec.moments]
        rows, cols, size = shard.rows, shard.cols, spec.grid.block_size
        if spec.codec.blockwise:
            blocks = shard.local_blocks(spec.grid)
        else:
            size = _PLAIN_BLOCK
            if not (stochastic and cols != shard.row_numel):  # all that the shard holds is then one long row
                rows, cols = 1, param.numel()
            blocks = LocalBlocks(0, -(-cols // size), None)
        parts = [Rectangle(0, cols, blocks.first, cut=False)]
        low_bits = _low_bits(name, spec, param, state)
        first_element = shard.first_element if stochastic else 0
        _check(name, "step", state["step"], torch.float32, 1, device)
        for moment, (codes, scales), width in zip(spec.moments, coded, widths, strict=True):
            _check(name, spec.codes_name(moment), codes, spec.codec.code_dtype, param.numel(), device)
            if scales is not None:
                numel = rows * blocks.per_row * width
                _check(name, spec.scales_name(moment), scales, torch.float32, numel, device)
        extremes: list[Tensor] = []
        cut = None
        if blocks.exchange is not None:
            parts = rectangles(spec.grid, shard.first_col, cols)
            scales_of = [c.scales for c in coded if c.scales is not None]
            extremes = [torch.zeros((rows, blocks.per_row, 2), dtype=torch.int32, device=device) for _ in scales_of]
            cut = CutParameter(spec, blocks, scales_of, extremes)
        parts = [part for part in parts if rows * part.cols]
        table: list[tuple[object, ...]] = [
            (
                _address(param, part.col),
                0,
                state["step"].data_ptr(),
                0 if low_bits is None else low_bits.data_ptr() + part.col * spec.weights.low_bits // 8,
                _addresses([c.codes for c in coded], part.col),
                _addresses([c.scales for c in coded], part.block - blocks.first, widths),
                _addresses(extremes, part.block - blocks.first, [2] * len(extremes)),
                rows,
                part.cols,
                cols,
                blocks.per_row,
                first_element + part.col,
                shard.row_numel,
                noise_key,
                size,
                spec.weights.index,
                DTYPES[param.dtype],
                spec.codec.index,
                group,
                part.cut,
            )
            for part in parts
        ]
        return cls(name, group, spec, device, table, [part.col for part in parts], state["step"], cut)

    @property
    def state_names(self) -> frozenset[str]:
        """The state entries that the rows point to."""
        spec = self.spec
        codes = [spec.codes_name(moment) for moment in spec.moments]
        scales = [spec.scales_name(moment) for moment in spec.moments] if spec.codec.blockwise else []
        low_bits = [LOW_BITS] if spec.weights.low_bits else []
        return frozenset(["step", *codes, *scales, *low_bits])


def _low_bits(name: str, spec: ParameterState, param: Tensor, state: StateDict) -> Tensor | None:
    """This rank's low bits of the master weights, where the weight format has some."""
    if not spec.weights.low_bits:
        return None
    if LOW_BITS not in state:
        raise RuntimeError(
            f"{name}: got state without {LOW_BITS}, expected it with master_weight_bits={16 + spec.weights.low_bits}; "
            "set the option when the optimizer is made, or load a state that has it"
        )
    low_bits = spec.shard.local(state[LOW_BITS])
    _check(name, LOW_BITS, low_bits, torch.int8, param.numel() * spec.weights.low_bits // 8, param.device)
    return low_bits


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
