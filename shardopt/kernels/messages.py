"""Gradients as bytes: E4M3 codes and power-of-two scales, in messages of a chunk per rank (csrc/comm/message.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.dispatch import DTYPES, cpu_target

#: Elements that share a scale.
BLOCK: int = _C.message_block


def chunk_bytes(numel: int) -> int:
    """Bytes of a message's chunk of so many elements."""
    return int(_C.message_chunk_bytes(numel))


def encode(floats: Tensor, chunks: int, chunk_numel: int, out: Tensor | None = None) -> Tensor:
    """Codes a tensor, chunk by chunk. A chunk's last block may be short.

    Args:
        floats: float32, bfloat16 or float16, contiguous, on the CPU or on CUDA, there in the current stream.
        chunks: how many chunks.
        chunk_numel: elements per chunk; the last chunks hold fewer or none where the tensor ends before.
        out: contiguous memory for the message.

    Returns:
        uint8, (chunks, bytes of a chunk).

    Raises:
        TypeError: another dtype.
        RuntimeError: this build has no kernels for the device.
        ValueError: the tensor is not contiguous, or the chunks do not hold it.
    """
    _check(floats)
    message = out
    if message is None:
        message = torch.empty(chunks, chunk_bytes(chunk_numel), dtype=torch.uint8, device=floats.device)
    where = (floats.data_ptr(), _C.DType(DTYPES[floats.dtype]), floats.numel(), message.data_ptr(), chunks, chunk_numel)
    if floats.is_cuda:
        _C.encode_message_cuda(*where, *_stream(floats))
    else:
        _C.encode_message(*where, torch.get_num_threads(), cpu_target())
    return message


def decode_sum(message: Tensor, out: Tensor, chunk_numel: int, *, terms: int = 1, factor: float = 1.0) -> None:
    """Decodes a message into a tensor. Sums are float32, in the order of the chunks; the result is rounded once.

    Args:
        message: of ``encode``, contiguous.
        out: float32, bfloat16 or float16, contiguous: its chunks are sums of ``terms`` successive ones of the message.
        chunk_numel: elements per chunk.
        terms: how many chunks of the message are added up.
        factor: what sums are multiplied by, rounded to float32.

    Raises:
        TypeError: another dtype.
        RuntimeError: this build has no kernels for the device.
        ValueError: the tensor is not contiguous, or the message does not fit it.
    """
    _check(out)
    chunks, left = divmod(message.shape[0], terms)
    if left or message.shape[1] != chunk_bytes(chunk_numel):
        raise ValueError(
            f"got a message of shape {tuple(message.shape)}, expected a multiple of {terms} chunks of "
            f"{chunk_bytes(chunk_numel)} bytes; give the chunk_numel that it was encoded with"
        )
    where = (out.data_ptr(), _C.DType(DTYPES[out.dtype]), out.numel(), message.data_ptr(), chunks, chunk_numel)
    if out.is_cuda:
        _C.decode_message_cuda(*where, terms, factor, *_stream(out))
    else:
        _C.decode_message(*where, terms, factor, torch.get_num_threads(), cpu_target())


def _check(tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES:
        raise TypeError(
            f"got a gradient of {tensor.dtype}, expected float32, bfloat16 or float16; set "
            "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
        )
    if not (tensor.device.type == "cpu" or (tensor.is_cuda and _C.with_cuda)):
        built = "cpu and cuda" if _C.with_cuda else "cpu"
        remedy = "; install it again with nvcc on PATH and SHARDOPT_CUDA=1" if tensor.is_cuda else ""
        raise RuntimeError(
            f"got a gradient on {tensor.device}, expected one on {built}, for which this build of shardopt has "
            f"kernels{remedy}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"got a gradient with strides {tensor.stride()}, expected a contiguous one")


def _stream(tensor: Tensor) -> tuple[int, int]:
    device = tensor.device.index
    return device, torch.cuda.current_stream(device).cuda_stream
