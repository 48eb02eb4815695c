"""DeepSpeed's functions that give a parameter's master and state in full, or change them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks.deepspeed import (
    BF16,
    BF16_OPTIMIZER,
    OFFLOAD,
    ROUND_ROBIN,
    STEPS,
    SUB_GROUPS,
    config,
    engine_snapshot,
    step_engine,
    step_whole,
    stepped_engine,
    stepped_whole,
)
from ranks.pool import Pool
from ranks.snapshot import Snapshot, assert_same
from shardopt.optim import ShardedOptimizer

#: Every stage at its worst, BF16_Optimizer and offload.
WAYS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, {}, BF16_OPTIMIZER),
    (2, ROUND_ROBIN, {}),
    (2, OFFLOAD, BF16),
    (3, SUB_GROUPS, {}),
]
FLOATS = ("exp_avg", "exp_avg_sq")


def _told(engine: Any) -> Snapshot:
    """Values that DeepSpeed's functions return; all ranks must call this."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: Snapshot = {}
    for name, param in engine.module.named_parameters():
        found[name] = safe_get_full_fp32_param(param).clone()
        for key in FLOATS:
            found[f"{name}/{key}"] = safe_get_full_optimizer_state(param, key)
    return found


def _decoded(model: torch.nn.Module, optimizer: ShardedOptimizer) -> Snapshot:
    """Values of a run without DeepSpeed."""
    state = optimizer.state_dict(dequantize=True)["state"]
    order = [param for group in optimizer.param_groups for param in group["params"]]
    place = {param: index for index, param in enumerate(order)}
    found: Snapshot = {}
    for name, param in model.named_parameters():
        found[name] = param.detach()
        found |= {f"{name}/{key}": state[place[param]][key] for key in FLOATS}
    return found


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(("stage", "zero", "other"), WAYS)
def test_full_state(tmp_path: Path, stage: int, zero: dict[str, Any], other: dict[str, Any]) -> None:
    settings = config(stage, zero=zero, **other)
    engine = stepped_engine(settings, STEPS, grouped=True)
    whole, optimizer = stepped_whole(settings, STEPS, grouped=True)
    assert_same(_told(engine), _decoded(whole, optimizer))
    engine.save_checkpoint(str(tmp_path))
    step_engine(engine, STEPS)
    step_whole(whole, optimizer, STEPS)
    assert_same(_told(engine), _decoded(whole, optimizer))
    dist.barrier()
    engine = stepped_engine(settings, 1, seed=1, grouped=True)
    engine.load_checkpoint(str(tmp_path))
    assert_same(_told(engine), _decoded(*stepped_whole(settings, STEPS, grouped=True)))


def _refuses(settings: dict[str, Any]) -> None:
    from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

    engine = stepped_engine(settings, 0)
    params = dict(engine.module.named_parameters())
    large, small = params["up.weight"], params["up.bias"]
    with pytest.raises(RuntimeError, match=r"expected state with exp_avg; take a step"):
        safe_get_full_optimizer_state(large, "exp_avg")
    step_engine(engine, 0)
    with pytest.raises(ValueError, match="got 'momentum_buffer', expected a moment of AdamW8bit: exp_avg, exp_avg_sq"):
        safe_get_full_optimizer_state(large, "momentum_buffer")
    before = engine_snapshot(engine)
    value = torch.zeros(engine.bare_shapes["up.weight"])
    with pytest.raises(
        RuntimeError, match=r"got a new exp_avg for up.weight, whose state is quantized \(log8\), expected"
    ):
        safe_set_full_optimizer_state(large, value, "exp_avg")
    with pytest.raises(ValueError, match=r"got exp_avg of shape \(3,\), expected"):
        safe_set_full_optimizer_state(small, torch.zeros(3), "exp_avg")
    assert_same(engine_snapshot(engine), before)


def _sets(settings: dict[str, Any]) -> None:
    """State that is float32 is changed, on all ranks, and steps go on with it; so are masters."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    engine = stepped_engine(settings, STEPS)
    whole, optimizer = stepped_whole(settings, STEPS)
    name, param = "up.bias", whole.up.bias
    new: Tensor = torch.linspace(-1, 1, param.numel()).view(param.shape)
    of_engine = dict(engine.module.named_parameters())[name]
    safe_set_full_optimizer_state(of_engine, new, "exp_avg")
    safe_set_full_fp32_param(of_engine, new)
    optimizer.state[param]["exp_avg"].copy_(new)
    param.data.copy_(new)
    for step in (STEPS, STEPS + 1):
        assert_same(_told(engine), _decoded(whole, optimizer))
        step_engine(engine, step)
        step_whole(whole, optimizer, step)


@pytest.mark.parametrize(("stage", "zero", "other"), [WAYS[1], WAYS[3]])
def test_setting_state(deepspeed_ranks: Pool, stage: int, zero: dict[str, Any], other: dict[str, Any]) -> None:
    settings = config(stage, zero=zero, **other)
    deepspeed_ranks.run(2, _refuses, settings)
    deepspeed_ranks.run(3 if stage == 3 else 2, _sets, settings)


@pytest.mark.deepspeed_ranks(3)
def test_local_state() -> None:
    """ZeRO 3's functions for what this rank holds."""
    settings = config(3)
    from deepspeed.utils import safe_get_local_optimizer_state, safe_set_local_optimizer_state

    engine = stepped_engine(settings, STEPS)
    decoded = _decoded(*stepped_whole(settings, STEPS))
    for name, param in engine.module.named_parameters():
        for key in FLOATS:
            full, size = decoded[f"{name}/{key}"].flatten(), param.partition_numel()
            padded = torch.nn.functional.pad(full, (0, size * dist.get_world_size() - full.numel()))
            local = safe_get_local_optimizer_state(param, key)
            assert torch.equal(local, padded[size * dist.get_rank() :][:size])
            if "bias" in name:
                safe_set_local_optimizer_state(param, 2 * local, key)
                assert torch.equal(safe_get_local_optimizer_state(param, key), 2 * local)
    large = dict(engine.module.named_parameters())["up.weight"]
    with pytest.raises(RuntimeError, match="whose state is quantized"):
        safe_set_local_optimizer_state(large, torch.zeros(large.partition_numel()), "exp_avg_sq")
