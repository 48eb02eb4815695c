"""DTensor parameters: FSDP2 (``fully_shard``), HSDP, tensor parallel, and their combinations.

Rows stay whole where only dim 0 is sharded. A shard of dim 1 cuts rows into column ranges; where these do not end on
block boundaries, the ranks that share rows exchange the extremes of their cut blocks, and each holds the scales of all
blocks of its rows (a replicated dimension of the scales' DTensor).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import get_process_group_ranks
from torch.distributed.tensor import DTensor, Replicate, _utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from shardopt.layout import BlockGrid, Division, LocalBlocks, Region, Shard
from shardopt.layout.partition import Cut, GridPartition, Placed, even_steps
from shardopt.sharding.exchange import RanksExchange, joint_group

_CACHED_SHARDS = 8192


def _along(mesh: DeviceMesh, dims: Sequence[int]) -> RanksExchange:
    """The exchange among the ranks that differ in these dimensions of their coordinates only."""
    return RanksExchange(tuple(mesh.get_group(dim) for dim in dims), mesh.device_type)


class _MeshAt:
    """A mesh as seen from another rank: the part of DeviceMesh's interface from which PyTorch 2.6 computes offsets."""

    def __init__(self, mesh: DeviceMesh, coordinate: Sequence[int]) -> None:
        self.ndim, self.size = mesh.ndim, mesh.size
        self._coordinate = list(coordinate)

    def get_coordinate(self) -> list[int]:
        return self._coordinate


class DTensorShard(Shard):
    """The part of a DTensor parameter on this rank."""

    plain = False
    layout_attribute = "_spec"
    local_attribute = "_local_tensor"

    def __init__(self, global_shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
        if any(placement.is_partial() for placement in placements):
            raise RuntimeError(
                f"got a parameter with placements {placements}, expected Shard or Replicate; reduce it first"
            )
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise RuntimeError(f"got a parameter on {mesh}, which this rank is not part of")
        self._mesh = mesh
        self._placements = placements
        local_shape, offset = self._part_of(global_shape, tuple(coordinate))
        super().__init__(global_shape, local_shape)
        self.offset = tuple(offset)
        self._first_row = offset[0] if offset else 0
        self.first_col = offset[1] * math.prod(global_shape[2:]) if len(offset) > 1 else 0
        self.cuts_rows = any(getattr(placement, "dim", 0) > 0 for placement in placements)
        self._blocks: dict[int, LocalBlocks] = {}

    def _part_of(
        self, global_shape: tuple[int, ...], coordinate: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Local shape and global offset of the part at a coordinate of the mesh."""
        if hasattr(_utils, "_compute_local_shape_and_global_offset"):
            return _utils._compute_local_shape_and_global_offset(
                global_shape, self._mesh.shape, list(coordinate), self._placements
            )
        at = _MeshAt(self._mesh, coordinate)  # before PyTorch 2.8
        shape, offset = _utils.compute_local_shape_and_global_offset(global_shape, at, self._placements)  # type: ignore[arg-type]
        return tuple(shape), tuple(offset)

    @cached_property
    def first_element(self) -> int:  # type: ignore[override]
        self._require_ranges(
            "rounding at random", "use stochastic_rounding=False and another codec than log4 for this parameter"
        )
        return self._first_row * self.row_numel + self.first_col

    def _require_ranges(self, purpose: str, other_remedy: str = "step it with another optimizer") -> None:
        strided = {getattr(placement, "dim", 0) for placement in self._placements if hasattr(placement, "split_factor")}
        deepest = max((getattr(placement, "dim", 0) for placement in self._placements), default=0)
        if deepest > 1 or any(self._ends_of(dim) is None for dim in strided):
            raise RuntimeError(
                f"got a parameter of shape {self.global_shape} with placements {self._placements} for {purpose}, "
                f"expected every rank to hold one range of dim 0 and one of dim 1; shard it so, or {other_remedy}"
            )

    @cached_property
    def holders(self) -> RanksExchange:  # type: ignore[override]
        return _along(self._mesh, range(self._mesh.ndim))

    @cached_property
    def parts(self) -> RanksExchange | None:  # type: ignore[override]
        sharded = [dim for dim, placement in enumerate(self._placements) if not placement.is_replicate()]
        return _along(self._mesh, sharded) if sharded else None

    @cached_property
    def division(self) -> Division | None:  # type: ignore[override]
        mesh_dims = [dim for dim, placement in enumerate(self._placements) if not placement.is_replicate()]
        if not mesh_dims:
            return None
        mine = self._mesh.get_coordinate()
        self._require_ranges("Muon")
        assert mine is not None
        coordinates: dict[int, tuple[int, ...]] = {}  # by global rank, of those that hold the parts
        for at in itertools.product(*(range(self._mesh.size(dim)) for dim in mesh_dims)):
            coordinate = list(mine)
            for dim, value in zip(mesh_dims, at, strict=True):
                coordinate[dim] = value
            coordinates[int(self._mesh.mesh[tuple(coordinate)])] = tuple(coordinate)
        group = joint_group(sorted(coordinates)) if len(mesh_dims) > 1 else self._mesh.get_group(mesh_dims[0])
        regions = [self._region_at(coordinates[rank]) for rank in get_process_group_ranks(group)]
        return Division(RanksExchange((group,), self._mesh.device_type), tuple(regions))

    def _region_at(self, coordinate: tuple[int, ...]) -> Region:
        shape, offset = self._part_of(self.global_shape, coordinate)
        columns = offset[1] * math.prod(self.global_shape[2:]) if len(offset) > 1 else 0
        first = offset[0] * self.row_numel + columns if math.prod(shape) else 0
        return Region(first, shape[0], math.prod(shape[1:]), self.row_numel)

    @cached_property
    def partition(self) -> Placed | None:  # type: ignore[override]
        return self._partition_by(self._placements, self.global_shape)

    def scales_partition(self, grid: BlockGrid) -> Placed | None:
        return self._partition_by(self._scales_placements(grid), (self.global_shape[0], grid.blocks_per_row))

    def _partition_by(self, placements: Sequence[Placement], shape: Sequence[int]) -> Placed | None:
        """The partition by these placements; None if the mesh's ranks are not evenly spaced, or parts are no grid."""
        coordinate = self._mesh.get_coordinate()
        assert coordinate is not None
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
        local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local

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
            return self.local(gradient)
        return self.local(gradient.redistribute(placements=self._placements)).contiguous()

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

    def whole(self, local: Tensor) -> Tensor:
        on_mesh = self.like_parameter(local.to(self._mesh.device_type))
        full: Tensor = on_mesh.full_tensor()  # type: ignore[attr-defined]
        return full

    def part(self, whole: Tensor) -> Tensor:
        return self._cut_out(whole, self._placements)

    def scales_part(self, whole: Tensor, grid: BlockGrid) -> Tensor:
        return self._cut_out(whole, self._scales_placements(grid))

    @cached_property
    def _column_dims(self) -> tuple[int, ...]:
        """The mesh dimensions that shard columns."""
        dims = []
        for mesh_dim, placement in enumerate(self._placements):
            dim = getattr(placement, "dim", 0)
            if dim > 1:
                raise RuntimeError(
                    f"got a parameter of shape {self.global_shape} sharded on dim {dim}, expected dim 0 or 1; use "
                    "another shard_placement_fn or parallelize_module plan, or codec='fp32' for this parameter"
                )
            if dim == 1:
                dims.append(mesh_dim)
        return tuple(dims)

    @cached_property
    def _column_ends(self) -> list[int] | None:
        return self._ends_of(1)

    def _ends_of(self, dim: int) -> list[int] | None:
        """Where the ranges of a dim end that the ranks hold which share the others, in order; without empty ranges.

        None where some rank holds no single range.
        """
        mesh_dims = [d for d, placement in enumerate(self._placements) if getattr(placement, "dim", None) == dim]
        coordinate = [0] * len(self._placements)
        ranges = set()
        for at in itertools.product(*(range(self._mesh.size(d)) for d in mesh_dims)):
            for mesh_dim, value in zip(mesh_dims, at, strict=True):
                coordinate[mesh_dim] = value
            shape, offset = self._part_of(self.global_shape, tuple(coordinate))
            if shape[dim]:
                ranges.add((offset[dim], offset[dim] + shape[dim]))
        starts, ends = [start for start, _ in sorted(ranges)], [end for _, end in sorted(ranges)]
        return ends if [*starts, self.global_shape[dim]] == [0, *ends] else None

    def _find_blocks(self, grid: BlockGrid) -> LocalBlocks:
        if not self._column_dims:
            return LocalBlocks(0, grid.blocks_per_row, None)
        if self._column_ends is None:
            raise RuntimeError(
                f"got a parameter of shape {self.global_shape} with placements {self._placements}, expected every rank "
                "to hold one range of dim 1; shard dim 1 on one mesh dimension only"
            )
        if self._is_aligned(grid, self._column_ends):
            first = self.first_col // grid.block_size
            end = -(-(self.first_col + self.cols) // grid.block_size)
            return LocalBlocks(first, end - first if self.cols else 0, None)
        return LocalBlocks(0, grid.blocks_per_row, _along(self._mesh, self._column_dims))

    def _is_aligned(self, grid: BlockGrid, ends: list[int]) -> bool:
        """Whether no block is cut and sharding the scales like the parameter gives each rank its own blocks' scales."""
        width = math.prod(self.global_shape[2:])
        if not all(grid.is_boundary(end * width) for end in ends):
            return False
        blocks = [-(-end * width // grid.block_size) for end in ends]
        scales = DTensorShard((grid.rows, grid.blocks_per_row), self._mesh, self._placements)
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

    def _cut_out(self, whole: Tensor, placements: tuple[Placement, ...]) -> Tensor:
        replicated = DTensor.from_local(whole, self._mesh, [Replicate()] * self._mesh.ndim, run_check=False)
        return self.local(replicated.redistribute(placements=placements)).contiguous()


_shards: dict[tuple[Any, ...], DTensorShard] = {}


def shard_of_dtensor(param: DTensor) -> DTensorShard:
    """The shard that a DTensor parameter is.

    Raises:
        RuntimeError: its placements or its mesh are none that a parameter can have, or this rank's part is not the one
            that they describe.
    """
    mesh = param.device_mesh
    # By identity: an equal mesh may be of process groups that are gone. The shard keeps its mesh alive.
    key = (id(mesh), param.shape, param.placements)
    shard = _shards.get(key)
    if shard is None:
        if len(_shards) >= _CACHED_SHARDS:
            _shards.clear()
        shard = _shards[key] = DTensorShard(tuple(param.shape), mesh, tuple(param.placements))
    if param._local_tensor.shape != shard.local_shape:
        raise RuntimeError(
            f"got a part of shape {tuple(param._local_tensor.shape)} of a parameter of shape {shard.global_shape}, "
            f"expected {shard.local_shape} for placements {param.placements}; pass shape= and stride= to "
            "DTensor.from_local where shards are uneven"
        )
    return shard
