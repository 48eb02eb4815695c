"""Refusals under DeepSpeed, and what is left to DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardopt
from programs import Programs
from ranks.deepspeed import (
    ALL_OFFLOAD,
    BF16,
    BF16_OPTIMIZER,
    OFFLOAD,
    ROUND_ROBIN,
    STEPS,
    SUB_GROUPS,
    WITHOUT_MASTERS,
    config,
    import_deepspeed,
    make_engine,
    stepped_engine,
    stepped_whole,
)
from ranks.models import make_net
from shardopt.sharding.deepspeed.engine import open_engine

MASTERS = {"bf16": WITHOUT_MASTERS, "params": {"master_weight_bits": 24}}
ZENFLOW = {**OFFLOAD, "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 4}}

#: A config, options of a given optimizer (None: the config names its type), and the error.
WRONG: list[tuple[dict[str, Any], dict[str, Any] | None, str]] = [
    (
        config(1, params={"learning_rate": 1}),
        None,
        "AdamW8bit: got unknown option 'learning_rate', expected .*lr, betas.*block_size",
    ),
    (config(1, "sgd8bit", params={"betas": 1}), None, "SGD8bit: got unknown option 'betas', expected .*momentum"),
    (config(1, params={"max_grad_norm": 1.0}), None, "got max_grad_norm.*set gradient_clipping"),
    (config(2, params={"offload": "state"}), None, "offload: got 'state' under DeepSpeed.*offload_optimizer"),
    (config(2, zero={"elastic_checkpoint": True}), None, "elastic_checkpoint: got true.*shardopt.checkpoint.save"),
    (config(2, None, zero=ZENFLOW), {}, "zenflow: got a setting, expected null; leave zenflow out"),
    (config(2, None, checkpoint={"load_universal": True}), {}, r"load_universal: got true.*shardopt\.checkpoint\.save"),
    (config(2, None), {"offload": "step"}, "offload: got 'step' under DeepSpeed.*offload_optimizer"),
]


@pytest.mark.deepspeed_ranks(2)
def test_wrong_config() -> None:
    import_deepspeed()
    for settings, options, match in WRONG:
        model = make_net()
        given = {} if options is None else {"optimizer": shardopt.AdamW8bit(model.parameters(), **options)}
        with pytest.raises(ValueError, match=match):
            make_engine(model, settings, **given)


@pytest.mark.deepspeed_ranks(2)
def test_a_replaced_optimizer_is_refused() -> None:
    """Frameworks put DeepSpeedCPUAdam in the place of a given optimizer under offload, with its param groups."""
    import_deepspeed()
    model = make_net()
    theirs = torch.optim.AdamW(shardopt.AdamW8bit(model.parameters()).param_groups)
    with pytest.raises(ValueError, match=r'got AdamW with .* set "zero_force_ds_cpu_optimizer": false'):
        make_engine(model, config(2, None, zero=OFFLOAD), optimizer=theirs, model_parameters=None)


@pytest.mark.deepspeed_ranks(1)
def test_quantize_state_is_refused() -> None:
    model = make_net()
    optimizer = shardopt.quantize_state(torch.optim.AdamW(model.parameters()))
    with pytest.raises(RuntimeError, match="quantize_state of AdamW under DeepSpeed, which flattens parameters"):
        make_engine(model, config(2, None), optimizer=optimizer, model_parameters=None)


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(("stage", "zero", "grouped"), [(1, {}, True), (3, SUB_GROUPS, False)])
def test_sums_over_parts_of_the_parameters_are_refused(stage: int, zero: dict[str, Any], grouped: bool) -> None:
    with pytest.raises(RuntimeError, match=r"got Prodigy8bit with .*, which ZeRO steps one after another, expected a"):
        stepped_engine(config(stage, "Prodigy8bit", zero=zero), 0, grouped=grouped)


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(
    ("stage", "zero", "sections"),
    [
        (1, {}, BF16_OPTIMIZER),
        (2, ROUND_ROBIN, BF16),
        (3, {**ALL_OFFLOAD, **SUB_GROUPS}, MASTERS),
    ],
)
def test_state_of_single_parameters_is_refused(stage: int, zero: dict[str, Any], sections: dict[str, Any]) -> None:
    """On all ranks, whether they hold elements of the parameter or not; masters are given out, shared ones as well."""
    settings = config(stage, zero=zero, **sections)
    engine = stepped_engine(settings, STEPS)
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_optimizer_state,
        safe_set_full_optimizer_state,
    )

    whole, _ = stepped_whole(settings, STEPS)
    for name, param in engine.module.named_parameters():
        with pytest.raises(RuntimeError, match=r"'exp_avg' of one parameter.*; use .*shardopt\.checkpoint\.save"):
            safe_get_full_optimizer_state(param, "exp_avg")
        with pytest.raises(RuntimeError, match=r"'exp_avg' of one parameter"):
            safe_set_full_optimizer_state(param, torch.zeros(engine.bare_shapes[name]), "exp_avg")
        if zero != ROUND_ROBIN:  # whose offsets DeepSpeed does not know
            assert torch.equal(safe_get_full_fp32_param(param).float(), whole.get_parameter(name).float())


@pytest.mark.parametrize(
    "parallel",
    [{"pipeline_parallelism": True}, {"autotp_size": lambda: 2}, {}],
    ids=lambda parallel: " ".join(parallel) or "experts",
)
def test_model_parallel_and_other_experts_are_refused(parallel: dict[str, Any]) -> None:
    """Ranks have other parameters under the same names, or stacks of experts of which nothing says which they are."""
    alone = {"pipeline_parallelism": False, "autotp_size": lambda: 0, "mp_world_size": 1}
    model = nn.Linear(4, 4)
    model.weight.allreduce = bool(parallel)
    engine = type("DeepSpeedEngine", (SimpleNamespace,), {})(optimizer=None, module=model, **{**alone, **parallel})
    match = "got a DeepSpeed engine with tensor or pipeline"
    if not parallel:
        match = r"or AutoEP, .* experts of deepspeed\.moe\.layer\.MoE only"
    with pytest.raises(ValueError, match=match), open_engine(engine):
        pass


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


@pytest.mark.deepspeed_ranks(2)
def test_other_types() -> None:
    """torch's types mean what they meant."""
    settings = {**config(1, None), "zero_allow_untested_optimizer": True}
    settings["optimizer"] = {"type": "NAdam", "params": {"lr": 1e-3}}
    engine = make_engine(make_net(), settings)
    assert isinstance(engine.basic_optimizer, torch.optim.NAdam)
