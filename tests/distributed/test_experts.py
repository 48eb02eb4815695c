"""Parameters that not all ranks hold, such as experts: checkpoints, and what other ranks hear of one's errors.

Steps and norms, at random: ``tests/checkpoint/attack/submeshes.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import shardopt
from ranks.layouts import distribute, mesh_of, values
from ranks.pool import Pool
from ranks.snapshot import assert_same, local, snapshot

OPTIONS = {"min_quantized_numel": 64, "block_size": 32}


class Separate(nn.Module):
    """A router and experts that are modules of their own; some of them, or all."""

    def __init__(self, seed: int, experts: Iterable[int] = range(4)) -> None:
        super().__init__()
        self.router = nn.Parameter(values((4, 33), seed))
        self.experts = nn.ModuleDict({str(expert): nn.Module() for expert in experts})
        for expert, module in self.experts.items():
            module.weight = nn.Parameter(values((6, 7, 40), seed + int(expert)))


@lru_cache(maxsize=1)
def _meshes() -> list[DeviceMesh]:
    return [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]


def _apart(everywhere: bool, steps: int, seed: int = 0) -> tuple[nn.Module, Any]:
    """Ranks 0 and 1 share two experts, ranks 2 and 3 the other two; an expert's rows are cut if its number is odd.

    With ``everywhere`` all ranks have modules of all experts, empty ones of those that they have no part of.
    """
    meshes, pair = _meshes(), dist.get_rank() // 2
    model = Separate(seed, range(4) if everywhere else range(2 * pair, 2 * pair + 2))
    for expert, module in model.experts.items():
        whole, placement = module.weight.detach(), Shard(2 if int(expert) % 2 else 0)
        module.weight = nn.Parameter(distribute(whole, meshes[int(expert) // 2], (placement,)))
    return _stepped(model, steps)


def _stepped(model: nn.Module, steps: int, first: int = 0, optimizer: Any = None) -> tuple[nn.Module, Any]:
    """Takes steps with gradients that follow from the names, of parameters that this rank has a part of."""
    optimizer = optimizer or shardopt.AdamW8bit(model.parameters(), **OPTIONS)
    for step in range(first, first + steps):
        for name, param in model.named_parameters():
            gradient = values(tuple(param.shape), 100 * step + sum(map(ord, name)))
            if not isinstance(param, DTensor):
                param.grad = gradient
            elif param.device_mesh.get_coordinate() is not None:
                param.grad = distribute(gradient, param.device_mesh, param.placements)
        optimizer.step()
    return model, optimizer


def _save_apart(everywhere: bool, path: Path) -> None:
    shardopt.checkpoint.save(path, *_apart(everywhere, 2))


def _save_whole(path: Path) -> None:
    shardopt.checkpoint.save(path, *_stepped(Separate(0), 2))


def _load_whole(path: Path) -> None:
    model, optimizer = _stepped(Separate(10), 1)
    shardopt.checkpoint.load(path, model, optimizer)
    runs = (model, optimizer), _stepped(Separate(0), 2)
    assert_same(*(snapshot(dict(of.named_parameters()), stepped) for of, stepped in runs))


def _load_apart(everywhere: bool, path: Path) -> None:
    """Compares this rank's parts with a run of one process, after the load and after another step."""
    model, optimizer = _apart(everywhere, 1, seed=10)
    shardopt.checkpoint.load(path, model, optimizer)
    whole, expected = _stepped(Separate(0), 2)
    own = {name for name, param in model.named_parameters() if local(param).numel()}
    for more in (0, 1):
        _stepped(model, more, 2, optimizer)
        _stepped(whole, more, 2, expected)
        found = (snapshot(dict(m.named_parameters()), o) for m, o in ((model, optimizer), (whole, expected)))
        assert_same(*({name: x for name, x in each.items() if name.split("/")[0] in own} for each in found))
    assert len(own) == 3


@pytest.mark.parametrize("everywhere", [False, True])
def test_experts_on_meshes_of_their_own(ranks: Pool, tmp_path: Path, everywhere: bool) -> None:
    ranks.run(4, _save_apart, everywhere, tmp_path / "apart")
    ranks.run(1, _load_whole, tmp_path / "apart")
    ranks.run(1, _save_whole, tmp_path / "whole")
    ranks.run(4, _load_apart, everywhere, tmp_path / "whole")
    ranks.run(4, _load_apart, not everywhere, tmp_path / "apart")


@pytest.mark.ranks(4)
@pytest.mark.parametrize("width", [200, 512])
def test_a_change_of_one_rank_raises_on_the_ranks_of_its_expert(width: int) -> None:
    """Also where no blocks are cut, and on all ranks, which share the other parameter: no rank waits."""
    rank = dist.get_rank()
    shared = nn.Parameter(distribute(values((8, width), 0), mesh_of((4,)), (Shard(1),)))
    expert = nn.Parameter(distribute(values((8, 202 if width == 512 else 512), 1), _meshes()[rank // 2], (Shard(1),)))
    optimizer = shardopt.AdamW8bit([expert], min_quantized_numel=0)
    optimizer.add_param_group({"params": [shared]})
    for step in range(2):
        for param in (shared, expert):
            param.grad = distribute(values(tuple(param.shape), 9 + step), param.device_mesh, param.placements)
        if step == 1 and rank == 1:
            optimizer.param_groups[0]["stochastic_rounding_seed"] = 7
        if step == 0:
            optimizer.step()
        else:
            named = "stochastic_rounding_seed" if rank < 2 else "parameters of which this rank holds no part"
            with pytest.raises(RuntimeError, match=f"got ranks that differ in {named}"):
                optimizer.step()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("leave_out", [False, True])
def test_a_nan_in_one_expert_raises_on_all_ranks(leave_out: bool) -> None:
    """Ranks of the other expert, or without one, share a parameter with the first one's."""
    pair = dist.get_rank() // 2
    shared = nn.Parameter(distribute(values((8, 64), 0), mesh_of((4,)), (Shard(0),)))
    expert = nn.Parameter(distribute(values((8, 64), 1 + pair), _meshes()[pair], (Shard(0),)))
    params = (shared,) if leave_out and pair == 1 else (shared, expert)
    optimizer = shardopt.AdamW8bit(params, min_quantized_numel=0, nonfinite="raise")
    for step in range(3):
        for param in params:
            gradient = values(tuple(param.shape), 9 + step)
            if step == 1 and param is expert and pair == 0:
                gradient[0, 0] = math.nan
            param.grad = distribute(gradient, param.device_mesh, param.placements)
        if step == 1:
            names = "parameter 1 of param group 0" if pair == 0 else "a parameter of other ranks"
            with pytest.raises(FloatingPointError, match=f"{names}.*: got a gradient with NaN or Inf"):
                optimizer.step()
        else:
            optimizer.step()
    assert [int(optimizer.state[param]["step"]) for param in params] == [2] * len(params)


@pytest.mark.ranks(3)
def test_a_norm_that_a_rank_does_not_take_part_in() -> None:
    """Rank 2 has no part of two experts, and no norm of theirs; later it shares the norm of one of them."""
    rank = dist.get_rank()
    experts = [nn.Parameter(distribute(values((4, 8), i), DeviceMesh("cpu", [i]), (Shard(0),))) for i in range(2)]
    for step in range(3):
        plain = nn.Parameter(values((3,), step))
        for param in (*experts, plain):
            param.grad = param.detach() * (step + 1)
        if rank < 2:
            shardopt.clip_grad_norm_(experts, 1e9)
        elif step == 1:
            with pytest.raises(RuntimeError, match="expected a mesh with all ranks that share parameters"):
                shardopt.clip_grad_norm_(experts, 1e9)
        norm = shardopt.clip_grad_norm_([experts[0], plain], 1e9)
        whole = torch.cat([values((4, 8), 0).flatten(), values((3,), step)]) * (step + 1)
        torch.testing.assert_close(norm, whole.norm())
