"""Memory of the CPU for state of parameters: offloaded for good, or asleep while other work has the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shardopt.state.slice_spec import StateDict
from shardopt.state.tensor_state import TensorState

_PAGE = 4096  # bytes
#: How entries of the state are aligned, in bytes.
ALIGNMENT = 64


class _HostMemory:
    """Memory of the CPU in whole pages, locked for copies from and to a GPU (``pin``) for as long as this object lives.

    Args:
        nbytes: bytes of the memory.
        pin: a GPU for whose copies the memory is locked; None leaves it pageable.
        what: names the contents in errors.

    Raises:
        MemoryError: the host does not have ``nbytes``, or refuses to lock them.
    """

    def __init__(self, nbytes: int, *, pin: torch.device | None, what: str = "the state") -> None:
        try:
            pages = torch.empty(nbytes + 2 * _PAGE, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            raise MemoryError(
                f"offload: got no memory on the host, expected {_text_of(nbytes)} for {what}; use more ranks, or "
                "give some parameters a param group with offload=None"
            ) from error
        first = -pages.data_ptr() % _PAGE
        self.memory = pages[first : first + -(-nbytes // _PAGE) * _PAGE]  # whole pages, which nobody else locks
        if pin is not None and nbytes:
            from shardopt.kernels.transfers_cuda import pin_memory

            pin_memory(self.memory, self, pin)


class Entry(NamedTuple):
    """A state entry's place in the host's memory."""

    host: _HostMemory
    offset: int
    like: Tensor

    def view(self) -> Tensor:
        """The entry's elements, with a storage of their own: torch.save refuses several dtypes in one storage."""
        if not self.like.nbytes:  # NumPy's empty arrays have strides of 0
            return torch.empty_like(self.like, device="cpu")
        part = self.host.memory.numpy()[self.offset : self.offset + self.like.nbytes]
        return torch.from_numpy(part).view(self.like.dtype).view(self.like.shape)


def make_homes(likes: Sequence[Tensor], *, pin: torch.device | None, what: str = "the state") -> list[Entry]:
    """Places for entries of parameters' state, in one piece of memory.

    Args:
        likes: tensors of the entries' shapes and dtypes.
        pin: a GPU for whose copies the memory is locked; None leaves it pageable.
        what: names the contents in errors.

    Raises:
        MemoryError: the host has too little memory, or refuses to lock it.
    """
    *offsets, end = accumulate((-(-like.nbytes // ALIGNMENT) * ALIGNMENT for like in likes), initial=0)
    demand_memory(end, ranks=1)  # other ranks may have their memory already
    host = _HostMemory(end, pin=pin, what=what)
    return [Entry(host, offset, like) for offset, like in zip(offsets, likes, strict=True)]


class StateEntry(NamedTuple):
    """A state entry of a parameter that is moved from and to the parameter's device.

    Attributes:
        device: the parameter's device.
        state: the optimizer's entries of the parameter, of which this one is replaced.
        key: the entry's name.
        spec: describes the state; None for a parameter of no param group now, such as ZeRO 3's between steps, whose
            entries are plain tensors.
    """

    device: torch.device
    state: StateDict
    key: str
    spec: TensorState | None

    @property
    def local(self) -> Tensor:
        """This rank's part."""
        return self.state[self.key] if self.spec is None else self.spec.shard.local(self.state[self.key])

    def replace(self, local: Tensor) -> None:
        """Replaces this rank's part; the entry's sharding does not change."""
        self.state[self.key] = local if self.spec is None else self.spec.like(self.key, local)


class Sleep:
    """Moves the state to the host's memory and back, see ``ShardedOptimizer.offload``.

    The host's memory is kept from one sleep to the next: page-locking memory takes longer than the copies.

    Attributes:
        asleep: whether the state is in the host's memory.
    """

    def __init__(self) -> None:
        self.asleep = False
        self._beds: list[Entry] = []  # the entries' places in the host's memory

    def begin(self, entries: Sequence[StateEntry]) -> None:
        """Moves entries to the host's memory.

        Raises:
            MemoryError: the host has too little memory. Nothing was moved.
        """
        likes = [torch.empty_like(entry.local, device="meta") for entry in entries]
        if [(x.shape, x.dtype) for x in likes] != [(bed.like.shape, bed.like.dtype) for bed in self._beds]:
            self._beds = []  # freed before new memory is allocated
            gpu = next((entry.device for entry in entries if entry.device.type == "cuda"), None)
            self._beds = make_homes(likes, pin=gpu)
        _move(entries, [bed.view() for bed in self._beds])
        self.asleep = True

    def end(self, entries: Sequence[StateEntry]) -> None:
        """Moves entries to their parameters' devices."""
        dense = torch.contiguous_format
        _move(entries, [torch.empty_like(x.local, device=x.device, memory_format=dense) for x in entries])
        self.asleep = False

    @property
    def nbytes(self) -> int:
        """Bytes of the host's memory outside of state entries: all of it while awake, else the alignment's."""
        taken = sum(bed.like.nbytes for bed in self._beds) if self.asleep else 0
        return self._beds[0].host.memory.nbytes - taken if self._beds else 0


def _move(entries: Sequence[StateEntry], places: Sequence[Tensor]) -> None:
    """Moves entries to other places, and waits for the copies."""
    for entry, place in zip(entries, places, strict=True):
        place.copy_(entry.local, non_blocking=True)
    for device in {entry.device for entry in entries if entry.device.type == "cuda"}:
        torch.cuda.synchronize(device)
    for entry, place in zip(entries, places, strict=True):
        entry.replace(place)


def demand_memory(nbytes: int, ranks: int) -> None:
    """Raises MemoryError if the host does not have ``nbytes`` for each of ``ranks``."""
    available = _available_host_bytes()
    if available is not None and nbytes * ranks > available:
        parts = f", {_text_of(nbytes)} for each of {ranks} ranks here" if ranks > 1 else ""
        raise MemoryError(
            f"offload: got {_text_of(available)} of available host memory, expected {_text_of(nbytes * ranks)}{parts}; "
            "use more hosts, or give some parameters a param group with offload=None"
        )


def _text_of(nbytes: int) -> str:
    """A size in GiB, MiB, KiB or bytes: the largest that is not larger than the size."""
    for symbol, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {symbol}"
    return f"{nbytes} bytes"


def _available_host_bytes() -> int | None:
    """Bytes that the system and the container could still give; None if neither tells."""
    limits = []
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # without a limit the file says "max"
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        limits.append(max(limit - used, 0))
    return min(limits, default=None)
