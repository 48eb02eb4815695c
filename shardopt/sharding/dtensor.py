"""DTensor parameters: FSDP2 (``fully_shard``), HSDP, tensor parallel, and their combinations.

Rows stay whole if only dim 0 is sharded. A shard of any other dim cuts rows into column ranges. If each rank has one
range that ends on block boundaries, scales are sharded alike. Otherwise the ranks that share rows exchange the extremes
of their cut blocks, and each holds the scales of all blocks of its rows (a replicated dimension of the scales'
DTensor).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import get_process_group_ranks, get_world_size
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardopt.kernels.memory import readable, written
from shardopt.layout import BlockGrid, Counted, Division, LocalBlocks, Region, Shard
from shardopt.layout.partition import Cut, GridPartition, Placed, even_steps
from shardopt.layout.ranges import Ranges, chunk, count, joined, strided_chunk
from shardopt.sharding.exchange import RanksExchange, StoreNotes, joint_group, moved_to, own_device

_CACHED_SHARDS = 8192


class DTensorShard(Shard):
    """The part of a DTensor parameter on this rank."""

    plain = False
    layout_attribute = "_spec"
    local_attribute = "_local_tensor"

    def __init__(
        self,
        global_shape: tuple[int, ...],
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        device: torch.device | None = None,
    ) -> None:
        if any(placement.is_partial() for placement in placements):
            raise RuntimeError(
                f"got a parameter with placements {placements}, expected Shard or Replicate; reduce it first"
            )
        self._mesh = mesh
        if device is None or device.type != mesh.device_type:  # offloaded, or without memory
            device = own_device(mesh.device_type)
        self._device = device
        self._placements = placements
        coordinate = mesh.get_coordinate()
        self.is_here = coordinate is not None  # else torch makes an empty local tensor
        indices = ((),) * len(global_shape) if coordinate is None else self._indices_at(global_shape, coordinate)
        super().__init__(global_shape, tuple(map(count, indices)) if self.is_here else (0,))
        self.indices = indices
        self.cuts_rows = any(getattr(placement, "dim", 0) > 0 for placement in placements)
        self._blocks: dict[int, LocalBlocks] = {}
        self._scales_partitions: dict[int, Placed | None] = {}

    def _indices_at(self, shape: tuple[int, ...], coordinate: Sequence[int]) -> tuple[Ranges, ...]:
        """The indices of each dimension that the rank at a coordinate of the mesh holds."""
        indices = [joined([(0, size)]) for size in shape]
        for placement, size, at in zip(self._placements, self._mesh.shape, coordinate, strict=True):
            if isinstance(placement, _StridedShard):
                dim = placement.dim
                indices[dim] = strided_chunk(indices[dim], size, at, int(placement.split_factor))
            elif not placement.is_replicate():
                dim = placement.dim  # type: ignore[attr-defined]
                indices[dim] = chunk(indices[dim], size, at)
        return tuple(indices)

    @cached_property
    def holders(self) -> RanksExchange | None:  # type: ignore[override]
        if not self.is_here:
            return None
        return self._along(range(self._mesh.ndim))

    @cached_property
    def row_owners(self) -> RanksExchange | None:  # type: ignore[override]
        return self._along(self._column_dims) if self._column_dims and self.is_here else None

    @cached_property
    def parts(self) -> RanksExchange | None:  # type: ignore[override]
        sharded = [dim for dim, placement in enumerate(self._placements) if not placement.is_replicate()]
        return self._along(sharded) if sharded and self.is_here else None

    def counted(self) -> Counted | None:
        if not hasattr(self, "_counted"):
            self._counted = self._find_counted()
        return self._counted

    def _find_counted(self) -> Counted:
        """The mesh's ranks; copies along its replicated dims, and, if it is a slice of a mesh, in the other slices."""
        numbers, slices = self._mesh.mesh.flatten(), _slices(self._mesh)
        members, reach = frozenset(numbers.tolist()), frozenset(slices.flatten().tolist())
        notes = StoreNotes(tuple(sorted(members))) if len(reach) < get_world_size() else None
        coordinate = self._mesh.get_coordinate()
        if coordinate is None:
            return Counted(None, members, frozenset(), reach, notes)
        at = tuple(slice(None) if p.is_replicate() else i for p, i in zip(self._placements, coordinate, strict=True))
        alike = torch.isin(numbers, self._mesh.mesh[at].flatten())
        own = self._mesh.get_rank()
        before = frozenset(number for number in slices[alike].flatten().tolist() if number < own)
        dims = [dim for dim in range(self._mesh.ndim) if self._mesh.size(dim) > 1] or [0]
        ranks = self._along(dims) if len(dims) == 1 else RanksExchange((joint_group(sorted(members)),), self._device)
        return Counted(ranks, members, before, reach, notes)

    @cached_property
    def division(self) -> Division | None:  # type: ignore[override]
        mesh_dims = [dim for dim, placement in enumerate(self._placements) if not placement.is_replicate()]
        if not mesh_dims or not self.is_here:
            return None
        mine = self._mesh.get_coordinate()
        assert mine is not None
        coordinates: dict[int, tuple[int, ...]] = {}  # by global number of the ranks that hold the parts
        for at in itertools.product(*(range(self._mesh.size(dim)) for dim in mesh_dims)):
            coordinate = list(mine)
            for dim, value in zip(mesh_dims, at, strict=True):
                coordinate[dim] = value
            coordinates[int(self._mesh.mesh[tuple(coordinate)])] = tuple(coordinate)
        group = joint_group(sorted(coordinates)) if len(mesh_dims) > 1 else self._mesh.get_group(mesh_dims[0])
        regions = [self._region_at(coordinates[rank]) for rank in get_process_group_ranks(group)]
        return Division(RanksExchange((group,), self._device), tuple(regions))

    def _region_at(self, coordinate: tuple[int, ...]) -> Region:
        shape, indices = self.global_shape, self._indices_at(self.global_shape, coordinate)
        if any(len(of_dim) > 1 for of_dim in indices):
            raise RuntimeError(
                f"got a parameter of shape {shape} with placements {self._placements} for Muon, expected every rank to "
                "hold one range of each dim; shard it so, or step it with another optimizer"
            )
        sizes = [count(of_dim) for of_dim in indices]
        if not math.prod(sizes):
            return Region(0, sizes[0], 0, self.row_numel)
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        first = sum(of_dim[0][0] * stride for of_dim, stride in zip(indices, strides, strict=True))
        last = max((dim for dim, size in enumerate(sizes) if size < shape[dim]), default=0)  # last dim that is cut
        between = zip(sizes[1:last], strides[1:last], strict=True)
        cols = math.prod(sizes[max(last, 1) :])
        return Region(first, sizes[0], cols, self.row_numel, tuple(between))

    @cached_property
    def partition(self) -> Placed | None:  # type: ignore[override]
        return self._partition_by(self._placements, self.global_shape)

    def scales_partition(self, grid: BlockGrid) -> Placed | None:
        partitions = self._scales_partitions
        if grid.block_size not in partitions:
            shape = (self.global_shape[0], grid.blocks_per_row)
            partitions[grid.block_size] = self._partition_by(self._scales_placements(grid), shape)
        return partitions[grid.block_size]

    def _partition_by(self, placements: Sequence[Placement], shape: Sequence[int]) -> Placed | None:
        """The partition by these placements; None if the mesh's ranks are not evenly spaced, or parts are no grid."""
        coordinate = self._mesh.get_coordinate()
        if coordinate is None:
            return None
        mesh, offset = self._mesh.mesh, 0
        cuts: list[Cut] = []
        strided: list[Cut] = []
        for dim, placement in enumerate(placements):
            if placement.is_replicate() or mesh.size(dim) == 1:
                continue
            along = mesh.movedim(dim, -1).reshape(-1, mesh.size(dim))
            stride = even_steps(tuple(along[0].tolist()))
            if stride is None or not bool((along - along[:, :1] == along[0] - along[0, 0]).all()):
                return None
            cut = Cut(placement.dim, mesh.size(dim), stride)  # type: ignore[attr-defined]
            offset += coordinate[dim] * stride
            factor = getattr(placement, "split_factor", None)
            if factor is None:
                cuts.append(cut)
                continue
            # Cuts the parts that a later dimension of the mesh makes, which must be equal.
            later = [mesh.size(d) for d in range(dim + 1, mesh.dim()) if getattr(placements[d], "dim", None) == cut.dim]
            earlier = [other for other in (*cuts, *strided) if other.dim == cut.dim]
            if earlier or later != [factor] or shape[cut.dim] % factor:
                return None
            strided.append(cut)
        ends = sorted((stride, ways) for _, ways, stride in (*cuts, *strided))
        if any(stride * ways > next_one for (stride, ways), (next_one, _) in itertools.pairwise(ends)):
            return None
        return Placed(GridPartition((*cuts, *strided)), offset)

    def local(self, tensor: Tensor) -> Tensor:
        return written(_local(tensor))

    def local_gradient(self, gradient: Tensor) -> Tensor:
        if not isinstance(gradient, DTensor):
            raise RuntimeError(
                f"got a plain gradient for a DTensor parameter of shape {self.global_shape}, expected a DTensor; "
                "wrap it with DTensor.from_local"
            )
        if gradient.device_mesh != self._mesh:
            raise RuntimeError(
                f"got a gradient on {gradient.device_mesh} for a parameter of shape {self.global_shape} on "
                f"{self._mesh}, expected the parameter's mesh; distribute it there"
            )
        if gradient.placements == self._placements:
            return readable(_local(gradient))
        return readable(_local(gradient.redistribute(placements=self._placements))).contiguous()

    def like_parameter(self, local: Tensor) -> Tensor:
        behind = local.shape[len(self.local_shape) :]
        return self._wrap(local, (*self.global_shape, *behind), self._placements)

    def local_blocks(self, grid: BlockGrid) -> LocalBlocks:
        blocks = self._blocks.get(grid.block_size)
        if blocks is None:
            blocks = self._blocks[grid.block_size] = self._find_blocks(grid)
        return blocks

    def like_scales(self, local: Tensor, grid: BlockGrid) -> Tensor:
        shape = (self.global_shape[0], grid.blocks_per_row, *local.shape[2:])
        return self._wrap(local, shape, self._scales_placements(grid))

    def part(self, whole: Tensor) -> Tensor:
        return self._cut_out(whole)

    def scales_part(self, whole: Tensor, grid: BlockGrid) -> Tensor:
        shape = (self.global_shape[0], grid.blocks_per_row)
        return DTensorShard(shape, self._mesh, self._scales_placements(grid), self._device)._cut_out(whole)

    @cached_property
    def _column_dims(self) -> tuple[int, ...]:
        """The mesh dimensions that shard columns."""
        return tuple(at for at, placement in enumerate(self._placements) if getattr(placement, "dim", 0) > 0)

    @cached_property
    def _column_ends(self) -> list[int] | None:
        """The sorted ends of the nonempty ranges of dim 1 on the ranks that share rows.

        None if a rank holds several ranges, or another dim is sharded, too.
        """
        coordinate = [0] * len(self._placements)
        ends = []
        for at in itertools.product(*(range(self._mesh.size(dim)) for dim in self._column_dims)):
            for mesh_dim, value in zip(self._column_dims, at, strict=True):
                coordinate[mesh_dim] = value
            _, columns, *others = self._indices_at(self.global_shape, coordinate)
            if len(columns) > 1 or [count(of_dim) for of_dim in others] != list(self.global_shape[2:]):
                return None
            ends += [end for _, end in columns]
        return sorted(ends)

    def _along(self, dims: Sequence[int]) -> RanksExchange:
        """The exchange among the ranks that differ in these dimensions of their coordinates only."""
        return RanksExchange(tuple(map(self._mesh.get_group, dims)), self._device)

    def _find_blocks(self, grid: BlockGrid) -> LocalBlocks:
        if not self._column_dims or not self.is_here:
            return LocalBlocks(0, grid.blocks_per_row, None)
        size, columns = grid.block_size, self.columns
        if self._column_ends is not None and self._is_aligned(grid, self._column_ends):
            ((first, end),) = columns or ((self.row_numel, self.row_numel),)
            return LocalBlocks(-(-first // size), -(-end // size) - -(-first // size), None)
        pieces = Counter(block for first, end in columns for block in {first // size, (end - 1) // size})
        return LocalBlocks(0, grid.blocks_per_row, self.row_owners, max(pieces.values(), default=1))

    def _is_aligned(self, grid: BlockGrid, ends: list[int]) -> bool:
        """Whether no block is cut and sharding the scales like the parameter gives each rank its own blocks' scales."""
        width = math.prod(self.global_shape[2:])
        if not all(grid.is_boundary(end * width) for end in ends):
            return False
        blocks = [-(-end * width // grid.block_size) for end in ends]
        if any(getattr(placement, "dim", 0) > 1 for placement in self._placements):
            return False  # the scales have two dims
        scales = DTensorShard((grid.rows, grid.blocks_per_row), self._mesh, self._placements, self._device)
        return scales._column_ends == blocks

    def _scales_placements(self, grid: BlockGrid) -> tuple[Placement, ...]:
        if self.local_blocks(grid).exchange is None:
            return self._placements
        return tuple(
            Replicate() if mesh_dim in self._column_dims else placement
            for mesh_dim, placement in enumerate(self._placements)
        )

    def _wrap(self, local: Tensor, shape: tuple[int, ...], placements: tuple[Placement, ...]) -> DTensor:
        # Not DTensor.from_local: it would move the state of an offloaded parameter to the mesh's device.
        stride = torch.empty(shape, device="meta").stride()
        meta = TensorMeta(torch.Size(shape), stride, local.dtype)
        spec: Any = DTensorSpec(self._mesh, placements, tensor_meta=meta)
        return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def _cut_out(self, whole: Tensor) -> Tensor:
        # Not by redistribute: PyTorch 2.8 cuts uneven strided shards otherwise than fully_shard.
        if not self.is_here:
            return torch.empty(0, dtype=whole.dtype, device=self._device)
        for dim, ranges in enumerate(self.indices):
            if count(ranges) < whole.shape[dim]:  # a copy, which does not keep the memory of the whole
                parts = [whole.narrow(dim, start, end - start) for start, end in ranges]
                whole = torch.cat([whole.narrow(dim, 0, 0), *parts], dim)
        return moved_to(self._device, whole).contiguous()


def _slices(mesh: DeviceMesh) -> Tensor:
    """The numbers of a mesh's ranks, flattened, and beside each those in the other slices of the mesh's root.

    A mesh that is no slice has one column.
    """
    numbers = mesh.mesh.flatten()
    if hasattr(mesh, "_get_root_mesh"):
        root = mesh._get_root_mesh().mesh
    else:  # before PyTorch 2.9
        root = torch.distributed.device_mesh._mesh_resources.get_root_mesh(mesh).mesh
    places = torch.isin(root, numbers).nonzero()
    varying = [dim for dim in range(root.ndim) if bool((places[:, dim] != places[0, dim]).any())]
    others = [dim for dim in range(root.ndim) if dim not in varying]
    if len(places) != len(numbers) or math.prod(root.size(dim) for dim in varying) != len(numbers):
        return numbers[:, None]
    rows = root.permute(*varying, *others).reshape(len(numbers), -1)
    own = rows[:, torch.isin(rows, numbers).all(0)].flatten()
    return torch.stack([rows[int((own == number).nonzero())] for number in numbers])


def _local(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        raise RuntimeError(
            f"got a plain tensor of shape {tuple(tensor.shape)} for a DTensor parameter, expected a DTensor; load it "
            "with load_state_dict, or wrap it with DTensor.from_local"
        )
    local = tensor.to_local()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


_shards: dict[tuple[Any, ...], DTensorShard] = {}


def shard_of_dtensor(param: DTensor) -> DTensorShard:
    """The shard that a DTensor parameter is.

    Raises:
        RuntimeError: a parameter cannot have these placements, or this rank's part has another shape or dtype than
            expected.
    """
    mesh, local = param.device_mesh, param._local_tensor
    # By identity, as an equal mesh may have process groups that are gone. The shard keeps its mesh alive.
    key = (id(mesh), param.shape, param.placements)
    shard = _shards.get(key)
    if shard is None:
        if len(_shards) >= _CACHED_SHARDS:
            _shards.clear()
        shard = _shards[key] = DTensorShard(tuple(param.shape), mesh, tuple(param.placements), local.device)
    if local.dtype != param.dtype:
        raise RuntimeError(
            f"got a parameter of {param.dtype} and shape {shard.global_shape} whose part is of {local.dtype}, expected "
            "one dtype; cast it with module.to(dtype), as an assignment to .data does not cast a DTensor's part"
        )
    if local.shape != shard.local_shape:
        raise RuntimeError(
            f"got a part of shape {tuple(local.shape)} of a parameter of shape {shard.global_shape}, "
            f"expected {shard.local_shape} for placements {param.placements}; pass shape= and stride= to "
            "DTensor.from_local where shards are uneven"
        )
    return shard
