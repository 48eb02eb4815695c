"""Steps that overlap the next forward pass, of models that are compiled, pickled, copied or let go."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import shardopt
from helpers import everything
from overlap_problem import start, train
from ranks.layered import Layers, batch
from ranks.offload import before_steps, offload_from_cpu, slow_steps
from ranks.snapshot import assert_same
from shardopt.release.forward_overlap import readers


@pytest.fixture(autouse=True)
def from_cpu() -> Iterator[None]:
    with offload_from_cpu():
        yield


@pytest.mark.parametrize("what", ["compiled", "its model", "in place"])
def test_compiled_models(what: str) -> None:
    found = []
    for overlap in (None, True):
        torch._dynamo.reset()
        model = Layers()
        compiled = torch.compile(model, backend="eager") if what != "in place" else model
        if what == "in place":
            model.compile(backend="eager")
        optimizer = start(compiled if what == "compiled" else model, overlap)
        with slow_steps(0.01):
            train(compiled, optimizer)
        optimizer.synchronize()
        found.append(everything(optimizer))
    assert_same(found[1], found[0])


def test_a_pickled_model_does_not_wait_for_anything(tmp_path: Path) -> None:
    model = Layers()
    optimizer = start(model, True)
    train(model, optimizer, 1)
    optimizer.synchronize()
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    go_on = threading.Event()
    with before_steps(lambda place: go_on.wait(30)):
        model(batch(1)).square().mean().backward()
        optimizer.step()
        loaded(batch(0))
        loaded.state_dict()
        go_on.set()
        optimizer.synchronize()


def test_copies_of_the_model_do_not_disturb() -> None:
    """A copy's forward passes do not count as the model's."""
    model = Layers()
    optimizer = start(model, True)
    with slow_steps(0.01):
        train(model, optimizer, 1)
        optimizer.synchronize()
        average = copy.deepcopy(model)
        train(model, optimizer, 1, between=lambda: average(batch(0)))
        train(model, optimizer, 1)


def test_removed() -> None:
    model = Layers()
    optimizer = shardopt.AdamW8bit(model.parameters(), min_quantized_numel=64, offload="step")
    with shardopt.release_gradients(model, optimizer, overlap_forward=True), slow_steps(0.01):
        train(model, optimizer, 1)
    for module in model.modules():
        hooks = (module._forward_pre_hooks, module._forward_hooks)
        assert not any((*hooks, module._state_dict_pre_hooks, module._load_state_dict_pre_hooks))
    train(model, optimizer, 1)


def test_readers() -> None:
    model = Layers()
    found = readers(model, set(model.parameters()))
    layers = [layer for part in model.layers for layer in part if not isinstance(layer, nn.Tanh)]
    assert list(found) == [model.embed, *layers, model.head, model]
    assert [len(found[module]) for module in (model.embed, model.head, model)] == [1, 1, 2]
    nested = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(2, 2), nn.Sequential(Layers())]), "b": nn.Linear(2, 2)})
    assert list(readers(nested, set(nested.parameters()))) == [nested["a"][0], nested["a"][1][0], nested["b"]]
    bare = nn.ModuleList([nn.ParameterList([torch.zeros(2)])])
    assert {type(reader): len(p) for reader, p in readers(bare, set(bare.parameters())).items()} == {
        nn.ParameterList: 1,
        nn.ModuleList: 1,
    }


@pytest.mark.parametrize("most", [1, 3])
def test_waiting_gradients(most: int) -> None:
    """At most ``waiting_gradients`` gradients live, besides the one that backward is adding."""
    model = Layers()
    params = list(model.parameters())
    optimizer = shardopt.AdamW8bit(params, min_quantized_numel=64, offload="step")
    with pytest.raises(ValueError, match="waiting_gradients: got 0, expected at least 1"):
        shardopt.release_gradients(model, optimizer, waiting_gradients=0)
    alive: list[StorageWeakRef] = []
    counts: list[int] = []

    def complete(param: Tensor) -> None:
        alive.append(StorageWeakRef(param.grad.untyped_storage()))
        counts.append(sum(not storage.expired() for storage in alive))

    for param in params:
        param.register_post_accumulate_grad_hook(complete)
    enough = most + 1
    with before_steps(lambda order: [time.sleep(0.001) for _ in range(5000) if max(counts) < enough]):
        shardopt.release_gradients(model, optimizer, waiting_gradients=most)
        model(batch(0)).square().mean().backward()
        optimizer.step()
    assert max(counts) == enough
