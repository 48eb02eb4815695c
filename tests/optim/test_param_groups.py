"""param_groups and muon_groups: options, and who steps a parameter, by patterns over the names of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardopt
from ranks.models import Net, make_net

NO_DECAY = ("*.bias", "norm.*")


def _names(groups: list[dict[str, Any]]) -> list[list[str]]:
    return [group["param_names"] for group in groups]


def _options(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in groups]


def _tied() -> nn.Module:
    model = nn.Module()
    model.embed, model.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
    model.head.weight = model.embed.weight
    return model


def test_parameters_with_equal_options_are_one_group() -> None:
    net = Net()
    groups = shardopt.param_groups(net, {"embed.*": {"codec": "fp32"}, "head.weight": {"codec": "fp32"}}, NO_DECAY)
    assert _names(groups) == [
        ["embed.weight", "head.weight"],
        ["up.weight", "down.weight", "conv.weight", "gate.weight"],
        ["up.bias", "down.bias", "norm.weight", "norm.bias", "conv.bias", "gate.bias", "head.bias"],
    ]
    assert _options(groups) == [{"codec": "fp32"}, {}, {"weight_decay": 0.0}]
    params = dict(net.named_parameters())
    for group in groups:
        assert all(params[name] is p for name, p in zip(group["param_names"], group["params"], strict=True))


def test_options_are_equal_by_value() -> None:
    """In any order of keys; learning rates in tensors only if they are one. Without patterns there is one group."""
    overrides = {"up.*": {"lr": 1.0, "eps": 1e-6}, "down.*": {"eps": 1e-6, "lr": 1.0}}
    assert len(shardopt.param_groups(Net(), overrides)) == 2
    one, other = torch.tensor(0.5), torch.tensor(0.5)
    groups = shardopt.param_groups(Net(), {"up.*": {"lr": one}, "down.*": {"lr": one}, "head.*": {"lr": other}})
    assert len(groups) == 3
    assert groups[1]["lr"] is one
    (group,) = shardopt.param_groups(Net())
    assert set(group) == {"params", "param_names"}


def test_prefixes_of_wrappers_are_left_out() -> None:
    expected = shardopt.param_groups(Net(), {"embed.weight": {"lr": 1.0}}, NO_DECAY)
    net = Net()
    net.up = checkpoint_wrapper(net.up)
    wrapped = nn.DataParallel(torch.compile(checkpoint_wrapper(net), backend="eager"))
    groups = shardopt.param_groups(wrapped, {"embed.weight": {"lr": 1.0}}, NO_DECAY)
    assert _names(groups) == _names(expected)
    assert groups.table() == expected.table()


def test_a_module_called_module_keeps_its_name() -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    assert _names(shardopt.param_groups(model, {"module.*": {"lr": 1.0}})) == [["module.weight", "module.bias"]]


@pytest.mark.parametrize("pattern", ["embed.*", "head.*"])
def test_a_shared_parameter_has_all_its_names(pattern: str) -> None:
    model = _tied()
    groups = shardopt.param_groups(model, {pattern: {"lr": 1.0}})
    assert _names(groups) == [["embed.weight"]]
    assert _options(groups) == [{"lr": 1.0}]
    assert [p.names for p in groups.parameters] == [("embed.weight", "head.weight")]
    model.decoder = model.encoder = nn.Linear(2, 2)
    groups = shardopt.param_groups(model, {"encoder.weight": {"lr": 1.0}})
    assert _names(groups) == [["embed.weight", "decoder.bias"], ["decoder.weight"]]


GPT2 = {"wte": nn.Embedding(9, 4), "ln_1": nn.LayerNorm(4), "c_attn": nn.Linear(4, 12), "ln_f": nn.LayerNorm(4)}
LLAMA = {"embed": nn.Embedding(9, 4), "q_proj": nn.Linear(4, 4, bias=False), "input_layernorm": nn.RMSNorm(4)}


@pytest.mark.parametrize("groups_of", [shardopt.param_groups, shardopt.muon_groups])
@pytest.mark.parametrize(("modules", "patterns"), [(GPT2, ("*.bias", "*ln_*")), (LLAMA, ("*norm*",))])
def test_no_decay_of_vectors(groups_of: Any, modules: dict[str, nn.Module], patterns: tuple[str, ...]) -> None:
    """``"auto"`` is every vector, whatever its name, and an override wins over it."""
    model = nn.ModuleDict(modules)
    groups = groups_of(model, no_decay="auto")
    assert groups.table() == groups_of(model, no_decay=patterns).table()
    vectors = {name for name, param in model.named_parameters() if param.ndim < 2}
    assert vectors == {name for group in groups if "weight_decay" in group for name in group["param_names"]}
    decayed = groups_of(model, no_decay="auto", overrides={patterns[-1]: {"weight_decay": 0.5}})
    assert 0.5 in [group.get("weight_decay") for group in decayed]


def test_table() -> None:
    model = _tied()
    model.scale = nn.Parameter(torch.zeros(()), requires_grad=False)
    model.token = shardopt.StableEmbedding(1000, 8)
    groups = shardopt.param_groups(model, {"head.*": {"lr": 0.5, "codec": "fp32"}}, ["token.norm.*"])
    assert groups.table().splitlines() == [
        "parameter                      shape  group  options",
        "scale                         scalar      0  frozen",
        "embed.weight = head.weight     9 x 4      1  codec='fp32', lr=0.5",
        "token.weight                1000 x 8      0  float32 state (StableEmbedding)",
        "token.norm.weight                  8      2  weight_decay=0.0",
        "token.norm.bias                    8      2  weight_decay=0.0",
    ]


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("*embde*", "embed.weight"),
        ("norms.*", "norm.weight, norm.bias"),
        ("Up.*", "embed.weight, up.weight, up.bias"),  # case matters
    ],
)
def test_a_pattern_without_a_match_names_near_ones(pattern: str, near: str) -> None:
    given: list[dict[str, Any]] = [{"overrides": {pattern: {"lr": 1.0}}}, {"no_decay": [pattern]}]
    for options in given:
        with pytest.raises(ValueError, match="matches no parameter") as error:
            shardopt.param_groups(Net(), **options)
        assert f"got pattern {pattern!r}" in str(error.value)
        assert f"such as {near}" in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "no_decay", "message"),
    [
        ({"up.*": {"codecs": "fp32"}}, (), r"overrides\['up\.\*'\]: got unknown option 'codecs', expected 'codec'"),
        ({"up.*": {"qqqq": 1}}, (), r"got unknown option 'qqqq', expected some of .*betas.*weight_decay"),
        ({"up.*": "fp32"}, (), r"overrides\['up\.\*'\]: got 'fp32', expected a dict"),
        ({}, "*.bias", r"no_decay: got .*expected \"auto\" or several patterns; write \(\"\*\.bias\",\) for one"),
    ],
)
def test_refused(overrides: Any, no_decay: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shardopt.param_groups(Net(), overrides, no_decay)


@pytest.mark.parametrize("groups_of", [shardopt.param_groups, shardopt.muon_groups])
def test_what_is_no_initialized_model_is_refused(groups_of: Any) -> None:
    params = nn.Linear(3, 3).parameters()
    for given in (list(params), params):
        with pytest.raises(TypeError, match="expected a model, whose parameters have names; pass the module"):
            groups_of(given)
    with pytest.raises(ValueError, match=r"got 0.weight of a lazy module.*; take a forward pass first"):
        groups_of(nn.Sequential(nn.LazyLinear(3)))


# muon_groups ----------------------------------------------------------------------------------------------------------


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


def options_by_name(groups: Any, model: nn.Module) -> dict[str, dict[str, Any]]:
    names = {param: name for name, param in model.named_parameters()}
    return {
        names[param]: {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for group in groups
        for param in group["params"]
    }


@pytest.mark.parametrize(("embed", "head"), [("embed_tokens", "lm_head"), ("wte", "head"), ("tokens", "classifier")])
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
    """Embeddings by class and by name, convolutions, a model without matrices."""
    model = nn.ModuleDict({"bag": nn.EmbeddingBag(9, 4), "wpe": nn.Linear(4, 4), "hidden": nn.Linear(4, 4)})
    assert of_muon(model) == {"hidden.weight"}
    assert of_muon(make_net()) == {"up.weight", "down.weight", "conv.weight", "gate.weight"}
    assert of_muon(nn.LayerNorm(4)) == set()


def test_exclude_split_and_other() -> None:
    model = Model()
    found = of_muon(model, exclude=["*.o_proj.*", "model.layers.1.experts"])
    assert found == MATRICES - {name for name in MATRICES if "o_proj" in name} - {"model.layers.1.experts"}
    groups = shardopt.muon_groups(model, split={"*.qkv_proj.weight": (8, 8, 8), "*.experts": "each"}, other="lion")
    chosen = options_by_name(groups, model)
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
    chosen = options_by_name(shardopt.muon_groups(model), model)
    assert chosen["model.layers.0.mlp.up_proj.weight"] == {"algorithm": "muon", "lr": 2e-2}
    assert chosen["lm_head.weight"] == chosen["model.norm.bias"] == {"algorithm": "adamw", "lr": 3e-4}
    groups = shardopt.muon_groups(model, lr=0.25, adamw_lr=0.125, no_decay=["*norm*", "*.bias"], overrides=overrides)
    chosen, rest = options_by_name(groups, model), {"algorithm": "adamw", "lr": 0.125}
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
        ({"split": {"*.qkv": (8, 8, 8)}}, r"\*\.qkv"),
        ({"split": {"lm_head.*": (25, 25)}}, r"split\['lm_head\.\*'\]: got a pattern that matches lm_head\.weight"),
        ({"overrides": {"*.nothing": {"lr": 1.0}}}, r"\*\.nothing"),
        ({"other": "sgd"}, "other: got 'sgd', expected 'adamw' or 'lion'"),
    ],
    ids=str,
)
def test_muon_groups_refuse(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shardopt.muon_groups(Model(), **options)
