"""Whole tensors and the parts of them that ranks hold, one from the other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ranks.layouts import COLUMN, ROW, deep_layouts, distribute, layouts, shard, values
from shardopt.layout import BlockGrid, shard_of
from versions import gathers_any_strided_shards, needs_uneven_fsdp2_and_tensor_parallel


def _assert_parts(param: DTensor, whole: Tensor, name: str, *, is_gathered: bool = True) -> None:
    found = shard_of(param)
    local = param.detach().to_local()
    assert torch.equal(found.part(whole), local), name
    assert not is_gathered or torch.equal(found.whole(local), whole), name
    pairs = torch.stack([whole, -whole], -1)
    assert torch.equal(found.part(pairs), torch.stack([local, -local], -1)), name
    grid = BlockGrid(tuple(whole.shape), 64)
    scales = torch.arange(float(grid.rows * grid.blocks_per_row)).view(grid.rows, grid.blocks_per_row)
    part = found.scales_part(scales, grid)
    blocks = found.local_blocks(grid)
    rows = torch.cat([scales[:0], *(scales[start:end] for start, end in found.indices[0])])
    assert torch.equal(part, rows[:, blocks.first : blocks.first + blocks.per_row]), name
    on_mesh = found.like_scales(part, grid)
    assert isinstance(on_mesh, DTensor)
    assert not is_gathered or torch.equal(on_mesh.full_tensor(), scales), name


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_layouts(world_size: int) -> None:
    for layout in (*layouts(dist.get_world_size()), *deep_layouts(dist.get_world_size())):
        whole = values(layout.shape, 0, layout.dtype)
        is_strided = any(isinstance(placement, _StridedShard) for placement in layout.placements)
        is_gathered = gathers_any_strided_shards or not is_strided
        _assert_parts(shard(whole, layout), whole, str(layout), is_gathered=is_gathered)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("rows", [97, 9, 3])
@pytest.mark.parametrize("placement", [pytest.param(ROW, marks=needs_uneven_fsdp2_and_tensor_parallel), COLUMN])
def test_fsdp2_and_tensor_parallel(rows: int, placement: Placement) -> None:
    """Uneven parts of dim 0, which ``distribute_tensor`` cuts otherwise than ``fully_shard`` in PyTorch 2.8."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = values((rows, 130), 0)
    layer = nn.Linear(130, rows, bias=False)
    layer.weight = nn.Parameter(distribute(whole, mesh["tp"], (placement,)))
    fully_shard(layer, mesh=mesh["dp"])
    assert isinstance(layer.weight, DTensor)
    _assert_parts(layer.weight, whole, str(placement))
