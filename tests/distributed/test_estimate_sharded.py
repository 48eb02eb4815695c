"""The estimate of every rank is what it takes in a real sharded run, byte for byte."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import shardopt
from estimate_problem import both, host_bytes
from ranks.offload import offload_from_cpu
from ranks.shaped import MODELS, Shaped, most_gradient_bytes, small_model
from shardopt.estimate import Model, Setup, estimate
from shardopt.estimate.backends import BACKENDS
from shardopt.estimate.ledger import DTYPES


def _wrapped(backend: str, model: Model, dtype: torch.dtype) -> nn.Module:
    net = Shaped(model).to(dtype)
    if backend == "fsdp2":
        for layer in (*net.layers, net):
            fully_shard(layer)
    if backend == "fsdp1":
        wrap = partial(FullyShardedDataParallel, use_orig_params=True, device_id=torch.device("cpu"))
        net.layers = nn.ModuleList(wrap(layer) for layer in net.layers)
        return wrap(net)
    if backend in ("ddp", "zero_redundancy"):
        return DistributedDataParallel(net, gradient_as_bucket_view=True)
    return net


def _compare(name: str, setup: Setup) -> None:
    model, rank = small_model(**MODELS[name]), dist.get_rank()
    expected = estimate(model, setup, rank)
    net = _wrapped(setup.backend, model, DTYPES[setup.dtype])
    params = list(net.parameters())
    if setup.backend == "zero_redundancy":
        optimizer = ZeroRedundancyOptimizer(params, optimizer_class=shardopt.AdamW8bit, **setup.options)
    else:
        optimizer = shardopt.AdamW8bit(params, **setup.options)
    with most_gradient_bytes(params if setup.release_gradients else []) as most:
        if setup.release_gradients:
            shardopt.release_gradients(net, optimizer)
        sums = 0
        if setup.micro_batches is not None:
            shardopt.comm.ordered_gradients(net, micro_batches=setup.micro_batches)
            for _ in range(setup.micro_batches // setup.world_size - 1):
                net(torch.zeros(())).backward()
                sums = max(sums, shardopt.memory_report(optimizer).host.gradient_sums)
        net(torch.zeros(())).backward()
        optimizer.step()
        report = shardopt.memory_report(optimizer)
        assert report.host.gradient_sums == 0
        report.host.gradient_sums = sums
        actual, kinds = both(report), both(expected)
        assert report.numel == expected.numel
        if setup.backend == "ddp" and setup.release_gradients:
            buckets = net._get_ddp_logging_data()["bucket_sizes"]
            actual["gradients"] = sum(int(size) for size in buckets.split(","))
        elif setup.release_gradients:
            actual["gradients"] = most()
            if setup.options.get("offload") == "step":  # it depends on how fast the thread is
                assert 0 < actual.pop("gradients") <= kinds.pop("gradients")
    assert actual == kinds, f"{name}, {setup}: got {actual}, expected {kinds}"
    assert expected.host.total - expected.host.offload_buffers == host_bytes(getattr(optimizer, "optim", optimizer)), (
        f"{name}, {setup}"
    )
    of_all = [estimate(model, setup, other) for other in range(setup.world_size)]
    most_of_any = estimate(model, setup)
    assert most_of_any.device.total == max(report.device.total for report in of_all)
    assert most_of_any.host.total == max(report.host.total for report in of_all)


def _cases(backend: str, world_size: int) -> list[tuple[str, Setup]]:
    """Every model; every codec with every weight format; every offload with gradients kept and released."""
    make = partial(Setup, backend=backend, world_size=world_size)
    cases = [(name, make()) for name in MODELS]
    for codec in ("log8", "companded8", "fp32"):
        cases.append(("odd", make(dtype="float32", options={"codec": codec})))
        cases += [("odd", make(options={"codec": codec, "master_weight_bits": bits})) for bits in (24, 32)]
    if BACKENDS[backend].orders:
        cases += [("odd", make(micro_batches=12)), ("few rows", make(micro_batches=7 * world_size))]
    offloads = [None, "state", "step"] if BACKENDS[backend].steps_on_host else [None, "state"]
    for offload in offloads:
        for release in (False, True) if BACKENDS[backend].releases else (False,):
            for budget in (0, "100KiB") if offload is not None else (0,):
                options = {"offload": offload, "device_state_budget": budget, "master_weight_bits": 24}
                cases.append(("odd", make(release_gradients=release, options=options)))
    return cases


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("backend", "world_size"),
    [
        *(("ddp", 2), ("fsdp2", 1), ("fsdp2", 3), ("fsdp1", 3), ("zero_redundancy", 3)),
        *(pytest.param(backend, 2, marks=pytest.mark.slow) for backend in ("fsdp2", "fsdp1")),
    ],
)
def test_as_a_real_run(backend: str, world_size: int) -> None:
    cases = _cases(backend, world_size)
    with offload_from_cpu(1 << 17):
        for name, setup in cases:
            _compare(name, setup)
