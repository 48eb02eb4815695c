"""Removed names and options, and those of bitsandbytes, say what to use instead; old state loads without them."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardopt
from shardopt.optim import Muon
from shardopt.removed import BITSANDBYTES_OPTIONS, NAMES, OPTIONS, QUANTIZE_STATE_OPTIONS

#: As earlier versions saved them in param groups, some with other values than the default.
SAVED: dict[str, Any] = {
    "device_state_budget": "1GiB",
    "exact_cut_blocks": True,
    "ns_method": "gram",
    "orthogonalize_memory": "64MiB",
    "pin_memory": False,
    "share_replicas": True,
}


def trained(steps: int = 1) -> tuple[nn.Module, Muon]:
    model = nn.Linear(64, 64, bias=False)
    optimizer = shardopt.Muon8bit(model.parameters())
    for _ in range(steps):
        model(torch.ones(2, 64)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str) -> None:
    assert not hasattr(shardopt, name)
    said = re.escape(f"; {name} was removed: {NAMES[name]}")
    with pytest.raises(AttributeError, match=f"{said}$"):
        getattr(shardopt, name)
    with pytest.raises(ImportError, match=f"{said}$"):
        exec(f"from shardopt import {name}", {})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("PagedAdamW8bit", 'PagedAdamW8bit is of bitsandbytes: use AdamW8bit, offload="state"'),
        ("PagedAdamW32bit", 'PagedAdamW32bit is of bitsandbytes: use AdamW, offload="state"'),
        ("Lion32bit", "Lion32bit is of bitsandbytes: use Lion"),
        ("Adam32bit", "Adam32bit is of bitsandbytes: use AdamW, weight_decay=0"),
    ],
)
def test_classes_of_bitsandbytes(name: str, said: str) -> None:
    """Python's own guess, of another rule, is not printed behind."""
    for code in (f"shardopt.{name}", f"from shardopt import {name}"):
        with pytest.raises((AttributeError, ImportError)) as caught:
            exec(code, {"shardopt": shardopt})
        printed = "".join(traceback.format_exception_only(caught.type, caught.value))
        assert printed.endswith(f"has no attribute '{name}'; {said}\n")


@pytest.mark.parametrize("name", BITSANDBYTES_OPTIONS)
def test_options_of_bitsandbytes(name: str) -> None:
    said = re.escape(f"got unknown option '{name}'") + ".*" + re.escape(f"; {name} is of bitsandbytes: ")
    with pytest.raises(TypeError, match=said):
        shardopt.AdamW8bit(nn.Linear(64, 64).parameters(), **{name: 1})


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    model, optimizer = trained(0)
    said = f"; {name} was removed: {OPTIONS[name]}"
    with pytest.raises(TypeError, match=f"{re.escape(said)}$"):
        shardopt.Muon(model.parameters(), **{name: SAVED[name]})
    with pytest.raises(ValueError, match=f"{re.escape(said)}$"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 64))], name: SAVED[name]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", QUANTIZE_STATE_OPTIONS)
def test_options_of_quantize_state(name: str) -> None:
    with pytest.raises(TypeError, match=f"{re.escape(f'; {name} was removed: {QUANTIZE_STATE_OPTIONS[name]}')}$"):
        shardopt.quantize_state(torch.optim.AdamW(nn.Linear(64, 64).parameters()), **{name: "state"})


def test_old_state_loads(tmp_path: Path) -> None:
    model, optimizer = trained()
    optimizer.param_groups[0].update(SAVED)
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    state_dict = optimizer.state_dict()
    (by_state_dict, first), (by_checkpoint, second) = trained(0), trained(0)
    first.load_state_dict(state_dict)
    shardopt.checkpoint.load(tmp_path, by_checkpoint, second)
    for own, loaded in ((by_state_dict, first), (by_checkpoint, second)):
        assert not loaded.param_groups[0].keys() & OPTIONS.keys()
        codes = [o.state[m.weight]["momentum_buffer_codes"] for m, o in ((model, optimizer), (own, loaded))]
        assert torch.equal(*codes)


def test_flat_state_with_other_scales_is_refused() -> None:
    model, optimizer = trained()
    state_dict = optimizer.state_dict()
    state_dict["param_groups"][0].update(exact_cut_blocks=False, held_elements=[[[0, 4096]]])
    with pytest.raises(ValueError, match="got state of flat shards saved with exact_cut_blocks=False by an earlier"):
        optimizer.load_state_dict(state_dict)
    assert model.weight in optimizer.state
