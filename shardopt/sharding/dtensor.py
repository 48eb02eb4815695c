"""DTensor parameters: FSDP2 (``fully_shard``), HSDP, tensor parallel, and their combinations.

Rows stay whole if only dim 0 is sharded. A shard of any other dim cuts rows into column ranges. If each rank has one
range that ends on block boundaries, scales are sharded alike. Otherwise the ranks that share rows exchange the extremes
of their cut blocks, and each holds the scales of all blocks of its rows (a replicated dimension of the scales'
DTensor).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store, get_world_size
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from shardopt.kernels.memory import readable, unwrapped
from shardopt.layout import BlockGrid, HoldersForSums, Shard
from shardopt.layout.partition import Cut, GridPartition
from shardopt.sharding.rank_group import TorchRankGroup, local_device, make_group, move_to

_MOST_CACHED = 8192  # shards; then the cache is emptied, as shards keep meshes alive


class DTensorShard(Shard):
    """The part of a DTensor parameter on this rank; ``rank_offset`` is the rank's index in the flattened mesh."""

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
        self._mesh, self._placements = mesh, placements
        if device is None or device.type != mesh.device_type:  # for collectives, of a parameter on host or meta device
            device = local_device(mesh.device_type)
        self._device = device
        #: The mesh dimensions that shard the parameter; it is replicated along the others.
        self._sharding_dims = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
        strides = [math.prod(mesh.shape[dim + 1 :]) for dim in range(mesh.ndim)]  # of ranks in the flattened mesh
        in_order = _order_of_cuts(placements, self._sharding_dims, tuple(mesh.shape))
        cuts = [Cut(placements[dim].dim, mesh.shape[dim], strides[dim]) for dim in in_order]  # type: ignore[attr-defined]
        self._coordinate = mesh.get_coordinate()
        self.is_here = self._coordinate is not None
        rank_offset = sum(index * stride for index, stride in zip(self._coordinate or (), strides, strict=False))
        super().__init__(global_shape, GridPartition(tuple(cuts)), rank_offset)
        if not self.is_here:  # torch makes an empty, 1-D local tensor on a rank outside of the mesh
            self.indices, self.local_shape = ((0, 0),) * len(global_shape), (0,)

    def _make_scales(self, grid: BlockGrid) -> DTensorShard:
        # If shards cut blocks in columns, only rows stay sharded: each rank has all scales of its rows.
        is_alike = self.partition.of_scales(grid) == self.partition
        placements = tuple(p if is_alike or getattr(p, "dim", 0) == 0 else Replicate() for p in self._placements)
        return DTensorShard((grid.rows, grid.blocks_per_row), self._mesh, placements, self._device)

    @cached_property
    def holders(self) -> TorchRankGroup | None:  # type: ignore[override]
        return self._group_along(range(self._mesh.ndim)) if self.is_here else None

    @cached_property
    def row_owners(self) -> TorchRankGroup | None:  # type: ignore[override]
        cutting_rows = [dim for dim in self._sharding_dims if self._placements[dim].dim > 0]  # type: ignore[attr-defined]
        return self._group_along(cutting_rows) if cutting_rows and self.is_here else None

    def holders_for_sums(self) -> HoldersForSums | None:
        return self._holders_for_sums

    @cached_property
    def _holders_for_sums(self) -> HoldersForSums:
        """Computes :meth:`holders_for_sums`. Collective.

        Replicas are along the replicated dims of the mesh, and in the other slices of a root mesh that was sliced.
        """
        mesh_ranks, slices = self._mesh.mesh.flatten(), _ranks_by_slice(self._mesh)
        members, known_holders = frozenset(mesh_ranks.tolist()), frozenset(slices.flatten().tolist())
        store = _get_default_store() if len(known_holders) < get_world_size() else None
        if self._coordinate is None:
            return HoldersForSums(None, members, frozenset(), known_holders, store)
        of_part = tuple(i if dim in self._sharding_dims else slice(None) for dim, i in enumerate(self._coordinate))
        is_replica = torch.isin(mesh_ranks, self._mesh.mesh[of_part].flatten())
        replicas, own = slices[is_replica].flatten().tolist(), self._mesh.get_rank()
        lower_replicas = frozenset(replica for replica in replicas if replica < own)
        # Without dims of one rank, so that a mesh with one other dim needs no new process group.
        dims = [dim for dim in range(self._mesh.ndim) if self._mesh.size(dim) > 1] or [0]
        return HoldersForSums(self._make_group_along(dims), members, lower_replicas, known_holders, store)

    def make_part_group(self) -> TorchRankGroup | None:
        return self._make_group_along(self._sharding_dims) if self._sharding_dims and self.is_here else None

    @property
    def _global_ranks(self) -> tuple[int, ...]:
        return tuple(self._mesh.mesh.flatten().tolist())

    def local(self, tensor: Tensor) -> Tensor:
        return unwrapped(_local(tensor))

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
        # Not DTensor.from_local: it would move the state of an offloaded parameter to the mesh's device.
        shape = (*self.global_shape, *local.shape[len(self.local_shape) :])
        meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), local.dtype)
        spec: Any = DTensorSpec(self._mesh, self._placements, tensor_meta=meta)
        return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def part(self, whole: Tensor) -> Tensor:
        # Not by redistribute: PyTorch 2.8 cuts uneven strided shards otherwise than fully_shard.
        if not self.is_here:
            return torch.empty(0, dtype=whole.dtype, device=self._device)
        return move_to(self._device, super().part(whole)).contiguous()

    def _group_along(self, dims: Sequence[int]) -> TorchRankGroup:
        """The ranks whose mesh coordinates differ from this rank's in ``dims`` only: one process group per dim."""
        return TorchRankGroup(tuple(map(self._mesh.get_group, dims)), self._device)

    def _make_group_along(self, dims: Sequence[int]) -> TorchRankGroup:
        """The ranks of :meth:`_group_along` as a single process group, made if needed. Collective."""
        if len(dims) == 1:
            return self._group_along(dims)
        along = tuple(slice(None) if dim in dims else i for dim, i in enumerate(self._coordinate or ()))
        return TorchRankGroup((make_group(sorted(self._mesh.mesh[along].flatten().tolist())),), self._device)


def _order_of_cuts(placements: tuple[Any, ...], sharded: Sequence[int], mesh: tuple[int, ...]) -> list[int]:
    """The mesh dimensions that shard a parameter, in the order in which they cut it.

    A ``_StridedShard`` cuts the parts that later mesh dims make of its dim: FSDP2 cuts tensor-parallel shards so.
    Strided dims therefore cut last, the first one after the others. RuntimeError if ``split_factor`` is another number.
    """
    strided = [dim for dim in sharded if getattr(placements[dim], "split_factor", 1) > 1]
    for dim in strided:
        later = [mesh[other] for other in sharded if other > dim and placements[other].dim == placements[dim].dim]
        if placements[dim].split_factor != math.prod(later):
            raise RuntimeError(
                f"got a parameter with placements {placements} on a mesh of shape {mesh}, expected a _StridedShard to "
                f"have a split_factor of {math.prod(later)}, the parts that later mesh dims make of its dim, as "
                "fully_shard gives it; shard the parameter with Shard"
            )
    return [dim for dim in sharded if dim not in strided] + strided[::-1]


def _ranks_by_slice(mesh: DeviceMesh) -> Tensor:
    """A matrix with a row per rank of a mesh: the global ranks with its place in each slice of the root mesh.

    A parameter on ``root["tp"]`` of a root mesh ("dp", "tp") has replicas in the other slices, which hold the same
    parameter by convention. The matrix has one column, the mesh's own ranks, if the mesh is not such a slice.
    """
    mesh_ranks = mesh.mesh.flatten()
    if hasattr(mesh, "_get_root_mesh"):
        root = mesh._get_root_mesh().mesh
    else:  # before PyTorch 2.9
        root = torch.distributed.device_mesh._mesh_resources.get_root_mesh(mesh).mesh
    coordinates = torch.isin(root, mesh_ranks).nonzero()
    varying = [dim for dim in range(root.ndim) if bool((coordinates[:, dim] != coordinates[0, dim]).any())]
    fixed = [dim for dim in range(root.ndim) if dim not in varying]
    if len(coordinates) != len(mesh_ranks) or math.prod(root.size(dim) for dim in varying) != len(mesh_ranks):
        return mesh_ranks[:, None]
    slices = root.permute(*varying, *fixed).reshape(len(mesh_ranks), -1)  # a slice per column
    own_slice = slices[:, torch.isin(slices, mesh_ranks).all(0)].flatten()
    return torch.stack([slices[int((own_slice == rank).nonzero())] for rank in mesh_ranks])  # in the mesh's order


def _local(tensor: Tensor) -> Tensor:
    """A DTensor's local tensor, after waiting for a collective that computes it."""
    if not isinstance(tensor, DTensor):
        raise RuntimeError(
            f"got a plain tensor of shape {tuple(tensor.shape)} for a DTensor parameter, expected a DTensor; load it "
            "with load_state_dict, or wrap it with DTensor.from_local"
        )
    local = tensor.to_local()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


_shards: dict[tuple[Any, ...], DTensorShard] = {}


def shard_of_dtensor(param: DTensor) -> DTensorShard:
    """The shard of a DTensor parameter, cached by mesh, shape and placements.

    Raises:
        RuntimeError: the placements are unsupported (such as Partial), or this rank's local tensor has another shape
            than the placements give, or another dtype than the DTensor.
    """
    mesh, local = param.device_mesh, param._local_tensor
    # By identity, as an equal mesh may have process groups that are gone. The shard keeps its mesh alive.
    key = (id(mesh), param.shape, param.placements)
    shard = _shards.get(key)
    if shard is None:
        if len(_shards) >= _MOST_CACHED:
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
