"""Memory of the stand-in for a CUDA device (:mod:`late_streams`): CPU memory under real tensors whose device is cuda:0.

PyTorch without CUDA takes such tensors: DLPack makes them, an empty device guard lets them pass, and kernels registered
for the dispatch key CUDA carry out their operations.
"""

from __future__ import annotations

import ctypes
import subprocess
import weakref
from bisect import bisect_right, insort
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import dlpack

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
