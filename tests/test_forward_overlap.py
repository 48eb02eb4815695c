"""Steps with offload="step" that go on during the next forward pass: the same bits, and errors for early reads."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import shardopt
from helpers import everything
from ranks.layered import Layers, batch
from ranks.offload import before_steps, offload_from_cpu, slow_steps
from ranks.snapshot import assert_same
from shardopt.integrations.forward_overlap import units_of
from shardopt.optim.deferred import DeferredSteps

STEPS = 3


@pytest.fixture(autouse=True)
def from_cpu() -> Iterator[None]:
    with offload_from_cpu():
        yield


def start(model: nn.Module, overlap: bool | None, **options: Any) -> shardopt.AdamW8bit:
    """An optimizer with steps beside the forward pass (True), the backward pass (False) or none."""
    optimizer = shardopt.AdamW8bit(
        model.parameters(), lr=1e-2, min_quantized_numel=64, offload=None if overlap is None else "step", **options
    )
    if overlap is not None:
        shardopt.release_gradients(model, optimizer, overlap_forward=overlap, waiting_gradients=100)
    return optimizer


def train(
    model: nn.Module, optimizer: shardopt.AdamW8bit, steps: int = STEPS, between: Callable[[], object] = bool
) -> None:
    """The usual loop; ``between`` is called after each step."""
    schedule = ExponentialLR(optimizer, 0.7)
    for step in range(steps):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        between()


def reference(**options: Any) -> dict[str, Any]:
    model = Layers()
    optimizer = start(model, None, **options)
    train(model, optimizer)
    return everything(optimizer)


@pytest.mark.parametrize("options", [{}, {"codec": "dynamic8"}, {"device_state_budget": "20KiB"}], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_same_bits(recompute: bool, options: dict[str, Any]) -> None:
    """Whatever comes between the steps: a new learning rate, gradients that are set to None."""
    with slow_steps(0.01):
        model = Layers(recompute)
        optimizer = start(model, True, **options)
        train(model, optimizer)
        optimizer.synchronize()
    assert_same(everything(optimizer), reference(**options))


def test_steps_go_on_after_step_and_forward_waits_for_its_own() -> None:
    """The first layer is computed while the last one has not been stepped."""
    model = Layers()
    optimizer = start(model, True)
    train(model, optimizer, 1)
    ready, go_on, seen = threading.Event(), threading.Event(), []
    last = model.layers[3][0].weight
    place = [param is last for param in model.parameters()].index(True)

    def embedded(*_: Any) -> None:
        seen.append(last.detach().clone())
        go_on.set()

    with before_steps(lambda of: (ready.wait(30), of == place and go_on.wait(30))):
        model(batch(1)).square().mean().backward()
        before = last.detach().clone()
        ready.set()
        optimizer.step()
        optimizer.zero_grad()
        hook = model.embed.register_forward_hook(embedded)
        model(batch(2))
        hook.remove()
    assert torch.equal(seen[0], before)
    assert not torch.equal(last, before)


def test_without_the_hooks_old_parameters_are_read() -> None:
    """The tests above can fail."""
    go_on = threading.Event()
    model = Layers()
    optimizer = start(model, True)
    for module in model.modules():
        module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
    with before_steps(lambda place: go_on.wait(30)):
        first = model(batch(0))
        first.square().mean().backward()
        optimizer.step()
        assert torch.equal(first, model(batch(0)))
        go_on.set()
        optimizer.synchronize()
        assert not torch.equal(first, model(batch(0)))


def test_the_first_parameters_go_first() -> None:
    ready, taken = threading.Event(), []
    model = Layers()
    optimizer = start(model, True)
    with before_steps(lambda place: (ready.wait(30), taken.append(place))):
        model(batch(0)).square().mean().backward()
        ready.set()
        optimizer.synchronize()
    assert sorted(taken) == list(range(len(list(model.parameters()))))
    assert taken[1:] == sorted(taken[1:]), "all but the one that came before the others"


@pytest.mark.parametrize("of", ["model", "layers", "checkpoint"])
def test_state_dicts_are_complete(of: str, tmp_path: Path) -> None:
    """And what is loaded is not overwritten by a step that is still to be taken."""
    expected = Layers()
    train(expected, start(expected, None), 2)
    model = Layers()
    optimizer = start(model, True)
    with slow_steps(0.02):
        train(model, optimizer, 2)
        if of == "checkpoint":
            shardopt.checkpoint.save(tmp_path, model, optimizer)
            model = Layers()
            shardopt.checkpoint.load(tmp_path, model, start(model, None))
        part = {"model": lambda m: m, "layers": lambda m: m.layers, "checkpoint": lambda m: m}[of]
        assert_same(part(model).state_dict(), part(expected).state_dict())


def test_loading_is_not_undone_by_late_steps(tmp_path: Path) -> None:
    model = Layers()
    first = copy.deepcopy(model.state_dict())
    optimizer = start(model, True)
    shardopt.checkpoint.save(tmp_path, model, optimizer)
    with slow_steps(0.02):
        train(model, optimizer, 1)
        model.load_state_dict(first)
        assert_same(model.state_dict(), first)
        train(model, optimizer, 1)
        shardopt.checkpoint.load(tmp_path, model, optimizer)
        assert_same(model.state_dict(), first)


def test_parameters_read_without_calling_their_layer() -> None:
    """Values of before the step may have been used: that is told, not trained on."""
    model = Layers(early=True)
    optimizer = start(model, True)
    train(model, optimizer, 1)
    with pytest.raises(
        RuntimeError, match=r"parameter 11 of param group 0 \(64, 64\): got a gradient of a value that may"
    ):
        model(batch(1)).square().mean().backward()


def test_another_model_than_the_one_given() -> None:
    outer = nn.Sequential(Layers())
    optimizer = start(outer, True)
    train(outer, optimizer, 1)
    assert list(units_of(outer)) == [outer, outer[0]]
    wrapper = nn.ModuleDict({"model": Layers()})
    wrapper.forward = lambda tokens: wrapper["model"](tokens)
    optimizer = start(nn.ModuleList([wrapper]), True)
    wrapper(batch(0)).square().mean().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="got a gradient of a value that may"):
        wrapper["model"].forward(batch(0)).square().mean().backward()


def test_layers_that_are_not_used_are_no_error() -> None:
    model = Layers()
    optimizer = start(model, True)
    train(model, optimizer, 1)
    dropped = model.layers.pop(3)
    train(model, optimizer, 1)
    model.layers.append(dropped)
    train(model, optimizer, 1)


def test_copies_of_the_model_do_not_disturb() -> None:
    """Their forward passes are not the model's."""
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
        model(batch(0)).square().mean().backward()
    for module in model.modules():
        hooks = (module._forward_pre_hooks, module._forward_hooks)
        assert not any((*hooks, module._state_dict_pre_hooks, module._load_state_dict_pre_hooks))
    train(model, optimizer, 1)


def test_units() -> None:
    model = Layers()
    units = units_of(model)
    assert list(units) == [model, *model.layers[0], *model.layers[1], *model.layers[2], *model.layers[3]]
    nested = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(2, 2), nn.Sequential(Layers())]), "b": nn.Linear(2, 2)})
    assert list(units_of(nested)) == [nested, nested["a"][0], nested["a"][1][0], nested["b"]]
    bare = nn.ModuleList([nn.ParameterList([torch.zeros(2)])])
    assert {unit: len(params) for unit, params in units_of(bare).items()} == {bare: 1}


def test_waiting_gradients() -> None:
    """No more of them than asked for live beside the one that is being stepped and the one that comes."""
    model = Layers()
    optimizer = shardopt.AdamW8bit(model.parameters(), min_quantized_numel=64, offload="step")
    with pytest.raises(ValueError, match="waiting_gradients: got -1, expected at least 0"):
        shardopt.release_gradients(model, optimizer, waiting_gradients=-1)
    live: list[int] = []
    most = 2
    with slow_steps(0.01), shardopt.release_gradients(model, optimizer, waiting_gradients=most):
        original = DeferredSteps._take_next

        def count(self: DeferredSteps) -> None:
            live.append(len(self._unfinished))
            original(self)

        DeferredSteps._take_next = count
        try:
            model(batch(0)).square().mean().backward()
            optimizer.step()
        finally:
            DeferredSteps._take_next = original
    assert max(live) == most + 1
