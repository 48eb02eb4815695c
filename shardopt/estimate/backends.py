"""The part of a model that a rank holds under each way to shard it.

No process group is needed: the ways are those of PyTorch and DeepSpeed, told by their arithmetic.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from shardopt.estimate.model import Form, Model
from shardopt.layout import FlatShard, Shard, equal_ends

_FSDP1_ALIGNMENT = 16  # bytes, of each parameter in a FlatParameter with use_orig_params
_ZERO_ALIGNMENT = 2  # elements, of a partition under ZeRO 1 and 2
_ZERO_SUB_GROUP = 10**9  # elements of a partition, at which ZeRO 3 closes a sub-group


@dataclass(frozen=True)
class Held:
    """Elements and shards that a rank holds.

    Attributes:
        numel: elements of parameters.
        weights: the same with padding.
        shards: of the parameters that the rank steps, in the optimizer's order.
        buffers: elements of the memory that gradients lie in, with padding; each is freed as a whole.
        buffer_of: in which of them the gradient of each of the model's parameters lies.
        is_flat: whether the optimizer steps not shards, but buffers that are made of them.
    """

    numel: int
    weights: int
    shards: tuple[Shard, ...]
    buffers: tuple[int, ...]
    buffer_of: tuple[int, ...]
    is_flat: bool = False

    @property
    def gradients(self) -> int:
        """Elements of all gradients."""
        return sum(self.buffers)

    def gradients_at_once(self, count: int) -> int:
        """Elements of the gradients that live at once if each is freed when ``count - 1`` further ones are complete.

        The backward pass is taken to reach parameters in the opposite of the optimizer's order.
        """
        last = max(len(self.buffer_of) - count, 0)
        windows = {frozenset(self.buffer_of[place : place + count]) for place in range(last + 1)}
        return max(sum(self.buffers[buffer] for buffer in window) for window in windows)


@dataclass(frozen=True)
class Backend:
    """A way to shard.

    Attributes:
        holds: what a rank holds, given the model, the number of ranks, the rank and the bytes of an element.
        replicated: whether all ranks hold the same.
        first_holds_most: whether no rank holds more than the first.
        releases: whether gradients can be released.
        orders: whether gradients can be ordered.
        steps_on_host: whether ``offload="step"`` is possible.
        zero_stage: of DeepSpeed's ZeRO, if it is that.
    """

    holds: Callable[[Model, int, int, int], Held]
    replicated: bool = False
    first_holds_most: bool = False
    releases: bool = False
    orders: bool = False
    steps_on_host: bool = True
    zero_stage: int = 0

    def ranks(self, world_size: int, *, has_budget: bool) -> range:
        """Ranks among which one holds the most: of smaller shards more may fit into a budget."""
        first = self.replicated or (self.first_holds_most and not has_budget)
        return range(1 if first else world_size)


def _of(form: Form, shard: Shard) -> Shard:
    return shard.with_float32_state() if form.float32_state else shard


@lru_cache(maxsize=4096)
def _whole(form: Form) -> Shard:
    return _of(form, Shard(form.shape, form.shape))


@lru_cache(maxsize=4096)
def _rows(form: Form, world_size: int, rank: int) -> Shard:
    """FSDP2's shard: as ``torch.chunk`` divides dim 0."""
    first, *others = form.shape
    most = -(-first // world_size)
    return _of(form, Shard(form.shape, (max(min(most, first - rank * most), 0), *others)))


@lru_cache(maxsize=65536)
def _range(form: Form, start: int, end: int) -> Shard:
    return _of(form, FlatShard(form.shape, start, end))


def _numel(shards: Sequence[Shard]) -> int:
    return sum(count * math.prod(shard.local_shape) for shard, count in Counter(shards).items())


def _single(model: Model, world_size: int, rank: int, itemsize: int) -> Held:
    """Each gradient has memory of its own."""
    shards = tuple(_whole(parameter.form) for parameter in model.parameters)
    numels = tuple(parameter.numel for parameter in model.parameters)
    return Held(model.numel, model.numel, shards, numels, tuple(range(len(numels))))


def _ddp(model: Model, world_size: int, rank: int, itemsize: int) -> Held:
    """As views of DDP's buckets (``gradient_as_bucket_view``) all gradients live as long as the model."""
    shards = tuple(_whole(parameter.form) for parameter in model.parameters)
    return Held(model.numel, model.numel, shards, (model.numel,), (0,) * len(shards))


def _fsdp2(model: Model, world_size: int, rank: int, itemsize: int) -> Held:
    """Each parameter is padded to the same rows on all ranks; a unit's gradients are one buffer."""
    shards = tuple(_rows(parameter.form, world_size, rank) for parameter in model.parameters)
    padded = {unit: _numel([_rows(form, world_size, 0) for form in unit]) for unit in set(model.units)}
    units = tuple(padded[unit] for unit in model.units)
    return Held(_numel(shards), sum(units), shards, units, model.unit_of)


@lru_cache(maxsize=4096)
def _fsdp1_unit(forms: tuple[Form, ...], world_size: int, rank: int, itemsize: int) -> tuple[int, tuple[Shard, ...]]:
    """The elements of a unit's FlatParameter on a rank, and the shards of what lies there of its parameters."""
    aligned = _FSDP1_ALIGNMENT // itemsize
    begins, end = [], 0
    for form in forms:
        begins.append(-(-end // aligned) * aligned)
        end = begins[-1] + form.numel
    size = -(-end // world_size)
    ranges = []
    for begin, form in zip(begins, forms, strict=True):
        ends = equal_ends(begin, form.numel, size, world_size)
        if ends[rank] < ends[rank + 1]:
            ranges.append(_range(form, ends[rank], ends[rank + 1]))
    return size, tuple(ranges)


def _fsdp1(model: Model, world_size: int, rank: int, itemsize: int) -> Held:
    units = [_fsdp1_unit(forms, world_size, rank, itemsize) for forms in model.units]
    sizes = tuple(size for size, _ in units)
    shards = tuple(shard for _, of_unit in units for shard in of_unit)
    return Held(_numel(shards), sum(sizes), shards, sizes, model.unit_of)


@lru_cache(maxsize=8)
def _owned(model: Model, world_size: int) -> tuple[tuple[Form, ...], ...]:
    """ZeroRedundancyOptimizer's partition: the largest parameter first, to the rank that has least so far."""
    owned: list[list[Form]] = [[] for _ in range(world_size)]
    sizes = [(0, rank) for rank in range(world_size)]
    for parameter in sorted(model.parameters, key=lambda parameter: -parameter.numel):
        size, rank = sizes[0]
        owned[rank].append(parameter.form)
        heapq.heapreplace(sizes, (size + parameter.numel, rank))
    return tuple(tuple(forms) for forms in owned)


def _zero_redundancy(model: Model, world_size: int, rank: int, itemsize: int) -> Held:
    shards = tuple(_whole(form) for form in _owned(model, world_size)[rank])
    return replace(_ddp(model, world_size, rank, itemsize), shards=shards)


def _zero_range(model: Model, world_size: int, rank: int, itemsize: int) -> Held:
    """ZeRO 1 and 2: a partition is a range of all parameters, flattened one after another."""
    size = -(-model.numel // (_ZERO_ALIGNMENT * world_size)) * _ZERO_ALIGNMENT
    shards, first = [], -rank * size
    for parameter in model.parameters:
        numel = parameter.numel
        start, end = (min(max(at, 0), numel) for at in (-first, size - first))
        shards.append(_range(parameter.form, start, end))
        first += numel
    return Held(model.numel, world_size * size, tuple(shards), (size,), (0,) * len(model.parameters), is_flat=True)


def _zero_ranges(model: Model, world_size: int, rank: int, itemsize: int) -> Held:
    """ZeRO 3: a partition has a range of each parameter, all of the same size on all ranks."""
    shards: list[Shard] = []
    sub_groups, sub_group_of = [0], []
    for parameter in model.parameters:
        numel = parameter.numel
        size = -(-numel // world_size)
        if sub_groups[-1] >= _ZERO_SUB_GROUP:
            sub_groups.append(0)
        sub_groups[-1] += size
        sub_group_of.append(len(sub_groups) - 1)
        shards.append(_range(parameter.form, min(rank * size, numel), min((rank + 1) * size, numel)))
    return Held(_numel(shards), sum(sub_groups), tuple(shards), tuple(sub_groups), tuple(sub_group_of), is_flat=True)


def owned_elements(model: Model, world_size: int) -> int:
    """Elements of the ordered sums that a rank owns: rows of each parameter, as many as FSDP2 gives its first rank."""
    return _numel([_rows(parameter.form, world_size, 0) for parameter in model.parameters])


BACKENDS = {
    "single": Backend(_single, replicated=True, releases=True, orders=True),
    "ddp": Backend(_ddp, replicated=True, releases=True, orders=True),
    "fsdp2": Backend(_fsdp2, first_holds_most=True, releases=True, orders=True),
    "fsdp1": Backend(_fsdp1, steps_on_host=False),
    "zero_redundancy": Backend(_zero_redundancy),
    "zero1": Backend(_zero_range, steps_on_host=False, zero_stage=1),
    "zero2": Backend(_zero_range, steps_on_host=False, zero_stage=2),
    "zero3": Backend(_zero_ranges, steps_on_host=False, zero_stage=3),
}
