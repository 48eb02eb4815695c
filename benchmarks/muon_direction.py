"""How far 8-bit momentum turns the directions that Muon orthogonalizes, beside linear codes and bfloat16.

    python benchmarks/muon_direction.py

Gradients are random, with given singular values on their left. From the momentum of 60 of them, coded in every step,
comes a direction, which is orthogonalized in float32; so is that of the exact momentum. Printed are relative errors
(Frobenius norm). The directions of shardopt's codecs come from its kernels, in bfloat16, as the optimizer has them; that
alone is the line of fp32. The last line orthogonalizes the exact direction in bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor, nn

import shardopt
from shardopt.kernels.newton_schulz import QUINTIC, NewtonSchulz
from step_cpu import commit, machine

SIDE = 512  # of the matrix
STEPS = 60
CODECS = {
    **{codec: f"{codec}, blocks of 128" for codec in ("log8", "companded8", "dynamic8")},
    "bf16": "bf16",
    "fp32": "fp32",
}
#: Singular values, of their numbers from 1 on.
SPECTRA: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": torch.ones_like,
    "1 / sqrt(k)": torch.rsqrt,
    "1 / k": torch.reciprocal,
}


def gradients(spectrum: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(SIDE, SIDE, generator=generator))[0]
    left = left * SPECTRA[spectrum](torch.arange(1.0, SIDE + 1))
    return [left @ torch.randn(SIDE, SIDE, generator=generator) for _ in range(STEPS)]


def direction(code: Callable[[Tensor], Tensor], of: list[Tensor], momentum: float = 0.95) -> Tensor:
    """The last direction, with Nesterov's look ahead, by its formulas."""
    coded = torch.zeros_like(of[0])
    for gradient in of:
        new = coded.lerp(gradient, 1 - momentum)
        found, coded = gradient.lerp(new, momentum), code(new)
    return found


def direction_of(codec: str, of: list[Tensor]) -> Tensor:
    """The last direction that shardopt.Muon would orthogonalize."""
    seen: list[Tensor] = []

    def instead(_: NewtonSchulz, matrix: Tensor) -> Tensor:
        seen[:] = [matrix.clone()]
        return matrix

    param = nn.Parameter(torch.zeros(SIDE, SIDE))
    optimizer = shardopt.Muon([param], codec=codec, block_size=128)
    with patch.object(NewtonSchulz, "__call__", instead):
        for gradient in of:
            param.grad = gradient
            optimizer.step()
    return seen[0].float()


def linear(x: Tensor) -> Tensor:
    """Through signed linear codes in blocks of 2048."""
    blocks = x.view(-1, 2048)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    return ((blocks / scales).round() * scales).view(x.shape)


def errors(spectrum: str) -> dict[str, float]:
    """By what the momentum is coded in."""
    newton_schulz = NewtonSchulz((QUINTIC,) * 5, 1e-7)
    given = gradients(spectrum)
    exact = direction(lambda x: x, given)
    found = {name: direction_of(codec, given) for codec, name in CODECS.items()}
    found["linear int8, blocks of 2048"] = direction(linear, given).bfloat16().float()
    found = {name: newton_schulz(x) for name, x in found.items()}
    found["arithmetic in bfloat16 alone"] = newton_schulz(exact.bfloat16()).float()
    expected = newton_schulz(exact)
    return {name: float((got - expected).norm() / expected.norm()) for name, got in found.items()}


def print_direction() -> None:
    by_spectrum = [errors(spectrum) for spectrum in SPECTRA]
    print(f"relative error of the orthogonalized direction, {SIDE} x {SIDE}, {STEPS} steps, by singular values")
    print(f"{'':30}" + "".join(f"{spectrum:>14}" for spectrum in SPECTRA))
    for name in by_spectrum[0]:
        print(f"{name:30}" + "".join(f"{of_one[name]:14.4f}" for of_one in by_spectrum))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"{machine()}, commit {commit()}")
    print_direction()


if __name__ == "__main__":
    main()
