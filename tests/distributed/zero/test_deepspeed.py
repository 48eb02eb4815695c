"""DeepSpeed's ZeRO 0 to 3: given the same gradients, masters, codes and scales are those of the unsharded optimizer."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardopt
from pairs import in_turn, slow
from ranks.deepspeed import (
    HYPER,
    config,
    engine_snapshot,
    groups_of,
    import_deepspeed,
    make_engine,
    make_whole,
    masters,
    model_parameters,
    step_engine,
    step_whole,
    stepped_engine,
    stepped_whole,
    taking_gradients,
    whole_snapshot,
)
from ranks.models import loss_of, make_batch, make_net
from ranks.pool import Pool
from ranks.snapshot import assert_same
from shardopt.sharding.deepspeed.hooks import is_known

STEPS = 3
BF16 = {"bf16": {"enabled": True}}
ROUND_ROBIN = {"round_robin_gradients": True}
SUB_GROUPS = {"sub_group_size": 20000}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
ZENFLOW = {**OFFLOAD, "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 4}}
#: What every stage is, at its worst.
STAGES: list[tuple[int, dict[str, Any]]] = [(0, {}), (1, ROUND_ROBIN), (2, ROUND_ROBIN), (3, SUB_GROUPS)]


def _check(engine: Any, whole: nn.Module, optimizer: Any, dtype: torch.dtype = torch.float32) -> None:
    """Demands that an engine holds what the unsharded optimizer holds, and computes with it."""
    assert_same(engine_snapshot(engine), whole_snapshot(whole, optimizer))
    expected = {name: param.detach().to(dtype) for name, param in whole.named_parameters()}
    assert_same(model_parameters(engine), expected)


def _as_whole(settings: dict[str, Any], rule: str, grouped: bool, options: dict[str, Any]) -> None:
    engine = stepped_engine(settings, STEPS, grouped=grouped)
    dtype = next(engine.module.parameters()).dtype
    _check(engine, *stepped_whole(STEPS, rule, dtype=dtype, grouped=grouped, **options), dtype)
    for flat, _ in masters(engine):
        assert flat.device.type == "cpu"
        assert engine.basic_optimizer.state[flat]["step"] == STEPS


MORE_STAGES: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {}),
    (2, {"overlap_comm": True, "contiguous_gradients": False, "reduce_scatter": False}),
    (3, {}),
    (3, {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 5000}),
    (1, OFFLOAD),
    (2, {**OFFLOAD, **ROUND_ROBIN}),
    (3, {**OFFLOAD, **SUB_GROUPS}),
]


@pytest.mark.parametrize(
    ("stage", "zero", "world_size", "grouped"),
    [
        *((*stage, 2, False) for stage in STAGES),
        *((*stage, 3, True) for stage in [*STAGES, *MORE_STAGES]),
        *slow((*stage, 2, False) for stage in MORE_STAGES),
    ],
)
def test_given_gradients(
    deepspeed_ranks: Pool, world_size: int, grouped: bool, stage: int, zero: dict[str, Any]
) -> None:
    deepspeed_ranks.run(world_size, _as_whole, config(stage, zero=zero), "adamw", grouped, {})


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize(("stage", "zero"), STAGES)
def test_given_gradients_on_other_worlds(
    deepspeed_ranks: Pool, world_size: int, stage: int, zero: dict[str, Any]
) -> None:
    deepspeed_ranks.run(world_size, _as_whole, config(stage, zero=zero), "adamw", True, {})


RULES_AND_CODECS: list[tuple[str, str, dict[str, Any]]] = [
    ("Adam8bit", "adam", {}),
    ("Lion8bit", "lion", {"lr": 1e-3, "codec": "companded8", "block_size": 32}),
    ("SGD8bit", "momentum", {"momentum": 0.9, "codec": "dynamic8"}),
    ("AdamW4bit", "adamw", {"codec": "log4"}),
    ("AdEMAMix8bit", "ademamix", {"alpha_steps": 3, "beta3_steps": 4}),
    ("AdamW8bit", "amsgrad", {"amsgrad": True, "block_size": 32}),
    ("LAMB8bit", "lamb", {"weight_decay": 0.1}),
    ("Lion8bit", "cautious_lion", {"lr": 1e-3, "cautious": True, "block_size": 32}),
    ("AdamW8bit", "adamw", {"codec": "bf16"}),
    ("AdamW8bit", "adamw", {"codec": "fp32"}),
]


@pytest.mark.parametrize(("kind", "rule", "params", "stage", "zero"), in_turn(RULES_AND_CODECS, STAGES[2:]))
def test_rules_and_codecs(
    deepspeed_ranks: Pool, stage: int, zero: dict[str, Any], kind: str, rule: str, params: dict[str, Any]
) -> None:
    deepspeed_ranks.run(3, _as_whole, config(stage, kind, zero=zero, params=params), rule, False, params)


@pytest.mark.parametrize(
    ("stage", "zero", "other"),
    [
        *((stage, zero, {}) for stage, zero in STAGES),
        (1, {}, {"data_types": {"grad_accum_dtype": "fp32"}}),  # BF16_Optimizer
        (2, {}, {"data_types": {"grad_accum_dtype": "fp32"}}),
        (2, {**OFFLOAD, **ROUND_ROBIN}, {}),
        (3, {**OFFLOAD, **SUB_GROUPS}, {}),
    ],
)
def test_bf16(deepspeed_ranks: Pool, stage: int, zero: dict[str, Any], other: dict[str, Any]) -> None:
    deepspeed_ranks.run(2, _as_whole, config(stage, zero=zero, **BF16, **other), "adamw", True, {})


def _without_masters(settings: dict[str, Any]) -> None:
    """DeepSpeed hands over bf16 partitions; what they lack of a master is in our state."""
    engine = make_engine(taking_gradients(make_net(torch.bfloat16)), settings)
    whole = make_net(torch.bfloat16)
    optimizer = shardopt.AdamW8bit(whole.parameters(), **settings["optimizer"]["params"])
    for step in range(STEPS):
        step_engine(engine, step)
        step_whole(whole, optimizer, step)
    assert {flat.dtype for flat, _ in masters(engine)} == {torch.bfloat16}
    _check(engine, whole, optimizer, torch.bfloat16)


@pytest.mark.parametrize(("stage", "zero", "bits"), in_turn(STAGES[1:], [(24,), (32,)]))
def test_bf16_without_masters(deepspeed_ranks: Pool, stage: int, zero: dict[str, Any], bits: int) -> None:
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    settings = config(stage, zero=zero, params={"master_weight_bits": bits}, bf16=bf16)
    deepspeed_ranks.run(2, _without_masters, settings)


@pytest.mark.parametrize("kind", ["adamw8bit", "ADAMW8BIT", "AdamW8Bit"])
def test_type_in_any_letter_case(deepspeed_ranks: Pool, kind: str) -> None:
    deepspeed_ranks.run(2, _as_whole, config(2, kind), "adamw", False, {})


def _accumulation(settings: dict[str, Any]) -> None:
    _check(stepped_engine(settings, STEPS), *stepped_whole(STEPS, micro_steps=2))


@pytest.mark.parametrize(("stage", "zero"), STAGES)
def test_gradient_accumulation(deepspeed_ranks: Pool, stage: int, zero: dict[str, Any]) -> None:
    deepspeed_ranks.run(2, _accumulation, config(stage, zero=zero, gradient_accumulation_steps=2))


def _clipped(settings: dict[str, Any], clip: float) -> None:
    engine = stepped_engine(settings, STEPS)
    hyper = {**settings["optimizer"]["params"]}
    clipped, free = (stepped_whole(STEPS, "momentum", **{**hyper, "clip": c})[0] for c in (clip, None))
    got = model_parameters(engine)
    for name, param in clipped.named_parameters():
        torch.testing.assert_close(got[name], param.detach(), rtol=1e-5, atol=1e-6)
    assert not all(torch.allclose(got[name], param.detach()) for name, param in free.named_parameters())


@pytest.mark.parametrize(("stage", "zero"), STAGES)
def test_gradient_clipping(deepspeed_ranks: Pool, stage: int, zero: dict[str, Any]) -> None:
    """The norm is summed in another order than elsewhere, so gradients equal up to rounding; SGD shows their size."""
    params = {"momentum": 0.9, "codec": "fp32", "weight_decay": 0.0}
    deepspeed_ranks.run(2, _clipped, config(stage, "SGD8bit", zero=zero, params=params, gradient_clipping=1.0), 1.0)


def _scheduled(settings: dict[str, Any]) -> None:
    engine = stepped_engine(settings, 0)
    whole, optimizer = make_whole()
    lrs = []
    for step in range(4):
        lrs += engine.get_lr()
        optimizer.param_groups[0]["lr"] = lrs[-1]
        step_engine(engine, step)
        step_whole(whole, optimizer, step)
    assert len(set(lrs)) > 2
    _check(engine, whole, optimizer)


@pytest.mark.parametrize(("stage", "zero"), STAGES)
def test_lr_scheduler(deepspeed_ranks: Pool, stage: int, zero: dict[str, Any]) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-2, "warmup_num_steps": 3}}
    deepspeed_ranks.run(2, _scheduled, config(stage, zero=zero, scheduler=schedule))


def _zero_init(settings: dict[str, Any]) -> None:
    with import_deepspeed().zero.Init(config_dict_or_path=settings):
        model = make_net()
    engine = make_engine(taking_gradients(model), settings, model_parameters=groups_of(model))
    for step in range(STEPS):
        step_engine(engine, step)
    _check(engine, *stepped_whole(STEPS, grouped=True))


@pytest.mark.parametrize("world_size", [2, 3])
def test_zero_init(deepspeed_ranks: Pool, world_size: int) -> None:
    deepspeed_ranks.run(world_size, _zero_init, config(3, zero=SUB_GROUPS))


def _given_optimizer(settings: dict[str, Any], called: bool) -> None:
    model = taking_gradients(make_net())
    if called:
        engine = make_engine(model, settings, optimizer=lambda params: shardopt.AdamW8bit(params, **HYPER))
    else:
        optimizer = shardopt.AdamW8bit(groups_of(model), **HYPER)
        engine = make_engine(model, settings, optimizer=optimizer, model_parameters=None)
        assert engine.basic_optimizer is optimizer
    for step in range(STEPS):
        step_engine(engine, step)
    _check(engine, *stepped_whole(STEPS, grouped=not called))


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize(("stage", "zero"), [(0, {}), (1, ROUND_ROBIN), (2, OFFLOAD), (3, OFFLOAD)])
def test_optimizer_instead_of_type(deepspeed_ranks: Pool, stage: int, zero: dict[str, Any], called: bool) -> None:
    deepspeed_ranks.run(2, _given_optimizer, config(stage, None, zero=zero), called)


def _trains(settings: dict[str, Any]) -> list[float]:
    """Gives every rank one batch: averaging is exact. ZeRO 3 computes linear layers otherwise, here for both."""
    engine = make_engine(make_net(), settings)
    whole, optimizer = make_whole()
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
    _check(engine, whole, optimizer)
    return losses


@pytest.mark.parametrize(("stage", "zero"), STAGES)
def test_trains_as_one(deepspeed_ranks: Pool, stage: int, zero: dict[str, Any]) -> None:
    first, second = deepspeed_ranks.run(2, _trains, config(stage, zero=zero))
    assert first == second
    assert first[-1] < first[0]


def _raises(settings: dict[str, Any], error: type[Exception], match: str, given: bool = False, **options: Any) -> None:
    import_deepspeed()
    model = make_net()
    own = {"optimizer": shardopt.AdamW8bit(model.parameters(), **options)} if given else {}
    with pytest.raises(error, match=match):
        make_engine(model, settings, **own)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (config(1, "AdamW9bit"), "got optimizer type 'AdamW9bit', expected one of shardopt's .*AdamW8bit.*Lion8bit"),
        (
            config(1, params={"learning_rate": 1}),
            "AdamW8bit: got learning_rate, expected .*lr, betas.*codec.*block_size",
        ),
        (config(1, "sgd8bit", params={"betas": 1}), "SGD8bit: got betas, expected .*momentum"),
        (config(1, params={"max_grad_norm": 1.0}), "got max_grad_norm.*set gradient_clipping"),
        (config(2, params={"offload": "state"}), "offload: got 'state' under DeepSpeed.*offload_optimizer"),
        (config(2, zero={"elastic_checkpoint": True}), "elastic_checkpoint: got true.*shardopt.checkpoint.save"),
        (config(2, zero=ZENFLOW), "zenflow: got one, expected none; leave it out"),
    ],
)
def test_wrong_config(deepspeed_ranks: Pool, settings: dict[str, Any], match: str) -> None:
    deepspeed_ranks.run(2, _raises, settings, ValueError, match)


@pytest.mark.parametrize(("zero", "name"), [({"elastic_checkpoint": True}, "elastic"), (ZENFLOW, "zenflow")])
def test_wrong_config_for_a_given_optimizer(deepspeed_ranks: Pool, zero: dict[str, Any], name: str) -> None:
    deepspeed_ranks.run(2, _raises, config(2, None, zero=zero), ValueError, f"{name}.*: got", True)


def test_own_offload_of_a_given_optimizer(deepspeed_ranks: Pool) -> None:
    match = "offload: got 'step' under DeepSpeed.*offload_optimizer"
    deepspeed_ranks.run(2, partial(_raises, offload="step"), config(2, None), ValueError, match, True)


def _replaced(zero: dict[str, Any]) -> None:
    import_deepspeed()
    model = make_net()
    theirs = torch.optim.AdamW(shardopt.AdamW8bit(model.parameters()).param_groups)
    with pytest.raises(ValueError, match=r'got AdamW with .* set "zero_force_ds_cpu_optimizer": false'):
        make_engine(model, config(2, None, zero=zero), optimizer=theirs, model_parameters=None)


def test_a_replaced_optimizer_is_refused(deepspeed_ranks: Pool) -> None:
    """Frameworks put DeepSpeedCPUAdam in the place of a given optimizer under offload, with its param groups."""
    deepspeed_ranks.run(2, _replaced, OFFLOAD)


@pytest.mark.parametrize(
    ("version", "known"),
    [
        *((version, True) for version in ("0.19.8", "0.19.9", "0.19.10", "0.19.8+3b1d7ad", "0.19.9.dev1")),
        *((version, False) for version in ("0.0.0", "0.9.5", "0.18.9", "0.19.7", "0.20", "0.20.0", "1.0.0", "1.19.8")),
    ],
)
def test_known_versions(version: str, known: bool) -> None:
    assert is_known(version) == known


def test_an_unknown_version_is_left_alone(tmp_path: Path) -> None:
    """DeepSpeed without our hooks can be used with its own optimizers, and refuses ours."""
    program = """
import os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
from shardopt.sharding.after_import import after_import

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
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("got DeepSpeed 0.18.3, expected 0.19.8 to before 0.20") == 2, done.stdout


def _strange() -> None:
    import_deepspeed()
    from shardopt.sharding.deepspeed.partitions import assign_partitions

    class UnknownOptimizer:
        pass

    engine = SimpleNamespace(module=make_net(), optimizer=UnknownOptimizer(), basic_optimizer=None)
    with pytest.raises(RuntimeError, match="got DeepSpeed's UnknownOptimizer, expected ZeRO 0 to 3 without MiCS"):
        assign_partitions(engine)


def test_unknown_wrappers_are_refused(deepspeed_ranks: Pool) -> None:
    deepspeed_ranks.run(2, _strange)


def _others_stay(kind: str) -> None:
    """DeepSpeed's own and torch's types mean what they meant."""
    engine = make_engine(make_net(), config(1, kind, params={"min_quantized_numel": 64}) | _plain(kind))
    assert isinstance(engine.basic_optimizer, getattr(torch.optim, kind))
    assert dist.get_world_size() == 2


def _plain(kind: str) -> dict[str, Any]:
    allowed = {"zero_allow_untested_optimizer": True}
    return {"optimizer": {"type": kind, "params": {"lr": 1e-3}}, **allowed}


def test_other_types(deepspeed_ranks: Pool) -> None:
    deepspeed_ranks.run(2, _others_stay, "NAdam")
