"""Correctly rounded float32 arithmetic in PyTorch, equal to the kernels bit for bit; splitting tensors into blocks."""

from __future__ import annotations

import torch
from torch import Tensor

INFINITY_BITS = 0x7F800000

_WHOLE = 1.5 * 2**23  # added to a small float32, rounds the sum to an integer, which the sum's low bits then hold


def float32(value: float) -> Tensor:
    """The 0-d float32 tensor nearest to a Python float."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` rounded once, for float32 tensors that can be broadcast together.

    The product of two float32 values is exact in float64. Their float64 sum is rounded to odd (Boldo & Melquiond,
    "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008), after which rounding
    to float32 gives the correctly rounded result.
    """
    product = a.double() * b.double()
    addend = c.double()
    total = product + addend
    share = total - product
    error = (product - (total - share)) + (addend - share)  # exact: the sum less its rounded value (Knuth's TwoSum)
    as_int = total.view(torch.int64)
    outwards = error * total  # NaN where the total is not finite
    away = (outwards > 0).long() - (outwards < 0).long()
    return (as_int + away * (~as_int & 1)).view(torch.float64).float()  # an even last bit moves to the odd neighbour


def bits(x: Tensor) -> Tensor:
    """Reinterprets the bits of a float32 tensor as int32."""
    return x.contiguous().view(torch.int32)


def float_from_bits(b: Tensor) -> Tensor:
    """Reinterprets the bits of an int32 tensor as float32, the inverse of :func:`bits`."""
    return b.contiguous().view(torch.float32)


def square_root(x: Tensor) -> Tensor:
    """The correctly rounded float32 square root, which ``torch.sqrt`` on the CPU is not.

    Through float64: no float32 root lies so near a midpoint that the second rounding could go wrong.
    """
    return x.double().sqrt().float()


def divide(a: Tensor, b: Tensor | float) -> Tensor:
    """``a / b`` in float32, without the multiplication by the reciprocal that PyTorch may do with a scalar."""
    return a / torch.as_tensor(b, dtype=torch.float32, device=a.device).expand_as(a)


def reciprocal(x: Tensor) -> Tensor:
    """``1 / x``, correctly rounded."""
    return divide(torch.ones_like(x), x)


def round_to_int(x: Tensor) -> Tensor:
    """Rounds float32 numbers of magnitude below 2^22 to the nearest integer, ties to even: int32."""
    return bits(x + _WHOLE) - int(bits(float32(_WHOLE)))


def round_fma(x: Tensor, y: Tensor, z: int = 0) -> Tensor:
    """Rounds the exact ``x * y + z``, of magnitude below 2^22, to the nearest integer, ties to even: int32."""
    return bits(fma(x, y, float32(_WHOLE + z))) - int(bits(float32(_WHOLE)))


def to_bf16(x: Tensor) -> Tensor:
    """The nearest bfloat16, ties to even; any NaN becomes the NaN with all bits but the sign's set."""
    nan = torch.tensor(0x7FFF, dtype=torch.int16, device=x.device).view(torch.bfloat16)
    return torch.where(x.isnan(), nan, x.bfloat16())


def to_blocks(x: Tensor, block_size: int, fill: int = 0) -> Tensor:
    """Splits every row of a matrix into quantization blocks, and pads the last block of each row.

    Args:
        x: any dtype, shape ``(rows, cols)``.
        block_size: elements per block.
        fill: value of the padding.

    Returns:
        Shape ``(rows, ceil(cols / block_size), block_size)``.
    """
    rows, cols = x.shape
    blocks = -(-cols // block_size)
    padded = torch.nn.functional.pad(x, (0, blocks * block_size - cols), value=fill)
    return padded.reshape(rows, blocks, block_size)


def from_blocks(blocks: Tensor, cols: int) -> Tensor:
    """The inverse of :func:`to_blocks`: shape ``(rows, cols)``."""
    return blocks.flatten(1)[:, :cols]
