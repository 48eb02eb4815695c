"""shardopt's CUDA code beside a device whose work comes late, early or in odd orders: the bits of the plain CPU run."""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import os
import textwrap
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial, reduce
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import Library

import shardopt
from helpers import Named
from late_problem import CPU, CUDA, Peers, Problem, Scenario, chunks_of, device_scalars, released, scenarios, steps
from late_schedule import KINDS
from late_streams import LateDevice, late_device
from ranks.snapshot import assert_same
from shardopt.state.residency import warn_of_one_thread
from slow_cases import slow


@pytest.fixture(autouse=True)
def small_chunks() -> Iterator[None]:
    with chunks_of(4608), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@pytest.fixture(autouse=True)
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_to_all(out: Tensor, message: Tensor, group: Peers) -> None:
        for place in range(group.size()):
            out[place].copy_(message[group.rank()])

    monkeypatch.setattr(torch.distributed, "all_to_all_single", all_to_all)


NAMES = list(scenarios(Path()))
pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None or not hasattr(Library, "fallback"),
    reason="needs a PyTorch without CUDA, whose place the stand-in takes, and with fallbacks of backends",
)


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Named]:
    """The outcomes of scenarios on the CPU, where each runs once."""
    return cache(lambda name: scenarios(tmp_path_factory.mktemp("cpu"))[name](CPU))


#: Each scenario on the late device, and on others on which alone faults that are planted below were noticed.
CASES = [*((name, "late", 0) for name in NAMES), ("few chunks", "ahead", 0), ("offload state", "random", 23)]
CASES += [(name, "behind", 0) for name in ("slept", "released forward", "released step")]
ALL_CASES = [*product(NAMES, KINDS, [0]), *product(NAMES, ["random"], range(1, 21))]


@pytest.mark.parametrize(("name", "kind", "seed"), [*CASES, *slow(ALL_CASES, besides=CASES)])
def test_same_bits(name: str, kind: str, seed: int, on_the_cpu: Callable[[str], Named], tmp_path: Path) -> None:
    wanted = on_the_cpu(name)
    with late_device(kind, seed):
        actual = scenarios(tmp_path)[name](CUDA)
    assert_same(actual, wanted)


#: Muon's matrix products have other bits on the CPU, so a late device is compared with an early one.
MUON: dict[str, Scenario] = {
    "muon": partial(steps, rule="muon"),
    "normuon offload": partial(steps, rule="normuon", offload="state"),
    "normuon scaled": partial(device_scalars, rule="normuon", offload="state"),
}


@cache
def early(name: str) -> Named:
    with late_device("early"):
        return MUON[name](CUDA)


@pytest.mark.parametrize(("name", "kind"), [*product(MUON, ["late"]), *slow(product(MUON, ["random"]))])
def test_muon(name: str, kind: str) -> None:
    wanted = early(name)
    with late_device(kind):
        actual = MUON[name](CUDA)
    assert_same(actual, wanted)


#: Faults of the code: in a function, the statement with this text is missing, or has another text. And a scenario
#: that notices, with the device on which it does, a kind and a seed, unless that is the late one.
PLANTS = """
kernels.transfers_cuda:CudaTransfers.__init__ | self._fetch_stream.wait_stream | offload a part
kernels.transfers_cuda:CudaTransfers.begin_phase | self._fetch_stream.wait_stream | offload step
kernels.transfers_cuda:CudaTransfers.fetch | self._fetch_stream.wait_stream(self._return_stream) | few chunks @ ahead 0
kernels.transfers_cuda:CudaTransfers.fetch | (slot.emptied, after) => (after,) | offload state @ random 23
kernels.transfers_cuda:CudaTransfers.wait_until_filled | slot.filled.synchronize() | offload step
kernels.transfers_cuda:CudaTransfers.wait_until_filled | .wait_event(slot.filled) | offload state
kernels.transfers_cuda:CudaTransfers.copy_back | self.wait_for_current_stream() | offload state
kernels.transfers_cuda:CudaTransfers.end_phase | .wait_stream(self._return_stream) | offload step
kernels.transfers_cuda:CudaTransfers.synchronize | self._return_stream.synchronize() | offload state
kernels.transfers_cuda:_drain | stream.synchronize() | dropped step
kernels.dispatch_cuda:CudaCall.run | tensor.record_stream(stream) | device scalars
kernels.dispatch_cuda:CudaCall._upload_in_graph | self._captured.append(staging) | captured
kernels.norms:CudaNormCall.run | use_in_current_stream | clipped
kernels.skipped:SkippedElements.count | torch.cuda.synchronize(device) | device scalars
step.tables:use_in_current_stream | tensor.record_stream(stream) | device scalars
step.tables:StepTables._run_device | self._context.captured.append | captured
step.gradient_norm:GradientNorm.norm_and_coefficient | use_in_current_stream(device, (words,)) | clipped
step.muon.waves:WaveStep.apply | self._transfers.wait_for_current_stream() | normuon offload
state.residency:StateResidency.move_state | self.synchronize() | replaced
state.residency:StateResidency.synchronize | transfers.synchronize() | offloaded checkpoints
kernels.transfers_cuda:_unpin | torch.cuda.synchronize(device) | let go
state.residency:_move | torch.cuda.synchronize(device) | slept
release.worker:WorkerTask.run | self._stream.wait_event(self._submitted) | released step
release.worker:WorkerTask.wait | self._copied.synchronize() | released forward @ behind 0
release.worker:WorkerThread.wait | .wait_stream(stream) | released step @ behind 0
release.worker:WorkerThread.wait | in self._streams.items() => in list(self._streams.items())[1:] | held, read
release.host_gradients:_wait_for_piece | copied.synchronize() | held
release.host_gradients:_wait_for_piece | copied.synchronize() | held in parts
"""


def plant(where: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes a function, given by its module and name, for the rest of a test."""
    module_name, _, path = where.partition(":")
    module = importlib.import_module(f"shardopt.{module_name}")
    *outer, name = path.split(".")
    owner = reduce(getattr, outer, module)
    tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(owner, name))))
    text, _, instead = fault.partition(" => ")
    code = ast.unparse(tree)
    statements = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    (found,) = [text] if instead else [each for each in statements if text in each]
    assert code.count(found) == 1, code
    code = code.replace(found, instead or "pass").replace("super().", f"super({path.split('.')[0]}, self).")
    scope: dict[str, Any] = {}
    exec(compile(f"from __future__ import annotations\n{code}", where, "exec"), vars(module), scope)
    monkeypatch.setattr(owner, name, scope[name])


@pytest.mark.parametrize(("where", "fault", "name"), [line.split(" | ") for line in PLANTS.strip().splitlines()])
def test_a_missing_wait_is_noticed(
    where: str,
    fault: str,
    name: str,
    on_the_cpu: Callable[[str], Named],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, _, first = name.partition(" @ ")
    wanted = early(name) if name in MUON else on_the_cpu(name)
    plant(where, fault, monkeypatch)
    devices = [*((kind, 0) for kind in KINDS), *(("random", seed) for seed in range(1, 40))]
    for kind, seed in sorted(devices, key=lambda device: f"{device[0]} {device[1]}" != first):
        scenario = {**scenarios(tmp_path / f"{kind} {seed}"), **MUON}[name]
        if not is_right(scenario, wanted, kind, seed):
            return
    pytest.fail("nobody noticed")


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


#: Options of steps of which the last must not wait, and how many copies to the host that step makes: one of the
#: count of skipped elements; NorMuon's also of the second moments of the rows of two matrices with a gradient.
NO_WAITS: dict[str, tuple[dict[str, Any], int]] = {
    "steps": ({}, 1),
    "offloaded": ({"offload": "state"}, 1),
    "scaled": ({"lr": 0.01}, 1),
    "normuon": ({"rule": "normuon", "offload": "state"}, 3),
    "clipped": ({}, 1),
}


@pytest.mark.parametrize("name", NO_WAITS)
def test_nothing_waits(name: str) -> None:
    """Not even with another set of gradients; and the host learns of skipped elements once per step."""
    given, wanted_copies = NO_WAITS[name]
    with late_device("late") as device:
        options = {key: torch.full((), x, device=CUDA) if key == "lr" else x for key, x in given.items()}
        problem = Problem(CUDA, **options)
        for t in range(5):
            waits, copies = device.waits, device.copies_to_host
            problem.set_gradients(t, without=(t % 3,) if t else ())
            if name == "clipped":
                optimizer = problem.optimizer if t % 2 else None
                shardopt.clip_grad_norm_(problem.params.values(), 0.5, optimizer=optimizer)
            problem.optimizer.step()
            if t > 0:  # the first step makes and locks memory
                assert device.waits == waits
                assert device.copies_to_host == copies + wanted_copies
        del problem


def test_released_gradients_copy_once_per_step_and_nothing_spins() -> None:
    with late_device("late") as device:
        before: list[int] = []
        released(CUDA, between=lambda: before.append(device.copies_to_host))
        assert before[2] - before[1] == 1
        steps(CUDA, offload="step")
        assert device.spins == 0


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("offload", ["step", "state"])
def test_the_first_step_of_a_cpu_in_one_thread_warns(monkeypatch: pytest.MonkeyPatch, offload: str) -> None:
    """Once, where a GPU's step is offloaded to it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(12))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    warn_of_one_thread.cache_clear()
    with late_device("early"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            Problem(CUDA, offload=offload).step(0)
    warn_of_one_thread.cache_clear()
    found = ["got 1 thread for the CPU's steps, expected up to 6" in str(each.message) for each in caught]
    assert found.count(True) == (offload == "step")


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
