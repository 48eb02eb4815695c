"""Parameters to shard, and the ways in which DTensors shard them. Sizes are chosen to hurt."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from versions import cuts_uneven_strided_shards

Shape = tuple[int, ...]
Placements = tuple[Placement, ...]

#: Dim 0 uneven, short and of one row; rows that end within a block, at one, just after one, and with no block cut.
MATRICES: tuple[Shape, ...] = ((97, 130), (70, 96), (3, 257), (1, 4099), (40, 66), (9, 512))
#: Convolution weights: a shard of dim 1 takes a multiple of 9, 15, 256 or 8 columns, or none.
CONVOLUTIONS: tuple[Shape, ...] = ((20, 7, 3, 3), (12, 9, 15), (6, 5, 8, 32), (8, 5, 8))
#: State in float32: a bias, a norm's weight, one element, rows too short for a scale.
SMALL: tuple[Shape, ...] = ((97,), (3,), (1,), (33, 31))

#: Stacks of experts and convolutions. With blocks of 128, a dim 2 of 256 or 384 is whole blocks; of 40 or 130 it leaves
#: a rank with several pieces of one block. A dim 2 of 5 or 3 leaves ranks with little or nothing.
EXPERTS: tuple[Shape, ...] = ((4, 6, 256), (2, 3, 384), (5, 7, 40), (3, 4, 130), (1, 5, 66))
DEEP_SHAPES: tuple[Shape, ...] = (*EXPERTS, (6, 9, 5, 24), (7, 20, 3, 3))

#: Options of `distribute_tensor`; PyTorch 2.6 has none for this.
_WITHOUT_COMMUNICATION = (
    {"src_data_rank": None} if "src_data_rank" in inspect.signature(distribute_tensor).parameters else {}
)

COLUMN, ROW, DEEP, WHOLE = Shard(1), Shard(0), Shard(2), Replicate()


class Layout(NamedTuple):
    """A parameter and the placements that shard it over a mesh of the world."""

    shape: Shape
    mesh: Shape
    placements: Placements
    dtype: torch.dtype

    def __str__(self) -> str:
        placements = "".join(str(placement) for placement in self.placements)
        return f"{'x'.join(map(str, self.shape))} {self.dtype} on {self.mesh} by {placements}"


def layouts(world_size: int) -> list[Layout]:
    """Every shape sharded in every way that a world and PyTorch allow, float32 and bfloat16 in turn."""
    ways: list[tuple[Shape, Placements]] = [((world_size,), (p,)) for p in (ROW, COLUMN, WHOLE)]
    mesh = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2)}[world_size]
    pairs = [(WHOLE, ROW), (ROW, WHOLE), (WHOLE, COLUMN), (ROW, COLUMN), (COLUMN, ROW), (ROW, ROW)]
    pairs += [(COLUMN, COLUMN), (_StridedShard(0, split_factor=mesh[1]), ROW)]
    ways += [(mesh, pair) for pair in pairs]
    found = []
    for mesh, placements in ways:
        for shape in (*MATRICES, *CONVOLUTIONS, *SMALL):
            if len(shape) > max(getattr(p, "dim", 0) for p in placements):
                dtype = torch.bfloat16 if len(found) % 2 else torch.float32
                found.append(Layout(shape, mesh, placements, dtype))
    return allowed(found)


def deep_layouts(world_size: int) -> list[Layout]:
    """Every shape in every way that leaves some rank with several ranges of a row's columns."""
    mesh = {2: (2, 1), 3: (1, 3), 4: (2, 2)}[world_size]
    ways: list[tuple[Shape, Placements]] = [((world_size,), (DEEP,))]
    pairs = [(ROW, DEEP), (DEEP, ROW), (COLUMN, DEEP), (DEEP, DEEP), (_StridedShard(2, split_factor=mesh[1]), DEEP)]
    ways += [(mesh, pair) for pair in pairs]
    return allowed(
        [
            Layout(shape, mesh, placements, torch.float32 if (i + j) % 2 else torch.bfloat16)
            for i, (mesh, placements) in enumerate(ways)
            for j, shape in enumerate((*DEEP_SHAPES, (5, 3, 4)))
        ]
    )


def allowed(found: Sequence[Layout]) -> list[Layout]:
    """The layouts that this version of PyTorch can make."""
    return [layout for layout in found if cuts_uneven_strided_shards or not _is_uneven(layout)]


def _is_uneven(layout: Layout) -> bool:
    """Whether a strided shard has its dim in parts of different sizes."""
    strided = [(p, n) for p, n in zip(layout.placements, layout.mesh, strict=True) if isinstance(p, _StridedShard)]
    return any(layout.shape[placement.dim] % (n * placement.split_factor) != 0 for placement, n in strided)


def values(shape: Shape, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers over several orders of magnitude, with some exact zeros, the same on all ranks."""
    return _values(shape, seed).to(dtype, copy=True)


@lru_cache(maxsize=8192)  # tests draw the same ones again and again
def _values(shape: Shape, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn((2, *shape), generator=generator)
    zero = torch.rand(shape, generator=generator) < 0.02
    return torch.where(zero, 0.0, normal[0] * torch.exp(2 * normal[1]))


def shard(whole: Tensor, layout: Layout) -> DTensor:
    """The DTensor of a whole tensor, which all ranks have."""
    return distribute(whole, mesh_of(layout.mesh), layout.placements)


def distribute(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """The DTensor of a whole tensor, which all ranks have: without communication where PyTorch can (2.7)."""
    return distribute_tensor(whole, mesh, placements, **_WITHOUT_COMMUNICATION)


def mesh_of(shape: Shape, *names: str) -> DeviceMesh:
    """The mesh of this shape over the world, with these names of its dimensions; each is made once."""
    world = dist.group.WORLD
    assert world is not None
    return _mesh(shape, names or None, world)


@lru_cache(maxsize=16)
def _mesh(shape: Shape, names: tuple[str, ...] | None, world: dist.ProcessGroup) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)
