"""DeepSpeed's ZeRO 0 to 3: given the same gradients, masters, codes and scales are those of the unsharded optimizer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardopt
from programs import Programs
from ranks.deepspeed import (
    BF16,
    BF16_OPTIMIZER,
    HYPER,
    OFFLOAD,
    ROUND_ROBIN,
    STAGES,
    STEPS,
    SUB_GROUPS,
    assert_as_whole,
    config,
    groups_of,
    import_deepspeed,
    make_engine,
    make_whole,
    model_parameters,
    runs_as_whole,
    step_engine,
    step_whole,
    stepped_engine,
    stepped_whole,
    twins,
)
from ranks.models import loss_of, make_batch, make_net
from ranks.pool import Pool
from shardopt.sharding.deepspeed.hooks import is_known
from slow_cases import slow

Zero = dict[str, Any]

PINNED = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
ALL_OFFLOAD = {**OFFLOAD, "offload_param": {"device": "cpu"}}
ZENFLOW = {**OFFLOAD, "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 4}}
MORE_STAGES: list[tuple[int, Zero]] = [
    (1, {}),
    (2, {}),
    (2, {"overlap_comm": True, "contiguous_gradients": False, "reduce_scatter": False}),
    (3, {}),
    (3, {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 5000}),
    (1, OFFLOAD),
    (2, {**OFFLOAD, **ROUND_ROBIN}),
    (3, {**OFFLOAD, **SUB_GROUPS}),
    (2, PINNED),
    (3, {**ALL_OFFLOAD, **SUB_GROUPS}),
]


@pytest.mark.parametrize(
    ("stage", "zero", "world_size", "grouped"),
    [
        *((*stage, 2, False) for stage in STAGES),
        *((*stage, 3, True) for stage in [*STAGES, *MORE_STAGES]),
        *slow((*stage, 2, False) for stage in MORE_STAGES),
        *slow((*stage, world_size, True) for stage in STAGES for world_size in (1, 4)),
    ],
)
def test_given_gradients(deepspeed_ranks: Pool, stage: int, zero: Zero, world_size: int, grouped: bool) -> None:
    deepspeed_ranks.run(world_size, runs_as_whole, twins(config(stage, zero=zero), grouped=grouped))


@pytest.mark.parametrize(
    ("stage", "zero", "sections"),
    [
        *((stage, zero, BF16) for stage, zero in STAGES),
        (1, {}, BF16_OPTIMIZER),
        (2, {}, BF16_OPTIMIZER),
        (2, {**OFFLOAD, **ROUND_ROBIN}, BF16),
        (3, {**OFFLOAD, **SUB_GROUPS}, BF16),
        (1, PINNED, BF16),
        (3, {**PINNED, **SUB_GROUPS}, BF16),
        (3, {**PINNED, "offload_param": PINNED["offload_optimizer"], "stage3_param_persistence_threshold": 0}, BF16),
    ],
)
def test_bf16(deepspeed_ranks: Pool, stage: int, zero: Zero, sections: dict[str, Any]) -> None:
    deepspeed_ranks.run(2, runs_as_whole, twins(config(stage, zero=zero, **sections), grouped=True))


@pytest.mark.parametrize(("stage", "zero"), STAGES)
def test_gradient_accumulation(deepspeed_ranks: Pool, stage: int, zero: Zero) -> None:
    deepspeed_ranks.run(2, runs_as_whole, twins(config(stage, zero=zero, gradient_accumulation_steps=2)))


def _clipped(settings: dict[str, Any], clip: float) -> None:
    engine = stepped_engine(settings, STEPS)
    clipped, optimizer = make_whole(settings)
    for step in range(STEPS):
        step_whole(clipped, optimizer, step, clip=clip)
    free, _ = stepped_whole(settings, STEPS)
    got = model_parameters(engine)
    for name, param in clipped.named_parameters():
        torch.testing.assert_close(got[name], param.detach(), rtol=1e-5, atol=1e-6)
    assert not all(torch.allclose(got[name], param.detach()) for name, param in free.named_parameters())


@pytest.mark.parametrize(("stage", "zero"), STAGES)
def test_gradient_clipping(deepspeed_ranks: Pool, stage: int, zero: Zero) -> None:
    """The norm is summed in another order than elsewhere, so gradients equal up to rounding; SGD shows their size."""
    params = {"momentum": 0.9, "codec": "fp32", "weight_decay": 0.0}
    deepspeed_ranks.run(2, _clipped, config(stage, "SGD8bit", zero=zero, params=params, gradient_clipping=1.0), 1.0)


def _scheduled(settings: dict[str, Any]) -> None:
    engine = stepped_engine(settings, 0)
    whole, optimizer = make_whole(settings)
    lrs = []
    for step in range(4):
        lrs += engine.get_lr()
        optimizer.param_groups[0]["lr"] = lrs[-1]
        step_engine(engine, step)
        step_whole(whole, optimizer, step)
    assert len(set(lrs)) > 2
    assert_as_whole(engine, whole, optimizer)


@pytest.mark.parametrize(("stage", "zero"), STAGES)
def test_lr_scheduler(deepspeed_ranks: Pool, stage: int, zero: Zero) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-2, "warmup_num_steps": 3}}
    deepspeed_ranks.run(2, _scheduled, config(stage, zero=zero, scheduler=schedule))


@pytest.mark.deepspeed_ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_zero_init(world_size: int) -> None:
    settings = config(3, zero=SUB_GROUPS)
    with import_deepspeed().zero.Init(config_dict_or_path=settings):
        model = make_net()
    engine = stepped_engine(settings, STEPS, model, grouped=True)
    assert_as_whole(engine, *stepped_whole(settings, STEPS, grouped=True))


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize(("stage", "zero"), [(0, {}), (1, ROUND_ROBIN), (2, OFFLOAD), (3, OFFLOAD)])
def test_optimizer_instead_of_type(stage: int, zero: Zero, called: bool) -> None:
    settings = config(stage, None, zero=zero)
    model = make_net()
    if called:
        engine = stepped_engine(settings, STEPS, model, optimizer=lambda params: shardopt.AdamW8bit(params, **HYPER))
    else:
        optimizer = shardopt.AdamW8bit(groups_of(model), **HYPER)
        engine = stepped_engine(settings, STEPS, model, optimizer=optimizer, model_parameters=None)
        assert engine.basic_optimizer is optimizer
    assert_as_whole(engine, *stepped_whole(settings, STEPS, grouped=not called))


def _trains(settings: dict[str, Any]) -> list[float]:
    """Gives every rank one batch: averaging is exact. ZeRO 3 computes linear layers otherwise, here for both."""
    engine = make_engine(make_net(), settings)
    whole, optimizer = make_whole(settings)
    losses = []
    for step in range(5):
        loss = loss_of(engine, make_batch(step))
        engine.backward(loss)
        engine.step()
        expected = loss_of(whole, make_batch(step))
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(loss, expected)
        losses.append(float(loss))
    assert_as_whole(engine, whole, optimizer)
    return losses


@pytest.mark.parametrize(("stage", "zero"), STAGES)
def test_trains_as_one(deepspeed_ranks: Pool, stage: int, zero: Zero) -> None:
    first, second = deepspeed_ranks.run(2, _trains, config(stage, zero=zero))
    assert first == second
    assert first[-1] < first[0]


def _raises(settings: dict[str, Any], error: type[Exception], match: str, given: bool = False, **options: Any) -> None:
    import_deepspeed()
    model = make_net()
    optimizer = {"optimizer": shardopt.AdamW8bit(model.parameters(), **options)} if given else {}
    with pytest.raises(error, match=match):
        make_engine(model, settings, **optimizer)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (
            config(1, params={"learning_rate": 1}),
            "AdamW8bit: got learning_rate, expected .*lr, betas.*codec.*block_size",
        ),
        (config(1, "sgd8bit", params={"betas": 1}), "SGD8bit: got betas, expected .*momentum"),
        (config(1, params={"max_grad_norm": 1.0}), "got max_grad_norm.*set gradient_clipping"),
        (config(2, params={"offload": "state"}), "offload: got 'state' under DeepSpeed.*offload_optimizer"),
        (config(2, zero={"elastic_checkpoint": True}), "elastic_checkpoint: got true.*shardopt.checkpoint.save"),
        (config(2, zero=ZENFLOW), "zenflow: got a setting, expected null; leave zenflow out"),
    ],
)
def test_wrong_config(deepspeed_ranks: Pool, settings: dict[str, Any], match: str) -> None:
    deepspeed_ranks.run(2, _raises, settings, ValueError, match)


def test_an_unknown_type_is_deepspeeds_to_refuse(deepspeed_ranks: Pool) -> None:
    match = "AdamW9bit is not a supported DeepSpeed Optimizer"
    deepspeed_ranks.run(2, _raises, config(1, "AdamW9bit"), AssertionError, match)


@pytest.mark.parametrize(("zero", "name"), [({"elastic_checkpoint": True}, "elastic"), (ZENFLOW, "zenflow")])
def test_wrong_config_for_a_given_optimizer(deepspeed_ranks: Pool, zero: Zero, name: str) -> None:
    deepspeed_ranks.run(2, _raises, config(2, None, zero=zero), ValueError, f"{name}.*: got", True)


def test_own_offload_of_a_given_optimizer(deepspeed_ranks: Pool) -> None:
    match = "offload: got 'step' under DeepSpeed.*offload_optimizer"
    deepspeed_ranks.run(2, partial(_raises, offload="step"), config(2, None), ValueError, match, True)


@pytest.mark.deepspeed_ranks(2)
def test_a_replaced_optimizer_is_refused() -> None:
    """Frameworks put DeepSpeedCPUAdam in the place of a given optimizer under offload, with its param groups."""
    zero = OFFLOAD
    import_deepspeed()
    model = make_net()
    theirs = torch.optim.AdamW(shardopt.AdamW8bit(model.parameters()).param_groups)
    with pytest.raises(ValueError, match=r'got AdamW with .* set "zero_force_ds_cpu_optimizer": false'):
        make_engine(model, config(2, None, zero=zero), optimizer=theirs, model_parameters=None)


@pytest.mark.parametrize(
    ("version", "known"),
    [
        *((version, True) for version in ("0.19.8", "0.19.9", "0.19.10", "0.19.8+3b1d7ad", "0.19.9.dev1")),
        *((version, False) for version in ("0.0.0", "0.9.5", "0.18.9", "0.19.7", "0.20", "0.20.0", "1.0.0", "1.19.8")),
    ],
)
def test_known_versions(version: str, known: bool) -> None:
    assert is_known(version) == known


def test_an_unknown_version_is_left_alone(programs: Programs, tmp_path: Path) -> None:
    """DeepSpeed without our hooks can be used with its own optimizers, and refuses ours."""
    program = """
import os
os.environ["DS_ACCELERATOR"] = "cpu"
from shardopt.sharding.hooks import after_import

def older(module):
    del module.ZeROOptimizer._configure_master_weights

def version(module):
    module.version = "0.18.3"

after_import("deepspeed.git_version_info", version)
after_import("deepspeed.runtime.base_optimizer", older)
import shardopt, torch
import deepspeed
from types import SimpleNamespace
parameter = torch.nn.Parameter(torch.zeros(2, 64))
settings = SimpleNamespace(optimizer_name="AdamW8bit")
for given in ({"optimizer": shardopt.AdamW8bit([parameter])}, {"config_class": settings}):
    try:
        deepspeed.DeepSpeedEngine(None, torch.nn.Linear(2, 2), **given)
    except RuntimeError as error:
        print(error)
"""
    programs.run(program, tmp_path)
    said = (tmp_path / "output.txt").read_text()
    assert said.count("got DeepSpeed 0.18.3, expected 0.19.8 to before 0.20") == 2, said


@pytest.mark.deepspeed_ranks(2)
def test_unknown_wrappers_are_refused() -> None:
    import_deepspeed()
    from shardopt.sharding.deepspeed.partitions import assign_partitions

    class UnknownOptimizer:
        pass

    engine = SimpleNamespace(module=make_net(), optimizer=UnknownOptimizer(), basic_optimizer=None)
    with pytest.raises(RuntimeError, match="got DeepSpeed's UnknownOptimizer, expected ZeRO 0 to 3 without MiCS"):
        assign_partitions(engine)


def _plain(kind: str) -> dict[str, Any]:
    allowed = {"zero_allow_untested_optimizer": True}
    return {"optimizer": {"type": kind, "params": {"lr": 1e-3}}, **allowed}


@pytest.mark.deepspeed_ranks(2)
def test_other_types() -> None:
    """DeepSpeed's own and torch's types mean what they meant."""
    kind = "NAdam"
    engine = make_engine(make_net(), config(1, kind, params={"min_quantized_numel": 64}) | _plain(kind))
    assert isinstance(engine.basic_optimizer, getattr(torch.optim, kind))
    assert dist.get_world_size() == 2


@pytest.mark.deepspeed_ranks(1)
def test_quantize_state_is_refused() -> None:
    model = make_net()
    optimizer = shardopt.quantize_state(torch.optim.AdamW(model.parameters()))
    with pytest.raises(RuntimeError, match="quantize_state of AdamW under DeepSpeed, which flattens parameters"):
        make_engine(model, config(2, None), optimizer=optimizer, model_parameters=None)
