"""quantize_state on shards beside ``test_layouts.py``: inside of ZeroRedundancyOptimizer, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ranks.models import WAYS, make_net, set_gradients
from shardopt import quantize_state
from shardopt.wrapper import QuantizedState

SMALL: dict[str, Any] = {"min_quantized_numel": 64}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("way", "make", "message"),
    [
        ("fsdp", torch.optim.Adafactor, "depends on all of the parameter"),
        ("fsdp columns", torch.optim.AdamW, "columns that end within blocks of 128"),
        ("fsdp1", torch.optim.AdamW, r"a flat shard .*; use fully_shard \(FSDP2\)"),
        ("fsdp1 flat", torch.optim.AdamW, r"a flat shard .*; use fully_shard \(FSDP2\)"),
    ],
)
def test_refusals(way: str, make: Any, message: str) -> None:
    sharded = WAYS[way](make_net())
    with pytest.raises(RuntimeError, match=message):
        quantize_state(make(list(sharded.parameters())), **SMALL)
    added = quantize_state(make([nn.Parameter(torch.zeros(64, 128))]), **SMALL)
    with pytest.raises(RuntimeError, match=message):
        added.add_param_group({"params": list(sharded.parameters())})
    assert len(added.param_groups) == 1


@pytest.mark.ranks(2)
def test_zero_redundancy() -> None:
    def make(params: Any, **options: Any) -> QuantizedState:
        return quantize_state(torch.optim.AdamW(params, **options), **SMALL)

    whole, model = make_net(), DistributedDataParallel(make_net())
    expected = make(whole.parameters(), lr=1e-3)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=make, lr=1e-3)  # type: ignore[arg-type]
    for step in range(3):
        for each, stepped in ((whole, expected), (model, optimizer)):
            set_gradients(each, step)
            stepped.step()
    assert all(map(torch.equal, model.parameters(), whole.parameters()))
    assert 0 < len(optimizer.optim.state) < len(expected.state)
    assert dist.is_initialized()
