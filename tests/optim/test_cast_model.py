"""cast_model: what stays in its dtype, and that the model computes with two of them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear

import shardopt
from ranks.layouts import values
from ranks.models import Net, loss_of, make_batch, make_net
from ranks.snapshot import assert_same

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class RootNorm(nn.Module):
    """A normalization of the user's own, which also wants to know something else."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(values((width,), 1))

    def forward(self, x: Tensor, *, add: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        assert (x.dtype, add.dtype) == (self.scale.dtype, torch.long)
        return {"both": (x * x.square().mean(-1, keepdim=True).rsqrt() * self.scale, add)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(66, 66)
        self.norm = RootNorm(66)
        self.register_buffer("frequencies", torch.arange(66) * 1.001)

    def forward(self, x: Tensor) -> Tensor:
        normed, _ = self.norm(self.layer(x), add=torch.arange(3))["both"]
        return x + normed


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: param.dtype for name, param in model.named_parameters()}


def is_kept_head(name: str, module: nn.Module) -> bool:
    return shardopt.is_norm(name, module) or name == "head"


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_norms_stay(dtype: torch.dtype) -> None:
    model = make_net()
    values_before = {name: param.detach().clone() for name, param in model.named_parameters()}
    same = dict(model.named_parameters())
    assert shardopt.cast_model(model, dtype) is model
    for name, param in model.named_parameters():
        wanted = FP32 if name.startswith("norm.") else dtype
        assert param is same[name]
        assert_same({name: param.detach()}, {name: values_before[name].to(wanted)})


def test_what_is_kept_is_asked_by_name_and_module() -> None:
    model = nn.ModuleDict({"first": Block(), "second": Block(), "head": nn.Linear(66, 3)})
    asked: list[str] = []

    def keep(name: str, module: nn.Module) -> bool:
        asked.append(name)
        assert model.get_submodule(name) is module
        return name in ("second", "head")

    shardopt.cast_model(model, BF16, keep)
    assert asked == ["", "first", "first.layer", "first.norm", "second", "head"]
    assert {name for name, dtype in dtypes(model).items() if dtype == FP32} == {
        *(f"second.{name}" for name, _ in Block().named_parameters()),
        *("head.weight", "head.bias"),
    }


def test_buffers_stay() -> None:
    model = nn.Sequential(Block(), nn.BatchNorm1d(66))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    shardopt.cast_model(model)
    assert_same(dict(model.named_buffers()), before)
    assert model(values((5, 66), 2, BF16)).dtype == BF16


def test_kept_layers_compute_in_their_own_dtype() -> None:
    model = shardopt.cast_model(make_net(), BF16)
    x = values((4, 66), 2, BF16)
    norm = model.norm
    assert_same(
        {"y": norm(x).detach()}, {"y": layer_norm(x.float(), (66,), norm.weight, norm.bias).bfloat16().detach()}
    )
    head = shardopt.cast_model(make_net(), BF16, is_kept_head).head
    x = values((4, 70), 3, BF16)
    assert_same({"y": head(x).detach()}, {"y": linear(x.float(), head.weight, head.bias).bfloat16().detach()})


def test_structures_are_cast_through() -> None:
    """Keyword arguments, dicts and tuples; whole numbers stay."""
    block = shardopt.cast_model(Block(), BF16)
    normed, numbers = block.norm(values((3, 66), 1, BF16), add=torch.arange(3))["both"]
    assert (normed.dtype, numbers.dtype) == (BF16, torch.long)


@pytest.mark.parametrize("keep", [shardopt.is_norm, is_kept_head])
def test_training(keep: shardopt.report.cast._Kept) -> None:
    model = shardopt.cast_model(make_net(), BF16, keep)
    optimizer = shardopt.AdamW8bit(model.parameters(), lr=1e-2, master_weight_bits=24, min_quantized_numel=64)
    losses = []
    for _ in range(8):
        loss = loss_of(model, make_batch(0))
        loss.backward()
        assert all(param.grad is not None and param.grad.dtype == param.dtype for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_cast_alike(how: object) -> None:
    model = shardopt.cast_model(make_net())
    tokens = make_batch(0)
    assert_same({"y": how(model)(tokens).detach()}, {"y": model(tokens).detach()})


def test_gradients_follow() -> None:
    model = nn.Linear(4, 4)
    model.weight.grad = torch.ones(4, 4)
    shardopt.cast_model(model)
    assert model.weight.grad.dtype == BF16


def test_wrong_dtypes_and_shared_parameters_change_nothing() -> None:
    model = Net()
    before = dtypes(model)
    with pytest.raises(ValueError, match=r"dtype: got torch.float32, expected torch.bfloat16 or torch.float16"):
        shardopt.cast_model(model, FP32)
    model.head = nn.Linear(66, 97, bias=False)
    model.head.weight = model.embed.weight
    before = dtypes(model)
    with pytest.raises(ValueError, match=r"got head.weight, which is kept, and embed.weight, which is not, as one"):
        shardopt.cast_model(model, BF16, is_kept_head)
    assert dtypes(model) == before
    assert not model.norm._forward_hooks
    shardopt.cast_model(model)
    assert model.head.weight is model.embed.weight


def test_is_norm() -> None:
    norms = [nn.LayerNorm(3), nn.RMSNorm(3), nn.GroupNorm(1, 3), nn.BatchNorm2d(3), nn.InstanceNorm1d(3), RootNorm(3)]
    assert all(shardopt.is_norm("", norm) for norm in norms)
    assert not any(shardopt.is_norm("norm", other) for other in (nn.Linear(3, 3), Block(), nn.Embedding(3, 3)))
