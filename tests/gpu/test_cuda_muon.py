"""Muon on a GPU: products of matrices repeat their bits, and all that is not such a product equals the CPU's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
from cuda_device import CUDA, needs_gpu
from kernel_problem import CPU, gradients, run, start
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.kernels.newton_schulz import POLAR_EXPRESS, QUINTIC, NewtonSchulz
from weight_formats import BF16, FP32

SHAPES = ((97, 130), (1, 4099), (257, 1), (64, 7, 3, 3))
if CUDA.type == "cuda":
    SHAPES = ((512, 512), (1408, 512), (512, 1408), *SHAPES)
MATRICES = tuple((shape[0], torch.Size(shape[1:]).numel()) for shape in SHAPES)


@needs_gpu
@pytest.mark.parametrize("coefficients", [(QUINTIC,) * 5, POLAR_EXPRESS[:5]], ids=["quintic", "polar express"])
@pytest.mark.parametrize("shape", MATRICES, ids=str)
def test_bits_do_not_depend_on_memory(
    shape: tuple[int, int], coefficients: tuple[tuple[float, float, float], ...]
) -> None:
    """Shows that products repeat their bits on any stream, whatever was computed before."""
    newton_schulz = NewtonSchulz(coefficients, 1e-7)
    matrix = values(shape, 0, BF16).to(CUDA)
    expected = newton_schulz(matrix.clone()).clone()
    kept: list[Tensor] = []
    for round_ in range(12):
        kept.append(torch.empty(1000 + 4099 * round_, device=CUDA))
        kept.append(newton_schulz(values((300 + round_, 200), round_, BF16).to(CUDA)))
        assert torch.equal(newton_schulz(matrix.clone()), expected), round_
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        actual = newton_schulz(matrix.clone())
    stream.synchronize()
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("codec", ["log8", "companded8", "dynamic8", "fp32"])
def test_momentum_is_the_cpus(codec: str) -> None:
    """Shows that matrices' momentum has the CPU's bits; with lr=0 and no decay the parameters stay."""
    steps = [gradients(t, FP32, SHAPES) for t in (1, 2, 3, 4)]
    options = {"lr": 0.0, "weight_decay": 0.0}
    wanted, skipped = run("muon", codec, start(FP32, SHAPES), steps, **options)
    actual, found_skipped = run("muon", codec, start(FP32, SHAPES), steps, CUDA, **options)
    assert_same(actual, wanted)
    assert found_skipped == skipped > 0


@pytest.mark.parametrize("weights", [{}, {"master_weight_bits": 24}, {"stochastic_rounding": True}], ids=str)
def test_waves_and_offload_change_no_bit(weights: dict[str, object]) -> None:
    """Shows that less memory for products, and offload, change no bit."""
    steps = [gradients(t, BF16, SHAPES) for t in (1, 2, 3)]
    wanted, _ = run("muon", "log8", start(BF16, SHAPES), steps, CUDA, **weights)
    for options in ({"memory": 1 << 20}, {"offload": "state"}):
        actual, _ = run("muon", "log8", start(BF16, SHAPES), steps, CUDA, **weights, **options)
        assert_same(actual, wanted)


def test_near_the_cpu() -> None:
    """Shows that a step is as near to a step in float64 as the CPU's is, within a factor of two."""
    initial, (given,) = start(FP32, SHAPES[:-3]), [gradients(1, FP32, SHAPES[:-3])]
    exact: dict[str, Tensor] = {}
    for name, gradient in given.items():
        x = gradient.double() * (1 - 0.95 * 0.95)
        x = x.T if x.shape[0] > x.shape[1] else x
        x = x / x.norm()
        for a, b, c in (QUINTIC,) * 5:
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        exact[name] = x.T if gradient.shape[0] > gradient.shape[1] else x
    errors: dict[str, dict[str, float]] = {}
    for device in (CPU, CUDA):
        options = {"lr": 1.0, "weight_decay": 0.0, "adjust_lr_fn": "spectral_norm"}
        found, _ = run("muon", "fp32", initial, [given], device, **options)
        for name, direction in exact.items():
            rows, cols = direction.shape
            moved = (initial[name].double() - found[name].double()) / (rows / cols) ** 0.5
            errors.setdefault(name, {})["cpu" if device is CPU else "cuda"] = float(
                (moved - direction).norm() / direction.norm()
            )
    for name, error in errors.items():
        assert error["cuda"] <= 2 * error["cpu"], (name, error)


def test_a_learning_rate_on_the_device() -> None:
    """Shows that a learning rate on the device steps as the same number on the host."""
    params = [Parameter(values((97, 130), 0).to(CUDA)) for _ in range(2)]
    gradient = values((97, 130), 1).to(CUDA)
    for param, lr in zip(params, (2**-6, torch.tensor(2**-6, device=CUDA)), strict=True):  # exact in float32
        param.grad = gradient.clone()
        shardopt.Muon8bit([param], lr=lr).step()
    assert torch.equal(*params)
