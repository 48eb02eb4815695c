"""Steps with offload="step" that go on during the next forward pass: who waits for what.

That their bits are those of ordinary steps: test_held_gradients.py.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import shardopt
from programs import Programs
from ranks.loop import STEPS, Layers, Loop, batch, compare
from ranks.offload import HostTransfers, before_steps, offload_from_cpu, slow_steps
from ranks.snapshot import assert_same


@pytest.fixture(autouse=True)
def from_cpu() -> Iterator[None]:
    with offload_from_cpu():
        yield


def test_steps_go_on_after_step_and_forward_waits_for_its_own() -> None:
    """The first layer is computed while the last one has not been stepped; steps come in the parameters' order."""
    loop = Loop(True)
    loop.step(0)
    loop.optimizer.synchronize()
    params = list(loop.model.parameters())
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
        loop.backward(1)
        assert not taken
        loop.update()
        hook = loop.model.embed.register_forward_hook(embedded)
        loop.model(batch(2))
        hook.remove()
    assert torch.equal(seen[0], before)
    assert not torch.equal(last, before)
    assert taken == list(range(len(params)))


@pytest.mark.parametrize(("overlap", "refusals"), [(True, 1), (False, 1000)])
def test_steps_without_a_thread(overlap: bool, refusals: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller takes the steps while the system refuses a thread."""
    start_thread, refused = threading.Thread.start, []

    def refuse(self: threading.Thread) -> None:
        if self.name.startswith("shardopt") and len(refused) < refusals:
            refused.append(self)
            raise RuntimeError("can't start new thread")
        start_thread(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    compare(overlap=overlap)
    assert len(refused) == min(refusals, STEPS * 17)


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


@pytest.mark.parametrize(
    ("read", "overlap"),
    [
        (lambda path, model, _: model.state_dict(), False),
        (lambda path, model, _: {f"layers.{key}": x for key, x in model.layers.state_dict().items()}, True),
        (lambda path, model, _: _saved(shardopt.checkpoint.async_save, path, model), True),
        (lambda path, model, optimizers: _saved(shardopt.checkpoint.save, path, model, optimizers[1]), False),
        (lambda path, model, optimizers: _saved(shardopt.checkpoint.save, path, model, optimizers[1]), True),
    ],
    ids=["state_dict", "a part's", "async_save", "save with one, backward", "save with one, forward"],
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


@pytest.mark.parametrize(("what", "overlap"), [("load_state_dict", True), ("load", False)])
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


def test_parameters_read_without_calling_their_layer() -> None:
    """Backward raises when a parameter's value from before its step may have been used."""
    loop = Loop(True, model=Layers(early=True))
    loop.step(0)
    with pytest.raises(
        RuntimeError, match=r"parameter 12 of param group 0 \(64,\): got a gradient of a value that may"
    ):
        loop.backward(1)


def test_memory_that_is_replaced_while_steps_wait() -> None:
    """A step whose parameters' memory was replaced is lost, but writes into no other tensor's memory."""
    loop = Loop(True)
    go_on = threading.Event()
    with before_steps(lambda place: go_on.wait(30)):
        loop.step(0)
        storages = [StorageWeakRef(param.untyped_storage()) for param in loop.model.parameters()]
        for param in loop.model.parameters():
            param.data = param.data.double()
        assert not any(storage.expired() for storage in storages)
        go_on.set()
        loop.optimizer.synchronize()
    assert all(storage.expired() for storage in storages)


def test_a_gradient_is_stepped_once_after_an_error() -> None:
    """A gradient that arrives when an earlier step has failed is left for ``step()``."""
    failures = [OSError("no way back")]

    class FailsOnce(HostTransfers):
        def copy_back(self, slot: Any, copies: Any) -> object:
            if failures:
                raise failures.pop()
            return super().copy_back(slot, copies)

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
        failures.append(OSError("no way back"))
        optimizer.zero_grad()
        model[:1](torch.randn(4, 64)).square().mean().backward()
        with pytest.raises(OSError, match="no way back"):
            release.remove()


@pytest.mark.parametrize("runs", ["the model before", "another after"])
def test_code_that_was_compiled_without_hooks(runs: str) -> None:
    """Dynamo keeps code per class; it is not to be used for a released model, in training and evaluation."""
    x, calls = torch.ones(50), {}

    def make() -> nn.Module:
        torch._dynamo.reset()
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50)) for _ in range(2)]
        calls["model"], calls["another"] = (torch.compile(model, backend="eager") for model in models)
        if runs == "the model before":
            run_before(calls["model"])
        return models[0]

    def run_before(call: Any) -> None:
        call(x).sum().backward()
        call.zero_grad()
        with torch.no_grad():
            call(x)

    def drive(loop: Loop) -> None:
        if runs == "another after":
            run_before(calls["another"])
        for _ in range(2):
            calls["model"](x).sum().backward()
            loop.update()
            with torch.no_grad():
                loop.norms.append(calls["model"](x))

    with slow_steps(0.02):
        compare(drive, make)


def test_forked(programs: Programs, tmp_path: Path) -> None:
    """Steps in flight are over before the fork, and the child's steps have a thread of their own.

    In a process of its own: a child cannot take backward passes if its parent's autograd has started threads.
    """
    programs.run(
        f"import sys; sys.path[:] = {sys.path}; import test_forward_overlap as t; t.fork_between_steps()", tmp_path
    )


def fork_between_steps() -> None:
    loop, ordinary = Loop(True), Loop(False)
    ordinary.run(2)
    with slow_steps(0.01):
        loop.step(0)
        child = os.fork()
        if not child:
            signal.alarm(60)
            try:
                loop.step(1)
                assert_same(loop.result(), ordinary.result())
                os._exit(0)
            finally:
                traceback.print_exc()
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Headed(Layers):
    """Layers with a head of its own, whose weight the forward pass may read without a call."""

    def __init__(self, *, tied: bool = False, reads: str = "") -> None:
        super().__init__()
        if not tied:
            self.head = nn.Linear(64, 50, bias=False)
        self.reads = reads

    def forward(self, tokens: Tensor) -> Tensor:
        head = self.head.weight * 1.0 if self.reads == "first" else self.head.weight
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.linear(x, head) if self.reads else self.head(x)


HEAD = 17  # the head's index among the parameters


def test_a_head_is_waited_for_when_it_is_called() -> None:
    """The head's step, which comes last, is held until the first layer runs in the second pass."""
    loop = Loop(True, model=Headed())
    assert list(loop.model.parameters())[HEAD] is loop.model.head.weight
    loop.step(0)
    loop.optimizer.synchronize()
    loop.backward(1)
    runs, waited = threading.Event(), []

    def hold(place: int) -> None:
        if place == HEAD:
            waited.append(runs.wait(30))

    loop.model.layers[0].register_forward_hook(lambda *_: runs.set())
    with before_steps(hold):
        loop.optimizer.step()
        loop.model(batch(2))
    assert waited == [True]


@pytest.mark.parametrize(("reads", "tied"), [("", False), ("", True), ("fused", False), ("first", True)])
def test_a_head_that_is_read_without_a_call(reads: str, tied: bool) -> None:
    """So fused losses read it. Evaluation may read it in another way than training."""

    def drive(loop: Loop) -> None:
        for step in range(2 * STEPS):
            loop.step(step)
            if step >= STEPS:
                loop.model.reads = "first"
                loop.evaluate()
                loop.model.reads = reads

    compare(drive, partial(Headed, tied=tied, reads=reads))


def test_a_head_that_is_no_longer_called_is_refused() -> None:
    """A pass of training that reads what the last one called may have read too early."""
    loop = Loop(True, model=Headed())
    with slow_steps(0.02):
        loop.run(2)
        loop.model.reads = "fused"
        loss = loop.loss(2)
        with pytest.raises(RuntimeError, match=r"read before the last step was complete|modified by an inplace"):
            loss.backward()
    loop.optimizer.synchronize()
    loop.optimizer.zero_grad()
    loop.step(3)
