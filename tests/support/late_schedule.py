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
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class Block:
    """A piece of the device's or of page-locked memory, which stays allocated so that a late reader finds poison.

    Attributes:
        address: where it begins.
        end: behind its last byte.
        memory: uint8, on the CPU; None if a caller's memory was locked by cudaHostRegister.
        stream: in whose order device memory was allocated and is used again; None for the host's.
        pool: the CUDA graph that the memory belongs to.
        users: what :meth:`torch.Tensor.record_stream`, or a copy from page-locked memory, has noted.
    """

    address: int
    end: int
    memory: Tensor | None = None
    stream: Stream | None = None
    pool: Graph | None = None
    users: list[Any] = field(default_factory=list)

    def poison(self) -> None:
        ctypes.memset(self.address, POISON, self.end - self.address)


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
        self._device = Device.now
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
        self.work = (stream or Device.now.current_stream()).last

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Device.now.current_stream()).wait_event(self)

    def query(self) -> bool:
        return self.work is None or self.work.done

    def synchronize(self) -> None:
        Device.now.spins += not self._blocking
        Device.now.demand([self.work] if self.work else [])


class Graph:
    """Stands in for torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []

    def replay(self) -> None:
        for run in self.work:
            Device.now.put(Device.now.current_stream(), run)


@contextmanager
def capture(graph: Graph) -> Iterator[None]:
    """Stands in for torch.cuda.graph."""
    device = Device.now
    device.synchronize()
    stream = Stream()
    with device.in_stream(stream):
        stream.graph = device.graph = graph
        try:
            yield
        finally:
            stream.graph = device.graph = None


class Device:
    """Streams, scheduler and memory of a device.

    Args:
        kind: one of ``KINDS``.
        seed: for the last of them.

    Attributes:
        now: the device that streams and events belong to.
        faults: what no order of events would allow, in words.
        waits: how often the host waited for the device.
        copies_to_host: how many it has issued.
        spins: how often a core was busy waiting for an event.
    """

    now: Device

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
        self._begins: list[int] = []
        self._blocks: dict[int, Block] = {}

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
                stream.graph.work.append(run)
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

    def block(self, address: int) -> Block | None:
        """The block that an address is in."""
        place = bisect_right(self._begins, address)
        block = self._blocks[self._begins[place - 1]] if place else None
        return block if block is not None and address < block.end else None

    def of_device(self, address: int) -> bool:
        """Whether memory is the device's."""
        block = self.block(address)
        return block is not None and block.stream is not None

    def is_locked(self, address: int) -> bool:
        """Whether memory of the CPU is page-locked."""
        block = self.block(address)
        return block is not None and block.stream is None

    def _add(self, block: Block) -> Block:
        insort(self._begins, block.address)
        self._blocks[block.address] = block
        return block

    def _tensor(self, nbytes: int, stream: Stream | None = None) -> Tensor:
        """Memory of its own, uint8: of the device, or of the host without a stream."""
        memory = torch.full((-(-max(nbytes, 1) // 512) * 512,), POISON, dtype=torch.uint8)
        address, pool = memory.data_ptr(), stream and stream.graph
        block = self._add(Block(address, address + len(memory), memory, stream, pool))
        capsule = dlpack.to_dlpack(memory)
        if stream is not None:  # DLTensor begins with the address, then the type of the device: 2 for CUDA
            self.put(stream, block.poison)
            ctypes.c_int.from_address(_pointer(capsule, b"dltensor") + 8).value = 2
        tensor = dlpack.from_dlpack(capsule)
        weakref.finalize(tensor.untyped_storage(), self._freed, block).atexit = False
        return tensor[:nbytes]

    def allocate(self, nbytes: int) -> Tensor:
        """Memory of the device, uint8, which its earlier owner may still write in the order of the stream."""
        with self._lock:
            return self._tensor(nbytes, self.current_stream())

    def pin(self, nbytes: int) -> Tensor:
        """Page-locked memory of PyTorch's allocator, uint8."""
        self.refuse_in_capture()
        return self._tensor(nbytes)

    def _freed(self, block: Block) -> None:
        """Lets the next owner of a block write to it, again and again as long as work that uses it may be queued."""
        with self._lock:
            if block.pool is not None:
                if block.pool is self.graph:
                    block.pool.work.append(block.poison)
                return
            users = block.users if block.stream is None else [s.last for s in (block.stream, *block.users)]
            until = [stream.last for stream in self.streams if stream.last is not None]
            self._freed_blocks.append((block, [work for work in users if work is not None], until))
            self._poison()

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Stands in for torch.Tensor.record_stream."""
        block = self.block(tensor.untyped_storage().data_ptr())
        if block is not None and block.stream not in (None, stream):
            block.users.append(stream)

    def host_register(self, device: int, address: int, nbytes: int) -> int:
        """Stands in for cudaHostRegister."""
        self.refuse_in_capture()
        self._add(Block(address, address + nbytes))
        return 0

    @property
    def locked_count(self) -> int:
        """How many pieces of memory cudaHostRegister has locked."""
        return sum(block.memory is None for block in self._blocks.values())

    def host_unregister(self, device: int, address: int) -> None:
        """Stands in for cudaHostUnregister."""
        self.refuse_in_capture()
        self._begins.remove(address)
        block = self._blocks.pop(address)
        for work in (work for work in block.users if work is not None and not work.done):
            self.faults.append("memory was unlocked that copies were still using")
            work.run = nothing  # the memory may be gone

    def alias(self, tensor: Tensor) -> Tensor:
        """A tensor as one of the CPU, which does not keep memory of the stand-in from being freed."""
        if tensor.numel() == 0:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        block = self.block(tensor.untyped_storage().data_ptr())
        if block is None or block.memory is None:
            return tensor.detach()
        begin = tensor.data_ptr() - block.address
        whole = block.memory[begin : begin + (len(block.memory) - begin) // tensor.itemsize * tensor.itemsize]
        alias = whole.view(tensor.dtype)
        return alias.as_strided(tensor.shape, tensor.stride(), alias.storage_offset())


def nothing() -> None:
    pass
