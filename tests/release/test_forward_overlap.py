"""Steps with offload="step" that go on during the next forward pass: the same bits, and who waits for what."""

from __future__ import annotations

import copy
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import shardopt
from helpers import everything
from overlap_problem import STEPS, start, train
from ranks.layered import Layers, batch
from ranks.offload import before_steps, offload_from_cpu, slow_steps
from ranks.snapshot import assert_same
from shardopt.kernels.transfers import HostTransfers
from shardopt.release import deferred


@pytest.fixture(autouse=True)
def from_cpu() -> Iterator[None]:
    with offload_from_cpu():
        yield


def reference(**options: Any) -> dict[str, Any]:
    model = Layers()
    optimizer = start(model, None, **options)
    train(model, optimizer)
    return everything(optimizer)


@pytest.mark.parametrize("options", [{}, {"codec": "dynamic8"}, {"device_state_budget": "20KiB"}], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_same_bits(recompute: bool, options: dict[str, Any]) -> None:
    """A new learning rate and gradients set to None between the steps change nothing."""
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


def test_without_the_hooks_old_parameters_are_read() -> None:
    """Without the hooks, the forward pass reads old parameters: the tests above can fail."""
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
        optimizer.step()
        ready.set()
        optimizer.synchronize()
    assert taken == list(range(len(list(model.parameters()))))


@pytest.mark.parametrize("refusals", [1, 1000])
@pytest.mark.parametrize("overlap", [True, False])
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
    assert_same(everything(optimizer), reference())


@pytest.mark.parametrize("of", ["model", "layers", "checkpoint"])
def test_state_dicts_are_complete(of: str, tmp_path: Path) -> None:
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
        lambda path, model, _: _saved(shardopt.checkpoint.save, path, model),
        lambda path, model, _: _saved(shardopt.checkpoint.async_save, path, model),
        lambda path, model, optimizers: _saved(shardopt.checkpoint.save, path, model, optimizers[1]),
    ],
    ids=["state_dict", "save", "async_save", "save with one"],
)
def test_the_model_is_complete_whichever_optimizer_is_given(
    read: Callable[..., dict[str, Tensor]], overlap: bool, tmp_path: Path
) -> None:
    expected, optimizers = _two_optimizers(overlap)
    for optimizer in optimizers:
        optimizer.synchronize()
    with slow_steps(0.02):
        assert_same(read(tmp_path, *_two_optimizers(overlap)), expected.state_dict())


@pytest.mark.parametrize("overlap", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize("what", ["load_state_dict", "load"])
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


def _values(model: nn.Module, read: Callable[[], Tensor], optimizer: shardopt.AdamW8bit) -> tuple[Tensor, Tensor]:
    """State as read while steps wait, and once they are taken."""
    go_on = threading.Timer(0.2, (gate := threading.Event()).set)
    with before_steps(lambda place: gate.wait(30)), torch.no_grad():
        with torch.enable_grad():
            model(batch(0)).square().mean().backward()
        optimizer.step()
        go_on.start()
        early = read()
        optimizer.synchronize()
        return early, read()


def test_modules_around_the_layers_wait_for_what_is_in_none() -> None:
    """Evaluating a wrapped model, or a part of it, waits for the parameters that it reads."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Layers()

        def forward(self, tokens: Tensor) -> Tensor:
            return self.model(tokens)

    outer = Outer()
    reads = {"model": lambda: outer.model(batch(1)), "embed": lambda: outer.model.embed(batch(1))}
    optimizer = start(outer, True)
    for name, read in reads.items():
        early, late = _values(outer, read, optimizer)
        assert torch.equal(early, late), name


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
    found = []
    for overlap in (None, True):
        model = Heads()
        optimizer = start(model, overlap)
        with slow_steps(0.01):
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
            optimizer.synchronize()
        found.append(everything(optimizer))
    assert_same(found[1], found[0])


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
