"""StableEmbedding: its initialization, its layer norm, and the float32 state that every optimizer gives its weight."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, layer_norm

import shardopt
from helpers import RULES
from ranks.models import Net, set_gradients
from ranks.snapshot import assert_same, snapshot

SIZE = (97, 66)


def _make(**options: Any) -> shardopt.StableEmbedding:
    torch.manual_seed(0)
    return shardopt.StableEmbedding(*SIZE, **options)


def _net() -> Net:
    torch.manual_seed(0)
    net = Net()
    net.embed = shardopt.StableEmbedding(*SIZE)
    return net


def _stepped(model: nn.Module, rule: str = "adamw", params: Any = None, **options: Any) -> shardopt.ShardedOptimizer:
    optimizer = RULES[rule].make(params or model.parameters(), **{"min_quantized_numel": 64, **options})
    for step in range(2):
        set_gradients(model, step)
        optimizer.step()
    return optimizer


def _is_float32(state: dict[str, Tensor]) -> bool:
    return len(state) > 1 and all(entry.dtype == torch.float32 and "_codes" not in key for key, entry in state.items())


def test_parameters() -> None:
    module = _make(padding_idx=3)
    assert list(module.state_dict()) == ["weight", "norm.weight", "norm.bias"]
    torch.manual_seed(0)
    expected = nn.init.xavier_uniform_(torch.empty(SIZE))
    expected[3] = 0
    assert torch.equal(module.weight, expected)
    module(torch.tensor([3, 4])).square().sum().backward()
    assert not module.weight.grad[3].any()
    weight = torch.randn(5, 8, dtype=torch.bfloat16)
    taken = shardopt.StableEmbedding.from_pretrained(weight)
    assert torch.equal(taken.weight, weight)
    assert not taken.weight.requires_grad
    assert {param.dtype for param in taken.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("norm", [torch.bfloat16, torch.float32])
def test_output_is_normalized_in_the_norms_dtype(norm: torch.dtype) -> None:
    module, tokens = _make(dtype=torch.bfloat16), torch.randint(97, (4, 5))
    module.norm.to(norm)
    with torch.no_grad():
        module.norm.bias.normal_()
    looked_up = embedding(tokens, module.weight).to(norm)
    expected = layer_norm(looked_up, (66,), module.norm.weight, module.norm.bias).bfloat16()
    assert_same({"": module(tokens)}, {"": expected})


@pytest.mark.parametrize(("rule", "codec"), [("adamw", "log8"), ("lion", "dynamic8")])
def test_state_is_float32_by_every_rule_and_codec(rule: str, codec: str) -> None:
    """Bit for bit that of an ordinary embedding with ``codec="fp32"``; the rest of the model is as without."""
    net, plain = _net(), Net()
    plain.embed = nn.Sequential()
    plain.embed.register_parameter("weight", nn.Parameter(net.embed.weight.detach().clone()))
    plain.embed.norm = nn.LayerNorm(66)
    plain.load_state_dict(net.state_dict())
    others = [param for name, param in plain.named_parameters() if name != "embed.weight"]
    groups = [{"params": [plain.embed.weight], "codec": "fp32"}, {"params": others}]
    got, expected = _stepped(net, rule, codec=codec), _stepped(plain, rule, groups, codec=codec)
    assert _is_float32(got.state[net.embed.weight])
    assert not _is_float32(got.state[net.up.weight])
    assert_same(snapshot(dict(net.named_parameters()), got), snapshot(dict(plain.named_parameters()), expected))


def _loaded_by_assignment(module: shardopt.StableEmbedding) -> shardopt.StableEmbedding:
    with torch.device("meta"):
        other = shardopt.StableEmbedding(*SIZE)
    other.load_state_dict(module.state_dict(), assign=True)
    return other


def _shared_with_head(module: shardopt.StableEmbedding) -> nn.Module:
    head = nn.Linear(66, 97, bias=False)
    head.weight = module.weight
    return head


WAYS: dict[str, Callable[[shardopt.StableEmbedding], nn.Module]] = {
    "copied": copy.deepcopy,
    "pickled": lambda module: pickle.loads(pickle.dumps(module)),
    "to_empty": lambda module: module.to("meta").to_empty(device="cpu"),
    "load_state_dict(assign=True)": _loaded_by_assignment,
    "shared": _shared_with_head,
    "parametrized": nn.utils.parametrizations.spectral_norm,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_weight_is_known_however_it_came(way: str) -> None:
    module = WAYS[way](_make())
    optimizer = shardopt.AdamW8bit(module.parameters(), min_quantized_numel=64)
    for param in module.parameters():
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    large = [param for param in module.parameters() if param.numel() == math.prod(SIZE)]
    assert len(large) == 1
    assert _is_float32(optimizer.state[large[0]])
