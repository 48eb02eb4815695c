"""Autograd notices a step of DTensors and of replicated parameters, as with torch.optim."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import shardopt
from ranks.layouts import COLUMN, ROW, WHOLE, mesh_of, values

OPTIMIZERS: dict[str, type[Optimizer]] = {"torch": torch.optim.AdamW, "shardopt": shardopt.AdamW}
PLACEMENTS = {"row": ROW, "column": COLUMN, "whole": WHOLE}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_dtensors(optimizer_name: str, placement: str) -> None:
    weight = nn.Parameter(distribute_tensor(values((64, 66), 0), mesh_of((2,)), (PLACEMENTS[placement],)))
    x = distribute_tensor(values((2, 64), 1), mesh_of((2,)), (WHOLE,)).requires_grad_(True)
    optimizer = OPTIMIZERS[optimizer_name]([weight])
    for _ in range(3):
        loss = (x @ weight).square().sum()
        loss.backward(retain_graph=True)
        local = weight.to_local()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        local.square().sum().backward()  # it shares the memory, and is not the tensor that was stepped
        optimizer.zero_grad()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_replicas(optimizer_name: str) -> None:
    torch.manual_seed(0)
    replica = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)))
    optimizer = OPTIMIZERS[optimizer_name](replica.parameters())
    for t in range(3):
        x = values((2, 64), t + dist.get_rank())
        apart = replica.module(x).square().mean()
        replica(x).square().mean().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            apart.backward()
        optimizer.zero_grad()
