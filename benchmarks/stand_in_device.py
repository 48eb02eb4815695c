"""A stand-in for a GPU, its copy engines and the CPU's kernels, whose work takes times that a model computes.

Shardopt's own scheduler runs: its hooks, its thread, its streams' waits. Time is virtual: of the threads that take part
exactly one runs, until it sleeps or waits; then the next one that need not wait goes on, and if there is none, time
moves to the next end of a sleep. So a run gives the same times on any machine. Tensors stand for larger ones, and
nothing is computed or copied: tests/kernels/test_late_streams.py compares the bits.

Copies of a stream are in order, and so are those of a direction. Kernels of the GPU are issued as they begin: Python is
neither ahead of the GPU nor behind it.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from shardopt.estimate.hiding import Machine
from shardopt.kernels import transfers_cuda
from shardopt.kernels.dispatch import CpuCall, Tables
from shardopt.kernels.transfers_cuda import CudaTransfers
from shardopt.release import deferred, host_gradients
from shardopt.state import residency
from shardopt.step.stepper import Stepper

GPU, TO_HOST, TO_GPU, CPU = "GPU", "copies to the host", "copies to the GPU", "CPU"
LANES = (GPU, TO_HOST, TO_GPU, CPU)

#: Seconds of Python, as seen on a Xeon with 2 cores (CPU time): to prepare a parameter's step, and to submit it. The
#: other thread takes 31 us for a job and 10 us for a chunk without a GPU, here more, for events and copies of CUDA.
PREPARE, SUBMIT, JOB, CHUNK = 35e-6, 75e-6, 100e-6, 40e-6

_CUDA = torch.device("cuda", 0)


@dataclass
class _Waiter:
    """A thread that does not run: it may go on when ``ready`` holds, or ``at`` this time."""

    ready: Callable[[], bool]
    at: float


class Clock:
    """Virtual time, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._changed = threading.Condition()
        self._waiting: list[_Waiter] = []
        self._turn: _Waiter | None = None

    def until(self, ready: Callable[[], bool] = lambda: False, at: float = math.inf) -> None:
        """Lets others run until a condition holds, or until a time.

        Raises:
            RuntimeError: all threads wait for each other.
        """
        with self._changed:
            waiter = _Waiter(ready, max(at, self.now))
            self._waiting.append(waiter)
            self._choose()
            self._await_turn(waiter)

    def join(self, ready: Callable[[], bool], joined: threading.Event) -> None:
        """Has a new thread take part as soon as a condition holds; sets the event at once."""
        with self._changed:
            waiter = _Waiter(ready, math.inf)
            self._waiting.append(waiter)
            joined.set()
            self._await_turn(waiter)

    def leave(self) -> None:
        """Ends the part of the thread that runs."""
        with self._changed:
            self._choose()

    def _choose(self) -> None:
        waiter = next((waiter for waiter in self._waiting if waiter.ready()), None)
        if waiter is None:
            waiter = min(self._waiting, key=lambda waiter: waiter.at)
            if waiter.at == math.inf:
                raise RuntimeError("got threads that all wait for each other, expected one that can go on")
            self.now = max(self.now, waiter.at)
        self._waiting.remove(waiter)
        self._turn = waiter
        self._changed.notify_all()

    def _await_turn(self, waiter: _Waiter) -> None:
        while self._turn is not waiter:
            self._changed.wait()


@dataclass(frozen=True)
class Interval:
    """Work on a lane, in seconds."""

    lane: str
    begin: float
    end: float
    name: str


class Device:
    """The device of one model on one machine.

    Args:
        machine: its speeds.
        scale: how many elements one of the real tensors stands for.
        step_bytes: that a step of the CPU reads and writes, per parameter.
        ranks: of the host, which all step at the same time.
    """

    def __init__(self, machine: Machine, scale: int, step_bytes: float, ranks: int) -> None:
        self.clock = Clock()
        self.intervals: list[Interval] = []
        self.gradient_bytes = self.most_gradient_bytes = 0
        self._machine, self._scale, self._step_bytes, self._ranks = machine, scale, step_bytes, ranks
        self._free_at = dict.fromkeys((TO_HOST, TO_GPU), 0.0)
        self._local = threading.local()
        self._default = Stream(self)

    def current_stream(self, device: object = None) -> Stream:
        stream: Stream = getattr(self._local, "stream", self._default)
        return stream

    @contextmanager
    def in_stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def compute(self, seconds: float, name: str) -> None:
        """Runs a kernel of the GPU in the current stream, and waits for its end; no kernel if it takes no time."""
        if seconds == 0:
            return
        begin = max(self.clock.now, self.current_stream().done_at)
        self._record(GPU, begin, begin + seconds, name)
        self.clock.until(at=begin + seconds)

    def copy(self, lane: str, nbytes: int, stream: Stream, name: str) -> None:
        """Queues a copy of real bytes, which stand for more."""
        begin = max(self.clock.now, stream.done_at, self._free_at[lane])
        end = begin + self._machine.link_seconds(nbytes * self._scale)
        stream.done_at = self._free_at[lane] = end
        self._record(lane, begin, end, name)

    def work(self, seconds: float, name: str) -> None:
        """Has the thread's kernel of the CPU take so long."""
        self._record(CPU, self.clock.now, self.clock.now + seconds, name)
        self.clock.until(at=self.clock.now + seconds)

    def step(self, numel: int) -> None:
        """Has the CPU take as long as for a step of so many real elements, a chunk."""
        self.clock.until(at=self.clock.now + CHUNK)
        stepped = numel * self._scale * self._ranks
        self.work(self._machine.step_seconds(stepped, stepped * self._step_bytes), "step")

    def take_norm(self, gradient: Tensor) -> None:
        """Has the CPU take as long as for a gradient's share of the norm."""
        numel = gradient.numel() * self._scale * self._ranks
        self.work(self._machine.norm_seconds(numel, numel * gradient.itemsize), "norm")

    def add(self, gradient: Tensor) -> None:
        """Has the CPU take as long as for adding a gradient to a float32 sum, which is read and written."""
        numel = gradient.numel() * self._scale * self._ranks
        self.work(self._machine.memory_seconds(numel * (gradient.itemsize + 8)), "sum")

    def gradient(self, like: Tensor) -> Tensor:
        """A gradient, whose bytes count as long as its memory lives."""
        memory = np.full(like.numel(), 0x3A83, np.uint16)  # 0.001
        self.gradient_bytes += memory.nbytes * self._scale
        self.most_gradient_bytes = max(self.most_gradient_bytes, self.gradient_bytes)
        weakref.finalize(memory, self._freed, memory.nbytes * self._scale)
        return torch.from_numpy(memory.view(np.int16)).view(torch.bfloat16).view(like.shape)

    def _freed(self, nbytes: int) -> None:
        self.gradient_bytes -= nbytes

    def _record(self, lane: str, begin: float, end: float, name: str) -> None:
        self.intervals.append(Interval(lane, begin, end, name))


class Stream:
    """A stream: stands in for torch.cuda.Stream.

    Attributes:
        done_at: when all work so far is done.
    """

    def __init__(self, device: Device) -> None:
        self.device, self.done_at, self._clock = _CUDA, 0.0, device.clock

    def wait_stream(self, other: Stream) -> None:
        self.done_at = max(self.done_at, other.done_at)

    def wait_event(self, event: Event) -> None:
        self.done_at = max(self.done_at, event.at)

    def record_event(self, event: Any = None) -> Any:
        event = event or torch.cuda.Event()
        event.at = max(self._clock.now, self.done_at)
        return event

    def synchronize(self) -> None:
        self._clock.until(at=self.done_at)


class Event:
    """An event: stands in for torch.cuda.Event."""

    _clock: Clock

    def __init__(self, *_: object, **__: object) -> None:
        self.at = 0.0

    def synchronize(self) -> None:
        if self.at > self._clock.now:
            self._clock.until(at=self.at)


class _Future(Future[None]):
    """A future of which threads that take part wait in virtual time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def result(self, timeout: float | None = None) -> None:
        self._await()
        super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._await()
        return super().exception(timeout)

    def _await(self) -> None:
        if not self.done():
            self._clock.until(self.done)


class _Executor:
    """Stands in for ThreadPoolExecutor: a thread that takes part in the clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._work, self.stops = clock, deque[Callable[[], object]](), False
        joined = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(joined,), daemon=True)
        self._thread.start()
        joined.wait()

    def submit(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def end(self) -> None:
        """Ends the thread, which has nothing to do."""
        self.stops = True
        self._clock.until(lambda: True)
        self._thread.join()

    def _run(self, joined: threading.Event) -> None:
        self._clock.join(self._is_wanted, joined)
        while not self.stops:
            self._work.popleft()()
            self._clock.until(self._is_wanted)
        self._clock.leave()

    def _is_wanted(self) -> bool:
        return self.stops or bool(self._work)


@contextmanager
def stand_in(device: Device, chunk_bytes: int) -> Iterator[None]:
    """Has shardopt offload from the CPU's memory to itself with the device's times.

    Args:
        device: stands in for a GPU.
        chunk_bytes: real bytes that are copied at a time.
    """
    clock = device.clock
    executors: list[_Executor] = []

    def executor(*_: object) -> _Executor:
        executors.append(_Executor(clock))
        return executors[-1]

    def wait(futures: list[_Future], return_when: str = "ALL_COMPLETED") -> None:
        enough = any if return_when == "FIRST_COMPLETED" else all
        if futures and not enough(future.done() for future in futures):
            clock.until(lambda: enough(future.done() for future in futures))

    class TimedTransfers(CudaTransfers):
        def __init__(self, nbytes: int) -> None:
            super().__init__(_CUDA, nbytes, to_host=True, pin=False)

        def _copy(self, to: Any, source: Any, nbytes: Any, stream: Any) -> None:
            if len(nbytes):
                device.copy(TO_HOST if stream is self._there else TO_GPU, int(nbytes.sum()), stream, "weights")

    made, submit = CpuCall.__init__, deferred.DeferredSteps.submit
    job, prepare = deferred.DeferredStep.take, Stepper.prepare

    def make(call: Any, tables: Tables, skipped: Any = None) -> None:
        made(call, tables, skipped)
        rows = tables.kernel_rows
        call.numel = int((rows["rows"] * rows["cols"]).sum())

    def timed_run(call: Any, phase: Any) -> None:
        device.step(call.numel)

    def begin_copy(to: Tensor, source: Tensor) -> Any:
        device.copy(TO_HOST, source.nbytes, device.current_stream(), "gradients")
        return device.current_stream().record_event()

    take = host_gradients.HostGradient.take

    def timed_take(held: Any, gradient: Tensor, **kwargs: Any) -> None:
        take(held, gradient, **kwargs)
        if held.sum.dtype != gradient.dtype:
            device.add(gradient)

    def timed_pass(gradient: Tensor, *args: Any) -> None:
        device.take_norm(gradient)

    def submit_on_gpu(steps: Any, _: torch.device, *args: Any, **kwargs: Any) -> Any:
        clock.until(at=clock.now + SUBMIT)
        return submit(steps, _CUDA, *args, **kwargs)

    def timed_job(step: Any) -> None:
        clock.until(at=clock.now + JOB)
        job(step)

    def timed_preparation(stepper: Any, *args: Any) -> Any:
        clock.until(at=clock.now + PREPARE)
        return prepare(stepper, *args)

    cuda = torch.cuda
    replaced: dict[tuple[Any, str], Any] = {
        (cuda, "Stream"): lambda *_, **__: Stream(device),
        (cuda, "Event"): type("Event", (Event,), {"_clock": clock}),
        (cuda, "current_stream"): device.current_stream,
        (cuda, "stream"): device.in_stream,
        (cuda, "device"): lambda _: nullcontext(),
        (cuda, "is_current_stream_capturing"): lambda: False,
        (transfers_cuda, "_finalize"): lambda owner, finish: None,
        (residency, "HostTransfers"): TimedTransfers,
        (residency, "FROM_CPU"): True,
        (residency, "CHUNK_BYTES"): chunk_bytes,
        (deferred, "Future"): lambda: _Future(clock),
        (deferred, "wait"): wait,
        (deferred, "ThreadPoolExecutor"): executor,
        (deferred.DeferredSteps, "submit"): submit_on_gpu,
        (deferred.DeferredStep, "take"): timed_job,
        (Stepper, "prepare"): timed_preparation,
        (host_gradients, "begin_copy"): begin_copy,
        (host_gradients, "take_pass"): timed_pass,
        (host_gradients.HostGradient, "take"): timed_take,
        (CpuCall, "__init__"): make,
        (CpuCall, "run"): timed_run,
    }
    with ExitStack() as stack:
        for (owner, name), value in replaced.items():
            stack.enter_context(patch.object(owner, name, value))
        yield
        for each in executors:
            each.end()
