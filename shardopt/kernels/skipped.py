"""Counts the gradient elements that were skipped, over all calls that an optimizer makes."""

from __future__ import annotations

import torch

from shardopt.kernels.dispatch import Call


class SkippedElements:
    """How many gradient elements an optimizer's calls have skipped, those that are gone included."""

    def __init__(self) -> None:
        self._before = 0
        self._calls: dict[Call, torch.device] = {}
        self._captured: dict[Call, list[object]] = {}

    def add(self, call: Call, device: torch.device) -> None:
        """Counts a call's elements from now on."""
        self._calls[call] = device

    def count(self, *, wait: bool) -> int:
        """The sum; see :meth:`Call.nonfinite`."""
        return self._before + sum(call.nonfinite(wait=wait) for call in self._calls)

    def keep_if_captured(self, call: Call, used: object) -> None:
        """Keeps a call for good whose run becomes part of a CUDA graph, and what else the graph goes on using."""
        if _is_capturing(self._calls[call]):
            self._captured.setdefault(call, []).append(used)

    def retire(self, calls: list[Call] | None = None) -> None:
        """Lets go of calls that are not used again, by default of all, once their elements are known."""
        for call in list(self._calls) if calls is None else calls:
            if call not in self._captured and not _is_capturing(self._calls[call]):
                self._before += call.nonfinite(wait=True)
                del self._calls[call]


def _is_capturing(device: torch.device) -> bool:
    """Whether work on a device is being recorded into a CUDA graph: nothing may wait for it then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
