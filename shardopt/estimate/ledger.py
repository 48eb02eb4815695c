"""Predicts, without allocating the model, what :func:`shardopt.memory_report` finds on the fullest rank, within 1%.

The optimizers make their state on the meta device, whose bytes are counted. FSDP2 shards along the first dimension;
with other backends a rank is taken to hold an equal share of all elements. Padding is not counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from shardopt import optim
from shardopt.estimate.model import Model, ParameterShape, Shape
from shardopt.kernels.transfers_cuda import SLOT_COUNT
from shardopt.layout import Shard
from shardopt.layout.partition import UNCUT, Cut, GridPartition
from shardopt.optim import SGD, ShardedOptimizer
from shardopt.release.backward import check_totals
from shardopt.report import MemoryReport, MemoryUse
from shardopt.report.memory import kind_of
from shardopt.state.residency import CHUNK_BYTES
from shardopt.state.slice_spec import SliceSpec

#: Optimizers by name; SGD with momentum, as it has no state without.
OPTIMIZERS: Mapping[str, Callable[..., ShardedOptimizer]] = {
    name: partial(kind, momentum=0.9) if issubclass(kind, SGD) else kind for name, kind in optim.OPTIMIZERS.items()
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BACKENDS = ("single", "ddp", "fsdp2", "fsdp1", "zero1", "zero2", "zero3")
#: DeepSpeed's own offloading to the host: none, ``offload_optimizer``, or ``offload_param`` in addition.
ZERO_OFFLOADS = ("none", "optimizer", "all")

_SUB_GROUP = 10**9  # elements: DeepSpeed's default of sub_group_size


@dataclass(frozen=True)
class Setup:
    """The way in which a model is trained, as far as memory depends on it.

    Attributes:
        optimizer: a key of ``OPTIMIZERS``.
        dtype: the dtype of weights and gradients, a key of ``DTYPES``.
        backend: how the model is sharded, one of ``BACKENDS``.
        world_size: the number of ranks, with one GPU each.
        gpus_per_node: the largest number of ranks on one host.
        release_gradients: whether each parameter is stepped in the backward pass, as soon as its gradient is complete.
        zero_offload: what DeepSpeed offloads to the host, one of ``ZERO_OFFLOADS``.
        options: the optimizer's options, see :class:`shardopt.state.options.Options`. DeepSpeed in bf16 keeps float32
            master weights, unless ``master_weight_bits`` of 24 or 32 has the optimizer's state hold them.

    Raises:
        ValueError: a field has an unknown value, or the fields contradict one another.
    """

    optimizer: str = "adamw8bit"
    dtype: str = "bfloat16"
    backend: str = "single"
    world_size: int = 1
    gpus_per_node: int = 8
    release_gradients: bool = False
    zero_offload: str = "none"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known_of = {"optimizer": OPTIMIZERS, "dtype": DTYPES, "backend": BACKENDS, "zero_offload": ZERO_OFFLOADS}
        for name, known in known_of.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected one of {', '.join(known)}")
        for name in ("world_size", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least 1")
        if self.backend == "single" and self.world_size > 1:
            raise ValueError(f"backend: got 'single' with {self.world_size} ranks, expected {', '.join(BACKENDS[1:])}")
        if self.release_gradients and self.backend not in ("single", "fsdp2"):
            raise ValueError(
                f"release_gradients: got True with {self.backend}, expected single or fsdp2: others free none"
            )
        least_stage = {"none": 0, "optimizer": 1, "all": 3}[self.zero_offload]
        if self.zero_stage < least_stage:
            raise ValueError(
                f"zero_offload: got {self.zero_offload!r} with {self.backend}, expected 'optimizer' with zero1, zero2 "
                "or zero3, or 'all' with zero3; use offload elsewhere"
            )
        offload = self.options.get("offload")
        if offload is not None and (self.zero_stage or (self.backend, offload) == ("fsdp1", "step")):  # flat shards
            raise ValueError(f"offload: got {offload!r} with {self.backend}, expected zero_offload, or fsdp2")
        optimizer, group = self.make_optimizer()
        if self.release_gradients:
            check_totals(optimizer, group)  # raises for rules with sums over all gradients

    @property
    def zero_stage(self) -> int:
        """The stage of DeepSpeed's ZeRO, 1 to 3; 0 with other backends."""
        return int(self.backend[-1]) if self.backend.startswith("zero") else 0

    @property
    def stepped_dtype(self) -> torch.dtype:
        """The dtype that the optimizer steps: float32 master weights with DeepSpeed, unless its state holds masters."""
        deepspeed_has_masters = self.zero_stage > 0 and self.options.get("master_weight_bits") is None
        return torch.float32 if deepspeed_has_masters else DTYPES[self.dtype]

    def make_optimizer(self) -> tuple[ShardedOptimizer, dict[str, Any]]:
        """Makes an optimizer of an empty parameter; returns it and its only param group. Raises on wrong options."""
        nothing = torch.empty(0, 0, dtype=self.stepped_dtype, device="meta")
        optimizer = OPTIMIZERS[self.optimizer]([nothing], **self.options)
        return optimizer, optimizer.param_groups[0]


def estimate(model: Model, setup: Setup) -> MemoryReport:
    """Estimates the bytes of a model's weights, gradients and optimizer state on the rank that holds most."""
    shards = [_rank0_shard(parameter, setup) for parameter in model.parameters]
    unit_numel: Counter[int | str] = Counter()  # by FSDP unit, whose gradients are complete at the same time
    for parameter, shard in zip(model.parameters, shards, strict=True):
        unit_numel[parameter.unit] += math.prod(shard.local_shape)
    # FSDP1 and ZeRO divide all elements equally among this many ranks; FSDP2's shards have been divided already.
    ranks = setup.world_size if setup.backend == "fsdp1" or setup.zero_stage else 1
    numel = sum(unit_numel.values())
    owned = -(-numel // ranks)
    report = MemoryReport(numel=numel if setup.zero_stage in (1, 2) else owned)
    if setup.zero_stage:
        _add_zero(report, numel, owned, setup)
    else:
        itemsize, gradient_numel = DTYPES[setup.dtype].itemsize, owned
        if setup.release_gradients:  # each is freed after its parameter's step: the largest alone counts
            by_parameter = (math.prod(shard.local_shape) for shard in shards)
            gradient_numel = max(unit_numel.values() if setup.backend == "fsdp2" else by_parameter)
        report.device.parameters, report.device.gradients = owned * itemsize, gradient_numel * itemsize
    offload = setup.options.get("offload")
    use = report.device if offload is None and setup.zero_offload == "none" else report.host
    _add_state(use, Counter(shards), ranks, setup, model.embeddings)
    if offload is not None:
        (report.host if offload == "step" else report.device).offload_buffers = SLOT_COUNT * CHUNK_BYTES
    return report


def _rank0_shard(parameter: ParameterShape, setup: Setup) -> Shard:
    """Rank 0's shard of a parameter under FSDP2; otherwise the whole parameter: ``estimate`` divides by the ranks."""
    is_cut = setup.backend == "fsdp2" and setup.world_size > 1
    shard = Shard(parameter.shape, GridPartition((Cut(0, setup.world_size, 1),)) if is_cut else UNCUT)
    return shard.with_float32_state() if parameter.float32_state else shard


def _add_state(
    use: MemoryUse, shards: Mapping[Shard, int], ranks: int, setup: Setup, embeddings: Collection[Shape]
) -> None:
    """Adds the bytes of the optimizer's state to ``use``: of ``shards`` (with counts), divided among ``ranks``."""
    optimizer, group = setup.make_optimizer()
    nbytes_of: Counter[str] = Counter()  # by kind of state
    for shard, count in shards.items():
        is_matrix = len(shard.global_shape) > 1 and shard.global_shape not in embeddings
        options = {**group, "algorithm": "muon" if is_matrix else "adamw"}  # which Muon alone reads
        spec = SliceSpec.of(shard, setup.stepped_dtype, options, optimizer.rule(options).moments)
        for key, value in spec.new_state(torch.device("meta")).items():
            nbytes_of[kind_of(key)] += count * value.nbytes
    for kind, nbytes in nbytes_of.items():
        setattr(use, kind, getattr(use, kind) + -(-nbytes // ranks))  # rounded up


def _add_zero(report: MemoryReport, numel: int, owned: int, setup: Setup) -> None:
    """Adds DeepSpeed's weights, masters, gradients and staging buffers, at the time of the optimizer's step.

    Of N elements a rank owns n and steps s at a time (a sub-group). w is the bytes of a weight, m those of a stepped
    element. *Asterisks*: on the host. No masters are counted if m = w and the weights are there, too.

    ===============  ========  =======  ===================================
    ZeRO, offload    weights   masters  gradients
    ===============  ========  =======  ===================================
    1, 2             w N       m n      m n
    1, 2, optimizer  w N       *m n*    *m n*, and *w n* staging if m > w
    3                w n       m n      w n, and m s
    3, optimizer     w n       *m n*    *w n*, and *m n* if m > w
    3, all           *w n*     *m n*    *w n*, and *m n* if m > w
    ===============  ========  =======  ===================================
    """
    weight, master = DTYPES[setup.dtype].itemsize, setup.stepped_dtype.itemsize
    stepped_use = report.device if setup.zero_offload == "none" else report.host
    weights_use = report.host if setup.zero_offload == "all" else report.device
    weights_use.parameters = weight * (owned if setup.zero_stage == 3 else numel)
    if master != weight or weights_use is not stepped_use:
        stepped_use.master_weights = master * owned
    stepped_use.gradients = (weight if setup.zero_stage == 3 else master) * owned
    if setup.zero_offload == "none":
        stepped_use.gradients += master * min(owned, _SUB_GROUP) if setup.zero_stage == 3 else 0
    elif master != weight and setup.zero_stage == 3:
        stepped_use.gradients += master * owned
    elif master != weight:
        stepped_use.offload_buffers = weight * owned
