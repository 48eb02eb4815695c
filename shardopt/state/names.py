"""Names of parameters in errors and reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def listed_name(group: Mapping[str, Any], index: int, position: int) -> str:
    """A parameter's name in its param group, or its position there.

    Args:
        group: the param group.
        index: the param group's index.
        position: the parameter's index in the param group.
    """
    names = group.get("param_names")
    return names[position] if names else f"parameter {position} of param group {index}"
