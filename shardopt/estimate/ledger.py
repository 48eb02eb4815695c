"""The ledger: what :func:`shardopt.memory_report` would find, without a model.

State is what the optimizers themselves would make, on the meta device; its scales and small float32 moments count as
they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from shardopt import optim
from shardopt.estimate.backends import BACKENDS, Backend, Held, owned_elements
from shardopt.estimate.model import Model, Shape
from shardopt.estimate.zero import ZERO_OFFLOADS, add_partitions, check
from shardopt.kernels.streamed import SLOTS
from shardopt.optim import SGD, ShardedOptimizer
from shardopt.release import deferred, host_gradients
from shardopt.release.released import demand_no_totals
from shardopt.report import MemoryReport, MemoryUse
from shardopt.report.memory import kind_of
from shardopt.state import residency
from shardopt.state.options import bytes_of
from shardopt.state.residency import Budget, Residency
from shardopt.state.slice_spec import SliceSpec

#: Optimizers by name, each with the moments that training uses.
OPTIMIZERS: Mapping[str, Callable[..., ShardedOptimizer]] = {
    name: partial(kind, momentum=0.9) if issubclass(kind, SGD) else kind for name, kind in optim.OPTIMIZERS.items()
}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_KNOWN: Mapping[str, Collection[str]] = {
    "optimizer": OPTIMIZERS,
    "dtype": DTYPES,
    "backend": BACKENDS,
    "zero_offload": ZERO_OFFLOADS,
}

_SUM_BYTES = 4  # of an element of a sum of gradients, which is float32
_CPU = torch.device("cpu")
_ACCELERATOR = torch.device("meta")  # stands for it: any device but the CPU


@dataclass(frozen=True)
class Setup:
    """How a model is trained.

    Attributes:
        optimizer: a name of ``OPTIMIZERS``.
        dtype: of weights and gradients, a name of ``DTYPES``.
        backend: a name of ``BACKENDS``.
        world_size: ranks, one GPU each.
        gpus_per_node: of those ranks, on one host.
        release_gradients: whether each parameter is stepped as soon as its gradient is there.
        overlap_forward: whether released parameters are stepped beside the next forward pass instead: with
            ``offload="step"`` by the CPU, from gradients in the host's memory.
        waiting_gradients: with released gradients and ``offload="step"``, those that may be under way to the CPU,
            counted as those of successive parameters.
        micro_batches: of a step. With ``release_gradients`` its backward passes on a rank; otherwise those of all
            ranks, whose gradients :func:`shardopt.comm.ordered_gradients` adds up, and None without it.
        zero_offload: what DeepSpeed moves to the host's memory, one of ``ZERO_OFFLOADS``.
        options: the optimizer's; with DeepSpeed bf16 has ``master_weight_bits`` of 24 or 32 without float32 masters,
            which it has otherwise; see :class:`shardopt.state.options.Options`.

    Raises:
        ValueError: some of it is not possible, alone or together.
    """

    optimizer: str = "adamw8bit"
    dtype: str = "bfloat16"
    backend: str = "single"
    world_size: int = 1
    gpus_per_node: int = 8
    release_gradients: bool = False
    overlap_forward: bool = False
    waiting_gradients: int = deferred.MOST_WAITING
    micro_batches: int | None = None
    zero_offload: str = "none"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected one of {', '.join(known)}")
        for name, least in (("world_size", 1), ("gpus_per_node", 1), ("waiting_gradients", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least {least}")
        if self.backend == "single" and self.world_size > 1:
            raise ValueError(
                f"backend: got 'single' with {self.world_size} ranks, expected one of "
                f"{', '.join(name for name in BACKENDS if name != 'single')}"
            )
        if self.release_gradients and not self._backend.releases:
            raise ValueError(
                f"release_gradients: got True with {self.backend}, which steps all parameters together, expected "
                "single, ddp or fsdp2"
            )
        if self.overlap_forward and not self.release_gradients:
            raise ValueError(
                "overlap_forward: got True without release_gradients, expected both, as it is an option of that; add "
                "release_gradients"
            )
        if self.orders and not self._backend.orders:
            raise ValueError(
                f"micro_batches: got {self.micro_batches} with {self.backend}, expected single, ddp or fsdp2, where "
                "gradients can be ordered"
            )
        multiple_of = self.world_size if self.orders else 1
        if self.micro_batches is not None and (self.micro_batches < 1 or self.micro_batches % multiple_of):
            expected = f"a multiple of {multiple_of}" if self.orders else "at least 1"
            raise ValueError(f"micro_batches: got {self.micro_batches} on {self.world_size} ranks, expected {expected}")
        check(self.backend, self._backend.zero_stage, self.zero_offload, self.dtype, self.options.get("offload"))
        if self.steps_on_host and not self._backend.steps_on_host:
            raise ValueError(
                f"offload: got 'step' with {self.backend}, whose shards are ranges of parameters, expected 'state', or "
                "fsdp2"
            )
        optimizer, group = self.group()
        if self.release_gradients:
            demand_no_totals(optimizer, group)
        offload = self.options.get("offload")
        if bytes_of(self.options.get("device_state_budget", 0)) and offload is None:
            raise ValueError(
                f"device_state_budget: got {self.options['device_state_budget']!r} without offload, expected "
                "offload='state' or 'step' beside it; add offload, or leave device_state_budget out"
            )
        if self.waiting_gradients != deferred.MOST_WAITING and not (self.release_gradients and self.steps_on_host):
            raise ValueError(
                f"waiting_gradients: got {self.waiting_gradients} without release_gradients and offload='step', "
                "expected both options beside it, as gradients wait only then; add them, or leave waiting_gradients out"
            )

    @property
    def orders(self) -> bool:
        """Whether gradients are ordered."""
        return self.micro_batches is not None and not self.release_gradients

    @property
    def steps_on_host(self) -> bool:
        """Whether the CPU steps, with ``offload="step"``."""
        return self.options.get("offload") == "step"

    @property
    def gathers_on_host(self) -> bool:
        """Whether gradients go to the host's memory, and wait there until they are complete and the step is taken."""
        return self.overlap_forward and self.steps_on_host

    @property
    def gradients_at_once(self) -> int | None:
        """How many gradients may live at once: a step on the CPU keeps some waiting. None: all of them."""
        accumulates = self.micro_batches not in (None, 1)
        if not self.release_gradients or ((self.overlap_forward or accumulates) and not self.gathers_on_host):
            return None
        return self.waiting_gradients + 1 if self.steps_on_host else 1

    @property
    def _backend(self) -> Backend:
        return BACKENDS[self.backend]

    @property
    def stepped_dtype(self) -> torch.dtype:
        """Of what the optimizer steps: DeepSpeed gives it float32 masters, unless master bits stand in its state."""
        has_masters = self._backend.zero_stage > 0 and self.options.get("master_weight_bits") is None
        return torch.float32 if has_masters else DTYPES[self.dtype]

    @property
    def stepped_on(self) -> torch.device:
        """Where that is."""
        return _ACCELERATOR if self.zero_offload == "none" else _CPU

    def group(self) -> tuple[ShardedOptimizer, dict[str, Any]]:
        """An optimizer with these options, and its param group.

        Raises:
            ValueError: an option is out of range.
        """
        nothing = torch.empty(0, 0, dtype=self.stepped_dtype, device="meta")
        optimizer = OPTIMIZERS[self.optimizer]([nothing], **self.options)
        return optimizer, optimizer.param_groups[0]


def estimate(model: Model, setup: Setup, rank: int | None = None) -> MemoryReport:
    """Memory that a model's weights, gradients and optimizer state take up on one rank.

    Args:
        model: the parameters.
        setup: how they are trained.
        rank: which; by default the most that any has on its GPU, and the most that any has in the host's memory.
    """
    if rank is None:
        has_budget = bytes_of(setup.options.get("device_state_budget", 0)) > 0
        ranks = BACKENDS[setup.backend].ranks(setup.world_size, has_budget=has_budget)
        reports = [estimate(model, setup, rank) for rank in ranks]
        device = max(reports, key=lambda report: report.device.total)
        return replace(device, host=max((report.host for report in reports), key=lambda use: use.total))
    backend, itemsize = BACKENDS[setup.backend], DTYPES[setup.dtype].itemsize
    held = backend.holds(model, setup.world_size, rank, itemsize)
    report = MemoryReport(numel=held.numel)
    if backend.zero_stage:
        stepped = setup.stepped_dtype.itemsize
        add_partitions(report, held, backend.zero_stage, setup.zero_offload, itemsize, stepped)
    else:
        report.device.parameters = held.weights * itemsize
        at_once = setup.gradients_at_once
        live = held.gradients if at_once is None else held.gradients_at_once(at_once)
        report.device.gradients = live * itemsize
        if setup.gathers_on_host:
            several = setup.micro_batches not in (None, 1)
            report.host.gradients = held.numel * (_SUM_BYTES if several else itemsize)
            report.host.gradients += host_gradients.PIECES * residency.CHUNK_BYTES if several else 0
        if setup.orders:
            report.device.gradient_sums = _sums(setup) * owned_elements(model, setup.world_size) * _SUM_BYTES
    _add_state(report, held, setup, model.embeddings)
    return report


def _sums(setup: Setup) -> int:
    """The most sums that wait for a further backward pass: one for each 1 in the number of terms so far."""
    assert setup.micro_batches is not None
    return max((n.bit_count() for n in range(setup.world_size, setup.micro_batches, setup.world_size)), default=0)


def _add_state(report: MemoryReport, held: Held, setup: Setup, embeddings: Collection[Shape]) -> None:
    """Adds state and offload buffers, placed as :class:`shardopt.state.residency.StateResidency` does."""
    optimizer, group = setup.group()
    counts = Counter(held.shards)
    states = {}
    for shard in counts:
        options = {**group, **optimizer.options_of(shard.global_shape, is_hidden=shard.global_shape not in embeddings)}
        moments = optimizer.rule(options).moments
        states[shard] = _StateBytes.of(SliceSpec.of(shard, setup.stepped_dtype, options, moments))
    stays = counts
    if group["offload"] is not None:
        budget = Budget(bytes_of(group["device_state_budget"]))
        stays = Counter(shard for shard in held.shards if budget.takes(states[shard].total))
    for shard, state in states.items():
        for offload, count in ((None, stays[shard]), (group["offload"], counts[shard] - stays[shard])):
            where = Residency.of(offload, setup.stepped_on)
            on_host = where.state.type == "cpu"
            state.add_to(report.host if on_host else report.device, count, aligned=offload == "state")
            steps = 0 if held.is_flat else count * state.step
            (report.host if where.steps.type == "cpu" else report.device).state += steps
    if held.is_flat:
        use = report.host if setup.stepped_on == _CPU else report.device
        use.state += len(held.buffers) * max(state.step for state in states.values())
    if stays != counts:
        use = report.host if group["offload"] == "step" else report.device
        use.offload_buffers = SLOTS * residency.CHUNK_BYTES


@dataclass(frozen=True)
class _StateBytes:
    """Bytes of one parameter's state: each entry's, by kind, and of the step count.

    Attributes:
        entries: fields of :class:`MemoryUse` and bytes.
        step: bytes.
    """

    entries: tuple[tuple[str, int], ...]
    step: int

    @classmethod
    def of(cls, spec: SliceSpec) -> _StateBytes:
        state: dict[str, Tensor] = spec.new(torch.device("meta"))
        step = state.pop("step")
        return cls(tuple((kind_of(key), value.nbytes) for key, value in state.items()), step.nbytes)

    @cached_property
    def total(self) -> int:
        """Bytes but for the step count."""
        return sum(nbytes for _, nbytes in self.entries)

    def add_to(self, use: MemoryUse, count: int, *, aligned: bool) -> None:
        """Adds so many parameters' entries; what aligning takes counts as state, as in a report."""
        for kind, nbytes in self.entries:
            setattr(use, kind, getattr(use, kind) + count * nbytes)
            if aligned:
                use.state += count * (-nbytes % residency.ALIGNMENT)
