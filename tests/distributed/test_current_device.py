"""A rank's GPU is that of its parameters or of its group, whichever is the current one. Fake tensors stand for GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from shardopt.checkpoint import ranks
from shardopt.sharding import ddp, dtensor, exchange

SECOND = torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def first_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Where tensors are reduced."""
    found: list[torch.device] = []
    monkeypatch.setattr(exchange, "all_reduce", lambda tensor, op, group: found.append(tensor.device))
    return found


def _in_ddp(monkeypatch: pytest.MonkeyPatch, module: nn.Module) -> Any:
    """The ranks of a module in ``DDP(module.to(1), device_ids=[1])``."""
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module, wrapper.process_group, wrapper.parameters_to_ignore = module, "group", set()
    monkeypatch.setattr(ddp, "get_world_size", lambda group: 2)
    copies = ddp.copies_in_ddp(nn.Sequential(wrapper))
    return copies[module.weight].ranks


def test_ddp(monkeypatch: pytest.MonkeyPatch, reduced: list[torch.device]) -> None:
    with FakeTensorMode():
        found = _in_ddp(monkeypatch, nn.LayerNorm(4, device=SECOND))
        for tensor in (torch.zeros(3, device=SECOND), torch.zeros(3)):
            found.all_reduce_max(tensor)
        assert found.within_reach(torch.zeros(3, device=SECOND)).device == SECOND
    assert reduced == [SECOND, SECOND]


@pytest.mark.parametrize(("local", "expected"), [(SECOND, 1), ("cpu", 0)])
def test_dtensor(local: Any, expected: int) -> None:
    """An offloaded parameter's device is the current GPU when the shard is made, as fully_shard has it."""
    mesh = SimpleNamespace(device_type="cuda", get_coordinate=lambda: [0], ndim=1, size=lambda dim=0: 1, shape=(1,))
    with FakeTensorMode():
        tensor = torch.zeros(3, 4, device=local)
        param: Any = SimpleNamespace(
            device_mesh=mesh, shape=tensor.shape, dtype=tensor.dtype, placements=(Shard(0),), _local_tensor=tensor
        )
        shard = dtensor.shard_of_dtensor(param)
        assert shard.part(torch.zeros(3, 4)).device == torch.device("cuda", expected)
        assert shard.part(torch.zeros(3, 4, device=SECOND)).device == SECOND


@pytest.mark.parametrize(("bound", "expected"), [(SECOND, 1), (None, 0)])
def test_messages_of_a_checkpoint(bound: torch.device | None, expected: int) -> None:
    group: Any = SimpleNamespace(_device_types=[torch.device("cuda")], bound_device_id=bound)
    assert exchange.device_of(group) == torch.device("cuda", expected)


def test_a_save_makes_the_models_gpu_current(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *error: object) -> None:
            entered.pop()

    monkeypatch.setattr(torch.cuda, "device", Device)
    with FakeTensorMode():
        model = nn.LayerNorm(4, device=SECOND)
    with ranks.on_device_of(model):
        assert entered == [SECOND]
    with ranks.on_device_of(nn.LayerNorm(4)):
        assert not entered
