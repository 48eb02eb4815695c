"""shardopt's CUDA code beside a device whose work comes late, early or in odd orders: the bits of the plain CPU run."""

from __future__ import annotations

import gc
import importlib
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.library import Library

import shardopt
from helpers import Named
from late_problem import CPU, CUDA, Peers, Problem, Scenario, device_scalars, released, scenarios, steps
from late_schedule import KINDS
from late_streams import LateDevice, late_device
from ranks.snapshot import assert_same
from shardopt.state import residency


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(residency, "CHUNK_BYTES", 4608)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@pytest.fixture(autouse=True)
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_to_all(out: Tensor, message: Tensor, group: Peers) -> None:
        for place in range(group.size()):
            out[place].copy_(message[group.rank()])

    def all_gather(out: Tensor, message: Tensor, group: Peers) -> None:
        for place in range(group.size()):
            out.view(group.size(), -1)[place].copy_(message)

    monkeypatch.setattr(torch.distributed, "all_to_all_single", all_to_all)
    monkeypatch.setattr("shardopt.comm.ddp._all_gather", all_gather)


NAMES = list(scenarios(Path()))
pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None or not hasattr(Library, "fallback"),
    reason="needs a PyTorch without CUDA, whose place the stand-in takes, and with fallbacks of backends",
)


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Named]:
    """The outcomes of scenarios on the CPU, where each runs once."""
    return cache(lambda name: scenarios(tmp_path_factory.mktemp("cpu"))[name](CPU))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_same_bits(name: str, kind: str, on_the_cpu: Callable[[str], Named], tmp_path: Path) -> None:
    wanted = on_the_cpu(name)
    with late_device(kind):
        actual = scenarios(tmp_path)[name](CUDA)
    assert_same(actual, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("name", NAMES)
def test_same_bits_in_any_order(name: str, seed: int, on_the_cpu: Callable[[str], Named], tmp_path: Path) -> None:
    wanted = on_the_cpu(name)
    with late_device("random", seed):
        found = scenarios(tmp_path)[name](CUDA)
    assert_same(found, wanted)


#: Muon's matrix products have other bits on the CPU, so a late device is compared with an early one.
MUON: dict[str, Scenario] = {
    "muon": steps(rule="muon"),
    "normuon": steps(rule="normuon"),
    "normuon offload": steps(rule="normuon", offload="state"),
    "normuon scaled": partial(device_scalars, rule="normuon", offload="state"),
}


@cache
def early(name: str) -> Named:
    with late_device("early"):
        return MUON[name](CUDA)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MUON)
def test_muon(name: str, kind: str) -> None:
    wanted = early(name)
    with late_device(kind):
        actual = MUON[name](CUDA)
    assert_same(actual, wanted)


class Plant(NamedTuple):
    """A fault of the code: the text of a function in which something is missing.

    Attributes:
        where: the function, by its module and name.
        text: the wait.
        instead: put into its place.
        scenarios: some that notice.
    """

    where: str
    text: str
    instead: str
    scenarios: tuple[str, ...]

    def grow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module_name, _, name = self.where.partition(":")
        module = importlib.import_module(f"shardopt.{module_name}")
        owner = module
        for part in name.split(".")[:-1]:
            owner = getattr(owner, part)
        function = getattr(owner, name.split(".")[-1])
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.text) == 1, source
        scope: dict[str, Any] = {}
        code = source.replace(self.text, self.instead).replace("super().", f"super({name.split('.')[0]}, self).")
        exec(compile(f"from __future__ import annotations\n{code}", self.where, "exec"), vars(module), scope)
        monkeypatch.setattr(owner, name.split(".")[-1], scope[function.__name__])


COPIES = "kernels.transfers_cuda:CudaTransfers"
PLANTS = {
    "new slots": Plant(
        f"{COPIES}.__init__", "self._there.wait_stream(torch.cuda.current_stream(device))", "pass", ("offload a part",)
    ),
    "gradients computed": Plant(
        f"{COPIES}.begin", "self._there.wait_stream(torch.cuda.current_stream(self._device))", "pass", ("offload step",)
    ),
    "state back before it is fetched": Plant(
        f"{COPIES}.fetch", "self._there.wait_stream(self._back)", "pass", ("few chunks",)
    ),
    "slot emptied": Plant(f"{COPIES}.fetch", "(slot.emptied, after)", "(after,)", ("offload state",)),
    "slot filled, by the host": Plant(f"{COPIES}.arrived", "slot.filled.synchronize()", "pass", ("offload step",)),
    "slot filled": Plant(
        f"{COPIES}.arrived", "torch.cuda.current_stream(self._device).wait_event(slot.filled)", "pass",
        ("offload state",),
    ),
    "slot stepped": Plant(f"{COPIES}.give_back", "self.follow()", "pass", ("offload state",)),
    "parameters back": Plant(
        f"{COPIES}.end", "torch.cuda.current_stream(self._device).wait_stream(self._back)", "pass", ("offload step",)
    ),
    "state complete": Plant(f"{COPIES}.synchronize", "self._back.synchronize()", "pass", ("offload state",)),
    "slots given back": Plant("kernels.transfers_cuda:_drain", "stream.synchronize()", "pass", ("dropped step",)),
    "memory unlocked": Plant(
        "kernels.transfers_cuda:_unpin", "torch.cuda.synchronize(device)", "pass",
        ("dropped state",),
    ),
    "tables": Plant("kernels.dispatch_cuda:CudaCall.run", "tensor.record_stream(stream)", "pass", ("device scalars",)),
    "uploads of a graph": Plant(
        "kernels.dispatch_cuda:CudaCall._upload_in_graph", "self._captured.append(staging)", "pass", ("captured",)
    ),
    "learning rate": Plant(
        "step.tables:use_in_current_stream", "tensor.record_stream(stream)", "pass", ("device scalars",)
    ),
    "tables of a graph": Plant("step.tables:StepTables._run_on", "self._captured.append(", "tuple(", ("captured",)),
    "tables of norms": Plant(
        "kernels.norms:CudaNormCall.run", "use_in_current_stream(self._device, (self._tasks, self._table))", "pass",
        ("clipped",),
    ),
    "sums of norms": Plant(
        "step.gradient_norm:GradientNorm.clip", "use_in_current_stream(device, (words,))", "pass", ("clipped",)
    ),
    "skipped elements": Plant(
        "kernels.skipped:SkippedElements.count", "torch.cuda.synchronize(device)", "pass", ("device scalars",)
    ),
    "state put into its place": Plant(
        "state.residency:StateResidency.put", "self.synchronize()", "pass", ("replaced",)
    ),
    "checkpoint of offloaded state": Plant(
        "state.residency:StateResidency.synchronize", "transfers.synchronize()", "pass", ("offloaded checkpoints",)
    ),
    "sleep after the step": Plant(
        "state.sleep:Sleep._follow",
        "self._streams[device].wait_stream(torch.cuda.current_stream(device))", "pass", ("slept",)
    ),
    "state on its way": Plant(
        "state.sleep:Sleep._copy",
        "(to if to.is_cuda else source).record_stream(stream)", "pass", ("slept",)
    ),
    "state there again": Plant(
        "state.sleep:Sleep.arrive", "torch.cuda.current_stream(device).wait_event(event)", "pass", ("slept",)
    ),
    "state on the host": Plant(
        "state.sleep:Sleep.synchronize", "stream.synchronize()", "pass", ("slept",)
    ),
    "gradient complete": Plant(
        "release.deferred:DeferredStep.take", "self._stream.wait_event(self._ready)", "pass", ("released step",)
    ),
    "parameter read": Plant(
        "release.deferred:DeferredStep.wait", "self._back.synchronize()", "pass", ("released forward",)
    ),
    "parameters read": Plant(
        "release.deferred:DeferredSteps.wait", "torch.cuda.current_stream(device).wait_stream(stream)", "pass",
        ("released step",),
    ),
    "parameters read, of the other stream": Plant(
        "release.deferred:DeferredSteps.wait", "in self._streams.items()", "in list(self._streams.items())[1:]",
        ("held, read",),
    ),
    "gradient on the host": Plant(
        "release.host_gradients:_arrived", "copied.synchronize()", "pass", ("held",)
    ),
    "memory on the way used again": Plant(
        "release.host_gradients:_arrived", "copied.synchronize()", "pass", ("held in parts",)
    ),
    "bucket filled": Plant(
        "comm.ddp:DdpReducer.reduce", "stream.wait_stream(torch.cuda.current_stream(buffer.device))", "pass",
        ("messages",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTS)
def test_a_missing_wait_is_noticed(
    name: str, on_the_cpu: Callable[[str], Named], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = PLANTS[name]
    wanted = {name: on_the_cpu(name) for name in plant.scenarios}
    plant.grow(monkeypatch)
    schedules = [*((kind, 0) for kind in KINDS), *(("random", seed) for seed in range(1, 40))]
    for scenario, (kind, seed) in product(plant.scenarios, schedules):
        if not is_right(scenarios(tmp_path / f"{kind} {seed}")[scenario], wanted[scenario], kind, seed):
            return
    pytest.fail(f"nobody noticed: {plant}")


def test_second_moments_of_rows_without_a_wait_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, wanted = MUON["normuon offload"], early("normuon offload")
    Plant("step.muon.waves:WaveStep.apply", "self._transfers.follow()", "pass", ()).grow(monkeypatch)
    assert not all(is_right(scenario, wanted, kind, 0) for kind in KINDS)


def is_right(scenario: Scenario, wanted: Named, kind: str, seed: int) -> bool:
    noticed = (AssertionError, RuntimeError, FloatingPointError, ValueError)
    try:
        with late_device(kind, seed):
            try:
                actual = scenario(CUDA)
            except noticed:  # here: the frames of the error would keep locked memory, and outlive the device
                return False
        assert_same(actual, wanted)
    except noticed:
        return False
    return True


def test_no_step_waits() -> None:
    """Not even with another set of gradients; and the host learns of skipped elements once per step."""

    def check(device: LateDevice, moments: int = 0, **options: Any) -> None:
        """``moments`` counts matrices with a gradient whose rows' second moments go to the host."""
        problem = Problem(CUDA, **options)
        problem.step(0)
        for t in range(1, 5):
            waits, copies = device.waits, device.copies_to_host
            problem.step(t, without=(t % 3,))
            assert device.waits == waits
            assert device.copies_to_host == copies + 1 + moments

    with late_device("late") as device:
        check(device)
        check(device, offload="state")
        check(device, 2, rule="normuon", offload="state")
        check(device, lr=torch.full((), 0.01, device=CUDA))


def test_no_sleep_waits() -> None:
    """The host goes on while state goes and comes. A capture of a step could not wait for the copies."""

    def check(device: LateDevice) -> None:
        problem = Problem(CUDA)
        for t in range(4):
            problem.step(t)
            if t == 0:
                problem.optimizer.offload()  # makes and locks memory
            waits = device.waits
            problem.optimizer.offload()
            problem.optimizer.reload()
            assert device.waits == waits
        problem.set_gradients(4)
        with (
            torch.cuda.graph(torch.cuda.CUDAGraph()),
            pytest.raises(RuntimeError, match=r"call optimizer\.sync"),
        ):
            problem.optimizer.step()

    with late_device("late") as device:
        check(device)


def test_no_clipping_waits() -> None:
    with late_device("late") as device:
        problem = Problem(CUDA)
        for t in range(5):
            problem.set_gradients(t, without=(t % 3,))
            waits, copies = device.waits, device.copies_to_host
            shardopt.clip_grad_norm_(problem.params.values(), 0.5, optimizer=problem.optimizer if t % 2 else None)
            assert (device.waits, device.copies_to_host) == (waits, copies)
            problem.optimizer.step()


def test_released_gradients_copy_once_per_step() -> None:
    with late_device("late") as device:
        before: list[int] = []
        released(between=lambda: before.append(device.copies_to_host))(CUDA)
        assert before[2] - before[1] == 1


@pytest.mark.parametrize("offload", ["state", "step"])
def test_an_optimizer_that_goes_during_a_capture(offload: str) -> None:
    """Finalizers of an optimizer wait for the device, which would spoil the capture: they run in the next step."""

    def check(device: LateDevice) -> None:
        problem, other = Problem(CUDA, offload=offload), Problem(CUDA, offload=offload)
        for each in (problem, other):
            each.step(0)
        del each
        locked = device.locked_count
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            del problem
            gc.collect()
        assert device.locked_count == locked
        other.step(1)
        assert device.locked_count == locked - (offload == "state")

    with late_device("late") as device:
        check(device)


def test_the_host_does_not_spin_for_gradients() -> None:
    with late_device("late") as device:
        steps(offload="step")(CUDA)
        assert device.spins == 0
