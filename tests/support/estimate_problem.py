"""A step of a real model with the parameters of an estimate, and what it took."""

from __future__ import annotations

from dataclasses import fields

import torch

import shardopt
from helpers import RULES
from ranks.shaped import Shaped, most_gradient_bytes
from shardopt.estimate import Model, Setup
from shardopt.estimate.ledger import DTYPES
from shardopt.layout import shard_of
from shardopt.optim import ShardedOptimizer
from shardopt.report import MemoryReport, MemoryUse

KINDS = [field.name for field in fields(MemoryUse)]
RULE_OF = {"adamw8bit": "adamw", "lion8bit": "lion", "sgd8bit": "momentum"}


def both(report: MemoryReport) -> dict[str, int]:
    """Bytes on device and host together: in these tests a run has only the CPU."""
    return {kind: getattr(report.device, kind) + getattr(report.host, kind) for kind in KINDS}


def run(model: Model, setup: Setup, hold: int = 0, device: str = "cpu") -> tuple[ShardedOptimizer, MemoryReport]:
    """A step of a real model; its optimizer, and its report with the most gradients that there were at once."""
    net = Shaped(model).to(device, DTYPES[setup.dtype])
    params = list(net.parameters())
    optimizer = RULES[RULE_OF[setup.optimizer]].make(params, **setup.options)
    with most_gradient_bytes(params, hold) as most:
        release = (
            shardopt.release_gradients(net, optimizer, waiting_gradients=setup.waiting_gradients)
            if setup.release_gradients
            else None
        )
        net(torch.zeros((), device=device)).backward()
        optimizer.step()
        optimizer.synchronize()
        report = shardopt.memory_report(optimizer)
        use = report.host if device == "cpu" else report.device
        if release is not None:
            release.remove()
            assert use.gradients == 0
            use.gradients = most()
        assert most() == use.gradients > 0
    return optimizer, report


def host_bytes(optimizer: ShardedOptimizer) -> int:
    """Offloaded state, which would stand in the host's memory if the parameters were on a GPU."""
    total = 0
    for param, state in optimizer.state.items():
        offload = optimizer._internals.residency.of(param).offload
        for key, value in state.items():
            nbytes = shard_of(value).local(value).nbytes
            if key == "step":
                total += nbytes if offload == "step" else 0
            elif offload is not None:
                total += -(-nbytes // 64) * 64 if offload == "state" else nbytes
    return total
