"""Steps that overlap the next forward pass, of models that are compiled, pickled, copied, forked or let go."""

from __future__ import annotations

import copy
import os
import signal
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


@pytest.mark.parametrize("runs", ["the model before", "another before", "another after"])
def test_code_that_was_compiled_without_hooks(runs: str) -> None:
    """Dynamo keeps code per class; it is not to be used for a released model, in training and evaluation."""
    found = []
    for overlap in (None, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, another = (nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50)) for _ in range(2))
        compiled, first = (torch.compile(one, backend="eager") for one in (model, another))
        if runs == "the model before":
            first = compiled
        for when in ("before", "after"):
            if runs.endswith(when):
                first(torch.ones(50)).sum().backward()
                first.zero_grad()
                with torch.no_grad():
                    first(torch.ones(50))
            if when == "before":
                optimizer = start(model, overlap)
        with slow_steps(0.02):
            for _ in range(2):
                compiled(torch.ones(50)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    found.append(compiled(torch.ones(50)))
    assert torch.equal(torch.stack(found[:2]), torch.stack(found[2:]))


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


@pytest.mark.parametrize("overlap", [False, True])
def test_forked(overlap: bool) -> None:
    """Steps in flight are over before the fork, and the child's steps have a thread of their own."""
    runs = []
    for released in (None, overlap):
        model = Layers()
        runs.append((model, start(model, released)))
    (expected, ordinary), (model, optimizer) = runs
    train(expected, ordinary, 1)
    train(expected, ordinary, 1)
    with slow_steps(0.01):
        train(model, optimizer, 1)
        child = os.fork()
        if not child:
            signal.alarm(60)
            try:
                train(model, optimizer, 1)
                optimizer.synchronize()
                assert_same(everything(optimizer), everything(ordinary))
                os._exit(0)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


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


class Headed(Layers):
    """Layers with a head of its own, whose weight the forward pass may read without a call; with or without a scale."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        if not tied:
            self.head = nn.Linear(64, 50, bias=False)
        self.fused = self.reads_first = False

    def forward(self, tokens: Tensor) -> Tensor:
        head = self.head.weight * 1.0 if self.reads_first else self.head.weight
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.linear(x, head) if self.fused or self.reads_first else self.head(x)


HEAD = 17  # the head's index among the parameters


def test_a_head_is_waited_for_when_it_is_called() -> None:
    """The head's step, which comes last, is held until the first layer runs in the second pass."""
    model = Headed()
    assert list(model.parameters())[HEAD] is model.head.weight
    optimizer = start(model, True)
    train(model, optimizer, 1)
    optimizer.synchronize()
    model(batch(1)).square().mean().backward()
    runs, waited = threading.Event(), []

    def hold(place: int) -> None:
        if place == HEAD:
            waited.append(runs.wait(30))

    model.layers[0].register_forward_hook(lambda *_: runs.set())
    with before_steps(hold):
        optimizer.step()
        model(batch(2))
    assert waited == [True]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("reads", [(), ("fused",), ("reads_first",)], ids=str)
def test_a_head_that_is_read_without_a_call(reads: tuple[str, ...], tied: bool) -> None:
    """So fused losses read it. Evaluation may read it in another way than training."""
    found = []
    for overlap in (None, True):
        model = Headed(tied=tied)
        optimizer = start(model, overlap)
        for name in reads:
            setattr(model, name, True)
        evaluated = []

        def evaluate(model: Headed = model, evaluated: list[Tensor] = evaluated) -> None:
            usual, model.reads_first = model.reads_first, True
            with torch.no_grad():
                evaluated.append(model(batch(9)))
            model.reads_first = usual

        with slow_steps(0.01):
            train(model, optimizer)
            train(model, optimizer, between=evaluate)
        optimizer.synchronize()
        found.append({**everything(optimizer), **{f"evaluated {i}": x for i, x in enumerate(evaluated)}})
    assert_same(found[1], found[0])


@pytest.mark.parametrize("how", ["fused", "reads_first"])
def test_a_head_that_is_no_longer_called_is_refused(how: str) -> None:
    """A pass of training that reads what the last one called may have read too early."""
    model = Headed()
    optimizer = start(model, True)
    with slow_steps(0.02):
        train(model, optimizer, 2)
        setattr(model, how, True)
        loss = model(batch(2)).square().mean()
        with pytest.raises(RuntimeError, match=r"read before the last step was complete|modified by an inplace"):
            loss.backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    train(model, optimizer, 1)


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
