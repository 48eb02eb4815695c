"""Steps straight from tables: every weight format, pieces of a larger parameter, cut blocks, without an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ranks.layouts import values
from shardopt import _C
from shardopt.codec import CODECS
from shardopt.kernels.dispatch import DTYPES, Call, LossScaling, addresses
from shardopt.kernels.skipped import SkippedElements

#: The weight format, the parameter's dtype and that of its low bits.
FORMATS: dict[str, tuple[_C.WeightFormat, torch.dtype, torch.dtype | None]] = {
    "fp32": (_C.WeightFormat.float32, torch.float32, None),
    "bf16": (_C.WeightFormat.bfloat16, torch.bfloat16, None),
    "fp16": (_C.WeightFormat.float16, torch.float16, None),
    "bf16+8": (_C.WeightFormat.bfloat16_plus8, torch.bfloat16, torch.int8),
    "bf16+16": (_C.WeightFormat.bfloat16_plus16, torch.bfloat16, torch.int16),
    "bf16 stochastic": (_C.WeightFormat.bfloat16_stochastic, torch.bfloat16, None),
    "fp16+8": (_C.WeightFormat.float16_plus8, torch.float16, torch.int8),
    "fp16+16": (_C.WeightFormat.float16_plus16, torch.float16, torch.int16),
}
HYPER = {
    "adam": [1e-2, 0.9, 0.999, 1e-8, 0.0, 0.1],
    "lion": [1e-3, 0.9, 0.99, 0.1],
    "momentum": [1e-2, 0.9, 0.1, 0.01, 0.0],
    "sgd": [1e-2, 0.01],
}
#: As many elements as the kernels take at a time where there are no blocks.
PLAIN_BLOCK = 1024
#: Elements after a tensor that a step must not write to.
GUARD = 64


class Piece(NamedTuple):
    """A rectangle of a parameter: columns from ``first_col`` on, which cuts a block if no multiple of the block size.

    ``offset`` elements lie before the first one in memory, for odd alignments; of each next tensor that many more.
    """

    rows: int
    cols: int
    first_col: int = 0
    row_numel: int = 0
    offset: int = 0

    def is_in_blocks(self, size: int) -> bool:
        """Whether blocks of a size can have it: it begins where one begins, or it lies in a single one."""
        begin = self.first_col % size
        return begin == 0 or begin + self.cols <= size


class Problem:
    """One rectangle with its state on a device, and the tables that step it."""

    def __init__(
        self, rule: str, codec: str, weights: str, piece: Piece, block_size: int, device: torch.device, seed: int = 0
    ) -> None:
        self._codec, self._piece = CODECS[codec], piece
        self._around: list[tuple[Tensor, Tensor, int, int]] = []
        blockwise = self._codec.blockwise
        rows, cols = (piece.rows, piece.cols) if blockwise else (1, piece.rows * piece.cols)
        size = block_size if blockwise else PLAIN_BLOCK
        moments = _C.rules[rule]["moments"]
        cut = bool(blockwise and moments and piece.first_col % size)
        blocks = 1 if cut else -(-cols // size)
        weight_format, dtype, low_dtype = FORMATS[weights]
        generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {"param": self._place(values((rows, cols), seed, dtype), device)}
        if low_dtype is not None:
            low = torch.randint(-100, 100, (rows, cols), generator=generator).to(low_dtype)
            self.tensors["low_bits"] = self._place(low, device)
        self.tensors["step"] = torch.zeros((), device=device)
        for k, kind in enumerate(moments):
            zero = self._codec.zero_code(signed=kind == "signed")
            codes = torch.full((rows, cols), zero, dtype=self._codec.code_dtype)
            has_own = k == 0 or not self._codec.shared
            self.tensors[f"codes {k}"] = self._place(codes, device) if has_own else self.tensors["codes 0"]
            width = self._codec.scales(signed=kind == "signed") if blockwise else 0
            self.tensors[f"scales {k}"] = self._place(torch.zeros((rows, blocks, max(width, 1))), device)
            self.tensors[f"extremes {k}"] = torch.zeros((rows, blocks, 2), dtype=torch.int32, device=device)
        self._gradient_dtype = dtype
        self.gradient = self._place(torch.zeros((rows, cols), dtype=dtype), device)

        def address(name: str) -> int:
            return self.tensors[name].data_ptr() if name in self.tensors else 0

        kernel_row: dict[str, Any] = {
            "param": address("param"),
            "gradient": self.gradient.data_ptr(),
            "step": address("step"),
            "low_bits": address("low_bits"),
            "codes": [address(f"codes {k}") for k in range(_C.max_moments)],
            "scales": [address(f"scales {k}") for k in range(_C.max_moments)],
            "extremes": [address(f"extremes {k}") for k in range(_C.max_moments)],
            "rows": rows,
            "cols": cols,
            "row_stride": cols,
            "scales_row_stride": blocks,
            "first_element": piece.first_col,
            "global_row_numel": max(piece.row_numel, piece.first_col + piece.cols) if blockwise else 10**6,
            "noise_key": 0x123456789ABCDEF,
            "block_size": size,
            "weight_format": int(weight_format),
            "gradient_dtype": DTYPES[dtype],
            "codec": self._codec.index,
            "group": 0,
            "cut": int(cut),
        }
        self.kernel_rows = np.zeros(1, dtype=_C.kernel_row)
        for field, value in kernel_row.items():
            self.kernel_rows[0][field] = value
        self.groups = np.zeros(1, dtype=_C.group_row)
        self.groups[0]["hyper"][: len(HYPER[rule])] = HYPER[rule]
        self.groups[0]["gradient_scale"] = 1.0
        self.groups[0]["rule"] = _C.rules[rule]["index"]
        self._phases = [_C.Phase.step]
        if cut:
            self._phases += [_C.Phase.relative] if self._codec.relative and "unsigned" in moments else []
            self._phases.append(_C.Phase.finish)

    def _place(self, value: Tensor, device: torch.device) -> Tensor:
        """A copy at an offset in memory whose other bytes are random."""
        begin = self._piece.offset * (1 + len(self._around))
        end = begin + value.numel()
        size = (end + GUARD) * value.element_size()
        generator = torch.Generator().manual_seed(len(self._around))
        buffer = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).to(device).view(value.dtype)
        self._around.append((buffer, buffer.clone(), begin, end))
        return buffer[begin:end].view(value.shape).copy_(value)

    def assert_nothing_written_around(self) -> None:
        """The bytes before and after each tensor are as they were."""
        for buffer, before, begin, end in self._around:
            for now, then in ((buffer[:begin], before[:begin]), (buffer[end:], before[end:])):
                assert torch.equal(now.view(torch.uint8), then.view(torch.uint8))

    def run(self, make_call: Callable[..., Call], steps: int) -> int:
        """Takes steps, with NaN and Inf among the third one's gradients; returns how many elements were skipped."""
        ordered = sorted(CODECS.values(), key=lambda codec: codec.index)
        counts, skipped = addresses([self.tensors["step"]]), SkippedElements()
        call = make_call(self.gradient.device, self.kernel_rows, counts, [codec.table for codec in ordered], skipped)
        for t in range(1, steps + 1):
            gradient = (values(tuple(self.gradient.shape), 100 + t) * 1e-2).to(self._gradient_dtype)
            if t == 3:
                gradient.view(-1)[::37] = torch.nan
                gradient.view(-1)[1::41] = torch.inf
            self.gradient.copy_(gradient)
            call.update(t == 1, self.groups, LossScaling(None, None))
            for phase in self._phases:
                call.run(phase)
        return skipped.count(wait=True)

    def snapshot(self) -> dict[str, Tensor]:
        """Everything that a step writes."""
        return {name: value.cpu().clone() for name, value in self.tensors.items()}


#: By name: whole rows, pieces of larger parameters, and cut blocks, which end or begin within a block of 128.
PIECES = {
    "small": Piece(3, 31),
    "even": Piece(5, 512),
    "odd": Piece(9, 257),
    "unaligned": Piece(4, 384, offset=3),
    "second half": Piece(3, 300, first_col=256, row_numel=700),
    "fragment": Piece(7, 45, first_col=168, row_numel=300),
    "aligned fragment": Piece(6, 64, first_col=64, row_numel=256),
}
#: Rows of any length, at any address: several chunks of whole rows, parts of rows, less than one; pieces of rows.
ROWS = {
    "130": Piece(19, 130),
    "257": Piece(9, 257, offset=5),
    "33": Piece(75, 33, offset=1),
    "1000": Piece(3, 1000, offset=3),
    "parts of rows": Piece(3, 2377, offset=7),
    "less than a word": Piece(1, 3, offset=1),
    "one column": Piece(70, 1, offset=3),
    "64 and 65": Piece(11, 65, offset=9),
    "two short windows": Piece(21, 20, offset=2),
    "unaligned": Piece(9, 384, offset=3),
    "last columns": Piece(5, 444, first_col=256, row_numel=700, offset=1),
}
