"""A stand-in for a CUDA device whose work comes as late, as early or in as odd an order as streams and events allow.

Tensors on ``cuda:0`` have memory of the CPU (:mod:`late_memory`). Operations, kernels and asynchronous copies only
queue their work in a stream; a scheduler runs the queues. A wait that is missing leads to other bits, or to an entry of
:attr:`LateDevice.faults`:

- A stream's work is in order. Streams know of each other by events only.
- Memory of the device that was freed is poisoned, as its next owner would overwrite it, once the work is done that its
  own stream had then, and that of streams in ``record_stream``. Memory that is allocated is poisoned in the order of
  its stream.
- PyTorch's page-locked memory is poisoned once it is freed and the copies are done that PyTorch has issued itself:
  PyTorch knows of no others. Memory locked by cudaHostRegister must not be in use when it is unlocked.
- Copies from pageable memory read it at once, copies to it and other blocking calls wait for their stream.
- A capture records the work of its stream; every replay queues it again. Waits of the host are refused meanwhile.

The scheduler's kinds: "late" does what the host waits for, and nothing else; "early" does all work at once if its waits
allow; "ahead" and "behind" treat the default stream as the former and others as the latter, and the other way round;
"random" decides for each stream, by the seed, or lets it alternate.

Not modelled: several devices; what two kernels do to each other that run at one time (each piece of work is
indivisible), or the threads of one; the kernels' arithmetic (a step is the CPU's; tests/kernels/test_cuda_emulated.py
has CUDA's); the legacy stream's implicit waits; NCCL, and its streams; PyTorch's backward pass; errors of CUDA, and
memory that is too small; how PyTorch's allocator splits blocks (it models when memory is used again); captures of more
than one stream; the host's own races for memory that is not page-locked.
"""

from __future__ import annotations

import gc
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.library import Library
from torch.utils._pytree import tree_map_only

from late_memory import Block, Ranges, bytes_at, let_cuda_pass
from shardopt import _C
from shardopt.comm import all_reduce
from shardopt.kernels.dispatch import cpu_target

KINDS = ("late", "early", "ahead", "behind", "random")
CUDA = torch.device("cuda", 0)


class Work:
    """A piece of work: done after all that was queued in its stream before, and after what it waits for."""

    def __init__(self, stream: Stream | None, run: Callable[[], object], after: Sequence[Work] = ()) -> None:
        self.stream, self.run, self.after = stream, run, list(after)
        self.done = False


class Stream:
    """Stands in for torch.cuda.Stream."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self._device = _running()
        self.device = CUDA
        self.queue: deque[Work] = deque()
        self.last: Work | None = None
        self.graph: Graph | None = None  # that captures it
        self.eagerness = self._device.new_eagerness()
        self._device.streams.append(self)
        self.cuda_stream = len(self._device.streams) - 1

    def wait_event(self, event: Event) -> None:
        if event.work is not None:
            self._device.put(self, _nothing, [event.work])

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
        self.work = (stream or _running().current_stream()).last

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _running().current_stream()).wait_event(self)

    def query(self) -> bool:
        return self.work is None or self.work.done

    def synchronize(self) -> None:
        _running().spins += not self._blocking
        _running().demand([self.work] if self.work else [])


class Graph:
    """Stands in for torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self._work: list[Callable[[], object]] = []

    def add(self, run: Callable[[], object]) -> None:
        self._work.append(run)

    def replay(self) -> None:
        device = _running()
        for run in self._work:
            device.put(device.current_stream(), run)


@contextmanager
def capture(graph: Graph) -> Iterator[None]:
    """Stands in for torch.cuda.graph."""
    device = _running()
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


class _GivenAway(NamedTuple):
    """A block that was freed: its next owner writes after some work."""

    block: Block
    after: list[Work]
    until: list[Work]


class LateDevice:
    """The device.

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
        self._given_away: list[_GivenAway] = []
        self._poisons = False
        self._memory, self._pinned, self._locked = Ranges(), Ranges(), Ranges()
        self._keeps: list[object] = []

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
        work.done, work.run, work.after = True, _nothing, []
        self._poison()

    def _poison(self) -> None:
        if self._poisons:
            return
        self._poisons = True
        for given in list(self._given_away):
            if all(work.done for work in given.after):
                given.block.poison()
                if all(work.done for work in given.until):
                    self._given_away.remove(given)
        self._poisons = False

    # Memory

    def allocate(self, nbytes: int) -> Tensor:
        """Memory of the device, uint8, which its earlier owner may still write in the order of the stream."""
        with self._lock:
            stream = self.current_stream()
            block = Block(max(nbytes, 1), stream, stream.graph)
            self._memory.add(block.address, block.end, block)
            self.put(stream, block.poison)
            return block.tensor(nbytes, self._freed)

    def _freed(self, block: Block) -> None:
        with self._lock:
            if block.pool is not None:
                if block.pool is self.graph:
                    block.pool.add(block.poison)
                return
            self._give_away(block, [stream.last for stream in (block.stream, *block.users)])

    def _give_away(self, block: Block, after: Sequence[Work | None]) -> None:
        """Lets the next owner of a block write to it, again and again as long as work that uses it may be queued."""
        until = [stream.last for stream in self.streams if stream.last is not None]
        self._given_away.append(_GivenAway(block, [work for work in after if work is not None], until))
        self._poison()

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Stands in for torch.Tensor.record_stream."""
        block = self._memory.at(tensor.untyped_storage().data_ptr())
        if block is not None and stream is not block.stream:
            block.users.append(stream)

    def pin(self, nbytes: int) -> Tensor:
        """Page-locked memory of PyTorch's allocator, uint8."""
        self.refuse_in_capture()
        block = Block(max(nbytes, 1))
        self._pinned.add(block.address, block.end, block)
        return block.tensor(nbytes, self._unpinned)

    def _unpinned(self, block: Block) -> None:
        with self._lock:
            self._give_away(block, block.users)

    def is_locked(self, address: int) -> bool:
        """Whether memory of the CPU is page-locked."""
        return self._pinned.at(address) is not None or self._locked.at(address) is not None

    def host_register(self, address: int, nbytes: int, flags: int) -> int:
        """Stands in for cudaHostRegister."""
        self.refuse_in_capture()
        users: list[Work] = []
        self._locked.add(address, address + nbytes, users)
        return 0

    @property
    def locked_count(self) -> int:
        """How many pieces of memory cudaHostRegister has locked."""
        return len(self._locked)

    def host_unregister(self, address: int) -> int:
        """Stands in for cudaHostUnregister."""
        self.refuse_in_capture()
        users = self._locked.pop(address)
        if any(not work.done for work in users):
            self.faults.append("memory was unlocked that copies were still using")
            for work in users:
                work.run = _nothing  # the memory may be gone
        return 0

    def alias(self, tensor: Tensor) -> Tensor:
        """A tensor's memory as a tensor of the CPU, which does not keep the memory from being freed."""
        address = tensor.untyped_storage().data_ptr() if tensor.numel() else 0
        block = self._memory.at(address) or self._pinned.at(address)
        if block is None:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        begin = tensor.data_ptr() - block.address
        whole = block.memory[begin : begin + (len(block.memory) - begin) // tensor.itemsize * tensor.itemsize]
        alias = whole.view(tensor.dtype)
        return alias.as_strided(tensor.shape, tensor.stride(), alias.storage_offset())

    # PyTorch's operations

    def empty(self, size: Sequence[int], dtype: torch.dtype | None = None, **_: object) -> Tensor:
        stride = torch.empty(tuple(size), device="meta").stride()
        return self.empty_strided(size, stride, dtype)

    def empty_strided(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype | None = None, **_: object
    ) -> Tensor:
        dtype = dtype or torch.get_default_dtype()
        last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        numel = 0 if 0 in tuple(size) else last + 1
        flat = self.allocate(numel * dtype.itemsize).view(dtype)
        return flat.as_strided(tuple(size), tuple(stride))

    def copy(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Tensor.copy_, where one or both are on the device."""
        stream = self.current_stream()
        if source.is_cuda and to.is_cuda:
            ours, theirs = self.alias(to), self.alias(source)
            self.put(stream, lambda: ours.copy_(theirs))
            return to
        host = source if to.is_cuda else to
        begin = host.untyped_storage().data_ptr() if host.numel() else 0
        is_asynchronous = non_blocking and self.is_locked(begin)
        host = self.alias(host) if self._pinned.at(begin) else host.detach()
        if to.is_cuda:
            ours, theirs = self.alias(to), host if is_asynchronous else host.clone()
        else:
            ours, theirs = host, self.alias(source)
            self.copies_to_host += 1
        self.put(stream, lambda: ours.copy_(theirs))
        if is_asynchronous:
            block = self._pinned.at(begin)
            if block is not None and stream.last is not None:
                block.users.append(stream.last)
        elif not (to.is_cuda and non_blocking):
            stream.synchronize()
        return to

    def scalar(self, tensor: Tensor) -> Any:
        """What Tensor.item gives."""
        self.current_stream().synchronize()
        return self.alias(tensor).item()

    def any_other(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """An operation that computes something."""
        arguments = list(zip(op._schema.arguments, args, strict=False)) + [
            (argument, kwargs[argument.name]) for argument in op._schema.arguments if argument.name in kwargs
        ]
        changed = [value for argument, value in arguments if argument.alias_info and argument.alias_info.is_write]
        on_cpu = self._converted((args, kwargs), self._alias_or_copy, torch.device("cpu"))
        if changed:
            self.put(self.current_stream(), lambda: op(*on_cpu[0], **on_cpu[1]))
            return changed[0] if len(op._schema.returns) == 1 else tuple(changed)
        meta = self._converted((args, kwargs), _like, torch.device("meta"))
        results = tree_map_only(
            Tensor, lambda x: self.empty_strided(x.shape, x.stride(), x.dtype), op(*meta[0], **meta[1])
        )
        into: list[Tensor] = []
        tree_map_only(Tensor, lambda x: into.append(self.alias(x)), results)

        def run() -> None:
            found: list[Tensor] = []
            tree_map_only(Tensor, found.append, op(*on_cpu[0], **on_cpu[1]))
            for to, source in zip(into, found, strict=True):
                to.copy_(source)

        self.put(self.current_stream(), run)
        return results

    def _alias_or_copy(self, tensor: Tensor) -> Tensor:
        return self.alias(tensor) if tensor.is_cuda else tensor.detach().clone()

    @staticmethod
    def _converted(arguments: Any, convert: Callable[[Tensor], Tensor], device: torch.device) -> Any:
        arguments = tree_map_only(Tensor, convert, arguments)
        return tree_map_only(torch.device, lambda given: device if given.type == "cuda" else given, arguments)

    # shardopt's kernels

    def step_cuda(self, *, gradients: int, entry_count: int, stream: int, **call: Any) -> None:
        launched = None
        if self._memory.at(gradients) is None:  # read by the host
            launched = bytes_at(gradients, 8 * entry_count).copy() if entry_count else np.zeros(0, np.uint8)
        else:
            assert call["entries"] <= gradients

        def run() -> None:
            table = bytes_at(gradients, 8 * entry_count) if launched is None else launched
            self._step(SimpleNamespace(**call), table.view(np.uint64), entry_count)

        self.put(self.streams[stream], run)

    def _step(self, call: SimpleNamespace, gradients: Any, entry_count: int) -> None:
        entries = np.frombuffer(bytes_at(call.entries, entry_count * _C.tensor_entry.itemsize), _C.tensor_entry).copy()
        steps = bytes_at(call.steps, 8 * call.step_count).view(np.uint64)
        tables = bytes_at(call.tables, 8 * len(_C.codecs)).view(np.uint64)
        entries["gradient"] = gradients
        fields = ("param", "gradient", "step", "low_bits", "codes", "scales", "extremes", "sums")
        used = np.concatenate([steps, tables, *(entries[field].reshape(-1) for field in fields)])
        used = used[used != 0].tolist()
        if not self._memory.all_at(used):
            self.faults.append("a kernel read tables that were not there")
            return
        count = int(entries["group"].max()) + 1 if entry_count else 0
        groups = np.frombuffer(bytes_at(call.groups, count * _C.group_entry.itemsize), _C.group_entry).copy()
        for group in groups:
            if group["lr"]:
                group["hyper"][0] = bytes_at(int(group["lr"]), 4).view(np.float32)[0]
        if call.found_inf and bytes_at(call.found_inf, 4).view(np.float32)[0]:
            return
        if call.grad_scale:
            groups["gradient_scale"] *= np.float32(1.0 / float(bytes_at(call.grad_scale, 4).view(np.float32)[0]))
        step = _C.CpuStep(entries, steps.copy(), tables.copy())
        step.prepare(groups, 1, cpu_target())
        bytes_at(call.nonfinite, 8).view(np.int64)[0] += step.run(call.phase)

    def copy_cuda(self, device: int, to: Any, source: Any, nbytes: Any, stream: int) -> None:
        for target, begin, size in zip(to.tolist(), source.tolist(), nbytes.tolist(), strict=True):
            self._copy_range(target, begin, size, self.streams[stream])

    def _copy_range(self, to: int, source: int, nbytes: int, stream: Stream) -> None:
        to_device = self._memory.at(to) is not None
        assert to_device != (self._memory.at(source) is not None), "one side is the device"
        host = source if to_device else to
        data = bytes_at(source, nbytes)
        if to_device and not self.is_locked(host):
            data = data.copy()

        def run() -> None:
            bytes_at(to, nbytes)[...] = data

        self.put(stream, run)
        users = self._locked.at(host)
        if users is not None and stream.last is not None:
            users.append(stream.last)
        if not to_device and not self.is_locked(host):
            stream.synchronize()

    def message_kernel(self, name: str) -> Callable[..., None]:
        kernel = getattr(_C, name)

        def launch(*args: Any) -> None:
            *where, _, stream = args
            self.put(self.streams[stream], lambda: kernel(*where, 1, cpu_target()))

        return launch


def _nothing() -> None:
    pass


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


_current: list[LateDevice] = []


def _running() -> LateDevice:
    return _current[-1]


_VIEWS = ("as_strided", "view", "_reshape_alias", "unfold", "view_as_real")


@contextmanager
def late_device(kind: str, seed: int = 0) -> Iterator[LateDevice]:
    """Has tensors on ``cuda:0`` and shardopt's CUDA code use a stand-in.

    Raises:
        AssertionError: at the end, if anything was done that no order of events allows.
    """
    let_cuda_pass()
    device = LateDevice(kind, seed)
    _current.append(device)
    Stream()
    all_reduce._side_stream.cache_clear()
    others, aten = Library("_", "IMPL"), Library("aten", "IMPL")
    with pytest.MonkeyPatch.context() as patch:
        _patch_torch(patch, device)
        _patch_kernels(patch, device)
        others.fallback(device.any_other, "CUDA")
        for name in _VIEWS:
            op = getattr(torch.ops.aten, name).default
            aten.impl(op, lambda *args, op=op: op.redispatch(_ON_CPU, *args), "CUDA")
        aten.impl("empty.memory_format", device.empty, "CUDA")
        aten.impl("empty_strided", device.empty_strided, "CUDA")
        aten.impl("copy_", device.copy, "CUDA")
        aten.impl("_local_scalar_dense", device.scalar, "CUDA")
        gc.freeze()  # what was there before is not looked through again
        try:
            yield device
            gc.collect()  # finalizers are part of the play
            device.synchronize()
            assert not device.faults, device.faults
        finally:
            gc.collect()
            gc.unfreeze()
            aten._destroy()
            others._destroy()
            all_reduce._side_stream.cache_clear()
            _current.pop()


_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def _patch_torch(patch: pytest.MonkeyPatch, device: LateDevice) -> None:
    empty = torch.empty

    def empty_or_pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        if not pin_memory:
            return empty(*args, **kwargs)
        size, dtype = torch.Size(args[0] if isinstance(args[0], Sequence) else args), kwargs["dtype"]
        return device.pin(size.numel() * dtype.itemsize).view(dtype).view(size)

    cuda = torch.cuda
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": capture,
        "stream": device.in_stream,
        "current_stream": device.current_stream,
        "synchronize": device.synchronize,
        "device": lambda device: nullcontext(),
        "is_current_stream_capturing": lambda: device.current_stream().graph is not None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_lazy_init": lambda: None,
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=device.host_register, cudaHostUnregister=device.host_unregister, cudaGetLastError=int
        ),
    }.items():
        patch.setattr(cuda, name, value)
    patch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: True, raising=False)
    patch.setattr(torch, "empty", empty_or_pinned)
    patch.setattr(Tensor, "record_stream", lambda tensor, stream: device.record_stream(tensor, stream))
    patch.setattr(Tensor, "is_pinned", lambda tensor: device.is_locked(tensor.data_ptr()))
    patch.setattr("shardopt.comm.all_reduce.Future", DeviceFuture)
    patch.setattr("shardopt.kernels.dispatch_cuda._table_copies", {})


def _patch_kernels(patch: pytest.MonkeyPatch, device: LateDevice) -> None:
    def tasks(entries: Any, groups: Any, aligned: bool = True) -> tuple[Any, list[Any]]:
        return np.zeros(16, np.uint8), []

    for name, value in {
        "with_cuda": True,
        "cuda_tasks": tasks,
        "cuda_prepared_bytes": 16,
        "cuda_launched_gradients": 8,
        "step_cuda": device.step_cuda,
        "copy_cuda": device.copy_cuda,
        "encode_message_cuda": device.message_kernel("encode_message"),
        "decode_message_cuda": device.message_kernel("decode_message"),
    }.items():
        patch.setattr(_C, name, value, raising=False)
