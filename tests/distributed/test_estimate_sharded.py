"""The estimate of a sharded run, or of one under DeepSpeed, is what the rank that holds most takes up, within 1%."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardopt
from estimate_problem import TOKENS, Layers, assert_near, both, estimated_model
from ranks.deepspeed import OFFLOAD, WITHOUT_MASTERS, make_engine, masters
from ranks.offload import offload_from_cpu
from shardopt.estimate import Setup, estimate
from shardopt.estimate.ledger import DTYPES
from shardopt.sharding.deepspeed.engine import open_engine


def _wrapped(backend: str, dtype: torch.dtype) -> nn.Module:
    net = Layers().to(dtype)
    if backend == "fsdp2":
        for layer in (*net.layers, net):
            fully_shard(layer)
    if backend == "fsdp1":
        wrap = partial(FullyShardedDataParallel, use_orig_params=True, device_id=torch.device("cpu"))
        net.layers = nn.ModuleList(wrap(layer) for layer in net.layers)
        return wrap(net)
    return DistributedDataParallel(net, gradient_as_bucket_view=True) if backend == "ddp" else net


@pytest.mark.ranks
@pytest.mark.parametrize(("backend", "world_size"), [("ddp", 2), ("fsdp2", 2), ("fsdp2", 3), ("fsdp1", 2)])
def test_as_a_real_run(backend: str, world_size: int) -> None:
    cases: list[dict[str, Any]] = [
        {"dtype": "float32"},
        {"options": {"master_weight_bits": 24}},
        {"optimizer": "lion8bit", "options": {"block_size": 32}},
        {"options": {"offload": "state"}},
    ]
    with offload_from_cpu(1 << 17):
        for case in cases:
            setup = Setup(backend=backend, world_size=world_size, **case)
            net = _wrapped(backend, DTYPES[setup.dtype])
            optimizer = (shardopt.Lion8bit if setup.optimizer == "lion8bit" else shardopt.AdamW8bit)(
                net.parameters(), **setup.options
            )
            net(TOKENS).backward()
            optimizer.step()
            actual, expected = both(shardopt.memory_report(optimizer)), both(estimate(estimated_model(), setup))
            for report in (actual, expected):
                assert bool(report.pop("offload_buffers")) == ("offload" in setup.options)  # of smaller chunks here
            if dist.get_rank() == 0:
                assert_near(actual, expected)


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(
    ("stage", "bits", "zero_offload"), [(1, None, "none"), (2, None, "optimizer"), (2, 24, "none"), (3, None, "none")]
)
def test_deepspeed(stage: int, bits: int | None, zero_offload: str) -> None:
    options: dict[str, Any] = {} if bits is None else {"master_weight_bits": bits}
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW8bit", "params": {"lr": 1e-3, **options}},
        "zero_optimization": {"stage": stage, **(OFFLOAD if zero_offload == "optimizer" else {})},
        "bf16": {"enabled": True} if bits is None else WITHOUT_MASTERS,
    }
    engine = make_engine(Layers() if bits is None else Layers().bfloat16(), settings)
    engine.backward(engine(TOKENS))
    engine.step()
    expected = estimate(
        estimated_model(), Setup(backend=f"zero{stage}", world_size=2, zero_offload=zero_offload, options=options)
    )
    with open_engine(engine) as (_, optimizer):  # ZeRO 3 hides the masters from it otherwise
        found = both(shardopt.memory_report(optimizer))
    flats = sum(flat.numel() * flat.element_size() for flat, _ in masters(engine))
    wanted = both(expected)
    if bits is None:
        found["master_weights"] = flats
    else:
        assert flats == pytest.approx(wanted["gradients"], rel=0.01), "masters are the bf16 parameters"
    kinds = ("state", "scales", "master_weights")
    assert_near({kind: found[kind] for kind in kinds}, {kind: wanted[kind] for kind in kinds})
    on_host = expected.device.state == 0
    assert on_host == (zero_offload == "optimizer")
    assert expected.device.parameters == 2 * estimated_model().numel // (2 if stage == 3 else 1)
