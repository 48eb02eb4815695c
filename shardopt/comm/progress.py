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

from shardopt.comm.pairwise import PairwiseSum
from shardopt.release.backward import Hook


class Progress:
    """Counts the backward passes of a step, and checks that gradients are not written or stepped between them.

    Attributes:
        micro_batches: the number of micro-batches per step, over all ranks.
        passes, done: the number of backward passes per step on each rank, and how many of this step's are over.
        sums: the partial sums of all gradients; weak references, as the reducers own them.
        end_callbacks: functions to call at the end of each backward pass, after the callbacks of DDP and FSDP2.
    """

    def __init__(self, model: Module, micro_batches: int, ranks: int) -> None:
        self._params = {name: param for name, param in model.named_parameters() if param.numel()}
        self.micro_batches, self.ranks = micro_batches, ranks
        self.passes, self.done = micro_batches // ranks, 0
        self.sums: weakref.WeakSet[PairwiseSum] = weakref.WeakSet()
        self.end_callbacks: list[Callable[[], object]] = []
        # The engine's callback for the end of the running pass. None between passes; dead if the last pass raised.
        self._end_callback: weakref.ref[Callable[[], None]] | None = None
        # The gradients' versions when the running pass began, or after the last pass.
        self._versions: dict[Parameter, tuple[int, int]] = {}
        _all.add(self)
        weakref.finalize(self, register_optimizer_step_pre_hook(Hook(self._check_step)).remove)  # once it is freed

    @property
    def first_micro_batch(self) -> int:
        """The number, over all ranks, of the first micro-batch in the running backward pass: rank 0's."""
        return self.done * self.ranks

    @property
    def is_last(self) -> bool:
        """Whether the running backward pass is the step's last one."""
        return self.done == self.passes - 1

    def begin_pass(self, *_: Any) -> None:
        """Starts a backward pass, unless it has begun; raises as :meth:`_check_next_pass` and :meth:`_check_hooks`."""
        if self._end_callback is not None and self._end_callback() is not None:
            return  # the running pass, or one within it
        is_within_step = self.done > 0 or self._end_callback is not None
        if is_within_step and self._is_discarded():  # zero_grad() starts the step again
            self.done = 0
            for pairwise in self.sums:
                pairwise.reset()
        elif is_within_step:
            self._check_next_pass()
        if self.done == 0:
            self._check_hooks()
        self._versions = self._gradient_versions()
        end = partial(_queue_callback, self._end_pass)  # queues when called, to run after those of DDP and FSDP2
        self._end_callback = weakref.ref(end)
        _queue_callback(end)

    def _check_next_pass(self) -> None:
        """Raises RuntimeError if a pass raised, if the step has had all its passes, or if gradients were modified."""
        if self._end_callback is not None:
            raise RuntimeError(
                "got a backward pass after one that raised, expected zero_grad() between them, which begins the "
                "step's micro-batches again"
            )
        if self.done == self.passes:
            raise RuntimeError(
                f"got more than {self.passes} backward passes, expected {self.micro_batches} micro-batches on "
                f"{self.ranks} ranks per step, and zero_grad() before the next; give ordered_gradients the number "
                "of micro-batches, call zero_grad(set_to_none=True), and checkpoint with use_reentrant=False"
            )
        # Compares gradients at the same address only, as DDP may replace .grad by another view of its buckets.
        now = self._gradient_versions()
        pairs = ((now[param], last) for param, last in self._versions.items() if param in now)
        if any(current != last and current[0] == last[0] for current, last in pairs):
            raise RuntimeError(
                f"got gradients that were written after {self.done} of {self.passes} backward passes, expected "
                "none: their sums are elsewhere; unscale and clip after all passes, and call "
                "zero_grad(set_to_none=True) to throw passes away"
            )

    def _check_hooks(self) -> None:
        """Raises RuntimeError if a parameter has a post-accumulate hook, as :func:`release_gradients` registers."""
        for name, param in self._params.items():
            if getattr(param, "_post_accumulate_grad_hooks", None):
                raise RuntimeError(
                    f"{name}: got a hook after its gradient's accumulation (release_gradients registers one), "
                    "expected a parameter without such a hook, which would see gradients before all micro-batches "
                    "are in them; remove the hook"
                )

    def _end_pass(self) -> None:
        """Has reducers add the gradients of a backward pass that ends, and counts the pass."""
        if self._gradient_versions() != self._versions:  # torch.autograd.grad writes no .grad: its passes do not count
            for callback in self.end_callbacks:
                callback()
            self._versions = self._gradient_versions()
            if not self._versions:
                raise RuntimeError(
                    "got a backward pass without gradients in the parameters that ordered_gradients was given, "
                    "expected the model to have kept its parameters; call ordered_gradients after to_empty() and "
                    "load_state_dict(assign=True), which replace parameters"
                )
            if self.is_last and any(pairwise.tensors and self.is_missing_in(pairwise) for pairwise in self.sums):
                raise RuntimeError(
                    "got a step's last backward pass without gradients of an FSDP2 module, expected some, as earlier "
                    "passes had: the last one takes the mean; install PyTorch 2.13, or use all modules in the last pass"
                )
            self.done += 1
        self._end_callback = None

    def _gradient_versions(self) -> dict[Parameter, tuple[int, int]]:
        """Maps each parameter with a gradient to the gradient's address and PyTorch's version counter of it."""
        versions = {}
        for param in self._params.values():
            if (grad := param.grad) is not None:
                local = getattr(grad, "_local_tensor", grad)  # a DTensor and its local tensor count apart
                versions[param] = local.data_ptr(), local._version + grad._version
        return versions

    def _is_discarded(self) -> bool:
        """Whether ``zero_grad(set_to_none=True)`` has discarded the step's passes so far."""
        return all(param.grad is None for param in self._params.values())

    def is_missing_in(self, pairwise: PairwiseSum) -> bool:
        """Whether no gradient of the running backward pass has been added to a sum yet."""
        return pairwise.next_term <= self.first_micro_batch

    def _check_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Raises RuntimeError if an optimizer is about to step these parameters before the last backward pass."""
        is_between_steps = self.done in (0, self.passes) and self._end_callback is None  # None: no pass has raised
        if is_between_steps:
            return
        params = (param for group in optimizer.param_groups for param in group["params"])
        if not self._is_discarded() and self in progresses_of(params):
            raise RuntimeError(
                f"got step() after {self.done} of {self.passes} backward passes, expected step() after all of its "
                f"{self.micro_batches} micro-batches; call zero_grad(set_to_none=True) to throw their gradients away"
            )


#: Has autograd call a function at the end of the running backward pass, after those queued before.
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback
_all: weakref.WeakSet[Progress] = weakref.WeakSet()  # in this process


def progresses_of(params: Iterable[Tensor]) -> Iterator[Progress]:
    """The :class:`Progress` objects of all models that have one of these parameters."""
    ids = set(map(id, params))
    return (progress for progress in _all if not ids.isdisjoint(map(id, progress._params.values())))
