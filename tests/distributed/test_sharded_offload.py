"""State in the host's memory beside ``test_layouts.py``: what stays or is refused, and threads."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import shardopt
from ranks.flat import forget_shards
from ranks.layouts import mesh_of
from ranks.models import WAYS, make_net
from ranks.offload import offload_from_cpu, slow_steps
from ranks.snapshot import assert_same, snapshot
from shardopt.state import host_memory

STEPS = 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("late", [False, True])
def test_flat_shards_that_cannot_be_offloaded(late: bool) -> None:
    """The error comes when the optimizer is made; for a model wrapped before the import of shardopt, from attach()."""
    model = WAYS["fsdp1"](make_net())
    if late:
        forget_shards(model)

    def tell(**options: object) -> None:
        optimizer = shardopt.AdamW8bit(model.parameters(), **options)
        if late:
            optimizer.attach(model)

    with offload_from_cpu():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host_memory, "_available_host_bytes", lambda: 1000)
            with pytest.raises(MemoryError, match="got 1000 bytes of available host memory"):
                tell(offload="state")
        if late:
            forget_shards(model)
        with pytest.raises(RuntimeError, match="offload='step': got parameters of flat shards"):
            tell(offload="step")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


@pytest.mark.ranks(2)
def test_collectives_stay_in_the_thread_of_the_backward_pass() -> None:
    """Gradients that are reduced here come in another thread's way if that reduces them; one rank's is slow."""
    runs = []
    for how in (None, "step"):
        torch.manual_seed(0)
        model = nn.Sequential(_Block(), _Block(), _Block())
        for block in model:
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
            parallelize_module(block, mesh_of((dist.get_world_size(),)), plan)
        with offload_from_cpu(), slow_steps(0.02 * dist.get_rank()):
            optimizer = shardopt.AdamW8bit(model.parameters(), lr=1e-2, min_quantized_numel=64, offload=how)
            if how is not None:
                shardopt.release_gradients(model, optimizer)
            for step in range(STEPS):
                x = torch.randn((4, 8, 64), generator=torch.Generator().manual_seed(step))
                model(x.chunk(dist.get_world_size(), 1)[dist.get_rank()]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        runs.append(snapshot(dict(model.named_parameters()), optimizer))
    assert_same(runs[1], runs[0])
