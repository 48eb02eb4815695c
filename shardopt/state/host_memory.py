"""Memory of the CPU for offloaded state of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

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
                "keep a part on the device with device_state_budget"
            ) from error
        first = -pages.data_ptr() % _PAGE
        self.memory = pages[first : first + -(-nbytes // _PAGE) * _PAGE]  # whole pages, which nobody else locks
        if pin is not None:
            from shardopt.kernels.transfers_cuda import pin_memory

            pin_memory(self.memory, self, pin)


class Entry(NamedTuple):
    """A state entry's place in the host's memory."""

    host: _HostMemory
    offset: int
    like: Tensor

    def view(self) -> Tensor:
        """The entry's elements, with a storage of their own: torch.save refuses several dtypes in one storage."""
        part = self.host.memory.numpy()[self.offset : self.offset + self.like.nbytes]
        return torch.from_numpy(part).view(self.like.dtype).view(self.like.shape)


def make_homes(
    states: Sequence[dict[str, Tensor]], *, pin: torch.device | None, what: str = "the state"
) -> list[dict[str, Entry]]:
    """Places for the entries of several parameters' state, in one piece of memory.

    Args:
        states: tensors of the entries' shapes and dtypes.
        pin: a GPU for whose copies the memory is locked; None leaves it pageable.
        what: names the contents in errors.

    Raises:
        MemoryError: the host has too little memory, or refuses to lock it.
    """
    offsets: list[dict[str, int]] = []
    end = 0
    for state in states:
        offsets.append({})
        for key, like in state.items():
            if like.nbytes:
                offsets[-1][key] = end
                end += -(-like.nbytes // ALIGNMENT) * ALIGNMENT
    demand_memory(end, ranks=1)  # other ranks may have their memory already
    host = _HostMemory(end, pin=pin, what=what)
    return [
        {key: Entry(host, offset, state[key]) for key, offset in placed.items()}
        for state, placed in zip(states, offsets, strict=True)
    ]


def demand_memory(nbytes: int, ranks: int) -> None:
    """Raises MemoryError if the host does not have ``nbytes`` for each of ``ranks``."""
    available = _available_host_bytes()
    if available is not None and nbytes * ranks > available:
        parts = f", {_text_of(nbytes)} for each of {ranks} ranks here" if ranks > 1 else ""
        raise MemoryError(
            f"offload: got {_text_of(available)} of available host memory, expected {_text_of(nbytes * ranks)}{parts}; "
            "use more hosts, or keep a part on the device with device_state_budget"
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
