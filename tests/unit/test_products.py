"""The products of linear layers: factors before rounding, FP8 by saturating casts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardopt import unit
from shardopt.unit import scaled
from versions import needs_scaled_mm_on_the_cpu

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FACTORS = (0.5, 0.25, 0.125)


def whole_numbers(*shape: int, most: int, seed: int) -> Tensor:
    """Whole numbers that FP8 has, whose products float32 sums without rounding."""
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def products(x: Tensor, weight: Tensor, upstream: Tensor, fp8: bool) -> tuple[Tensor, ...]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    result = unit.product(x, weight, *FACTORS, fp8=fp8)
    return (result.detach(), *torch.autograd.grad(result, (x, weight), upstream))


def problem(tokens: int, inputs: int, outputs: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    x = whole_numbers(2, tokens, inputs, most=16, seed=0)
    weight = whole_numbers(outputs, inputs, most=16, seed=1)
    upstream = whole_numbers(2, tokens, outputs, most=8, seed=2)
    return x.to(device), weight.to(device), upstream.to(device)


@pytest.mark.parametrize(("dtype", "most"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_casts_saturate(dtype: torch.dtype, most: float) -> None:
    x = torch.tensor([most, most * 1.5, 1e30, torch.inf, -1e30, -torch.inf, 1.0, torch.nan])
    found = unit.to_fp8(x, dtype)
    assert found.dtype == dtype
    assert found.float()[:-1].tolist() == [most] * 4 + [-most] * 2 + [1.0]
    assert found.float()[-1].isnan()
    assert unit.to_fp8(x.half(), dtype).float()[:-1].tolist() == found.float()[:-1].tolist()


def test_each_product_has_its_factor() -> None:
    x, weight, upstream = problem(24, 40, 56)
    for fp8 in (False, True):
        result, of_x, of_weight = products(x, weight, upstream, fp8)
        assert torch.equal(result, 0.5 * (x @ weight.t()))
        assert torch.equal(of_x, 0.25 * (upstream @ weight))
        assert torch.equal(of_weight, 0.125 * (upstream.flatten(0, 1).t() @ x.flatten(0, 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_operands_are_rounded_to_fp8(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, upstream = torch.randn(8, 48, dtype=dtype), torch.randn(32, 48), torch.randn(8, 32, dtype=dtype)
    result, of_x, of_weight = products(x, weight, upstream, True)
    a, b, g = (unit.to_fp8(t, f).to(dtype) for t, f in ((x, E4M3), (weight, E4M3), (upstream, E5M2)))
    zero = torch.zeros((), dtype=dtype)
    assert torch.equal(result, torch.addmm(zero, a, b.t(), beta=0, alpha=0.5))
    assert torch.equal(of_x, torch.addmm(zero, g, b, beta=0, alpha=0.25))
    assert torch.equal(of_weight, torch.addmm(zero.float(), g.float().t(), a.float(), beta=0, alpha=0.125))
    assert (result.dtype, of_x.dtype, of_weight.dtype) == (dtype, dtype, torch.float32)
    assert not torch.equal(result, products(x, weight.to(dtype), upstream, False)[0])


@needs_scaled_mm_on_the_cpu
def test_scaled_mm_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, which has it, too, so that the operands' layouts are tried without a GPU."""
    expected = products(*problem(24, 32, 48), True)
    calls = []
    scaled_mm = torch._scaled_mm
    monkeypatch.setattr(scaled, "_multiplies_fp8", lambda left, right: True)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **options: calls.append(args) or scaled_mm(*args, **options))
    actual = products(*problem(24, 32, 48), True)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert len(calls) == 3
    for left, right in calls:
        assert left.is_contiguous()
        assert right.t().is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(24, 32, 48), (24, 40, 56)], ids=["multiples of 16", "others"])
def test_gpus_give_the_same(sizes: tuple[int, int, int]) -> None:
    expected = products(*problem(*sizes), True)
    actual = products(*problem(*sizes, device="cuda"), True)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(actual, expected, strict=True))


def test_no_rounded_weight_is_kept() -> None:
    """FSDP could not free it between forward and backward pass."""
    weight = nn.Parameter(torch.randn(32, 48))
    result = unit.product(torch.randn(8, 48), weight, fp8=True)
    rows, kept = result.grad_fn.saved_tensors
    assert rows.dtype == E4M3
    assert kept.data_ptr() == weight.data_ptr()


def test_the_factor_enters_before_rounding() -> None:
    """The sum of the gradient is beyond float16, its multiple is not."""
    tokens = 1 << 18
    x, weight = torch.ones(tokens, 2, dtype=torch.float16), torch.ones(2, 2, dtype=torch.float16)
    upstream = torch.ones(tokens, 2, dtype=torch.float16)
    weight.requires_grad_()
    result = unit.product(x, weight, of_weight=tokens**-0.5)
    (gradient,) = torch.autograd.grad(result, weight, upstream)
    assert torch.equal(gradient, torch.full((2, 2), tokens**0.5, dtype=torch.float16))


def test_autocast_and_frozen_operands() -> None:
    layer = unit.Linear(32, 48, bias=True)
    x = torch.randn(8, 32, requires_grad=True)
    for layer.fp8 in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            result = layer(x)
        result.sum().backward()
        assert result.dtype == torch.bfloat16
        assert (x.grad.dtype, layer.weight.grad.dtype) == (torch.float32, torch.float32)
    layer.zero_grad()
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    layer.weight.requires_grad_(True)
    layer(x.detach()).sum().backward()
    assert layer.weight.grad.shape == layer.weight.shape
