"""``TrainingArguments(optim="shardopt_adamw_8bit")``: every optimizer by name, with options, in Python and by argv."""

from __future__ import annotations

import inspect
import pickle
import re
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hugging_face
import shardopt
from hugging_face import trained
from needed import needs
from ranks.pool import Pool
from shardopt.clients import names
from shardopt.clients.names import NAMES, add_names, parse_options, patch_trainer

NAMED = {"optim": "shardopt_adamw_8bit", "optim_args": "min_quantized_numel=64"}


class Args(SimpleNamespace):
    """TrainingArguments as far as they are about optimizers."""

    def __init__(self, optim: str, optim_args: str | None = None, **changed: Any) -> None:
        usual = {"learning_rate": 1e-3, "weight_decay": 0.1}
        usual |= {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
        super().__init__(optim=optim, optim_args=optim_args, **{**usual, **changed})


class Trainer:
    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: nn.Module | None = None) -> tuple[Any, dict[str, Any]]:
        return torch.optim.SGD, {"lr": args.learning_rate}


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trainer's method after it has learned our names."""

    class Taught(Trainer):
        pass

    monkeypatch.setattr(names, "installed_version", lambda: "5.24.0")
    patch_trainer(SimpleNamespace(Trainer=Taught))  # type: ignore[arg-type]
    return Taught.get_optimizer_cls_and_kwargs


@pytest.mark.parametrize("version", ["4.56.2", "6.0.0"])
def test_other_versions_are_left_alone_and_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Left(str, Enum):
        SGD = "sgd"

    class LeftTrainer(Trainer):
        pass

    monkeypatch.setattr(names, "installed_version", lambda: version)
    add_names(SimpleNamespace(OptimizerNames=Left))  # type: ignore[arg-type]
    patch_trainer(SimpleNamespace(Trainer=LeftTrainer))  # type: ignore[arg-type]
    assert list(Left) == [Left.SGD]
    assert LeftTrainer.get_optimizer_cls_and_kwargs is Trainer.get_optimizer_cls_and_kwargs
    with pytest.raises(
        RuntimeError, match=rf"got transformers {re.escape(version)}, expected 4.57 or later, before 6.0"
    ):
        shardopt.register()


def test_register_installs_hooks_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[list[str]] = []
    monkeypatch.setattr(names, "install_hooks", installed.append)
    monkeypatch.setattr(names, "installed_version", lambda: None)
    shardopt.register()
    assert installed == []
    monkeypatch.setenv("SHARDOPT_HOOKS", "torch")
    shardopt.register()
    assert installed == [["transformers"]]


def test_every_optimizer_is_made_by_its_name(find: Any) -> None:
    assert set(NAMES.values()) == {getattr(shardopt, name) for name in shardopt.optim.__all__} - {
        shardopt.optim.ShardedOptimizer
    }
    for name, kind in (("adamw", "AdamW"), ("adamw_4bit", "AdamW4bit"), ("stableadamw_8bit", "StableAdamW8bit")):
        assert NAMES[f"shardopt_{name}"] is getattr(shardopt, kind)
    model = Model()
    for name, kind in NAMES.items():
        found, options = find(Args(name), model)
        assert type(kind(options.pop("params", model.parameters()), **options)) is found is kind


def test_other_names_stay_theirs(find: Any) -> None:
    assert find(Args("sgd", "momentum=0.9")) == (torch.optim.SGD, {"lr": 1e-3})


def test_options() -> None:
    some = "codec=dynamic8, block_size=64,betas=(0.9,0.95),lr=1e-4, offload=None, ns_coefficients=((1, 2), (4, 5))"
    expected = {"codec": "dynamic8", "block_size": 64, "betas": (0.9, 0.95), "lr": 1e-4, "offload": None}
    assert parse_options(some) == expected | {"ns_coefficients": ((1, 2), (4, 5))}
    assert parse_options(None) == parse_options("") == {}
    with pytest.raises(ValueError, match=r"optim_args: got 'codec=log8 block_size.*expected commas between options"):
        parse_options("lr=1e-3, codec=log8 block_size = 128")
    for text in ("log8", "=3", "codec log8=1"):
        with pytest.raises(ValueError, match=r"optim_args: got .*expected options such as"):
            parse_options(text)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (Args("shardopt_adamw_8bit"), {"lr": 1e-3}),
        (Args("shardopt_sgd", "momentum=0.9", adam_beta1=0.8, adam_epsilon=1e-6), {"lr": 1e-3, "momentum": 0.9}),
        (Args("shardopt_lion", adam_beta2=0.95, adam_epsilon=1e-6), {"lr": 1e-3, "betas": (0.9, 0.95)}),
        (Args("shardopt_ademamix", adam_beta1=0.8), {"lr": 1e-3, "betas": (0.8, 0.999, 0.9999)}),
        (
            Args("shardopt_adamw", "betas=(0.7, 0.8), lr=0.5, eps=0.1", adam_beta2=0.95, adam_epsilon=1e-6),
            {"lr": 0.5, "betas": (0.7, 0.8), "eps": 0.1},
        ),
    ],
    ids=lambda value: getattr(value, "optim", None),
)
def test_arguments(find: Any, args: Args, expected: dict[str, Any]) -> None:
    assert find(args) == (NAMES[args.optim], expected)


def test_weight_decay_is_trainers(find: Any) -> None:
    with pytest.raises(ValueError, match=r"got weight_decay=0.1, expected TrainingArguments\(weight_decay=...\)"):
        find(Args("shardopt_adamw_8bit", "weight_decay=0.1"))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.hidden = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16, bias=False).requires_grad_(False)
        self.head = nn.Linear(16, 32)


def test_muon_gets_groups_of_the_model(find: Any) -> None:
    args = Args("shardopt_muon_8bit", "adamw_lr=1e-4, momentum=0.9", adam_beta2=0.98, adam_epsilon=1e-6)
    kind, options = find(args, Model())
    assert kind is shardopt.Muon8bit
    optimizer = kind(options.pop("params"), **options)
    groups = {name: group for group in optimizer.param_groups for name in group["param_names"]}
    assert {name for name in groups if groups[name]["algorithm"] == "muon"} == {"hidden.weight"}
    expected = {
        "hidden.weight": {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1, "eps": 1e-7},
        "embed.weight": {"lr": 1e-4, "betas": (0.9, 0.98), "weight_decay": 0.1, "eps": 1e-6},
        "head.bias": {"lr": 1e-4, "betas": (0.9, 0.98), "weight_decay": 0.0, "eps": 1e-6},
    }
    for name, options in expected.items():
        assert {option: groups[name][option] for option in options} == options


def test_muon_without_a_model_is_refused(find: Any) -> None:
    with pytest.raises(ValueError, match="optim: got Muon8bit from a trainer that passes no model"):
        find(Args("shardopt_muon_8bit"))


# From here on by transformers itself.

transformers = needs("transformers", "accelerate")


@transformers
@pytest.mark.client_ranks(1)
def test_the_command_line_takes_every_name() -> None:
    from transformers import HfArgumentParser, Trainer, TrainingArguments

    # The only things of transformers that are relied on: this method, and the enumeration.
    assert list(inspect.signature(Trainer.get_optimizer_cls_and_kwargs).parameters) == ["args", "model"]
    parser = HfArgumentParser(TrainingArguments)
    assert set(NAMES) <= {
        str(choice) for action in parser._actions if action.dest == "optim" for choice in action.choices
    }
    for name in NAMES:
        (args,) = parser.parse_args_into_dataclasses(["--optim", name, "--output_dir", "x", "--use_cpu"])
        assert args.to_dict()["optim"] == name
        assert pickle.loads(pickle.dumps(args.optim)) is args.optim is type(args.optim)[name.upper()]
        assert args.optim.value == name
    with pytest.raises(TypeError, match="blocksize"):
        hugging_face.make_trainer(
            "plain", Path("x"), optim="shardopt_adamw_8bit", optim_args="blocksize=3"
        ).create_optimizer()


@pytest.fixture(scope="module")
def plain(client_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A run with the class itself, in one process."""
    return client_ranks.run(1, trained, "plain", tmp_path_factory.mktemp("plain"))[0]


@transformers
@pytest.mark.parametrize("mode", ["plain", "fsdp2", pytest.param("zero2 offload", marks=needs("deepspeed"))])
def test_named_is_the_class(client_ranks: Pool, plain: dict[str, str], mode: str, tmp_path: Path) -> None:
    """With the same bits, at the end and after a resume."""
    world_size = 1 if mode == "plain" else 2
    run = partial(client_ranks.run, world_size, partial(trained, **NAMED), mode, tmp_path)
    assert run() == [plain] * world_size
    assert run(tmp_path) == [plain] * world_size


@transformers
@pytest.mark.parametrize("mode", ["ddp", "fsdp2", "fsdp1", pytest.param("zero2", marks=needs("deepspeed"))])
def test_muon_by_name(client_ranks: Pool, mode: str, tmp_path: Path) -> None:
    options = "adamw_lr=3e-3, min_quantized_numel=64"
    muon = partial(trained, optim="shardopt_muon_8bit", optim_args=options, weight_decay=0.1)
    expected = client_ranks.run(1, muon, "plain", tmp_path / "plain")
    assert "optimizer.model.layers.0.mlp.up_proj.weight.momentum_buffer_codes" in expected[0]
    assert client_ranks.run(2, muon, mode, tmp_path) == expected * 2
    assert client_ranks.run(2, muon, mode, tmp_path, tmp_path) == expected * 2
