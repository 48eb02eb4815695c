"""Ordered sums in one process: a module's gradients are taken when a backward pass is over."""

from __future__ import annotations

from torch.nn import Module, Parameter

from shardopt.comm.progress import Progress, rows_of
from shardopt.comm.reduction import Reduction
from shardopt.comm.wire import Wire, WireFormat
from shardopt.kernels.autograd import without_autograd


class PlainReducer:
    """Sums of the gradients of a module that is not wrapped.

    Args:
        model: the module.
        progress: of the module.
        wire: the format that gradients are rounded for, as if they were sent.
    """

    def __init__(self, model: Module, progress: Progress, wire: WireFormat) -> None:
        self._progress = progress
        self._sums = [
            (param, Reduction(progress, Wire(wire, [rows_of(param.shape)])))
            for param in model.parameters()
            if param.numel()
        ]
        self._hooked: set[Parameter] = set()
        self._hook()
        model.register_forward_pre_hook(lambda *_: self._hook())
        progress.at_end.append(self._end)

    def _hook(self) -> None:
        """Has the gradients of all parameters begin a pass, of those that are no longer frozen, too."""
        for param, _ in self._sums:
            if param.requires_grad and param not in self._hooked:
                self._hooked.add(param)
                param.register_hook(lambda _: self._progress.begin())  # type: ignore[no-untyped-call]

    @without_autograd
    def _end(self) -> None:
        for param, reduction in self._sums:
            grad = param.grad
            if grad is not None:
                flat = grad.reshape(1, -1)
                reduction.push(flat, flat[0])
                if flat.data_ptr() != grad.data_ptr():  # a copy, of strided memory
                    grad.copy_(flat.view_as(grad))
