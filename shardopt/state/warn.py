"""Warnings that Python reports at the user's line of code, not at one in shardopt or torch."""

from __future__ import annotations

import sys
import warnings


def warn_user(message: str, category: type[Warning]) -> None:
    """Warns at the innermost stack frame outside shardopt and torch, whose hooks wrap the methods of optimizers."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("shardopt", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
