"""The Newton-Schulz iteration, which orthogonalizes a matrix (Jordan et al., 2024, https://kellerjordan.github.io)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]

#: For five steps (Jordan et al.): singular values of at least 0.002 of the norm end up between 0.68 and 1.21.
QUINTIC: Coefficients = (3.4445, -4.7750, 2.0315)

_POLAR = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_SAFETY = 1.01  # by the authors: rounding in bfloat16 may lift singular values above 1

#: One triple per step, for singular values from 10^-3 on (Amsel et al., arXiv 2505.16932); further steps take the last.
POLAR_EXPRESS: tuple[Coefficients, ...] = (
    *((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR),
    (1.875, -1.25, 0.375),
)


@dataclass(frozen=True)
class NewtonSchulz:
    """The iteration on one matrix, with the same sequence of matrix products for all matrices of the same shape.

    All matrices are bfloat16, and products are summed in float32, unless PyTorch allows a GPU to sum in less
    (``torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction``). The result has equal bits on all ranks if
    the device's type and the versions of PyTorch and its libraries are equal.

    Attributes:
        coefficients: a, b, c of ``aX + (b XX' + c (XX')^2) X``, one triple per step.
        eps: the least norm that the matrix is divided by.
    """

    coefficients: tuple[Coefficients, ...]
    eps: float

    def __call__(self, matrix: Tensor) -> Tensor:
        """Orthogonalizes a matrix.

        Products are the device's bfloat16 products. On the CPU they are computed in float32 and rounded, as most
        processors take a hundred times as long for bfloat16 products.

        Args:
            matrix: bfloat16, contiguous, of two dimensions; overwritten.

        Returns:
            A matrix of its shape and dtype, maybe transposed in memory.
        """
        is_tall, kind = matrix.shape[0] > matrix.shape[1], matrix.device.type
        x = matrix.T if is_tall else matrix
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            x.div_(x.norm().clamp(min=self.eps))
            x = self._in_float32(x) if kind == "cpu" else self._in_bfloat16(x)
        return x.T if is_tall else x

    def _in_bfloat16(self, x: Tensor) -> Tensor:  # on GPUs
        for a, b, c in self.coefficients:  # x <- a x + (b gram + c gram^2) x
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x

    def _in_float32(self, x: Tensor) -> Tensor:
        """The iteration in float32, with products and sums rounded to bfloat16; all steps reuse four buffers."""
        x = x.float()
        result = torch.empty_like(x)
        gram, polynomial = x.new_empty(2, len(x), len(x))
        for a, b, c in self.coefficients:
            _round(torch.mm(x, x.T, out=gram))
            # Not addmm: MKL rounds its factors otherwise with another number of threads.
            torch.mm(gram, gram, out=polynomial).mul_(c)
            _round(polynomial.add_(gram.mul_(b)))
            torch.mm(polynomial, x, out=result)
            _round(result.add_(x.mul_(a)))
            x, result = result, x
        return x.bfloat16()

    def flops(self, rows: int, cols: int) -> int:
        """Number of multiply-adds of the iteration on a matrix, by which work is balanced between ranks."""
        short, long = min(rows, cols), max(rows, cols)
        return len(self.coefficients) * short * short * (2 * long + short)

    def workspace(self, rows: int, cols: int, device_type: str) -> int:
        """Bytes of temporary memory that the iteration allocates in addition to the matrix."""
        short, long = min(rows, cols), max(rows, cols)
        # Two matrices of each shape: on the CPU float32, and a bfloat16 one with which to round; elsewhere bfloat16.
        return (10 * long + 10 * short) * short if device_type == "cpu" else (4 * long + 4 * short) * short


def _round(x: Tensor) -> Tensor:
    """Rounds float32 numbers in place to the nearest bfloat16 values."""
    return x.copy_(x.bfloat16())
