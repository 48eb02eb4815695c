"""Bytes under DeepSpeed, as allocated while the optimizer steps.

Each piece of memory is counted once, and what part it plays is looked up in DeepSpeed's own attributes; the kinds are
those of ``shardopt.memory_report``, with float32 masters as master weights and staging as offload buffers. On the CPU
accelerator the device's memory is the host's, so the part says on which side a piece would stand with a GPU: the
optimizer's state, masters, their gradients and the staging buffers in the host's memory if ``offload_optimizer`` is on,
the parameters' partitions if ``offload_param`` is; all else on the device. Of all other tensors that are alive only the
sum is told: buffers whose size the config or the largest parameter fixes (buckets).
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from torch import Tensor, nn

from shardopt.report import MemoryReport
from shardopt.report.memory import kind_of

NO_MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


@dataclass
class Found:
    """Result of :func:`measure`.

    Attributes:
        report: weights, gradients, masters, staging and state by the side where they would stand with a GPU.
        rest: bytes of all other tensors that were made.
        numel: elements of the model.
        owned: elements that this rank's optimizer steps, with padding.
    """

    report: MemoryReport
    rest: int
    numel: int
    owned: int

    @property
    def total(self) -> int:
        return self.report.device.total + self.report.host.total


def masters(engine: Any) -> list[Tensor]:
    """The tensors that the optimizer steps."""
    wrapper = engine.optimizer
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        if hasattr(wrapper, name):
            return list(getattr(wrapper, name))
    return [param for group in engine.basic_optimizer.param_groups for param in group["params"]]


def roles(engine: Any) -> Iterator[tuple[str, bool, Iterable[Any]]]:
    """Kinds, whether they are the host's, and tensors that are such; memory that is of several is of the first."""
    wrapper, optimizer = engine.optimizer, engine.basic_optimizer
    zero = engine.config.get("zero_optimization", {})
    host, params_on_host = "offload_optimizer" in zero, "offload_param" in zero
    params = list(engine.module.parameters())
    yield "parameters", params_on_host, [getattr(param, "ds_tensor", param) for param in params]
    held = masters(engine)
    yield "master_weights", host, held
    yield "gradients", host, [master.grad for master in held]
    yield "gradients", host, [getattr(wrapper, "grad_partitions_flat_buffer", None)]
    yield "gradients", False, [param.grad for param in params]
    yield "offload_buffers", host, getattr(wrapper, "param_buffer_of_bit16_for_cpu_offload_groups", [])
    for state in optimizer.state.values():
        for key, entry in state.items():
            yield kind_of(key), host, [entry]


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Bytes of the pieces of memory in which tensors stand, by address."""
    found = {}
    for x in tensors:
        if isinstance(x, Tensor) and x.device.type == "cpu" and not x.is_sparse:
            storage = x.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


@contextmanager
def nothing_before() -> Iterator[None]:
    """Inside, ``gc.get_objects`` gives only what was made there; walks and collections are as short as that."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def count(engine: Any) -> Found:
    """Counts what is alive."""
    numel = sum(getattr(param, "ds_numel", param.numel()) for param in engine.module.parameters())
    report = MemoryReport(numel)
    counted: set[int] = set()
    for kind, on_host, tensors in roles(engine):
        use = report.host if on_host else report.device
        for address, nbytes in storages(tensors).items():
            if address not in counted:
                counted.add(address)
                setattr(use, kind, getattr(use, kind) + nbytes)
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of attributes that are looked at only to see whether a thing is a tensor
        alive = storages(x for x in gc.get_objects() if isinstance(x, Tensor))
    rest = sum(nbytes for address, nbytes in alive.items() if address not in counted)
    return Found(report, rest, numel, sum(master.numel() for master in masters(engine)))


@nothing_before()
def measure(model: nn.Module, settings: dict[str, Any], loss_of: Callable[[Any], Tensor]) -> Found:
    """Takes two steps; looks when all gradients of the second are there, before they are used.

    Args:
        model: what to train.
        settings: DeepSpeed's config.
        loss_of: the loss of an engine.

    Returns:
        What is most, if DeepSpeed steps one piece after another.
    """
    import deepspeed

    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]
    found: list[Found] = []
    inner = engine.basic_optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        found.append(count(engine))
        return inner(*args, **kwargs)

    for current in range(2):
        engine.backward(loss_of(engine))
        if current == 1:
            engine.basic_optimizer.step = step
        engine.step()
    engine.basic_optimizer.step = inner
    engine.destroy()
    return max(found, key=lambda each: each.total)
