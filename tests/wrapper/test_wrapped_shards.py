"""quantize_state on DTensors: what is refused, and what is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ranks.models import WAYS, make_net
from ranks.pool import Pool
from shardopt import quantize_state


def _added() -> None:
    sharded = WAYS["fsdp"](make_net())
    whole = nn.Parameter(torch.zeros(64, 128))
    optimizer = quantize_state(torch.optim.Muon([whole]))
    with pytest.raises(RuntimeError, match="depends on others of the parameter"):
        optimizer.add_param_group({"params": [p for p in sharded.parameters() if p.dim() == 2]})
    assert [group["params"] for group in optimizer.param_groups] == [[whole]]


def test_an_added_group_of_shards(ranks: Pool) -> None:
    ranks.run(1, _added)


class Mine(torch.optim.AdamW):
    """An optimizer that nobody has tested."""


def _untested() -> None:
    sharded = WAYS["fsdp"](make_net())
    with pytest.warns(UserWarning, match=r"copies of weights in keep=, as they are not detected on shards$"):
        quantize_state(Mine(list(sharded.parameters())))


def test_copies_of_weights_on_shards(ranks: Pool) -> None:
    ranks.run(1, _untested)
