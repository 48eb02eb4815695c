"""First calls in inference mode keep no inference tensors: training goes on, with the same bits."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardopt
from helpers import RULES, everything
from ranks.layouts import values
from ranks.offload import offload_from_cpu
from ranks.snapshot import assert_same


def _loaded(model: nn.Module, optimizer: Any, path: Path) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def _saved_and_loaded(model: nn.Module, optimizer: Any, path: Path) -> None:
    shardopt.checkpoint.save(path / "saved", model, optimizer)
    shardopt.checkpoint.async_save(path / "copied", model, optimizer).result()
    shardopt.checkpoint.load(path / "copied", model, optimizer)


def _imported(model: nn.Module, optimizer: Any, path: Path) -> None:
    torch_optimizer = torch.optim.AdamW(model.parameters())
    torch_optimizer.load_state_dict(optimizer.state_dict(dequantize=True))
    shardopt.checkpoint.import_state(optimizer, torch_optimizer.state_dict())


#: Calls that make or keep tensors, by name; a step with gradients comes before and after.
CALLS: dict[str, Callable[[nn.Module, Any, Path], object]] = {
    "step": lambda model, optimizer, path: optimizer.step(),
    "clip": lambda model, optimizer, path: shardopt.clip_grad_norm_(model.parameters(), 0.1, optimizer=optimizer),
    "clip in place": lambda model, optimizer, path: shardopt.clip_grad_norm_(model.parameters(), 0.1),
    "load_state_dict": _loaded,
    "dequantized": lambda model, optimizer, path: optimizer.load_state_dict(optimizer.state_dict(dequantize=True)),
    "checkpoint": _saved_and_loaded,
    "import_state": _imported,
    "sleep": lambda model, optimizer, path: (optimizer.offload(), optimizer.reload()),
    "full precision": lambda model, optimizer, path: optimizer.load_full_precision_parameters(
        optimizer.full_precision_parameters()
    ),
    "reset_state": lambda model, optimizer, path: optimizer.reset_state(),
    "attach": lambda model, optimizer, path: optimizer.attach(model),
    "release": lambda model, optimizer, path: shardopt.release_gradients(model, optimizer, overlap_forward=True),
    "ordered": lambda model, optimizer, path: shardopt.comm.ordered_gradients(model, micro_batches=1),
}


def _train(optimizer_of: Callable[[Any], Any], call: str, when: int, inside: bool, path: Path) -> dict[str, Any]:
    """Three steps, with one call in inference mode, or not."""
    model = nn.Sequential(nn.Linear(130, 33), nn.Linear(33, 7, bias=False))
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.copy_(values(tuple(param.shape), index))
    optimizer = optimizer_of(model.parameters())
    for step in range(3):
        if call in ("release", "ordered") and step == when:
            with torch.inference_mode(inside):
                CALLS[call](model, optimizer, path)
        model(values((4, 130), 9 + step)).square().mean().backward()
        if call not in ("release", "ordered") and step == when:
            with torch.inference_mode(inside):
                CALLS[call](model, optimizer, path)
        optimizer.step()
        optimizer.zero_grad()
    getattr(optimizer, "synchronize", lambda: None)()
    return everything(optimizer)


@pytest.mark.parametrize("call", CALLS)
def test_calls(call: str, tmp_path: Path) -> None:
    """Before the first step, or after it where there must be state."""
    when = 2 if call == "import_state" else 0
    make = lambda params: shardopt.AdamW8bit(params, min_quantized_numel=64, offload="step")  # noqa: E731
    with offload_from_cpu():
        got, expected = (_train(make, call, when, inside, tmp_path / str(inside)) for inside in (True, False))
    assert_same(got, expected)


@pytest.mark.parametrize(
    "make",
    [
        *(RULES[rule].make for rule in ("adamw", "nadam", "adagrad", "lamb", "prodigy")),
        lambda params, **options: shardopt.NorMuon8bit([p for p in params if p.ndim > 1], **options),
        lambda params, **options: shardopt.quantize_state(torch.optim.AdamW(params, lr=1e-2), **options),
    ],
    ids=["adamw", "nadam", "adagrad", "lamb", "prodigy", "normuon", "quantize_state"],
)
def test_first_steps_of_rules(make: Callable[..., Any], tmp_path: Path) -> None:
    got, expected = (
        _train(lambda params: make(params, min_quantized_numel=64), "step", 0, inside, tmp_path)
        for inside in (True, False)
    )
    assert_same(got, expected)


def test_the_package_uses_one_decorator() -> None:
    """``torch.no_grad`` alone keeps the mode, and so what a function makes would be an inference tensor."""
    package = Path(shardopt.__file__).parent
    for file, text in ((file, file.read_text()) for file in package.rglob("*.py")):
        if "no_grad" in text:
            functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
            decorators = (decorator for node in functions for decorator in node.decorator_list)
            assert not [d.lineno for d in decorators if "no_grad" in ast.unparse(d)], file
