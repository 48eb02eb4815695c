"""Counts the collectives that are issued, whoever issues them and however they are called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch.distributed import ProcessGroup

_NAMES = [
    name
    for name in dir(ProcessGroup)
    if any(word in name for word in ("reduce", "gather", "broadcast", "scatter", "alltoall", "all_to_all", "barrier"))
]
#: Names that newer versions of PyTorch have for these.
_RENAMED = {"all_to_all_single": "alltoall_base"}


@contextmanager
def counted_collectives() -> Iterator[list[tuple[str, int]]]:
    """Collectives that this rank issues inside: the name, and the bytes of the first tensors."""
    found: list[tuple[str, int]] = []

    def counting(name: str, original: Any) -> Any:
        def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            tensors = args[0] if args and isinstance(args[0], list) else args[:1]
            found.append((_RENAMED.get(name, name), sum(getattr(tensor, "nbytes", 0) for tensor in tensors)))
            return original(group, *args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in _NAMES:
            stack.enter_context(patch.object(ProcessGroup, name, counting(name, getattr(ProcessGroup, name))))
        yield found
