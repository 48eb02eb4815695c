"""Counts a step's backward passes for ordered gradient sums, and raises when the training loop breaks the protocol."""

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
from shardopt.release.backward import Hook


class Progress:
    """Counts the backward passes of a step, and checks that gradients are not written or stepped between them.

    Args:
        micro_batches: the number of micro-batches per step, over all ranks.
        ranks: the number of ranks, which take equally many micro-batches.

    Attributes:
        counters: the partial sums of all gradients; weak references, as the reducers own them.
        at_end: functions to call at the end of each backward pass, after the callbacks of DDP and FSDP2.
    """

    def __init__(self, model: Module, micro_batches: int, ranks: int) -> None:
        self._params = {name: param for name, param in model.named_parameters() if param.numel()}
        self.micro_batches, self.ranks = micro_batches, ranks
        self.passes = micro_batches // ranks
        self.counters: weakref.WeakSet[Counter] = weakref.WeakSet()
        self.at_end: list[Callable[[], object]] = []
        self.done = 0  # passes of this step that are over
        # Weak reference to the end callback: alive during a pass, dead if the pass raised; None after a complete pass.
        self._callback: weakref.ref[Callable[[], object]] | None = None
        # The result of _written() when the running pass began, or after the last pass.
        self._seen: dict[Parameter, tuple[int, int]] = {}
        _all.add(self)
        handle = register_optimizer_step_pre_hook(Hook(self._check_step))
        weakref.finalize(self, handle.remove)

    @property
    def first(self) -> int:
        """The index, over all ranks, of the first micro-batch in the running backward pass: rank 0's."""
        return self.done * self.ranks

    @property
    def is_last(self) -> bool:
        """Whether the running backward pass is the step's last one."""
        return self.done == self.passes - 1

    def begin(self, *_: Any) -> None:
        """Starts a backward pass; further calls in the same pass return at once. Reducers and gradient hooks call it.

        Raises:
            RuntimeError: the step has had all its passes, or one raised, or gradients were modified between passes.
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
        end = partial(_queue, self._end)  # queued again when called, so that it runs after those of DDP and FSDP2
        self._callback = weakref.ref(end)
        _queue(end)

    def _end(self) -> None:  # the end of a backward pass: reducers add its gradients, and the pass is counted
        if self._written() != self._seen:  # torch.autograd.grad writes no .grad: such a pass does not count
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
        """Maps each parameter with a gradient to the gradient's address and PyTorch's version counter of it."""
        found = {}
        for param in self._params.values():
            if (grad := param.grad) is not None:
                local = getattr(grad, "_local_tensor", grad)  # a DTensor and its local tensor count apart
                found[param] = local.data_ptr(), local._version + grad._version
        return found

    def _was_written(self) -> bool:
        """Whether other code modified gradients in place since the last pass.

        Compares gradients at the same address only, as DDP may replace ``.grad`` by another view of its buckets.
        """
        now = self._written()
        pairs = ((now[param], seen) for param, seen in self._seen.items() if param in now)
        return any(here[0] == seen[0] and here != seen for here, seen in pairs)

    def _is_thrown_away(self) -> bool:  # whether zero_grad(set_to_none=True) has discarded the passes so far
        return all(param.grad is None for param in self._params.values())

    def is_behind(self, counter: Counter) -> bool:
        """Whether no gradient of the running backward pass has been added to the counter yet."""
        return counter.next <= self.first

    def _check_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Raises RuntimeError if an optimizer is about to step these parameters before the last backward pass."""
        if self.done in (0, self.passes) and self._callback is None:
            return
        params = (param for group in optimizer.param_groups for param in group["params"])
        if not self._is_thrown_away() and self in progresses_of(params):
            raise RuntimeError(
                f"got step() after {self.done} of {self.passes} backward passes, expected step() after all of its "
                f"{self.micro_batches} micro-batches; call zero_grad(set_to_none=True) to throw their gradients away"
            )


def _queue(callback: Any) -> None:  # to be called at the end of the running backward pass
    torch.autograd.Variable._execution_engine.queue_callback(callback)


_all: weakref.WeakSet[Progress] = weakref.WeakSet()


def progresses_of(params: Iterable[Tensor]) -> Iterator[Progress]:
    """The :class:`Progress` objects of all models that have one of these parameters."""
    ids = set(map(id, params))
    return (progress for progress in _all if not ids.isdisjoint(map(id, progress._params.values())))
