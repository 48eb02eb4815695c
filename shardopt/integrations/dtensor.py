"""DTensor parameters: FSDP2 (``fully_shard``), HSDP, tensor parallel, and their combinations.

Rows stay whole where only dim 0 is sharded. A shard of dim 1 cuts rows into column ranges; where these do not end on
block boundaries, the ranks that share rows exchange the extremes of their cut blocks, and each holds the scales of all
blocks of its rows (a replicated dimension of the scales' DTensor).
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardopt.layout import BlockGrid, LocalBlocks, Shard, register

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


class MeshExchange:
    """Agreement among the ranks along some dimensions of a mesh."""

    def __init__(self, mesh: DeviceMesh, dims: Sequence[int]) -> None:
        self._groups = [mesh.get_group(dim) for dim in dims]

    def all_reduce_max(self, tensor: Tensor) -> None:
        for group in self._groups:
            torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group=group)


@lru_cache(maxsize=64)
def _exchange(mesh: DeviceMesh, dims: tuple[int, ...]) -> MeshExchange:
    return MeshExchange(mesh, dims)


class DTensorShard(Shard):
    """The part of a DTensor parameter on this rank."""

    def __init__(self, global_shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
        for placement in placements:
            if placement.is_partial():
                raise RuntimeError(
                    f"got a parameter with placements {placements}, expected Shard or Replicate; reduce it first"
                )
        self._mesh = mesh
        self._placements = placements
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise RuntimeError(f"got a parameter on {mesh}, which this rank is not part of")
        local_shape, offset = self._part_of(global_shape, tuple(coordinate))
        super().__init__(global_shape, local_shape)
        self._first_index = offset[1] if len(offset) > 1 else 0
        self.first_col = self._first_index * math.prod(global_shape[2:])

    def _part_of(
        self, global_shape: tuple[int, ...], coordinate: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Local shape and global offset of the part at a coordinate of the mesh."""
        from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

        return _compute_local_shape_and_global_offset(
            global_shape, self._mesh.shape, list(coordinate), self._placements
        )

    def local(self, tensor: Tensor) -> Tensor:
        from torch.distributed._functional_collectives import AsyncCollectiveTensor

        local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local

    def local_gradient(self, gradient: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        if not isinstance(gradient, DTensor):
            raise RuntimeError(
                f"got a plain gradient for a DTensor parameter of shape {self.global_shape}, expected a DTensor; "
                "wrap it with DTensor.from_local"
            )
        if gradient.device_mesh == self._mesh and gradient.placements != self._placements:
            gradient = gradient.redistribute(placements=self._placements)
        return self.local(gradient)

    def like_parameter(self, local: Tensor) -> Tensor:
        return self._wrap(local, self.global_shape, self._placements)

    def local_blocks(self, grid: BlockGrid) -> LocalBlocks:
        return self._local_blocks(grid.block_size)

    def like_scales(self, local: Tensor, grid: BlockGrid) -> Tensor:
        shape = (self.global_shape[0], grid.blocks_per_row, *local.shape[2:])
        return self._wrap(local, shape, self._scales_placements(grid))

    def whole(self, tensor: Tensor) -> Tensor:
        full: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
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
    def _column_ranges(self) -> list[tuple[int, int]]:
        """The ranges of dim 1 that the ranks sharing rows hold, in order; empty ones are left out."""
        coordinate = [0] * len(self._placements)
        ranges = set()
        for at in itertools.product(*(range(self._mesh.size(d)) for d in self._column_dims)):
            for mesh_dim, value in zip(self._column_dims, at, strict=True):
                coordinate[mesh_dim] = value
            shape, offset = self._part_of(self.global_shape, tuple(coordinate))
            if shape[1]:
                ranges.add((offset[1], offset[1] + shape[1]))
        found = sorted(ranges)
        ends = [0, *(end for _, end in found)]
        if [start for start, _ in found] != ends[:-1] or ends[-1] != self.global_shape[1]:
            raise RuntimeError(
                f"got a parameter of shape {self.global_shape} with placements {self._placements}, expected every rank "
                "to hold one range of dim 1; shard dim 1 on one mesh dimension only"
            )
        return found

    def _local_blocks(self, block_size: int) -> LocalBlocks:
        grid = BlockGrid(self.global_shape, block_size)
        if not self._column_dims:
            return LocalBlocks(0, grid.blocks_per_row, None)
        if self._is_aligned(grid):
            first = self.first_col // block_size
            end = -(-(self.first_col + self.cols) // block_size)
            return LocalBlocks(first, max(end - first, 0) if self.cols else 0, None)
        return LocalBlocks(0, grid.blocks_per_row, _exchange(self._mesh, self._column_dims))

    def _is_aligned(self, grid: BlockGrid) -> bool:
        """Whether no block is cut and sharding the scales like the parameter gives each rank its own blocks' scales."""
        width = math.prod(self.global_shape[2:])
        ends = [end for _, end in self._column_ranges]
        if not all(grid.is_boundary(end * width) for end in ends):
            return False
        blocks = [-(-end * width // grid.block_size) for end in ends]
        ranges = DTensorShard((grid.rows, grid.blocks_per_row), self._mesh, self._placements)
        return [end for _, end in ranges._column_ranges] == blocks

    def _scales_placements(self, grid: BlockGrid) -> tuple[Placement, ...]:
        from torch.distributed.tensor import Replicate

        if self.local_blocks(grid).exchange is None:
            return self._placements
        return tuple(
            Replicate() if mesh_dim in self._column_dims else placement
            for mesh_dim, placement in enumerate(self._placements)
        )

    def _wrap(self, local: Tensor, shape: tuple[int, ...], placements: tuple[Placement, ...]) -> DTensor:
        # Not DTensor.from_local: it would move the state of an offloaded parameter to the mesh's device.
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        stride = torch.empty(shape, device="meta").stride()
        meta = TensorMeta(torch.Size(shape), stride, local.dtype)
        spec: Any = DTensorSpec(self._mesh, placements, tensor_meta=meta)
        return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def _cut_out(self, whole: Tensor, placements: tuple[Placement, ...]) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate

        replicated = DTensor.from_local(whole, self._mesh, [Replicate()] * self._mesh.ndim, run_check=False)
        return self.local(replicated.redistribute(placements=placements)).contiguous()


@lru_cache(maxsize=4096)
def _shard(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensorShard:
    return DTensorShard(shape, mesh, placements)


def _resolve(param: Tensor) -> Shard | None:
    module = sys.modules.get("torch.distributed.tensor")  # without it no tensor is a DTensor
    if module is None or not isinstance(param, module.DTensor):
        return None
    return _shard(tuple(param.shape), param.device_mesh, tuple(param.placements))


register(_resolve)
