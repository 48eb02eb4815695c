"""First calls in inference mode keep no inference tensors: training goes on, with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardopt
from helpers import everything
from ranks.layouts import values
from ranks.offload import offload_from_cpu
from ranks.snapshot import assert_same


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
    "checkpoint": _saved_and_loaded,
    "import_state": _imported,
    "sleep": lambda model, optimizer, path: (optimizer.offload(), optimizer.reload()),
    "full precision": lambda model, optimizer, path: optimizer.load_full_precision_parameters(
        optimizer.full_precision_parameters()
    ),
    "release": lambda model, optimizer, path: shardopt.release_gradients(model, optimizer, overlap_forward=True),
    "ordered": lambda model, optimizer, path: shardopt.comm.ordered_gradients(model, micro_batches=1),
}


def _quantized(params: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
    return shardopt.quantize_state(torch.optim.AdamW(params, lr=1e-2), min_quantized_numel=64)


def _train(kind: Callable[..., Any], call: str, inside: bool, path: Path) -> dict[str, Any]:
    """Three steps, with one call in inference mode, or not: as early as it may be."""
    model = nn.Sequential(nn.Linear(130, 33), nn.Linear(33, 7, bias=False))
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.copy_(values(tuple(param.shape), index))
    optimizer = kind(model.parameters(), min_quantized_numel=64, offload="step")
    when, begins = 2 if call == "import_state" else 0, call in ("release", "ordered")
    for step in range(3):
        for backward in (False, True):
            if step == when and backward != begins:
                with torch.inference_mode(inside):
                    CALLS[call](model, optimizer, path)
            if not backward:
                model(values((4, 130), 9 + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    getattr(optimizer, "synchronize", lambda: None)()
    return everything(optimizer)


@pytest.mark.parametrize(
    ("kind", "call"),
    [*((shardopt.AdamW8bit, call) for call in CALLS), (shardopt.Prodigy8bit, "step"), (_quantized, "step")],
)
def test_calls(kind: Callable[..., Any], call: str, tmp_path: Path) -> None:
    with offload_from_cpu():
        got, expected = (_train(kind, call, inside, tmp_path / str(inside)) for inside in (True, False))
    assert_same(got, expected)
