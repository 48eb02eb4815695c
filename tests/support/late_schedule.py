"""Streams, the scheduler and the memory of the stand-in for a CUDA device (:mod:`late_streams`).

Memory is the CPU's, under real tensors whose device is cuda:0. PyTorch without CUDA takes such tensors: DLPack makes
them, an empty device guard lets them pass, and kernels registered for the dispatch key CUDA carry out their operations.
"""

from __future__ import annotations

import ctypes
import gc
import random
import subprocess
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import dlpack

KINDS = ("late", "early", "ahead", "behind", "random")
CUDA = torch.device("cuda", 0)
#: Bytes of memory that nobody has written, or that somebody else owns by now: NaN, addresses that are none, -1.
POISON = 0xFF

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)

_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }
"""


@cache
def let_cuda_pass() -> None:
    """Has PyTorch without CUDA accept tensors on cuda:0, for the rest of the process.

    Backward passes have a thread for the device if this comes before the first of them in the process.
    """
    home = Path(torch.__file__).parent
    with TemporaryDirectory() as folder:
        library = Path(folder, "guard.so")
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
        flags = ["-std=c++20", "-O0", "-fPIC", "-shared", abi, f"-I{home / 'include'}", f"-L{home / 'lib'}", "-lc10"]
        command = ["c++", "-x", "c++", "-", *flags, "-o", str(library)]
        subprocess.run(command, input=_GUARD, text=True, check=True)
        ctypes.CDLL(str(library))


class Block:
    """A piece of memory, which stays allocated for good so that a late reader finds poison in it.

    Attributes:
        memory: uint8, on the CPU.
        stream: in whose order device memory was allocated and is used again; None for the host's.
        users: what :meth:`torch.Tensor.record_stream` or a copy from page-locked memory has noted.
        pool: the CUDA graph that the memory belongs to.
    """

    def __init__(self, nbytes: int, stream: Any = None, pool: Any = None) -> None:
        self.memory = torch.full((-(-nbytes // 512) * 512,), POISON, dtype=torch.uint8)
        self.address = self.memory.data_ptr()
        self.end = self.address + len(self.memory)
        self.stream, self.pool = stream, pool
        self.users: list[Any] = []

    def poison(self) -> None:
        ctypes.memset(self.address, POISON, self.end - self.address)

    def tensor(self, nbytes: int, on_free: Callable[[Block], None]) -> Tensor:
        """The memory, uint8: of the device, or of the host where it has no stream.

        Args:
            nbytes: how many bytes.
            on_free: called when nobody has the tensor's storage any more.
        """
        capsule = dlpack.to_dlpack(self.memory)
        if self.stream is not None:  # DLTensor begins with the address, then the type of the device: 2 for CUDA
            ctypes.c_int.from_address(_pointer(capsule, b"dltensor") + 8).value = 2
        tensor = dlpack.from_dlpack(capsule)
        weakref.finalize(tensor.untyped_storage(), on_free, self).atexit = False
        return tensor[:nbytes]


class Ranges:
    """Pieces of memory that do not overlap, by address."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._found: dict[int, tuple[int, Any]] = {}

    def __len__(self) -> int:
        return len(self._begins)

    def add(self, begin: int, end: int, value: Any) -> None:
        insort(self._begins, begin)
        self._found[begin] = end, value

    def pop(self, begin: int) -> Any:
        self._begins.remove(begin)
        return self._found.pop(begin)[1]

    def at(self, address: int) -> Any:
        """The value of the piece that an address is in; None for another address."""
        place = bisect_right(self._begins, address)
        end, value = self._found[self._begins[place - 1]] if place else (0, None)
        return value if address < end else None


def bytes_at(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory as an array, without a copy."""
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


class Work:
    """A piece of work: done after all that was queued in its stream before, and after what it waits for."""

    def __init__(self, stream: Stream | None, run: Callable[[], object], after: Sequence[Work] = ()) -> None:
        self.stream, self.run, self.after = stream, run, list(after)
        self.done = False


class Stream:
    """Stands in for torch.cuda.Stream."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self._device = running()
        self.device = CUDA
        self.queue: deque[Work] = deque()
        self.last: Work | None = None
        self.graph: Graph | None = None  # that captures it
        self.eagerness = self._device.new_eagerness()
        self._device.streams.append(self)
        self.cuda_stream = len(self._device.streams) - 1

    def wait_event(self, event: Event) -> None:
        if event.work is not None:
            self._device.put(self, nothing, [event.work])

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._device.demand([self.last] if self.last else [])


class Event:
    """Stands in for torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.work: Work | None = None
        self._blocking = blocking

    def record(self, stream: Stream | None = None) -> None:
        self.work = (stream or running().current_stream()).last

    def wait(self, stream: Stream | None = None) -> None:
        (stream or running().current_stream()).wait_event(self)

    def query(self) -> bool:
        return self.work is None or self.work.done

    def synchronize(self) -> None:
        running().spins += not self._blocking
        running().demand([self.work] if self.work else [])


class Graph:
    """Stands in for torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self._work: list[Callable[[], object]] = []

    def add(self, run: Callable[[], object]) -> None:
        self._work.append(run)

    def replay(self) -> None:
        device = running()
        for run in self._work:
            device.put(device.current_stream(), run)


@contextmanager
def capture(graph: Graph) -> Iterator[None]:
    """Stands in for torch.cuda.graph."""
    device = running()
    device.synchronize()
    stream = Stream()
    with device.in_stream(stream):
        stream.graph = device.graph = graph
        try:
            yield
        finally:
            stream.graph = device.graph = None


class DeviceFuture:
    """Stands in for torch.futures.Future(devices=...): whose waits are events."""

    def __init__(self, devices: object = None) -> None:
        self._event = Event()

    def set_result(self, value: object) -> None:
        self._value = value
        self._event.record()

    def wait(self) -> object:
        self._event.wait()
        return self._value


class Device:
    """Streams, scheduler and memory of a device.

    Args:
        kind: one of ``KINDS``.
        seed: for the last of them.

    Attributes:
        faults: what no order of events would allow, in words.
        waits: how often the host waited for the device.
        copies_to_host: how many it has issued.
        spins: how often a core was busy waiting for an event.
    """

    def __init__(self, kind: str, seed: int = 0) -> None:
        self._kind, self._random = kind, random.Random(seed)
        self.streams: list[Stream] = []
        self.faults: list[str] = []
        self.waits = self.copies_to_host = self.spins = 0
        self.graph: Graph | None = None
        self._lock = threading.RLock()
        self._thread = threading.local()
        self._freed_blocks: list[tuple[Block, list[Work], list[Work]]] = []
        self._poisons = False
        self._blocks, self._locked = Ranges(), Ranges()

    def new_eagerness(self) -> float:
        if self._kind == "random":
            return self._random.choice((0.0, 0.5, 1.0))
        return float(self._kind in ("early", "ahead" if self.streams else "behind"))

    # Streams

    def current_stream(self, device: object = None) -> Stream:
        stream: Stream = getattr(self._thread, "stream", self.streams[0])
        return stream

    @contextmanager
    def in_stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    def put(self, stream: Stream, run: Callable[[], object], after: Sequence[Work] = ()) -> None:
        """Queues work."""
        with self._lock:
            if stream.graph is not None:
                if any(not work.done for work in after):
                    raise RuntimeError("a capture that waits for work outside of it")
                stream.graph.add(run)
                return
            stream.last = Work(stream, run, after)
            stream.queue.append(stream.last)
            self._run_ahead()

    def demand(self, wanted: Sequence[Work]) -> None:
        """The host waits."""
        with self._lock:
            self.refuse_in_capture()
            self.waits += 1
            for work in wanted:
                self._complete(work)

    def refuse_in_capture(self) -> None:
        if self.graph is not None:
            self.faults.append("the host waited in the middle of a capture")
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def synchronize(self, device: object = None) -> None:
        """Stands in for torch.cuda.synchronize."""
        streams = list(self.streams)
        self._random.shuffle(streams)
        self.demand([stream.last for stream in streams if stream.last])

    def _complete(self, work: Work) -> None:
        while not work.done:
            assert work.stream is not None
            first = work.stream.queue[0]
            for other in first.after:
                self._complete(other)
            if not first.done:
                self._run(work.stream.queue.popleft())

    def _run_ahead(self) -> None:
        again = True
        while again:
            again = False
            for stream in self.streams:
                while stream.queue and all(work.done for work in stream.queue[0].after):
                    if self._random.random() >= stream.eagerness:
                        break
                    self._run(stream.queue.popleft())
                    again = True

    def _run(self, work: Work) -> None:
        collects = gc.isenabled()
        gc.disable()  # a finalizer may wait for the device
        try:
            with torch.no_grad():
                work.run()
        finally:
            if collects:
                gc.enable()
        work.done, work.run, work.after = True, nothing, []
        self._poison()

    def _poison(self) -> None:
        if self._poisons:
            return
        self._poisons = True
        for entry in list(self._freed_blocks):
            block, after, until = entry
            while after and after[-1].done:
                after.pop()
            if not after:
                block.poison()
                while until and until[-1].done:
                    until.pop()
                if not until:
                    self._freed_blocks.remove(entry)
        self._poisons = False

    # Memory

    def of_device(self, address: int) -> Block | None:
        """The block of the device's memory that an address is in."""
        block: Block | None = self._blocks.at(address)
        return block if block is not None and block.stream is not None else None

    def of_host(self, address: int) -> Block | None:
        """The block of PyTorch's page-locked memory that an address is in."""
        block: Block | None = self._blocks.at(address)
        return block if block is not None and block.stream is None else None

    def allocate(self, nbytes: int) -> Tensor:
        """Memory of the device, uint8, which its earlier owner may still write in the order of the stream."""
        with self._lock:
            stream = self.current_stream()
            block = Block(max(nbytes, 1), stream, stream.graph)
            self._blocks.add(block.address, block.end, block)
            self.put(stream, block.poison)
            return block.tensor(nbytes, self._freed)

    def pin(self, nbytes: int) -> Tensor:
        """Page-locked memory of PyTorch's allocator, uint8."""
        self.refuse_in_capture()
        block = Block(max(nbytes, 1))
        self._blocks.add(block.address, block.end, block)
        return block.tensor(nbytes, self._freed)

    def _freed(self, block: Block) -> None:
        """Lets the next owner of a block write to it, again and again as long as work that uses it may be queued."""
        with self._lock:
            if block.pool is not None:
                if block.pool is self.graph:
                    block.pool.add(block.poison)
                return
            users = block.users if block.stream is None else [s.last for s in (block.stream, *block.users)]
            until = [stream.last for stream in self.streams if stream.last is not None]
            self._freed_blocks.append((block, [work for work in users if work is not None], until))
            self._poison()

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Stands in for torch.Tensor.record_stream."""
        block = self.of_device(tensor.untyped_storage().data_ptr())
        if block is not None and stream is not block.stream:
            block.users.append(stream)

    def is_locked(self, address: int) -> bool:
        """Whether memory of the CPU is page-locked."""
        return self.of_host(address) is not None or self._locked.at(address) is not None

    def host_register(self, device: int, address: int, nbytes: int) -> int:
        """Stands in for cudaHostRegister."""
        self.refuse_in_capture()
        self._locked.add(address, address + nbytes, [])  # work that uses it
        return 0

    @property
    def locked_count(self) -> int:
        """How many pieces of memory cudaHostRegister has locked."""
        return len(self._locked)

    def host_unregister(self, device: int, address: int) -> None:
        """Stands in for cudaHostUnregister."""
        self.refuse_in_capture()
        users = self._locked.pop(address)
        if any(not work.done for work in users):
            self.faults.append("memory was unlocked that copies were still using")
            for work in users:
                work.run = nothing  # the memory may be gone

    def alias(self, tensor: Tensor) -> Tensor:
        """A tensor's memory as a tensor of the CPU, which does not keep the memory from being freed."""
        address = tensor.untyped_storage().data_ptr() if tensor.numel() else 0
        block = self._blocks.at(address)
        if block is None:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        begin = tensor.data_ptr() - block.address
        whole = block.memory[begin : begin + (len(block.memory) - begin) // tensor.itemsize * tensor.itemsize]
        alias = whole.view(tensor.dtype)
        return alias.as_strided(tensor.shape, tensor.stride(), alias.storage_offset())


def nothing() -> None:
    pass


_devices: list[Device] = []


def running() -> Device:
    return _devices[-1]


@contextmanager
def running_on(device: Device) -> Iterator[None]:
    """Makes a device the one that streams belong to."""
    _devices.append(device)
    try:
        yield
    finally:
        _devices.pop()
