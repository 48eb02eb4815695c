"""Counts the memory of tensors that operations make."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside and live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (*args, *(kwargs or {}).values())
        known = {x.untyped_storage()._cdata for x in given if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and (storage := result.untyped_storage())._cdata not in known:
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, storage.nbytes())
        return result

    def _gone(self, nbytes: int) -> None:
        self.now -= nbytes
