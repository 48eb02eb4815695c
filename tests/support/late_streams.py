"""A stand-in for a CUDA device whose work comes as late, as early or in as odd an order as streams and events allow.

Tensors on ``cuda:0`` have memory of the CPU. Operations, kernels and asynchronous copies only
queue their work in a stream; a scheduler runs the queues. A wait that is missing leads to other bits, or to one of
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

Not modelled: several devices; what two kernels do to each other that run at one time, or the threads of one; the
kernels' arithmetic (a step is the CPU's; tests/ptx/test_cuda_kernels.py has CUDA's); the legacy stream's implicit
waits; NCCL; PyTorch's backward pass; errors of CUDA; how PyTorch's allocator splits blocks; captures of more than one
stream; the host's own races for memory that is not page-locked.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.library import Library
from torch.utils._pytree import tree_map_only

from late_schedule import Device, Event, Graph, Stream, bytes_at, capture, let_cuda_pass
from shardopt import _C
from shardopt.kernels import dispatch_cuda
from shardopt.kernels.dispatch import cpu_target


class LateDevice(Device):
    """The device: what PyTorch and shardopt ask of it."""

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
        block = self.block(host.untyped_storage().data_ptr()) if host.numel() else None
        is_asynchronous = non_blocking and block is not None
        host = self.alias(host)
        if to.is_cuda:
            ours, theirs = self.alias(to), host if is_asynchronous else host.clone()
        else:
            ours, theirs = host, self.alias(source)
            self.copies_to_host += 1
        self.put(stream, lambda: ours.copy_(theirs))
        if block is not None and is_asynchronous:
            block.users.append(stream.last)
        elif not (to.is_cuda and non_blocking):
            stream.synchronize()
        return to

    def scalar(self, tensor: Tensor) -> Any:
        """The number that Tensor.item gives."""
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
            return (None, changed[0], tuple(changed))[min(len(op._schema.returns), 2)]
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

    def step_cuda(self, *, gradients: int, row_count: int, stream: int, **call: Any) -> None:
        table = bytes_at(gradients, 8 * row_count) if row_count else np.zeros(0, np.uint8)
        table = table if self.of_device(gradients) else table.copy()  # the host's is read now
        self.put(self.streams[stream], lambda: self._step(SimpleNamespace(**call), table.view(np.uint64), row_count))

    def _step(self, call: SimpleNamespace, gradients: Any, row_count: int) -> None:
        kernel_rows = np.frombuffer(
            bytes_at(call.kernel_rows, row_count * _C.kernel_row.itemsize), _C.kernel_row
        ).copy()
        steps = bytes_at(call.steps, 8 * call.step_count).view(np.uint64)
        tables = bytes_at(call.tables, 8 * len(_C.codecs)).view(np.uint64)
        kernel_rows["gradient"] = gradients
        fields = ("param", "gradient", "step", "low_bits", "codes", "scales", "extremes", "sums")
        used = np.concatenate([steps, tables, *(kernel_rows[field].reshape(-1) for field in fields)])
        used = used[used != 0].tolist()
        if not all(map(self.of_device, used)):
            self.faults.append("a kernel read tables that were not there")
            return
        count = int(kernel_rows["group"].max()) + 1 if row_count else 0
        groups = np.frombuffer(bytes_at(call.groups, count * _C.group_row.itemsize), _C.group_row).copy()
        for group in groups:
            if group["lr"]:
                group["hyper"][0] = bytes_at(int(group["lr"]), 4).view(np.float32)[0]
        if call.found_inf and bytes_at(call.found_inf, 4).view(np.float32)[0]:
            return
        if call.grad_scale:
            groups["gradient_scale"] *= np.float32(1.0 / float(bytes_at(call.grad_scale, 4).view(np.float32)[0]))
        if call.factor:
            groups["gradient_scale"] *= bytes_at(call.factor, 4).view(np.float32)[0]
        step = _C.CpuStep(kernel_rows, steps.copy(), tables.copy())
        step.prepare(groups, 1, cpu_target())
        bytes_at(call.nonfinite, 8).view(np.int64)[0] += step.run(call.phase)

    def copy_cuda(self, device: int, to: Any, source: Any, nbytes: Any, stream: int) -> None:
        for target, begin, size in zip(to.tolist(), source.tolist(), nbytes.tolist(), strict=True):
            self._copy_range(target, begin, size, self.streams[stream])

    def _copy_range(self, to: int, source: int, nbytes: int, stream: Stream) -> None:
        to_device = self.of_device(to)
        assert to_device != self.of_device(source), "one side is the device"
        locked = self.block(source if to_device else to)
        data = bytes_at(source, nbytes)
        data = data.copy() if to_device and locked is None else data

        def run() -> None:
            bytes_at(to, nbytes)[...] = data

        self.put(stream, run)
        if locked is not None and locked.memory is None:  # PyTorch does not know of this copy from or to its own memory
            locked.users.append(stream.last)
        elif locked is None and not to_device:
            stream.synchronize()

    def norm_cuda(
        self,
        kernel_rows: int,
        tasks: int,
        task_count: int,
        norm_pass: _C.NormPass,
        factor: int,
        device: int,
        stream: int,
    ) -> None:
        def run() -> None:
            rows = int(bytes_at(tasks, 16 * task_count).view(np.int64)[1::2].max(initial=-1)) + 1
            table = np.frombuffer(bytes_at(kernel_rows, rows * _C.kernel_row.itemsize), _C.kernel_row).copy()
            if not all(map(self.of_device, [*table["gradient"].tolist(), *table["sums"].tolist()])):
                self.faults.append("a kernel read tables that were not there")
                return
            by = float(bytes_at(factor, 4).view(np.float32)[0]) if factor else 1.0
            _C.norm(table, norm_pass, by, 1, cpu_target())

        self.put(self.streams[stream], run)

    def clip_cuda(self, *args: Any) -> None:
        *where, _, stream = args
        self.put(self.streams[stream], lambda: _C.clip(*where))


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


_VIEWS = ("as_strided", "view", "_reshape_alias", "unfold", "view_as_real")


@contextmanager
def late_device(kind: str, seed: int = 0) -> Iterator[LateDevice]:
    """Has tensors on ``cuda:0`` and shardopt's CUDA code use a stand-in.

    Raises:
        AssertionError: at the end, if anything was done that no order of events allows.
    """
    let_cuda_pass()
    device = Device.now = LateDevice(kind, seed)
    others, aten = Library("_", "IMPL"), Library("aten", "IMPL")
    with pytest.MonkeyPatch.context() as patch:
        Stream()
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
            dispatch_cuda._device_copy.cache_clear()


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
    }.items():
        patch.setattr(cuda, name, value)
    patch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: True, raising=False)
    patch.setattr(torch, "empty", empty_or_pinned)
    patch.setattr(Tensor, "record_stream", lambda tensor, stream: device.record_stream(tensor, stream))
    patch.setattr(Tensor, "is_pinned", lambda tensor: device.is_locked(tensor.data_ptr()))


def _patch_kernels(patch: pytest.MonkeyPatch, device: LateDevice) -> None:
    def tasks(kernel_rows: Any, groups: Any) -> tuple[Any, list[Any]]:
        return np.zeros(16, np.uint8), []

    for name, value in {
        "with_cuda": True,
        "cuda_tasks": tasks,
        "cuda_prepared_bytes": 16,
        "cuda_launched_gradients": 8,
        "step_cuda": device.step_cuda,
        "norm_cuda": device.norm_cuda,
        "clip_cuda": device.clip_cuda,
        "cuda_norm_task": 512,
        "copy_cuda": device.copy_cuda,
        "pin_cuda": device.host_register,
        "unpin_cuda": device.host_unregister,
    }.items():
        patch.setattr(_C, name, value, raising=False)
