"""Checks that tensors have memory before their addresses are used, and finds, copies and compares that memory.

An ordinary tensor's storage may have been freed or cut by ``resize_``. A wrapper subclass
(``torch.Tensor._make_wrapper_subclass``) has its elements in inner tensors, and a zero tensor
(``torch._efficientzerotensor``) has none anywhere: both have address 0 and a storage of the expected length. The memory
of a negative or conjugate view has other values than the view.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: Attribute of a wrapper in which :func:`unwrapped` caches the name of the inner tensor that has the elements.
_INNER_NAME = "_shardopt_inner"
_PIECE_BYTES = 16 << 20  # bytes that a worker thread copies at a time, within host memory


def has_memory(tensor: Tensor) -> bool:
    """Whether a dense tensor's data pointer is usable: False for wrapper subclasses and zero tensors.

    True also for tensors without elements, and for a freed storage, which :func:`check_storage` reports.
    """
    if tensor.numel() == 0 or tensor.data_ptr() != tensor.storage_offset() * tensor.itemsize:  # storage not at 0
        return True
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and not tensor._is_zerotensor()


def check_storage(name: str, what: str, tensor: Tensor, error: type[RuntimeError] = RuntimeError) -> None:
    """Checks that a dense tensor's elements lie in memory, within its storage, which ``resize_`` may have freed or cut.

    Errors say the parameter's ``name`` and the tensor's role, ``what``, such as "gradient"; ``error`` is their class.

    Raises:
        RuntimeError: the tensor has elements without memory, or outside its storage.
    """
    if tensor.numel() == 0:
        return
    if not has_memory(tensor):
        raise error(
            f"{name}: got a {what} of {_kind(tensor)}, which has no memory of its own, expected an ordinary tensor; "
            "make it of .clone()"
        )
    needed = tensor.storage_offset() * tensor.itemsize + _span_bytes(tensor)
    available = tensor.untyped_storage().nbytes()
    if available < needed:
        raise error(
            f"{name}: got a {what} whose storage has {available} bytes, expected {needed}: resize_() freed or cut the "
            "storage; give the tensor its memory back first"
        )


def check_sign(name: str, what: str, tensor: Tensor) -> None:
    """Raises RuntimeError for a negative view, as kernels would write to memory that holds the negated elements."""
    if tensor.is_neg():
        raise RuntimeError(
            f"{name}: got a {what} that is a negative view, whose memory has the opposite signs, expected an ordinary "
            "tensor; make it of .resolve_neg()"
        )


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor whose memory has the elements, for kernels to write: the tensor itself, or a wrapper's inner tensor.

    The first call for a wrapper compares bytes, and caches the inner tensor's name in an attribute of the wrapper.

    Raises:
        RuntimeError: the number of a wrapper's inner tensors of its shape and dtype is not 1, or the inner tensor has
            other values.
    """
    if type(tensor) in (Tensor, torch.nn.Parameter) or type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__:
        return tensor  # no wrapper
    known = vars(tensor).get(_INNER_NAME)
    if known is not None and _may_be_inner(inner := getattr(tensor, known), tensor):
        return unwrapped(inner)
    if tensor.numel() and has_memory(tensor):  # a subclass that stores its elements itself
        return tensor
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else list(vars(tensor))
    inner_names = [name for name in names if _may_be_inner(getattr(tensor, name), tensor)]
    if len(inner_names) == 1 and _has_same_bytes(getattr(tensor, inner_names[0]), tensor):
        setattr(tensor, _INNER_NAME, inner_names[0])
        return unwrapped(getattr(tensor, inner_names[0]))
    if tensor.numel() == 0:
        return tensor
    raise RuntimeError(
        f"got a tensor of {_kind(tensor)} with {len(inner_names)} inner tensors of its shape {tuple(tensor.shape)} and "
        f"{tensor.dtype}, expected exactly one, with the tensor's elements; give shardopt parameters that are not "
        "quantized, and others to the optimizer of the package that made them, or freeze them"
    )


def readable(tensor: Tensor) -> Tensor:
    """A tensor whose memory kernels can read: the tensor itself, or an ordinary copy of a wrapper or zero tensor.

    Raises:
        RuntimeError: a wrapper cannot be copied.
    """
    if tensor.layout != torch.strided or has_memory(tensor):
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    with torch.no_grad():
        try:
            return copy.copy_(tensor)
        except Exception as error:  # whatever the subclass raises
            raise RuntimeError(
                f"got a tensor of {_kind(tensor)} of shape {tuple(tensor.shape)}, which cannot be copied into an "
                f"ordinary one: {error}; make it an ordinary tensor"
            ) from error


def as_bytes(tensor: Tensor) -> Tensor:
    """The contiguous bytes of a tensor's elements, as 1-D uint8 on its device; a view if possible, else a copy."""
    return readable(tensor.detach()).resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def memoryview_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory, as a memoryview. Avoids ``numpy()``, which makes storages unresizable."""
    data = as_bytes(tensor.detach().cpu())
    memory: Any = (ctypes.c_uint8 * data.numel()).from_address(data.data_ptr())
    memory.tensor = data  # keeps the bytes alive as long as the view
    return memoryview(memory).cast("B")


def copy_to_host(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies tensors on any device into tensors in host memory; worker threads share the copies within host memory.

    PyTorch's own copies synchronize their threads after each tensor, which is slow while other programs use the CPU.
    Here the threads synchronize once.

    Args:
        targets: on the CPU, contiguous; none may overlap another target or a source.
        sources: as many, with the targets' shapes and dtypes.
    """
    pieces: list[tuple[int, int, int]] = []  # address to copy to, address to copy from, bytes
    by_torch: list[tuple[Tensor, Tensor]] = []
    for target, source in zip(targets, sources, strict=True):
        if not _is_plain_on_host(source):
            by_torch.append((target, source))
            continue
        for begin in range(0, source.nbytes, _PIECE_BYTES):
            nbytes = min(_PIECE_BYTES, source.nbytes - begin)
            pieces.append((target.data_ptr() + begin, source.data_ptr() + begin, nbytes))
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(lambda piece: ctypes.memmove(*piece), pieces))  # releases the GIL
    if by_torch:
        torch._foreach_copy_([target for target, _ in by_torch], [source for _, source in by_torch])


def find_overlap(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Finds two strided tensors that overlap in memory: their indices, ascending, or None if no two overlap.

    A step that updated both would be a data race between threads.
    """
    begins = np.array([tensor.data_ptr() for tensor in tensors], np.int64)  # 0 without elements
    ends = begins + np.array([_span_bytes(tensor) for tensor in tensors], np.int64)
    order = np.argsort(begins, kind="stable")
    if not np.any(begins[order][1:] < np.maximum.accumulate(ends[order])[:-1]):  # each begins after all before it end
        return None
    reaching: list[int] = []  # tensors that begin before this one and may end after its beginning
    for index in order.tolist():
        reaching = [other for other in reaching if ends[other] > begins[index]]
        for other in reaching:  # views of one tensor may be interleaved, and share nothing
            if np.shares_memory(_strided_array(tensors[other]), _strided_array(tensors[index])):
                return min(other, index), max(other, index)
        if tensors[index].numel():
            reaching.append(index)
    return None


def _may_be_inner(inner: object, tensor: Tensor) -> bool:
    """Whether a wrapper's attribute is a tensor of the wrapper's shape, dtype and device, so may hold its elements."""
    same = ("shape", "dtype", "device")
    return isinstance(inner, Tensor) and all(getattr(inner, name) == getattr(tensor, name) for name in same)


def _has_same_bytes(inner: Tensor, tensor: Tensor) -> bool:
    """Whether an inner tensor's bytes equal the wrapper's: False if the wrapper computes its elements from them."""
    check_storage(_kind(tensor), "inner tensor", inner)
    return tensor.numel() == 0 or torch.equal(as_bytes(inner), as_bytes(tensor))


def _kind(tensor: Tensor) -> str:  # for errors
    return "a zero tensor" if tensor._is_zerotensor() else type(tensor).__name__


def _is_plain_on_host(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie in host memory, unmodified and contiguous."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided or not (tensor.is_cpu and tensor.is_contiguous()):
        return False
    return has_memory(tensor) and not (tensor.is_conj() or tensor.is_neg())


def _span_bytes(tensor: Tensor) -> int:
    """Bytes of memory from the beginning of the first element to the end of the last, with gaps of strided views."""
    if tensor.numel() == 0 or tensor.is_contiguous():
        return tensor.numel() * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _strided_array(tensor: Tensor) -> npt.NDArray[np.void]:
    """A NumPy array with the tensor's address and strides, for overlap checks only: the address may be a device's."""
    interface = {
        "version": 3,
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
        "typestr": f"|V{tensor.itemsize}",
        "data": (tensor.data_ptr(), False),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
