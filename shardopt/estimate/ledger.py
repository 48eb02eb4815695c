"""Predicts, without allocating the model, what :func:`shardopt.memory_report` finds on the fullest rank, within 1%.

The optimizers make their state on the meta device, whose bytes are counted. FSDP2 shards along the first dimension;
with other backends a rank is taken to hold an equal share of all elements. Padding is not counted.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from shardopt import optim
from shardopt.estimate.model import Model, ParameterShape, Shape
from shardopt.kernels.transfers_cuda import SLOTS
from shardopt.layout import Shard
from shardopt.layout.partition import UNCUT, Cut, GridPartition
from shardopt.optim import SGD, ShardedOptimizer
from shardopt.release.released import demand_no_totals
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

_KNOWN = {"optimizer": OPTIMIZERS, "dtype": DTYPES, "backend": BACKENDS, "zero_offload": ZERO_OFFLOADS}
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
        for name, known in _KNOWN.items():
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
        if self.stage < {"none": 0, "optimizer": 1, "all": 3}[self.zero_offload]:
            raise ValueError(
                f"zero_offload: got {self.zero_offload!r} with {self.backend}, expected 'optimizer' with zero1, zero2 "
                "or zero3, or 'all' with zero3; use offload elsewhere"
            )
        offload = self.options.get("offload")
        if offload is not None and (self.stage or (self.backend, offload) == ("fsdp1", "step")):
            raise ValueError(f"offload: got {offload!r} with {self.backend}, expected zero_offload, or fsdp2")
        optimizer, group = self.group()
        if self.release_gradients:
            demand_no_totals(optimizer, group)

    @property
    def stage(self) -> int:
        """The stage of DeepSpeed's ZeRO, 1 to 3; 0 with other backends."""
        return int(self.backend[-1]) if self.backend.startswith("zero") else 0

    @property
    def stepped_dtype(self) -> torch.dtype:
        """The dtype that the optimizer steps: float32 master weights with DeepSpeed, unless its state holds masters."""
        has_masters = self.stage > 0 and self.options.get("master_weight_bits") is None
        return torch.float32 if has_masters else DTYPES[self.dtype]

    def group(self) -> tuple[ShardedOptimizer, dict[str, Any]]:
        """Makes an optimizer of an empty parameter, which validates the options; returns it with its param group.

        Raises:
            ValueError: an option is out of range.
        """
        nothing = torch.empty(0, 0, dtype=self.stepped_dtype, device="meta")
        optimizer = OPTIMIZERS[self.optimizer]([nothing], **self.options)
        return optimizer, optimizer.param_groups[0]


def estimate(model: Model, setup: Setup) -> MemoryReport:
    """Estimates the bytes of a model's weights, gradients and optimizer state on the rank that holds most."""
    units: dict[int | str, int] = defaultdict(int)
    shards: Counter[Shard] = Counter()
    for parameter in model.parameters:
        shard = _shard(parameter, setup)
        shards[shard] += 1
        units[parameter.unit] += math.prod(shard.local_shape)
    share = setup.world_size if setup.backend == "fsdp1" or setup.stage else 1
    numel, owned = sum(units.values()), -(-sum(units.values()) // share)
    report = MemoryReport(numel=numel if setup.stage in (1, 2) else owned)
    if setup.stage:
        _add_partitions(report, numel, owned, setup)
    else:
        sizes = units.values() if setup.backend == "fsdp2" else (math.prod(shard.local_shape) for shard in shards)
        report.device.parameters = owned * DTYPES[setup.dtype].itemsize
        report.device.gradients = (max(sizes) if setup.release_gradients else owned) * DTYPES[setup.dtype].itemsize
    offload = setup.options.get("offload")
    use = report.device if offload is None and setup.zero_offload == "none" else report.host
    _add_state(use, shards, share, setup, model.embeddings)
    if offload is not None:
        (report.host if offload == "step" else report.device).offload_buffers = SLOTS * CHUNK_BYTES
    return report


def _shard(parameter: ParameterShape, setup: Setup) -> Shard:
    """Rank 0's shard of a parameter under FSDP2; otherwise the whole parameter, of which callers take a share."""
    ways = setup.world_size if setup.backend == "fsdp2" else 1
    shard = Shard(parameter.shape, GridPartition((Cut(0, ways, 1),)) if ways > 1 else UNCUT)
    return shard.with_float32_state() if parameter.float32_state else shard


def _add_state(
    use: MemoryUse, shards: Mapping[Shard, int], share: int, setup: Setup, embeddings: Collection[Shape]
) -> None:
    """Adds the bytes of the optimizer's state for ``shards`` (how often each occurs), divided by ``share`` ranks."""
    optimizer, group = setup.group()
    totals: Counter[str] = Counter()
    for shard, count in shards.items():
        is_matrix = len(shard.global_shape) > 1 and shard.global_shape not in embeddings
        options = {**group, "algorithm": "muon" if is_matrix else "adamw"}  # which Muon alone reads
        spec = SliceSpec.of(shard, setup.stepped_dtype, options, optimizer.rule(options).moments)
        for key, value in spec.new_state(torch.device("meta")).items():
            totals[kind_of(key)] += count * value.nbytes
    for kind, nbytes in totals.items():
        setattr(use, kind, getattr(use, kind) - (-nbytes // share))


def _add_partitions(report: MemoryReport, numel: int, owned: int, setup: Setup) -> None:
    """Adds DeepSpeed's weights, masters, gradients and staging buffers while the optimizer steps.

    Of N elements a rank owns n, in sub-groups of s. w are bytes of a weight, m of what is stepped; between asterisks:
    on the host. Masters are the weights where both lie on one side and m = w.

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
    weights_use.parameters = weight * (owned if setup.stage == 3 else numel)
    if master != weight or weights_use is not stepped_use:
        stepped_use.master_weights = master * owned
    stepped_use.gradients = (weight if setup.stage == 3 else master) * owned
    if setup.zero_offload == "none":
        stepped_use.gradients += master * min(owned, _SUB_GROUP) if setup.stage == 3 else 0
    elif master != weight and setup.stage == 3:
        stepped_use.gradients += master * owned
    elif master != weight:
        stepped_use.offload_buffers = weight * owned
