"""Saves and loads of tensors that are not ordinary memory: freed and cut storages, wrapper subclasses, odd views."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardopt
from ranks.layouts import values
from shardopt.checkpoint import CheckpointError, async_save, load, save
from shardopt.optim import ShardedOptimizer
from wrappers import Coded, Scaled, Wrapped, zeros


def trained(wrap: Callable[[Tensor], Tensor] = Tensor.clone, seed: int = 0) -> tuple[nn.Module, ShardedOptimizer]:
    model = nn.Module()
    model.weight = nn.Parameter(wrap(values((33, 200), seed)))
    model.bias = nn.Parameter(values((33,), seed + 1))
    model.register_buffer("mean", values((5,), seed + 2))
    optimizer = shardopt.AdamW8bit(model.parameters(), lr=1e-2)
    for t in range(2):
        for index, param in enumerate((model.weight, model.bias)):
            param.grad = values(tuple(param.shape), 10 * (seed + t) + index)
        optimizer.step()
    return model, optimizer


def tensors(model: Any, optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    state = optimizer.state[model.weight]
    return {"weight": model.weight, "bias": model.bias, "mean": model.mean, **state}


WRONG = {
    "weight": r"^weight: got a parameter",
    "mean": r"^mean: got a buffer",
    "exp_avg_codes": r"^weight: got a state exp_avg_codes",
    "exp_avg_sq_scales": r"^weight: got a state exp_avg_sq_scales",
    "step": r"^weight: got a state step",
    "extra": r"^extra 'extra': got a tensor",
}


@pytest.mark.parametrize("freed", [True, False])
@pytest.mark.parametrize("which", WRONG)
def test_a_storage_that_is_too_small_is_not_saved(tmp_path: Path, which: str, freed: bool) -> None:
    saves = save if freed else async_save
    model, optimizer = trained()
    save(tmp_path, model, optimizer)
    before = sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir())
    extra = torch.ones(9)
    storage = {**tensors(model, optimizer), "extra": extra}[which].untyped_storage()
    storage.resize_(0 if freed else storage.nbytes() - 1)
    with pytest.raises(CheckpointError, match=WRONG[which] + r" whose storage has \d+ bytes, expected \d+"):
        saves(tmp_path, model, optimizer, extra=extra)
    assert sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir()) == before


def test_nothing_is_loaded_into_a_freed_storage(tmp_path: Path) -> None:
    """But freed state is replaced."""
    model, optimizer = trained()
    save(tmp_path, model, optimizer)
    other, fresh = trained(seed=5)
    fresh.state[other.weight]["exp_avg_codes"].untyped_storage().resize_(0)
    before = other.bias.clone()
    for which in ("weight", "mean"):
        storage = tensors(other, fresh)[which].untyped_storage()
        nbytes = storage.nbytes()
        storage.resize_(0)
        with pytest.raises(CheckpointError, match=WRONG[which] + " whose storage has 0 bytes"):
            load(tmp_path, other, fresh)
        assert torch.equal(other.bias, before)
        storage.resize_(nbytes)
    load(tmp_path, other, fresh)
    for key, value in tensors(model, optimizer).items():
        assert torch.equal(tensors(other, fresh)[key], value)


@pytest.mark.parametrize("saves", [save, async_save])
def test_wrapped_parameters(tmp_path: Path, saves: Callable[..., Any]) -> None:
    """Their checkpoints are those of ordinary parameters, and load into either."""
    model, optimizer = trained(Wrapped)
    model.mean = Wrapped(model.mean)
    if future := saves(tmp_path, model, optimizer):
        future.result()
    other, fresh = trained(seed=5)
    load(tmp_path, other, fresh)
    again, anew = trained(Wrapped, seed=6)
    before: Any = again.weight._tensor
    load(tmp_path, again, anew)
    assert again.weight._tensor is before
    for name in ("weight", "bias", "mean", "exp_avg_codes", "exp_avg_sq_scales", "step"):
        found = [tensors(*each)[name] for each in ((model, optimizer), (other, fresh), (again, anew))]
        one, *others = (getattr(tensor, "_tensor", tensor) for tensor in found)
        assert all(torch.equal(one, each) for each in others), name
    for saved in (model.bias, optimizer.state[model.weight]["exp_avg_codes"]):
        saved.untyped_storage().resize_(0)  # as FSDP frees them: ``numpy()`` would forbid it


@pytest.mark.parametrize("wrapper", [Scaled, Coded])
@pytest.mark.parametrize("kind", ["weight", "mean"])
def test_other_wrappers_are_refused(tmp_path: Path, wrapper: type[Wrapped], kind: str) -> None:
    model, optimizer = trained()
    save(tmp_path, model, optimizer)
    wrapped = wrapper(torch.ones(4, 4))
    setattr(model, kind, nn.Parameter(wrapped, requires_grad=False) if kind == "weight" else wrapped)
    for call in (save, load):
        with pytest.raises(CheckpointError, match=rf"^{kind}: got a tensor of {wrapper.__name__} .*exactly one"):
            call(tmp_path, model)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "negative": lambda x: torch._neg_view(x.neg()),
    "imaginary": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
    "conjugate": lambda x: torch.complex(x, x).conj(),
    "zeros": zeros,
    "wrapper": Scaled,
}


@pytest.mark.parametrize("saves", [save, async_save])
@pytest.mark.parametrize("view", VIEWS)
def test_views_whose_memory_has_other_values(tmp_path: Path, view: str, saves: Callable[..., Any]) -> None:
    odd = VIEWS[view](values((7, 130), 3))
    plain = odd.clone().resolve_neg().resolve_conj()
    model = nn.Module()
    if view in ("negative", "imaginary", "conjugate"):
        model.weight = nn.Parameter(odd)
        model.register_buffer("mean", odd)
    if future := saves(tmp_path, model, extra=odd):
        future.result()
    target = nn.Module()
    for name in model.state_dict():
        setattr(target, name, nn.Buffer(torch._neg_view(torch.ones_like(plain))))
    assert torch.equal(load(tmp_path, target).extra["extra"], plain)
    assert all(torch.equal(tensor, plain) for tensor in target.state_dict().values())
