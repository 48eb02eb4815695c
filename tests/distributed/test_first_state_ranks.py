"""First steps and saved names under sharding: which step counts, and parameters in another order."""

from __future__ import annotations

from functools import partial

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import shardopt
from ranks.models import set_gradients
from ranks.runs import snapshot_of, step_with, trained
from ranks.snapshot import assert_same


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["fsdp", "fsdp columns", "fsdp1", "fsdp1 flat", "zero"])
def test_a_first_step_of_a_warm_up_counts_where_gradients_are_zero(way: str) -> None:
    """Of shards whose rows no token has met, or of a rank's parameters under ZeRO."""
    model, optimizer = trained(way, 0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    set_gradients(model, 0)
    inner = getattr(optimizer, "optim", optimizer)
    for param in (param for group in inner.param_groups for param in group["params"]) if dist.get_rank() != 1 else ():
        if param.grad is not None:
            getattr(param.grad, "_local_tensor", param.grad).zero_()
    optimizer.step()
    assert {float(entries["step"]) for entries in inner.state.values() if entries} == {1.0}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["ddp", "fsdp", "fsdp1"])
def test_named_state_in_another_order(way: str) -> None:
    """torch's functions number parameters by themselves, and leave the saved names in their order."""
    kept = {}
    for turn in (1, -1):
        model, _ = trained(way, 0)
        optimizer = shardopt.AdamW8bit(list(model.named_parameters())[::turn], min_quantized_numel=64)
        if turn == 1:
            step_with(model, optimizer, 0)
            kept = {"saved": get_optimizer_state_dict(model, optimizer), "plain": optimizer.state_dict()}
            expected = snapshot_of(model, optimizer)
            continue
        names = optimizer.param_groups[0]["param_names"]
        for name, load in (
            ("saved", partial(set_optimizer_state_dict, model, optimizer)),
            ("plain", optimizer.load_state_dict),
        ):
            load(kept[name])
            assert optimizer.param_groups[0]["param_names"] == names
            state = {key: x for key, x in snapshot_of(model, optimizer).items() if "/" in key}
            assert_same(state, {key: x for key, x in expected.items() if "/" in key})
