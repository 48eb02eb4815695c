"""All tensors have std between 1/4 and 4 at initialisation: weights, activations, their gradients, weight gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.model import ModelConfig
from shardopt import unit
from shardopt.unit import functional
from unit_model import build

CONTEXT, WINDOWS = 64, 8
#: Functions between modules.
BETWEEN = ("attention", "swiglu", "residual_split", "residual_add")


class Deviations:
    """Standard deviations by the name of a tensor."""

    def __init__(self) -> None:
        self.of: dict[str, float] = {}

    def note(self, name: str, tensor: Tensor) -> None:
        """Notes that of a tensor, and of its gradient once it comes."""
        self.of[name] = tensor.double().std().item()
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(lambda gradient: self.note(f"gradient of {name}", gradient))

    def watch(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The function, whose results are noted."""
        calls = 0

        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            results = function(*args, **options)
            for index, tensor in enumerate(results if isinstance(results, tuple) else (results,)):
                self.note(f"{name} {calls}, result {index}", tensor)
            return results

        return call


def deviations(
    monkeypatch: pytest.MonkeyPatch, dim: int, layers: int, dtype: torch.dtype = torch.float32, fp8: bool = False
) -> dict[str, float]:
    """All of a model's after one forward and one backward pass on random tokens."""
    found = Deviations()
    for name in BETWEEN:
        watched = found.watch(getattr(functional, name), name)
        monkeypatch.setattr(functional, name, watched)
        monkeypatch.setattr(unit, name, watched)
    model = build(ModelConfig(dim, layers, 4), CONTEXT, dtype, fp8)

    def note(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, inputs, output: found.note(f"output of {name}", output)

    for name, module in model.named_modules():
        module.register_forward_hook(note(name or "model"))
    batch = torch.randint(256, (WINDOWS, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
    for name, param in model.named_parameters():
        found.note(name, param.detach())
        found.note(f"gradient of {name}", param.grad)
    return found.of


@pytest.mark.parametrize(("dim", "layers"), [(64, 4), (256, 2)])
def test_all_tensors(monkeypatch: pytest.MonkeyPatch, dim: int, layers: int) -> None:
    found = deviations(monkeypatch, dim, layers)
    assert len(found) > 50 * layers
    # muP lets the logits grow from dim ** -0.5; the gradient that comes from outside is that of the mean loss.
    logits = [found.pop("output of head"), found.pop("output of model")]
    assert all(0.5 < std * dim**0.5 < 2 for std in logits)
    assert found.pop("gradient of output of model") < 1e-3
    outside = {name: std for name, std in found.items() if not 0.25 <= std <= 4}
    assert outside == {}


@pytest.mark.parametrize(("dtype", "fp8"), [(torch.float16, False), (torch.float32, True)], ids=["fp16", "fp8"])
def test_narrow_formats(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, fp8: bool) -> None:
    """Without a scale anywhere."""
    with monkeypatch.context() as patch:
        expected = deviations(patch, 64, 2)
    actual = deviations(monkeypatch, 64, 2, dtype, fp8)
    assert actual.keys() == expected.keys()
    # E4M3 rounds to within 1/16, E5M2 to within 1/8: a product of both to within 0.2, of std far less.
    changed = {name: (std, expected[name]) for name, std in actual.items() if abs(std / expected[name] - 1) > 0.2}
    assert changed == {}
