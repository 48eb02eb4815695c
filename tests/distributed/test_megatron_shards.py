"""Shards read from the buffers of Megatron's DistributedOptimizer; a stand-in has the attributes that are read.

``tests/clients/test_megatron.py`` runs the same with Megatron-Core itself.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

import shardopt
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.layout import UnknownShardError, shard_of

#: Blocks of 128 that ranges cut; a parameter of which a single rank has elements; a matrix over three ranks.
SHAPES = {"long": (9, 300), "few": (2, 33), "bias": (5,), "row": (1, 257), "wide": (40, 130)}
BUCKETS = (("wide", "row"), ("bias", "few", "long"))  # Megatron lays parameters out from the last one to the first
STEPS = 2
#: Files of Megatron's optimizer, and a class of each.
OF_MEGATRON = {"distrib_optimizer": "DistributedOptimizer", "cpu_offloading": "HybridDeviceOptimizer"}


def import_client() -> Any:
    """``shardopt.clients.megatron`` on modules without content, whether Megatron-Core is installed or not."""
    names = ("megatron", "megatron.core", "megatron.core.optimizer")
    modules = {name: ModuleType(name) for name in (*names, *(f"{names[2]}.{file}" for file in OF_MEGATRON))}
    for file, name in OF_MEGATRON.items():
        setattr(modules[f"{names[2]}.{file}"], name, type(name, (), {}))
        setattr(modules[names[2]], file, modules[f"{names[2]}.{file}"])
    with mock.patch.dict(sys.modules, modules):
        sys.modules.pop("shardopt.clients.megatron", None)
        return importlib.import_module("shardopt.clients.megatron")


def model_of() -> nn.Module:
    """The whole parameters, equal on all ranks."""
    model = nn.Module()
    for seed, (name, shape) in enumerate(SHAPES.items()):
        model.register_parameter(name, Parameter(values(shape, seed)))
    return model


def range_of(start: int, end: int) -> Any:
    return SimpleNamespace(start=start, end=end)


def stand_in(model: nn.Module) -> Any:
    """An object with a DistributedOptimizer's buffers, ranges and param groups: matrices, and the rest."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    places: dict[Any, tuple[int, int, int]] = {}
    buckets, ranges, offset = [], [], 0
    for number, names in enumerate(BUCKETS):
        end = offset
        for name in names:
            param = getattr(model, name)
            places[param] = (end, end + param.numel(), number)
            end += param.numel()
        size = -(-(end - offset) // (64 * ranks)) * 64
        first, last = offset + rank * size, offset + (rank + 1) * size
        held = {}
        for param, (begin, stop, of_bucket) in places.items():
            if of_bucket == number and max(first, begin) < min(last, stop):
                held[param] = {"param": range_of(max(first, begin) - begin, min(last, stop) - begin)}
        ranges.append({"param_map": held})
        buckets.append(SimpleNamespace(offset=offset, grad_data=torch.empty(ranks * size)))
        offset += ranks * size
    groups: tuple[list[Any], list[Any]] = ([], [])
    views: tuple[list[Any], list[Any]] = ([], [])
    for of_bucket in ranges:
        for param, known in of_bucket["param_map"].items():
            which = int(param.dim() == 1)
            groups[which].append(param)
            views[which].append(param.view(-1)[known["param"].start : known["param"].end])
    return SimpleNamespace(
        data_parallel_group=dist.group.WORLD,
        buffers=[SimpleNamespace(param_index_map=places, buckets=buckets)],
        gbuf_ranges=[{("float32", "float32"): ranges}],
        model_chunks=[model],
        model_fp32_groups=groups,
        shard_fp32_groups=views,
        model_float16_groups=([], []),
        shard_fp32_from_float16_groups=([], []),
    )


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [3, 2, 1])
@pytest.mark.parametrize("optimizer_class", [shardopt.AdamW8bit, shardopt.LAMB8bit], ids=lambda cls: cls.__name__)
def test_bits_of_the_unsharded_run(world_size: int, optimizer_class: Any) -> None:
    """The bits of the unsharded run, on ranks that have nothing of some parameters."""
    client, model, whole = import_client(), model_of(), model_of()
    wrapper = stand_in(model)
    nonempty = client.nonempty_by_group(wrapper)
    stepped = client.stepped_by_group(client.shards_of(wrapper), nonempty, wrapper.data_parallel_group)
    assert [[tuple(p.shape) for p in group] for group in stepped] == [
        [shape for shape in SHAPES.values() if (len(shape) == 1) == one] for one in (False, True)
    ]
    matrices, rest = ([*group.values()] for group in stepped)
    optimizer = optimizer_class([{"params": matrices}, {"params": rest}], min_quantized_numel=64)
    named = dict(whole.named_parameters())
    others = [[p for p in named.values() if (p.dim() == 1) == one] for one in (False, True)]
    expected = optimizer_class([{"params": params} for params in others], min_quantized_numel=64)
    tensors = {param: tensor for group in stepped for param, tensor in group.items()}
    for step in range(STEPS):
        for index, (name, param) in enumerate(model.named_parameters()):
            named[name].grad = values(SHAPES[name], 100 + 10 * step + index)
            tensor, shard = tensors[param], shard_of(tensors[param])
            if tensor.numel():
                tensor.grad = named[name].grad.reshape(-1)[shard.start : shard.end].clone()
        optimizer.step()
        expected.step()
    for name, param in model.named_parameters():
        tensor, shard = tensors[param], shard_of(tensors[param])
        start, end = shard.start, shard.end
        held = {name: named[name].detach().reshape(-1)[start:end]}
        assert_same({name: tensor.detach()}, held)
        assert_same({name: param.detach().reshape(-1)[start:end]}, held)  # the tensors are views of the parameters
        codes = expected.state[named[name]].get("exp_avg_codes")
        if tensor.numel() and codes is not None:
            assert_same({name: optimizer.state[tensor]["exp_avg_codes"]}, {name: codes.reshape(-1)[start:end]})


@pytest.mark.ranks(2)
def test_another_account_of_the_ranges() -> None:
    """Megatron's own ranges are compared with the buckets': a version that divides otherwise is refused."""
    model = model_of()
    wrapper = stand_in(model)
    (ranges,) = wrapper.gbuf_ranges[0].values()
    known = next(iter(ranges[0]["param_map"].values()))
    known["param"].end -= 1
    with pytest.raises(UnknownShardError, match="Megatron-Core shards in a way"):
        import_client().shards_of(wrapper)
