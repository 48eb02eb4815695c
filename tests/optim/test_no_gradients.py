"""The first step warns when it finds no gradient: the optimizer was made of parameters that were replaced later."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardopt


def test_a_first_step_without_gradients_warns_once() -> None:
    optimizer = shardopt.AdamW8bit(torch.nn.Linear(64, 64).parameters())
    with pytest.warns(
        RuntimeWarning, match=r"no gradient in any of 2 parameters.*make the optimizer after fully_shard"
    ):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_a_first_step_with_one_gradient_does_not_warn() -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = shardopt.AdamW8bit(model.parameters())
    model.bias.grad = torch.ones(64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        model.bias.grad = None
        optimizer.step()


def test_steps_of_a_release_count() -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = shardopt.AdamW8bit(model.parameters())
    release = shardopt.release_gradients(model, optimizer)
    model(torch.ones(1, 64)).sum().backward()
    release.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_a_rank_that_holds_nothing_does_not_warn() -> None:
    """The rank is not part of the parameter's mesh."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = DeviceMesh("cpu", [1])
        param = torch.nn.Parameter(DTensor.from_local(torch.empty(0), mesh, [Shard(0)], shape=(8, 8), stride=(8, 1)))
        assert param.numel() == 64
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shardopt.AdamW8bit([param]).step()
    finally:
        dist.destroy_process_group()
