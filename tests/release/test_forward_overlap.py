"""Steps with offload="step" that go on during the next forward pass: the same bits, and who waits for what."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.lr_scheduler import ExponentialLR

import shardopt
from helpers import everything
from ranks.layered import Layers, batch
from ranks.offload import before_steps, offload_from_cpu, slow_steps
from ranks.snapshot import assert_same
from shardopt.kernels.transfers import HostTransfers
from shardopt.release import deferred
from shardopt.release.forward_overlap import readers

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


def compare(
    make: Callable[[], Any], drive: Callable[[Any, shardopt.AdamW8bit], object] = train, **options: Any
) -> None:
    """Demands that a model's steps beside the forward pass give the bits of ordinary steps, with slow steps."""
    found = []
    for overlap in (None, True):
        model = make()
        optimizer = start(model, overlap, **options)
        with slow_steps(0.01):
            drive(model, optimizer)
        optimizer.synchronize()
        found.append(everything(optimizer))
    assert_same(found[1], found[0])


@pytest.mark.parametrize(
    ("recompute", "options"),
    [(False, {}), (True, {"codec": "dynamic8"}), (False, {"device_state_budget": "20KiB"})],
    ids=str,
)
def test_same_bits(recompute: bool, options: dict[str, Any]) -> None:
    """A new learning rate and gradients set to None between the steps change nothing."""
    compare(lambda: Layers(recompute), **options)


def test_steps_go_on_after_step_and_forward_waits_for_its_own() -> None:
    """The first layer is computed while the last one has not been stepped; steps come in the parameters' order."""
    model = Layers()
    optimizer = start(model, True)
    train(model, optimizer, 1)
    optimizer.synchronize()
    params = list(model.parameters())
    taken: list[int] = []
    go_on, seen = threading.Event(), []
    last, before = params[-1], params[-1].detach().clone()

    def before_step(place: int) -> None:
        taken.append(place)
        if place == len(params) - 1:
            assert go_on.wait(30)

    def embedded(*_: Any) -> None:
        seen.append(last.detach().clone())
        go_on.set()

    with before_steps(before_step):
        model(batch(1)).square().mean().backward()
        assert not taken
        optimizer.step()
        optimizer.zero_grad()
        hook = model.embed.register_forward_hook(embedded)
        model(batch(2))
        hook.remove()
    assert torch.equal(seen[0], before)
    assert not torch.equal(last, before)
    assert taken == list(range(len(params)))


@pytest.mark.parametrize(("overlap", "refusals"), [(True, 1), (True, 1000), (False, 1000)])
def test_steps_without_a_thread(overlap: bool, refusals: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller takes the steps while the system refuses a thread."""
    start_thread, refused = threading.Thread.start, []

    def refuse(self: threading.Thread) -> None:
        if self.name.startswith("shardopt") and len(refused) < refusals:
            refused.append(self)
            raise RuntimeError("can't start new thread")
        start_thread(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    model = Layers()
    optimizer = start(model, overlap)
    train(model, optimizer)
    optimizer.synchronize()
    tasks = STEPS * len(list(model.parameters())) * (2 if overlap else 1)  # arrivals of gradients, and steps
    assert len(refused) == (1 if refusals == 1 else tasks)
    expected = Layers()
    ordinary = start(expected, None)
    train(expected, ordinary)
    assert_same(everything(optimizer), everything(ordinary))


def _two_optimizers(overlap: bool) -> tuple[nn.Module, list[shardopt.AdamW8bit]]:
    """A model and its two optimizers, whose first steps are in flight."""
    model = Layers()
    params = list(model.parameters())
    optimizers = []
    for part in (params[:14], params[14:]):
        optimizers.append(shardopt.AdamW8bit(part, lr=1e-2, min_quantized_numel=64, offload="step"))
        shardopt.release_gradients(model, optimizers[-1], overlap_forward=overlap, waiting_gradients=100)
    model(batch(0)).square().mean().backward()
    for optimizer in optimizers if overlap else ():
        optimizer.step()
    return model, optimizers


def _saved(
    save: Callable[..., object], path: Path, model: nn.Module, *optimizer: shardopt.AdamW8bit
) -> dict[str, Tensor]:
    result = save(path, model, *optimizer)
    if isinstance(result, Future):
        result.result()
    loaded = Layers()
    shardopt.checkpoint.load(path, loaded)
    return loaded.state_dict()


@pytest.mark.parametrize("overlap", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "read",
    [
        lambda path, model, _: model.state_dict(),
        lambda path, model, _: {f"layers.{key}": value for key, value in model.layers.state_dict().items()},
        lambda path, model, _: _saved(shardopt.checkpoint.save, path, model),
        lambda path, model, _: _saved(shardopt.checkpoint.async_save, path, model),
        lambda path, model, optimizers: _saved(shardopt.checkpoint.save, path, model, optimizers[1]),
    ],
    ids=["state_dict", "a part's", "save", "async_save", "save with one"],
)
def test_the_model_is_complete_whichever_optimizer_is_given(
    read: Callable[..., dict[str, Tensor]], overlap: bool, tmp_path: Path
) -> None:
    expected, optimizers = _two_optimizers(overlap)
    for optimizer in optimizers:
        optimizer.synchronize()
    with slow_steps(0.02):
        actual = read(tmp_path, *_two_optimizers(overlap))
    assert_same(actual, {key: value for key, value in expected.state_dict().items() if key in actual})


@pytest.mark.parametrize(("what", "overlap"), [("load_state_dict", True), ("load", True), ("load", False)])
def test_loading_a_model_is_not_undone_by_late_steps(what: str, overlap: bool, tmp_path: Path) -> None:
    first = Layers()
    shardopt.checkpoint.save(tmp_path, first)
    with slow_steps(0.02):
        model, optimizers = _two_optimizers(overlap)
        if what == "load":
            shardopt.checkpoint.load(tmp_path, model)
        else:
            model.load_state_dict(first.state_dict())
        for optimizer in optimizers:
            optimizer.synchronize()
    assert_same(model.state_dict(), first.state_dict())


def test_loading_is_not_undone_by_late_steps(tmp_path: Path) -> None:
    """A waiting step does not overwrite loaded state."""
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
    """Backward raises when a parameter's value from before its step may have been used."""
    model = Layers(early=True)
    optimizer = start(model, True)
    train(model, optimizer, 1)
    with pytest.raises(
        RuntimeError, match=r"parameter 12 of param group 0 \(64,\): got a gradient of a value that may"
    ):
        model(batch(1)).square().mean().backward()


def test_a_layer_read_before_it_is_called() -> None:
    """Autograd raises, since it saved a value from before the step."""

    class Regularized(Layers):
        def forward(self, tokens: Tensor) -> Tensor:
            early = sum(layer[1].weight.square().mean() for layer in self.layers)
            return super().forward(tokens) + early

    model = Regularized()
    optimizer = start(model, True)
    with before_steps(lambda place: time.sleep(0.02)):
        train(model, optimizer, 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(batch(1)).square().mean().backward()


def test_modules_around_the_layers_wait_for_what_is_in_none() -> None:
    """Evaluating a wrapped model, or a part of it, waits for the parameters that it reads."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Layers()

        def forward(self, tokens: Tensor) -> Tensor:
            return self.model(tokens)

    outer = Outer()
    optimizer = start(outer, True)
    for part in (outer.model, outer.model.embed):
        go_on = threading.Timer(0.2, (gate := threading.Event()).set)
        with before_steps(lambda place, gate=gate: gate.wait(30)):
            outer(batch(0)).square().mean().backward()
            optimizer.step()
            go_on.start()
            early = part(batch(1))
            optimizer.synchronize()
        assert torch.equal(early, part(batch(1)))


class Heads(nn.Module):
    """Forward passes that call some layers only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Embedding(50, 64)
        self.heads = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, tokens: Tensor, head: int) -> Tensor:
        if head > 1:
            raise ValueError("no such head")
        return self.heads[head](self.body(tokens)).square().mean()


@pytest.mark.parametrize("between", ["evaluation", "two passes", "failure"])
def test_layers_that_some_forward_pass_does_not_call_are_no_error(between: str) -> None:
    def drive(model: nn.Module, optimizer: shardopt.AdamW8bit) -> None:
        for step in range(STEPS):
            if between == "evaluation":
                with torch.no_grad():
                    model(batch(step), 0)
            elif between == "failure":
                with pytest.raises(ValueError, match="no such head"):
                    model(batch(step), 7)
            only = (1,) if between == "evaluation" and step else (0, 1)
            sum(model(batch(step), head) for head in only).backward()
            optimizer.step()
            optimizer.zero_grad()

    compare(Heads, drive)


def test_memory_that_is_replaced_while_steps_wait() -> None:
    """A step whose parameters' memory was replaced is lost, but writes into no other tensor's memory."""
    model = Layers()
    optimizer = start(model, True)
    go_on = threading.Event()
    with before_steps(lambda place: go_on.wait(30)):
        model(batch(0)).square().mean().backward()
        optimizer.step()
        storages = [StorageWeakRef(param.untyped_storage()) for param in model.parameters()]
        for param in model.parameters():
            param.data = param.data.double()
        assert not any(storage.expired() for storage in storages)
        go_on.set()
        optimizer.synchronize()
    assert all(storage.expired() for storage in storages)


class FailsOnce(HostTransfers):
    """Fails to copy parameters back, as often as ``left`` says."""

    left = 0

    def give_back(self, slot: Any, copies: Any) -> object:
        if FailsOnce.left:
            FailsOnce.left -= 1
            raise OSError("no way back")
        return super().give_back(slot, copies)


def test_a_gradient_is_stepped_once_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that arrives when an earlier step has failed is left for ``step()``."""
    monkeypatch.setattr(FailsOnce, "left", 1)
    with offload_from_cpu(transfers=FailsOnce):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        optimizer = shardopt.AdamW8bit(model.parameters(), min_quantized_numel=64, offload="step")
        release = shardopt.release_gradients(model, optimizer, waiting_gradients=1)
        with pytest.raises(OSError, match="no way back"):
            model(torch.randn(4, 64)).square().mean().backward()
        assert [param.grad is not None for param in model.parameters()] == [False, False, True, False]
        optimizer.step()
        steps = [float(optimizer.state[param]["step"]) for param in list(model.parameters())[2:]]
        assert steps == [1, 1]
        FailsOnce.left = 1
        optimizer.zero_grad()
        model[:1](torch.randn(4, 64)).square().mean().backward()
        with pytest.raises(OSError, match="no way back"):
            release.remove()
        shardopt.release_gradients(model, optimizer)


def test_interrupted_while_it_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interrupt, the gradient is still there, and its step has not begun."""

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    optimizer = shardopt.AdamW8bit(model.parameters(), min_quantized_numel=64, offload="step")
    shardopt.release_gradients(model, optimizer, waiting_gradients=1)
    with slow_steps(0.2), monkeypatch.context() as patch:
        patch.setattr(deferred, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(4, 64)).square().mean().backward()
    assert [param.grad is not None for param in model.parameters()] == [False, True, False]
    optimizer.step()
    assert [float(optimizer.state[param]["step"]) for param in list(model.parameters())[1:]] == [1, 1]


# Compiled, pickled, copied and forked models ------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["compiled", "in place"])
def test_compiled_models(what: str) -> None:
    def make() -> nn.Module:
        torch._dynamo.reset()
        model = Layers()
        if what == "compiled":
            return torch.compile(model, backend="eager")  # type: ignore[return-value]
        model.compile(backend="eager")
        return model

    compare(make)


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


@pytest.mark.parametrize(("reads", "tied"), [("", False), ("fused", False), ("reads_first", False), ("fused", True)])
def test_a_head_that_is_read_without_a_call(reads: str, tied: bool) -> None:
    """So fused losses read it. Evaluation may read it in another way than training."""
    evaluated: list[Tensor] = []

    def drive(model: Headed, optimizer: shardopt.AdamW8bit) -> None:
        if reads:
            setattr(model, reads, True)

        def evaluate() -> None:
            usual, model.reads_first = model.reads_first, True
            with torch.no_grad():
                evaluated.append(model(batch(9)))
            model.reads_first = usual

        train(model, optimizer)
        train(model, optimizer, between=evaluate)

    compare(lambda: Headed(tied=tied), drive)
    assert torch.equal(torch.stack(evaluated[:STEPS]), torch.stack(evaluated[STEPS:]))


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
