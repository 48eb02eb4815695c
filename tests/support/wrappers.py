"""Wrapper subclasses of tensors, as packages for quantized training make them, and other tensors without memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Wrapped(Tensor):
    """Has the elements of one inner tensor, and a second inner tensor of another shape, as torchao's float8 weights.

    Operations see the inner tensor; those below return wrappers.
    """

    _tensor: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, *more: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor, *more: Tensor) -> None:
        self._tensor, self.more, self.scale = inner, more, torch.ones(())

    def __tensor_flatten__(self) -> tuple[list[str], tuple[()]]:
        return ["_tensor", "scale"], ()

    def elements(self) -> Tensor:
        return self._tensor

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return cls(function(args[0]._tensor, *args[1:]), *args[0].more)
        args, kwargs = tree_map_only(Wrapped, lambda wrapper: wrapper.elements(), (args, kwargs or {}))
        return function(*args, **kwargs)


class Scaled(Wrapped):
    """A tensor whose elements are half the inner tensor's, of one shape and dtype with it."""

    def elements(self) -> Tensor:
        return self._tensor / 2


class Twice(Wrapped):
    """Two inner tensors have its shape and dtype."""

    def __init__(self, inner: Tensor, *more: Tensor) -> None:
        super().__init__(inner, *more)
        self.other = inner.clone()

    def __tensor_flatten__(self) -> tuple[list[str], tuple[()]]:
        return ["_tensor", "other"], ()


class Coded(Wrapped):
    """A tensor with an inner one of int8 codes, as torchao's weights for quantized training; nothing can copy it."""

    @staticmethod
    def __new__(cls, inner: Tensor, *more: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.size(), dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor, *more: Tensor) -> None:
        super().__init__((inner * 10).to(torch.int8), *more)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            found = Coded(torch.zeros(args[0].shape))
            found._tensor = args[0]._tensor
            return found
        raise NotImplementedError(f"{function} of codes")


def zeros(like: Tensor) -> Tensor:
    """A zero tensor, which has no memory; nor has a part of one, whose address is not 0."""
    return torch._efficientzerotensor((1 + like.numel(),), dtype=like.dtype)[1:].view(like.shape)
