"""Allocates contiguous host memory, pinned for copies to and from a GPU, for offloaded state and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

_MIB = 1 << 20
_PAGE = 4096  # bytes
_ALIGNMENT = 64  # of each tensor, in bytes


def allocate_host_tensors(
    formats: Sequence[Tensor], *, pin: torch.device | None, what: str = "the state"
) -> list[Tensor]:
    """Allocates uninitialized CPU tensors with the shapes and dtypes of ``formats`` in one contiguous buffer.

    The buffer is freed when the last tensor is. Each tensor has its own storage, as torch.save refuses several dtypes
    in one. If ``pin`` is a GPU, the buffer is pinned for copies from and to it. ``what`` names the contents in errors.

    Raises MemoryError if the host has too little memory, or refuses to pin it.
    """
    *offsets, nbytes = accumulate((-(-like.nbytes // _ALIGNMENT) * _ALIGNMENT for like in formats), initial=0)
    demand_host_memory(nbytes, ranks=1)  # not times the ranks of the host: others may have allocated theirs already
    try:
        pages = torch.empty(nbytes + 2 * _PAGE, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise MemoryError(
            f"offload: got no memory on the host, expected {nbytes / _MIB:.0f} MiB for {what}; use more ranks, or give "
            "some parameters a param group with offload=None"
        ) from error
    first = -pages.data_ptr() % _PAGE
    memory = pages[first : first + -(-nbytes // _PAGE) * _PAGE]  # whole pages, which no other buffer pins
    array = memory.numpy()  # lives as long as any of the tensors below, and so do the buffer and its pinning
    if pin is not None and nbytes:
        from shardopt.kernels.transfers_cuda import pin_memory

        pin_memory(memory, array, pin)
    tensors = []
    for offset, like in zip(offsets, formats, strict=True):
        if like.nbytes:
            part = torch.from_numpy(array[offset : offset + like.nbytes])
            tensors.append(part.view(like.dtype).view(like.shape))
        else:  # NumPy's empty arrays have strides of 0
            tensors.append(torch.empty_like(like, device="cpu"))
    return tensors


def demand_host_memory(nbytes: int, ranks: int) -> None:
    """Raises MemoryError if the host has less available memory than ``nbytes`` for each of its ``ranks``."""
    available = _available_host_bytes()
    if available is not None and nbytes * ranks > available:
        parts = f", {nbytes / _MIB:.0f} MiB for each of {ranks} ranks here" if ranks > 1 else ""
        raise MemoryError(
            f"offload: got {available / _MIB:.0f} MiB of available host memory, expected "
            f"{nbytes * ranks / _MIB:.0f} MiB{parts}; use more hosts, or give some parameters a param group with "
            "offload=None"
        )


def _available_host_bytes() -> int | None:
    """Host memory that can still be allocated, within the container's limit (cgroup v2); None if unknown."""
    limits = []
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # without a limit the file says "max"
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        limits.append(max(limit - used, 0))
    return min(limits, default=None)
