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
from shardopt.layout import BlockGrid, Counted, Shard
from shardopt.layout.partition import Cut, GridPartition
from shardopt.sharding.rank_group import TorchRankGroup, joint_group, moved_to, own_device

_CACHED_SHARDS = 8192


class DTensorShard(Shard):
    """The part of a DTensor parameter on this rank, computed from the DTensor's device mesh and placements."""

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
        if device is None or device.type != mesh.device_type:  # offloaded, or without memory
            device = own_device(mesh.device_type)
        self._device = device
        #: The mesh dimensions that shard the parameter, and in which order they cut it.
        self._sharded = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
        self._cutting = _in_order(placements, self._sharded, tuple(mesh.shape))
        strides = [math.prod(mesh.shape[dim + 1 :]) for dim in range(mesh.ndim)]  # of ranks in the flattened mesh
        cuts = [Cut(placements[dim].dim, mesh.shape[dim], strides[dim]) for dim in self._cutting]  # type: ignore[attr-defined]
        self._coordinate = coordinate = mesh.get_coordinate()
        self.is_here = coordinate is not None
        offset = sum(at * stride for at, stride in zip(coordinate or (), strides, strict=False))
        super().__init__(global_shape, GridPartition(tuple(cuts)), offset)
        if not self.is_here:  # torch makes an empty local tensor
            self.indices, self.local_shape = ((0, 0),) * len(global_shape), (0,)

    def _matrix_of_blocks(self, grid: BlockGrid) -> DTensorShard:
        alike = self._is_aligned(grid)
        placements = [p if alike or getattr(p, "dim", 0) == 0 else Replicate() for p in self._placements]
        return DTensorShard((grid.rows, grid.blocks_per_row), self._mesh, tuple(placements), self._device)

    @cached_property
    def holders(self) -> TorchRankGroup | None:  # type: ignore[override]
        return self._along(range(self._mesh.ndim)) if self.is_here else None

    @cached_property
    def row_owners(self) -> TorchRankGroup | None:  # type: ignore[override]
        across = [dim for dim in self._sharded if self._placements[dim].dim > 0]  # type: ignore[attr-defined]
        return self._along(across) if across and self.is_here else None

    def counted(self) -> Counted | None:
        return self._counted

    @cached_property
    def _counted(self) -> Counted:
        """Computes :meth:`counted`; copies are along replicated mesh dims and in other slices of a sliced root mesh."""
        numbers, slices = self._mesh.mesh.flatten(), _slices(self._mesh)
        members, reach = frozenset(numbers.tolist()), frozenset(slices.flatten().tolist())
        store = _get_default_store() if len(reach) < get_world_size() else None
        if self._coordinate is None:
            return Counted(None, members, frozenset(), reach, store)
        at = tuple(i if dim in self._sharded else slice(None) for dim, i in enumerate(self._coordinate))
        alike = torch.isin(numbers, self._mesh.mesh[at].flatten())
        own = self._mesh.get_rank()
        before = frozenset(number for number in slices[alike].flatten().tolist() if number < own)
        dims = [dim for dim in range(self._mesh.ndim) if self._mesh.size(dim) > 1] or [0]
        return Counted(self._joint(dims), members, before, reach, store)

    def divided_among(self) -> TorchRankGroup | None:
        return self._joint(self._sharded) if self._sharded and self.is_here else None

    @property
    def _numbers(self) -> tuple[int, ...]:
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
        return moved_to(self._device, super().part(whole)).contiguous()

    def _along(self, dims: Sequence[int]) -> TorchRankGroup:
        """The ranks whose mesh coordinates differ from this rank's in ``dims`` only: one process group per dim."""
        return TorchRankGroup(tuple(map(self._mesh.get_group, dims)), self._device)

    def _joint(self, dims: Sequence[int]) -> TorchRankGroup:
        """The ranks of :meth:`_along` as a single process group, made if needed; all of the ranks must call this."""
        if len(dims) == 1:
            return self._along(dims)
        at = tuple(slice(None) if dim in dims else i for dim, i in enumerate(self._coordinate or ()))
        return TorchRankGroup((joint_group(sorted(self._mesh.mesh[at].flatten().tolist())),), self._device)


def _in_order(placements: tuple[Any, ...], sharded: Sequence[int], mesh: tuple[int, ...]) -> list[int]:
    """The mesh dimensions that shard a parameter, in the order in which they cut it.

    A ``_StridedShard`` cuts the parts that later mesh dims make of its dim: FSDP2 cuts tensor-parallel shards so.

    Raises:
        RuntimeError: the ``split_factor`` of a ``_StridedShard`` is not the number of these parts.
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


def _slices(mesh: DeviceMesh) -> Tensor:
    """A row per rank of a mesh: its global number, and its counterparts' numbers in other slices of the root mesh.

    The matrix has one column if the mesh is not a slice of a larger mesh.
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
