"""muon_groups: who steps each parameter of a model, told by its modules, names and patterns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardopt
from ranks.models import make_net

REST = {"algorithm": "adamw", "lr": 3e-4}


class Block(nn.Module):
    """Named as in Hugging Face's models."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict(
            {"qkv_proj": nn.Linear(8, 24, bias=False), "o_proj": nn.Linear(8, 8, bias=False)}
        )
        self.mlp = nn.ModuleDict({"up_proj": nn.Linear(8, 16), "down_proj": nn.Linear(16, 8)})
        self.input_layernorm = nn.LayerNorm(8)
        self.experts = nn.Parameter(torch.zeros(3, 8, 16))


class Model(nn.Module):
    def __init__(
        self, *, tied: bool = False, vocabulary: int = 50, embed: str = "embed_tokens", head: str = "lm_head"
    ) -> None:
        super().__init__()
        inner = {
            embed: nn.Embedding(50, 8),
            "layers": nn.ModuleList(Block() for _ in range(2)),
            "norm": nn.LayerNorm(8),
        }
        self.model = nn.ModuleDict(inner)
        self.add_module(head, nn.Linear(8, vocabulary, bias=False))
        if tied:
            getattr(self, head).weight = self.model[embed].weight


#: Hidden matrices of :class:`Model`.
MATRICES = {
    f"model.layers.{i}.{name}"
    for i in range(2)
    for name in (
        "experts",
        "self_attn.qkv_proj.weight",
        "self_attn.o_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    )
}


def of_muon(model: nn.Module, **options: Any) -> set[str]:
    """The names of the parameters in groups for Muon; demands that each parameter is in one group."""
    names = {param: name for name, param in model.named_parameters()}
    groups = shardopt.muon_groups(model, **options)
    params = [param for group in groups for param in group["params"]]
    assert sorted(map(id, params)) == sorted(map(id, names))
    return {names[param] for group in groups if group["algorithm"] == "muon" for param in group["params"]}


def options_of(groups: Any, model: nn.Module) -> dict[str, dict[str, Any]]:
    names = {param: name for name, param in model.named_parameters()}
    return {
        names[param]: {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for group in groups
        for param in group["params"]
    }


def test_matrices_and_the_rest() -> None:
    model = Model()
    assert of_muon(model) == MATRICES
    found = options_of(shardopt.muon_groups(model), model)
    assert found["model.layers.0.mlp.up_proj.weight"] == {"algorithm": "muon", "lr": 2e-2}
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.bias", "model.layers.1.mlp.up_proj.bias"):
        assert found[name] == REST


@pytest.mark.parametrize(("embed", "head"), [("wte", "head"), ("word_embeddings", "output"), ("tokens", "classifier")])
@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_by_any_name(embed: str, head: str, tied: bool) -> None:
    """By their class, and the head by its size or because it is tied."""
    assert of_muon(Model(embed=embed, head=head, tied=tied)) == MATRICES


def test_a_last_layer_of_another_size_is_a_matrix() -> None:
    """A classifier on top is told by its name only."""
    assert of_muon(Model(vocabulary=7, head="out")) == {*MATRICES, "out.weight"}
    assert of_muon(Model(vocabulary=7, head="head")) == MATRICES
    assert of_muon(Model(vocabulary=7, head="out"), exclude=["out.*"]) == MATRICES


def test_other_models() -> None:
    """Embeddings by class and by name, convolutions, models without embeddings or without matrices."""
    model = nn.ModuleDict({"bag": nn.EmbeddingBag(9, 4), "wpe": nn.Linear(4, 4), "hidden": nn.Linear(4, 4)})
    assert of_muon(model) == {"hidden.weight"}
    assert of_muon(make_net()) == {"up.weight", "down.weight", "conv.weight", "gate.weight"}
    assert of_muon(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) == {"0.weight", "1.weight"}
    assert of_muon(nn.LayerNorm(4)) == set()


def test_exclude_split_and_other() -> None:
    model = Model()
    found = of_muon(model, exclude=["*.o_proj.*", "model.layers.1.experts"])
    assert found == MATRICES - {name for name in MATRICES if "o_proj" in name} - {"model.layers.1.experts"}
    groups = shardopt.muon_groups(model, split={"*.qkv_proj.weight": (8, 8, 8), "*.experts": "each"}, other="lion")
    chosen = options_of(groups, model)
    assert chosen["model.layers.1.self_attn.qkv_proj.weight"]["split"] == (8, 8, 8)
    assert chosen["model.layers.0.experts"]["split"] == "each"
    assert "split" not in chosen["model.layers.0.self_attn.o_proj.weight"]
    assert chosen["model.norm.weight"] == {"algorithm": "lion", "lr": 3e-4, "betas": (0.9, 0.99)}
    shardopt.Muon8bit(groups)


def test_no_decay_and_overrides() -> None:
    """An override wins over the algorithm that muon_groups chooses; the learning rate goes with the algorithm."""
    model = Model()
    overrides = {
        "model.layers.0.*": {"momentum": 0.8},
        "*.o_proj.*": {"lr": 0.7},
        "model.embed_tokens.weight": {"algorithm": "muon"},
        "lm_head.weight": {"algorithm": "muon", "lr": 0.1, "codec": "fp32"},
        "model.layers.1.experts": {"algorithm": "adamw"},
        "model.layers.1.mlp.up_proj.weight": {"algorithm": "adamw", "lr": 0.5},
    }
    groups = shardopt.muon_groups(model, lr=0.25, adamw_lr=0.125, no_decay=["*norm*", "*.bias"], overrides=overrides)
    chosen, rest = options_of(groups, model), {"algorithm": "adamw", "lr": 0.125}
    assert chosen["model.norm.weight"] == {**rest, "weight_decay": 0.0}
    assert chosen["model.layers.0.input_layernorm.weight"] == {**rest, "weight_decay": 0.0, "momentum": 0.8}
    assert chosen["model.layers.0.self_attn.o_proj.weight"] == {"algorithm": "muon", "lr": 0.7, "momentum": 0.8}
    assert chosen["model.layers.1.self_attn.qkv_proj.weight"] == {"algorithm": "muon", "lr": 0.25}
    assert chosen["model.embed_tokens.weight"] == {"algorithm": "muon", "lr": 0.25}
    assert chosen["lm_head.weight"] == {"algorithm": "muon", "lr": 0.1, "codec": "fp32"}
    assert chosen["model.layers.1.experts"] == rest
    assert chosen["model.layers.1.mlp.up_proj.weight"] == {"algorithm": "adamw", "lr": 0.5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude": "*.experts"}, r"exclude: got '\*\.experts', expected several patterns"),
        ({"exclude": ["*.expert"]}, r"\*\.expert"),
        ({"split": {"*.qkv": (8, 8, 8)}}, r"\*\.qkv"),
        ({"split": {"lm_head.*": (25, 25)}}, r"split\['lm_head\.\*'\]: got a pattern that matches lm_head\.weight"),
        ({"no_decay": ["*.nothing"]}, r"\*\.nothing"),
        ({"overrides": {"*.nothing": {"lr": 1.0}}}, r"\*\.nothing"),
        ({"other": "sgd"}, "other: got 'sgd', expected 'adamw' or 'lion'"),
    ],
    ids=str,
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shardopt.muon_groups(Model(), **options)
