"""Checks that a tensor's elements lie in memory, before anything reads its address.

An ordinary tensor's storage may have been freed or cut by ``resize_``. A wrapper subclass
(``torch.Tensor._make_wrapper_subclass``) has its elements in inner tensors, and a zero tensor
(``torch._efficientzerotensor``) has none anywhere: both have address 0 and a storage of the expected length. The memory
of a negative or conjugate view has other values than the view.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

#: Name of the attribute in which a wrapper keeps the name of the inner tensor that has its elements.
_INNER = "_shardopt_inner"


def has_memory(tensor: Tensor) -> bool:
    """Whether a dense tensor's elements, if any, lie at its address, or did until its storage was freed."""
    if tensor.numel() == 0 or tensor.data_ptr() != tensor.storage_offset() * tensor.itemsize:
        return True
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and not tensor._is_zerotensor()


def check_storage(name: str, what: str, tensor: Tensor, error: type[RuntimeError] = RuntimeError) -> None:
    """Checks that a dense tensor's elements lie in memory, within its storage, which ``resize_`` may have freed or cut.

    Args:
        name: the parameter's name in errors.
        what: the tensor's role in errors, such as "gradient".
        tensor: the tensor.
        error: the class of the error.

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
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    available = tensor.untyped_storage().nbytes()
    if available < needed:
        raise error(
            f"{name}: got a {what} whose storage has {available} bytes, expected {needed}: resize_() freed or cut the "
            "storage; give the tensor its memory back first"
        )


def check_sign(name: str, what: str, tensor: Tensor) -> None:
    """Checks that the kernels may write a tensor's memory: a negative view's has the opposites of the elements.

    Raises:
        RuntimeError: the tensor is a negative view.
    """
    if tensor.is_neg():
        raise RuntimeError(
            f"{name}: got a {what} that is a negative view, whose memory has the opposite signs, expected an ordinary "
            "tensor; make it of .resolve_neg()"
        )


def written(tensor: Tensor) -> Tensor:
    """The tensor to write into in order to change a tensor's elements: the tensor itself, or a wrapper's inner tensor.

    Raises:
        RuntimeError: the number of a wrapper's inner tensors of its shape and dtype is not 1, or the inner tensor has
            other values.
    """
    if type(tensor) in (Tensor, torch.nn.Parameter) or type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__:
        return tensor
    known = vars(tensor).get(_INNER)
    if known is not None and _fits(inner := getattr(tensor, known), tensor):
        return written(inner)
    if tensor.numel() and has_memory(tensor):
        return tensor
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else list(vars(tensor))
    inner_names = [name for name in names if _fits(getattr(tensor, name), tensor)]
    if len(inner_names) == 1 and _has_elements(getattr(tensor, inner_names[0]), tensor):
        setattr(tensor, _INNER, inner_names[0])
        return written(getattr(tensor, inner_names[0]))
    if tensor.numel() == 0:
        return tensor
    raise RuntimeError(
        f"got a tensor of {_kind(tensor)} with {len(inner_names)} inner tensors of its shape {tuple(tensor.shape)} and "
        f"{tensor.dtype}, expected exactly one, with the tensor's elements; give shardopt parameters that are not "
        "quantized, and others to the optimizer of the package that made them, or freeze them"
    )


def readable(tensor: Tensor) -> Tensor:
    """A tensor with memory of the same elements: the tensor itself if possible, else a copy, which PyTorch dispatches.

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
    """The bytes of a tensor's elements, one element after another: uint8, on the tensor's device."""
    return readable(tensor.detach()).resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def memoryview_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's elements in host memory. Avoids ``numpy()``, after which no storage can be resized."""
    data = as_bytes(tensor.detach().cpu())
    memory: Any = (ctypes.c_uint8 * data.numel()).from_address(data.data_ptr())
    memory.tensor = data  # keeps the bytes alive as long as the view
    return memoryview(memory).cast("B")


def _fits(inner: object, tensor: Tensor) -> bool:
    """Whether a wrapper's inner tensor may have its elements."""
    return isinstance(inner, Tensor) and (inner.shape, inner.dtype, inner.device) == (
        tensor.shape,
        tensor.dtype,
        tensor.device,
    )


def _has_elements(inner: Tensor, tensor: Tensor) -> bool:
    """Whether a wrapper's elements equal an inner tensor's, rather than being computed from them."""
    check_storage(_kind(tensor), "inner tensor", inner)
    return tensor.numel() == 0 or torch.equal(as_bytes(inner), as_bytes(tensor))


def _kind(tensor: Tensor) -> str:
    return "a zero tensor" if tensor._is_zerotensor() else type(tensor).__name__
