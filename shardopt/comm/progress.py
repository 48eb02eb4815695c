"""Where a model is in the micro-batches of a step, and what must not happen there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardopt.comm.counter import Counter


class Progress:
    """Counts the backward passes of a step.

    Args:
        model: the model, whose next forward pass notices that a backward pass raised.
        micro_batches: per step, over all ranks.
        ranks: the number of ranks.

    Attributes:
        counters: the sums of all gradients, which their reducers keep alive.
        at_end: called when a backward pass is over, and PyTorch has done with it.
    """

    def __init__(self, model: Module, micro_batches: int, ranks: int) -> None:
        self._params = {name: param for name, param in model.named_parameters() if param.numel()}
        self.micro_batches, self.ranks = micro_batches, ranks
        self.passes = micro_batches // ranks
        self.counters: weakref.WeakSet[Counter] = weakref.WeakSet()
        self.at_end: list[Callable[[], object]] = []
        self._after_last: list[Callable[[], object]] = []
        self.done = 0  # passes of this step that are over
        self._has_failed = False
        self._task = -1  # PyTorch's number of the running backward pass
        # PyTorch holds its referent until the running pass ends or raises. None while none is running.
        self._callback: weakref.ref[Callable[[], object]] | None = None
        # By _with_gradient, before the running pass or after the last one.
        self._seen: dict[Parameter, tuple[int, int]] = {}
        _all.add(self)
        model.register_forward_pre_hook(lambda *_: self._notice_failure())

    @property
    def first(self) -> int:
        """The number of the running backward pass's first micro-batch."""
        return self.done * self.ranks

    @property
    def is_last(self) -> bool:
        """Whether the running backward pass is the step's last one."""
        return self.done == self.passes - 1

    def _notice_failure(self) -> None:
        callback = self._callback
        if callback is not None and not is_in_backward() and callback() is None:  # not in another thread, either
            self._fail()

    def begin(self) -> None:
        """Is called by whatever comes first in a backward pass, and by more.

        Raises:
            RuntimeError: the step has had all its passes, or one that raised, or its gradients were written between.
        """
        task, callback = torch._C._current_graph_task_id(), self._callback
        if callback is not None:
            if task in (-1, self._task) or callback() is not None:
                return  # the running pass, or one within it
            self._fail()
        if self.done or self._has_failed:
            if self._is_thrown_away():
                self.done, self._has_failed = 0, False
                for counter in self.counters:
                    counter.reset()
            elif self._has_failed:
                raise RuntimeError(
                    "got a backward pass after one that raised, expected zero_grad() between them, which begins the "
                    "step's micro-batches anew"
                )
            elif self.done == self.passes:
                raise RuntimeError(
                    f"got more than {self.passes} backward passes, expected {self.micro_batches} micro-batches on "
                    f"{self.ranks} ranks per step, and zero_grad() before the next; give ordered_gradients the number "
                    "of micro-batches, call zero_grad(set_to_none=True), and checkpoint with use_reentrant=False"
                )
            elif self._has_written():
                raise RuntimeError(
                    f"got gradients that were written after {self.done} of {self.passes} backward passes, expected "
                    "none: their sums are elsewhere; unscale and clip after all passes, and call "
                    "zero_grad(set_to_none=True) to throw passes away"
                )
        if not self.done:
            for name, param in self._params.items():
                if getattr(param, "_post_accumulate_grad_hooks", None):
                    raise RuntimeError(
                        f"{name}: got a hook after its gradient's accumulation (release_gradients registers one), "
                        "expected a parameter without such a hook, which would see gradients before all micro-batches "
                        "are in them; remove the hook"
                    )
        self._task = task
        self._seen = self._with_gradient()
        end = partial(_queue, self._end)  # behind those of DDP and FSDP2
        self._callback = weakref.ref(end)
        _queue(end)

    def _end(self) -> None:
        if self._callback is None:
            return
        if all(map(self.is_behind, self.counters)) and not self.has_changed(self._params.values()):
            self._callback = None  # nothing was accumulated, as by torch.autograd.grad
            return
        is_last = self.is_last
        try:
            for end in self.at_end:
                end()
            self._seen = self._with_gradient()
            if not self._seen:
                raise RuntimeError(
                    "got a backward pass without gradients in the parameters that ordered_gradients was given, "
                    "expected the model to have kept its parameters; call ordered_gradients after to_empty() and "
                    "load_state_dict(assign=True), which replace parameters"
                )
        except BaseException:
            self._fail()
            raise
        self.done += 1
        self._callback = None
        for call in self._after_last if is_last else ():
            call()

    def call_after_last(self, call: Callable[[], object]) -> Callable[[], object]:
        """Has something called after each step's last pass, when gradients are complete; returns how to end that."""
        self._after_last.append(call)
        return partial(self._after_last.remove, call)

    def _fail(self) -> None:
        self._callback, self._has_failed, self._seen = None, True, self._with_gradient()

    def has_changed(self, params: Iterable[Parameter]) -> bool:
        """Whether the running pass has written to a parameter's gradient."""
        now = self._with_gradient()
        return any(now.get(param) != self._seen.get(param) for param in params)

    def _with_gradient(self) -> dict[Parameter, tuple[int, int]]:
        """The parameters that have a gradient, with its address and PyTorch's count of writes to it."""
        grads = ((param, param.grad) for param in self._params.values())
        return {param: _written(grad) for param, grad in grads if grad is not None}

    def _has_written(self) -> bool:
        """Whether somebody wrote to gradients since the last pass.

        DDP moves views of its buckets without writing: a gradient at another address says nothing.
        """
        now = self._with_gradient()
        return any(param in now and now[param][0] == at and now[param][1] != n for param, (at, n) in self._seen.items())

    def _is_thrown_away(self) -> bool:
        return all(param.grad is None for param in self._seen)

    def is_behind(self, counter: Counter) -> bool:
        """Whether sums have nothing of the running pass."""
        return counter.next <= self.first

    def check_step(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError if an optimizer is about to step the parameters in the middle of a step."""
        self._notice_failure()
        if self.done in (0, self.passes) and not self._has_failed:
            return
        params = (param for group in optimizer.param_groups for param in group["params"])
        if not self._is_thrown_away() and self in progresses_of(params):
            raise RuntimeError(
                f"got step() after {self.done} of {self.passes} backward passes, expected step() after all of its "
                f"{self.micro_batches} micro-batches; call zero_grad(set_to_none=True) to throw their gradients away"
            )


def _written(gradient: Tensor) -> tuple[int, int]:
    local: Tensor = getattr(gradient, "_local_tensor", gradient)  # a DTensor and its local tensor count apart
    return local.data_ptr(), local._version + gradient._version


def is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _queue(callback: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


_all: weakref.WeakSet[Progress] = weakref.WeakSet()


def progresses_of(params: Iterable[Tensor]) -> Iterator[Progress]:
    """Finds the objects that count passes of one of the parameters."""
    ids = set(map(id, params))
    return (progress for progress in _all if not ids.isdisjoint(map(id, progress._params.values())))


def _check_step(optimizer: Optimizer, *_: Any) -> None:
    for progress in _all:
        progress.check_step(optimizer)


register_optimizer_step_pre_hook(_check_step)
