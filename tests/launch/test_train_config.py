"""Settings that both the job's options and DeepSpeed's config have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lm import config, engine_config
from lm.errors import UserError
from lm.options import Config
from train_job import ROOT

MANY = {
    "train_batch_size": 24,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.25,
    "optimizer": {
        "type": "AdamW8bit",
        "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1, "block_size": 64, "maximize": False},
    },
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": False},
}


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun would start them."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")


def load(tmp_path: Path, settings: Any, *options: object) -> Config:
    path = tmp_path / "deepspeed.json"
    path.write_text(settings if isinstance(settings, str) else json.dumps(settings))
    argv = ["--backend", "deepspeed", "--deepspeed", path, "--device", "cpu", *options]
    return config.load([str(option) for option in argv])


def test_the_job_takes_over_what_the_config_says(tmp_path: Path) -> None:
    options = load(tmp_path, MANY)
    assert (options.batch, options.accumulate, options.clip, options.precision) == (24, 3, 0.25, "bf16-mixed")
    assert (options.optimizer, options.lr, options.betas, options.weight_decay) == ("adamw8bit", 3e-4, (0.9, 0.95), 0.1)
    assert options.block_size == 64
    assert options.codec is None


def test_the_config_takes_over_what_the_job_says(tmp_path: Path) -> None:
    options = load(tmp_path, MANY)
    found = engine_config.complete(options, 2)
    sizes = {"train_micro_batch_size_per_gpu": 4}
    assert {name: value for name, value in found.items() if name not in ("optimizer", "bf16")} == {
        **{name: value for name, value in MANY.items() if name not in ("optimizer", "bf16")},
        **sizes,
    }
    assert found["bf16"] == {"enabled": True}
    assert found["optimizer"]["type"] == "AdamW8bit"
    assert found["optimizer"]["params"] == {**MANY["optimizer"]["params"], "betas": (0.9, 0.95)}

    short = {"zero_optimization": {"stage": 3}, "gradient_clipping": "auto", "optimizer": {"params": {"lr": "auto"}}}
    given = ("--batch", 12, "--optimizer", "lion8bit", "--lr", "2e-4", "--clip", 0, "--codec", "companded8")
    assert engine_config.complete(load(tmp_path, short, *given), 2) == {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Lion8bit", "params": {"lr": 2e-4, "codec": "companded8"}},
        "bf16": {"enabled": False},
        "zero_optimization": {"stage": 3},
    }
    stored = engine_config.complete(load(tmp_path, short, "--precision", "bf16"), 2)
    assert stored["bf16"] == {
        "enabled": True,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": True,
    }


def test_micro_batches_are_of_the_ranks_that_there_are(tmp_path: Path) -> None:
    settings = {"train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 2}
    assert load(tmp_path, settings).batch == 20
    assert load(tmp_path, settings, "--batch", 20).batch == 20
    with pytest.raises(UserError, match=r"train_micro_batch_size_per_gpu on 2 ranks 20, but batch is given as 24"):
        load(tmp_path, settings, "--batch", 24)


AGREEING = [("--lr", 3e-4), ("--betas", 0.9, 0.95), ("--batch", 24), ("--precision", "bf16-mixed"), ("--clip", 0.25)]


@pytest.mark.parametrize("options", AGREEING, ids=lambda options: options[0])
def test_both_may_say_the_same(options: tuple[object, ...], tmp_path: Path) -> None:
    assert load(tmp_path, MANY, *options) == load(tmp_path, MANY)


CONTRADICTIONS = {
    "train_batch_size 24, but batch is given as 12": ("--batch", 12),
    "gradient_accumulation_steps 3, but accumulate is given as 1": ("--accumulate", 1),
    "gradient_clipping 0.25, but clip is given as 0": ("--clip", 0),
    "optimizer.type adamw8bit, but optimizer is given as lion8bit": ("--optimizer", "lion8bit"),
    "optimizer.params.lr 0.0003, but lr is given as 0.001": ("--lr", 1e-3),
    "optimizer.params.block_size 64, but block_size is given as 128": ("--block-size", 128),
    "bf16 bf16-mixed, but precision is given as fp32": ("--precision", "fp32"),
}


@pytest.mark.parametrize(("complaint", "options"), CONTRADICTIONS.items(), ids=lambda value: str(value)[:30])
def test_contradictions_name_both(complaint: str, options: tuple[object, ...], tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        load(tmp_path, MANY, *options)
    assert f"{tmp_path}/deepspeed.json says {complaint}" in str(raised.value)


def test_what_a_yaml_file_says_counts(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("batch: 12\n")
    with pytest.raises(UserError, match="batch is given as 12"):
        load(tmp_path, MANY, "--config", path)


REFUSED = {
    "scheduler": ({"scheduler": {"type": "WarmupLR"}}, "got scheduler, but the job has a schedule of its own"),
    "fp16": ({"fp16": {"enabled": True}}, "got fp16, but the job computes in float32 or bfloat16"),
    "another optimizer": (
        {"optimizer": {"type": "OneBitAdam"}},
        "got optimizer.type 'OneBitAdam', expected one of Adagrad8bit, Adam4bit, Adam8bit, AdamW4bit",
    ),
    "a bad value": ({"optimizer": {"params": {"lr": "fast"}}}, "optimizer.params.lr: got 'fast', expected a number"),
    "sizes": (
        {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4},
        "got train_batch_size 12, expected 8",
    ),
    "no object": ("[1]", "got list, expected an object"),
    "no JSON": ("{", "is not valid JSON"),
    "no optimizer": ({"optimizer": None}, "got optimizer None, expected an object"),
    "no params": ({"optimizer": {"params": 3}}, "got optimizer.params 3, expected an object"),
    "text for a number": (
        {"train_micro_batch_size_per_gpu": "4"},
        "got train_micro_batch_size_per_gpu '4', expected a number",
    ),
}


@pytest.mark.parametrize(("settings", "complaint"), REFUSED.values(), ids=REFUSED)
def test_what_the_job_refuses(settings: Any, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        load(tmp_path, settings)
    assert complaint in str(raised.value)


def test_auto_where_the_job_has_nothing_to_say(tmp_path: Path) -> None:
    options = load(tmp_path, {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}})
    with pytest.raises(UserError, match=r'got "auto" for zero_optimization\.reduce_bucket_size'):
        engine_config.complete(options, 2)


def test_fp16_that_is_switched_off_is_none(tmp_path: Path) -> None:
    assert load(tmp_path, {"fp16": {"enabled": False}}).precision == "fp32"


@pytest.mark.parametrize(
    "options",
    [("--backend", "deepspeed"), ("--backend", "fsdp2", "--deepspeed", str(ROOT / "configs" / "zero2.json"))],
    ids=["no config", "no backend"],
)
def test_backend_and_config_go_together(options: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="--backend deepspeed and a config go together"):
        config.load(options)
