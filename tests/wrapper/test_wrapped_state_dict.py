"""State dicts of quantize_state: of its own, and from and to those of the bare optimizer."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

import shardopt
from shardopt import quantize_state
from wrapped import AdamW, Custom, bits, parameters, quietly, same, trained, trained_adamw


def test_round_trip() -> None:
    (params, optimizer), others = trained_adamw(), parameters()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = quantize_state(AdamW(others))
    again.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        for x, y in zip(others, params, strict=True):
            x.copy_(y)
    for run, own_params in ((optimizer, params), (again, others)):
        trained(run, own_params, range(4, 7))
    assert same(bits(others, again), bits(params, optimizer))
    again.load_state_dict(optimizer.state_dict(dequantize=True))
    assert same(bits([], again), bits([], optimizer))


def test_another_format() -> None:
    _, optimizer = trained_adamw()
    for options, name in (({"codec": "dynamic8"}, "codec"), ({"block_size": 64}, "block_size")):
        again = quantize_state(AdamW(parameters()), **options)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"saved with {name}="):
            again.load_state_dict(optimizer.state_dict())
        assert not again.state


def test_states_of_our_optimizers_are_other_codes() -> None:
    """AdamW8bit codes exp_avg in units of exp_avg_sq, the wrapper in its own: each refuses the other's codes."""
    (_, optimizer), others = trained_adamw(), parameters()
    ours = trained(shardopt.AdamW8bit(others), others)
    with pytest.raises(ValueError, match="dequantize=True"):
        optimizer.load_state_dict(ours.state_dict())
    with pytest.raises(ValueError, match="dequantize=True"):
        ours.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(ours.state_dict(dequantize=True))
    ours.load_state_dict(optimizer.state_dict(dequantize=True))


Damage = Callable[[dict[str, Any]], Any]


def changed(**entries: Any) -> Damage:
    """Changes entries of parameter 0; None removes one."""

    def change(saved: dict[str, Any]) -> dict[str, Any]:
        new = {key: x for key, x in {**saved["state"][0], **entries}.items() if x is not None}
        return {**saved, "state": {**saved["state"], 0: new}}

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (changed(exp_avg_codes=torch.zeros(3, 3, dtype=torch.uint8)), "exp_avg_codes"),
        (changed(exp_avg_codes=torch.zeros(64, 128)), "exp_avg_codes of torch.float32"),
        (changed(exp_avg_scales=torch.full((64, 1), torch.nan)), "exp_avg_scales"),
        (changed(exp_avg_codes=None), "got state with .*, expected .*exp_avg_codes"),
        (lambda saved: {**saved, "state": {0: 3}}, "expected a dict of entries by name"),
        (
            lambda saved: {**saved, "param_groups": [{**saved["param_groups"][0], "unsigned": [3]}]},
            "got state saved with unsigned=",
        ),
        (lambda saved: {}, "load what"),
        (lambda saved: None, "load what"),
    ],
)
def test_damaged_state_dicts_are_refused_and_change_nothing(damage: Damage, message: str) -> None:
    _, optimizer = trained_adamw()
    before = [x.clone() for x in bits([], optimizer)]
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(damage(optimizer.state_dict()))
    assert same(bits([], optimizer), before)


def test_a_stable_embedding_keeps_its_floats_alone() -> None:
    """A stable embedding's moments stay float32; entries of the same names are quantized for other parameters."""

    def make() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(shardopt.StableEmbedding(100, 64), nn.Linear(64, 128))
        return model, quantize_state(torch.optim.AdamW(model.parameters()))

    def step(model: nn.Module, optimizer: Optimizer, seed: int) -> list[Parameter]:
        torch.manual_seed(seed)
        params = list(model.parameters())
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
        return params

    (model, optimizer), (other, again) = make(), make()
    step(model, optimizer, 1)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    params, others = step(model, optimizer, 2), step(other, again, 2)
    assert "exp_avg" in again.state[other.get_parameter("0.weight")]
    assert "exp_avg_codes" in again.state[other.get_parameter("1.weight")]
    assert same(bits(others, again), bits(params, optimizer))


@pytest.mark.parametrize(("saved_as", "loaded_as"), [(("squares",), ()), ((), ("squares", "moment"))])
def test_other_signs(saved_as: tuple[str, ...], loaded_as: tuple[str, ...]) -> None:
    """A state dict with other signs is refused: with most codecs, signed and unsigned codes differ in values alone."""
    params = parameters()
    saved = trained(quietly(Custom(params), unsigned=saved_as), params).state_dict()
    again = quietly(Custom(parameters()), unsigned=loaded_as)
    with pytest.raises(
        ValueError, match=r"saved with (squares|moment)='(un)?signed', expected '(un)?signed'; pass .* the options"
    ):
        again.load_state_dict(saved)
    assert not again.state
    again = quietly(Custom(parameters()), unsigned=[*saved_as, "of_no_entry"])
    again.load_state_dict(saved)


def test_state_dicts_share_no_memory() -> None:
    """A state dict, in codes or floats, shares no memory with the optimizers that made or loaded it; torch's does."""
    params, bare_params, others = parameters(), parameters(), parameters()
    optimizer, bare, again = quantize_state(AdamW(params)), AdamW(bare_params), quantize_state(AdamW(others))
    trained(optimizer, params)
    before = [x.clone() for x in bits([], optimizer)]
    bare.load_state_dict(optimizer.state_dict(dequantize=True))
    trained(bare, bare_params, range(1))
    assert same(bits([], optimizer), before)
    again.load_state_dict(optimizer.state_dict())
    trained(again, others, range(1))
    assert same(bits([], optimizer), before)
    again.load_state_dict(bare.state_dict())
    before = [x.clone() for x in bits([], bare)]
    trained(again, others, range(1))
    assert same(bits([], bare), before)


@pytest.mark.parametrize("dtype", [torch.float64, 3])
def test_a_damaged_dtype(dtype: Any) -> None:
    params = parameters(torch.bfloat16)
    optimizer = trained(quietly(Custom(params)), params)
    saved = optimizer.state_dict()
    assert saved["state"][0]["squares_dtype"] == torch.float32
    saved["state"][0]["squares_dtype"] = dtype
    with pytest.raises(ValueError, match=r"got squares_dtype as .*, expected torch.float32 or one of 16 bits"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entries_of_double_precision(dtype: torch.dtype) -> None:
    """A float64 entry of a float64 parameter is quantized; beside a float32 parameter it is kept."""

    class Double(Custom):
        def step(self, closure: Any = None) -> None:
            for param in self.param_groups[0]["params"]:
                self.state[param].setdefault("moment", torch.zeros_like(param, dtype=torch.float64)).add_(param.grad)

    params = [Parameter(torch.zeros(64, 128, dtype=dtype))]
    params[0].grad = torch.ones_like(params[0])
    optimizer = quietly(Double(params))
    optimizer.step()
    assert ("moment" in optimizer.state[params[0]]) == (dtype == torch.float32)
    again = quietly(Double(params))
    again.load_state_dict(optimizer.state_dict())
    assert same(bits([], again), bits([], optimizer))
    assert again.state_dict(dequantize=True)["state"][0]["moment"].dtype == torch.float64
