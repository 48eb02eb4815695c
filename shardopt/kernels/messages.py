"""Gradients on the wire and their sums: E4M3 codes with power-of-two scales, or floats (csrc/comm/message.h)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.dispatch import DTYPES, cpu_target

#: Elements that share a scale.
BLOCK: int = _C.message_block


class Part(NamedTuple):
    """Rows of a parameter in a chunk.

    Attributes:
        rows: the number of rows.
        row_numel: elements of a row.
        is_coded: whether elements become E4M3 codes; float32 otherwise.
    """

    rows: int
    row_numel: int
    is_coded: bool


def row_bytes(numel: int) -> int:
    """Bytes of a coded row of ``numel`` elements."""
    return _C.message_row_bytes(numel)


class Layout:
    """Where the parts of a chunk lie, one after another.

    Args:
        parts: the parts of the chunk.

    Attributes:
        numel: elements of a chunk.
        bytes: bytes of a chunk's message, with float32 for parts that are not coded.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        table = []
        self.numel = self.bytes = self._blocks = 0
        for rows, row_numel, is_coded in parts:
            if rows * row_numel:
                table.append(
                    (self._blocks, self.numel, self.bytes, row_numel if is_coded else rows * row_numel, is_coded)
                )
                self._blocks += rows * -(-row_numel // BLOCK) if is_coded else -(-rows * row_numel // BLOCK)
                self.bytes += rows * row_bytes(row_numel) if is_coded else -(-4 * rows * row_numel // 16) * 16
                self.numel += rows * row_numel
        self._table = torch.tensor(table, dtype=torch.int64, device="cpu")
        self._on_devices: dict[torch.device, Tensor] = {}

    def argument(self, device: torch.device, nbytes: int) -> tuple[int, int, int, int, int]:
        """The layout as kernels on a device read it, for messages of ``nbytes`` per chunk."""
        table = self._table
        if device.type != "cpu":
            if device not in self._on_devices:
                self._on_devices[device] = table.to(device)
            table = self._on_devices[device]
        return table.data_ptr(), len(table), self._blocks, self.numel, nbytes


def encode(chunks: Tensor, layout: Layout) -> Tensor:
    """Codes chunks of floats.

    Args:
        chunks: float32, bfloat16 or float16, (chunks, ``layout.numel``), contiguous, on the CPU, or on CUDA in the
            current stream.
        layout: the layout of a chunk.

    Returns:
        uint8, (chunks, ``layout.bytes``).

    Raises:
        TypeError: the dtype is another one.
        RuntimeError: this build has no kernels for the device.
        ValueError: the tensor is not contiguous, or its chunks do not have ``layout.numel`` elements.
    """
    _check(chunks, (len(chunks), layout.numel))
    message = torch.empty(len(chunks), layout.bytes, dtype=torch.uint8, device=chunks.device)
    where = layout.argument(chunks.device, layout.bytes)
    call = (where, chunks.data_ptr(), _C.DType(DTYPES[chunks.dtype]), message.data_ptr(), len(chunks))
    if chunks.is_cuda:
        _C.encode_message_cuda(*call, *_stream(chunks))
    else:
        _C.encode_message(*call, torch.get_num_threads(), cpu_target())
    return message


def add_up(
    message: Tensor,
    layout: Layout,
    *,
    first: int = 0,
    begin: int = 0,
    sums: Sequence[Tensor | None] = (),
    out: Sequence[Tensor] = (),
    mean: Tensor | None = None,
    divisor: float = 1.0,
) -> None:
    """Adds numbered terms to sums, pairwise: two sums of 2^k terms become one if the first is at a multiple of 2^(k+1).

    Args:
        message: the terms, (terms, bytes of ``encode``); or floats, (terms, ``layout.numel``). Contiguous.
        layout: the layout of a term; for floats, a single part.
        first: the number of the first term.
        begin: the number of the first term that the sums contain.
        sums: the sums to which the terms are added, oldest first: float32, of at least ``layout.numel`` elements. None
            stands for zeros.
        out: receive the sums after the terms, oldest first: float32. May be some of ``sums``.
        mean: receives the sum of all sums, from the latest to the oldest, divided by ``divisor`` and rounded once:
            float32, bfloat16 or float16. ``out`` then receives nothing.
        divisor: the mean's divisor.

    Raises:
        TypeError: a dtype is not supported.
        RuntimeError: this build has no kernels for the device.
        ValueError: a tensor is not contiguous or has another size, or sums and terms do not fit.
    """
    raw = torch.float32 if message.dtype == torch.uint8 else message.dtype
    if message.dtype == torch.uint8:
        _check_place(message, (len(message), layout.bytes))
    else:
        _check(message, (len(message), layout.numel))
    if mean is not None:
        _check(mean, (layout.numel,))
    call = (
        layout.argument(message.device, message.shape[1] * message.element_size()),
        message.data_ptr(),
        _C.DType(DTYPES[raw]),
        len(message),
        first,
        begin,
        [0 if x is None else x.data_ptr() for x in sums],
        [x.data_ptr() for x in out],
        0 if mean is None else mean.data_ptr(),
        _C.DType(DTYPES[torch.float32 if mean is None else mean.dtype]),
        divisor,
    )
    if message.is_cuda:
        _C.sum_message_cuda(*call, *_stream(message))
    else:
        _C.sum_message(*call, torch.get_num_threads(), cpu_target())


def _check(tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype not in DTYPES:
        raise TypeError(
            f"got a gradient of {tensor.dtype}, expected float32, bfloat16 or float16; set "
            "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
        )
    _check_place(tensor, shape)


def _check_place(tensor: Tensor, shape: tuple[int, ...]) -> None:
    if not (tensor.device.type == "cpu" or (tensor.is_cuda and _C.with_cuda)):
        built = "cpu and cuda" if _C.with_cuda else "cpu"
        remedy = "; install it again with nvcc on PATH and SHARDOPT_CUDA=1" if tensor.is_cuda else ""
        raise RuntimeError(
            f"got a gradient on {tensor.device}, expected one on {built}, for which this build of shardopt has "
            f"kernels{remedy}"
        )
    if tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"got a gradient of shape {tuple(tensor.shape)} with strides {tensor.stride()}, expected a contiguous one "
            f"of {shape}"
        )


def _stream(tensor: Tensor) -> tuple[int, int]:
    device = tensor.device.index
    return device, torch.cuda.current_stream(device).cuda_stream
