"""Names of parameters in errors and reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def param_name(group: Mapping[str, Any], index: int, position: int) -> str:
    """A parameter's name from ``param_names`` of its param group, or else its position, for errors and reports.

    Wrappers that put other tensors into a param group (DeepSpeed's flat masters) leave ``param_names`` unchanged: if
    there are not as many names as tensors, they are not the tensors' names.
    """
    names = group.get("param_names")
    if names and len(names) == len(group["params"]):
        return str(names[position])
    return f"parameter {position} of param group {index}"


@contextmanager
def naming_errors(name: str) -> Iterator[None]:
    """Context manager that puts a parameter's name before the message of a plain RuntimeError raised inside."""
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # such as torch.OutOfMemoryError
            raise
        raise RuntimeError(f"{name}: {error}") from error
