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
from shardopt.release.released import Hook


class Progress:
    """Counts the backward passes of a step.

    Args:
        micro_batches: per step, over all ranks.
        ranks: how many share them.

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
        self.done = 0  # passes of this step that are over
        # PyTorch holds its referent until the running pass ends or raises. None once a pass has ended without an error.
        self._callback: weakref.ref[Callable[[], object]] | None = None
        # By _written, before the running pass or after the last one.
        self._seen: dict[Parameter, tuple[int, int]] = {}
        _all.add(self)
        handle = register_optimizer_step_pre_hook(Hook(self._check_step))
        weakref.finalize(self, handle.remove)

    @property
    def first(self) -> int:
        """The number of the running backward pass's first micro-batch."""
        return self.done * self.ranks

    @property
    def is_last(self) -> bool:
        """Whether the running backward pass is the step's last one."""
        return self.done == self.passes - 1

    def begin(self, *_: Any) -> None:
        """Starts a backward pass; further calls in the same pass return at once. Reducers and gradient hooks call it.

        Raises:
            RuntimeError: the step has had all its passes, or one that raised, or its gradients were written between.
        """
        if self._callback is not None and self._callback() is not None:
            return  # the running pass, or one within it
        if self.done or self._callback is not None:
            if self._is_thrown_away():
                self.done = 0
                for counter in self.counters:
                    counter.reset()
            elif self._callback is not None:
                raise RuntimeError(
                    "got a backward pass after one that raised, expected zero_grad() between them, which begins the "
                    "step's micro-batches again"
                )
            elif self.done == self.passes:
                raise RuntimeError(
                    f"got more than {self.passes} backward passes, expected {self.micro_batches} micro-batches on "
                    f"{self.ranks} ranks per step, and zero_grad() before the next; give ordered_gradients the number "
                    "of micro-batches, call zero_grad(set_to_none=True), and checkpoint with use_reentrant=False"
                )
            elif self._was_written():
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
        self._seen = self._written()
        end = partial(_queue, self._end)  # behind those of DDP and FSDP2
        self._callback = weakref.ref(end)
        _queue(end)

    def _end(self) -> None:
        if self._written() != self._seen:  # not in a pass of torch.autograd.grad
            for end in self.at_end:
                end()
            self._seen = self._written()
            if not self._seen:
                raise RuntimeError(
                    "got a backward pass without gradients in the parameters that ordered_gradients was given, "
                    "expected the model to have kept its parameters; call ordered_gradients after to_empty() and "
                    "load_state_dict(assign=True), which replace parameters"
                )
            if self.is_last and any(counter.tensors and self.is_behind(counter) for counter in self.counters):
                raise RuntimeError(
                    "got a step's last backward pass without gradients of an FSDP2 module, expected some, as earlier "
                    "passes had: the last one takes the mean; install PyTorch 2.13, or use all modules in the last pass"
                )
            self.done += 1
        self._callback = None

    def _written(self) -> dict[Parameter, tuple[int, int]]:
        """The parameters that have a gradient, with its address and PyTorch's count of writes to it."""
        found = {}
        for param in self._params.values():
            if (grad := param.grad) is not None:
                local = getattr(grad, "_local_tensor", grad)  # a DTensor and its local tensor count apart
                found[param] = local.data_ptr(), local._version + grad._version
        return found

    def _was_written(self) -> bool:
        """Whether somebody wrote to gradients since the last pass.

        DDP moves views of its buckets without writing: a gradient at another address says nothing.
        """
        now = self._written()
        pairs = ((now[param], seen) for param, seen in self._seen.items() if param in now)
        return any(here[0] == seen[0] and here != seen for here, seen in pairs)

    def _is_thrown_away(self) -> bool:
        return all(param.grad is None for param in self._params.values())

    def is_behind(self, counter: Counter) -> bool:
        """Whether sums have nothing of the running pass."""
        return counter.next <= self.first

    def _check_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Raises RuntimeError if an optimizer is about to step the parameters in the middle of a step."""
        if self.done in (0, self.passes) and self._callback is None:
            return
        params = (param for group in optimizer.param_groups for param in group["params"])
        if not self._is_thrown_away() and self in progresses_of(params):
            raise RuntimeError(
                f"got step() after {self.done} of {self.passes} backward passes, expected step() after all of its "
                f"{self.micro_batches} micro-batches; call zero_grad(set_to_none=True) to throw their gradients away"
            )


def _queue(callback: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


_all: weakref.WeakSet[Progress] = weakref.WeakSet()


def progresses_of(params: Iterable[Tensor]) -> Iterator[Progress]:
    """Finds the objects that count passes of one of the parameters."""
    ids = set(map(id, params))
    return (progress for progress in _all if not ids.isdisjoint(map(id, progress._params.values())))
