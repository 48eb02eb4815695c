"""State dicts of quantize_state: of its own, and from and to those of the bare optimizer."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

import shardopt
from shardopt import quantize_state
from shardopt.codec import CODECS
from wrapped import ELEMENTWISE, Custom, bits, parameters, quietly, same, trained

AdamW = ELEMENTWISE["torch AdamW foreach"]
BLOCKWISE = [name for name, codec in CODECS.items() if codec.blockwise and not codec.shared]


def test_round_trip() -> None:
    params, others = parameters(), parameters()
    optimizer = trained(quantize_state(AdamW(params)), params)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = quantize_state(AdamW(others), working_memory=0)
    again.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        for x, y in zip(others, params, strict=True):
            x.copy_(y)
    for each, own in ((optimizer, params), (again, others)):
        trained(each, own, range(4, 7))
    assert same(bits(others, again), bits(params, optimizer))


def test_a_loaded_state_is_a_copy() -> None:
    params = parameters()
    optimizer = trained(quantize_state(AdamW(params)), params)
    saved = optimizer.state_dict()
    before = saved["state"][0]["exp_avg_codes"].clone()
    again = quantize_state(AdamW(parameters()))
    again.load_state_dict(saved)
    trained(again, again.param_groups[0]["params"], range(1))
    assert torch.equal(before, optimizer.state[params[0]]["exp_avg_codes"])


def test_to_the_bare_optimizer_and_back() -> None:
    params, others = parameters(), parameters()
    optimizer = trained(quantize_state(AdamW(params)), params)
    bare = AdamW(others)
    bare.load_state_dict(optimizer.state_dict(dequantize=True))
    trained(bare, others, range(1))
    back = quantize_state(AdamW(parameters()))
    back.load_state_dict(optimizer.state_dict(dequantize=True))
    assert same(bits([], back), bits([], optimizer))


def test_copies_of_weights_stay_what_they_are() -> None:
    params = parameters()
    optimizer = trained(quietly(Custom(params)), params)
    again = quietly(Custom(parameters()))
    again.load_state_dict(optimizer.state_dict())
    assert same(bits([], again), bits([], optimizer))
    trained(again, again.param_groups[0]["params"])
    assert "start" in again.state[again.param_groups[0]["params"][0]]


def test_another_format() -> None:
    params = parameters()
    optimizer = trained(quantize_state(AdamW(params)), params)
    for options, name in (({"codec": "dynamic8"}, "codec"), ({"block_size": 64}, "block_size")):
        again = quantize_state(AdamW(parameters()), **options)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"saved with {name}="):
            again.load_state_dict(optimizer.state_dict())
        assert not again.state


def test_states_of_our_optimizers_are_other_codes() -> None:
    """AdamW8bit codes exp_avg in units of exp_avg_sq, the wrapper in its own: each refuses the other's codes."""
    params, others = parameters(), parameters()
    optimizer = trained(quantize_state(AdamW(params)), params)
    ours = trained(shardopt.AdamW8bit(others), others)
    with pytest.raises(ValueError, match="dequantize=True"):
        optimizer.load_state_dict(ours.state_dict())
    with pytest.raises(ValueError, match="dequantize=True"):
        ours.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(ours.state_dict(dequantize=True))
    ours.load_state_dict(optimizer.state_dict(dequantize=True))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("exp_avg_codes", torch.zeros(3, 3, dtype=torch.uint8), "exp_avg_codes"),
        ("exp_avg_codes", torch.zeros(64, 128), "exp_avg_codes of torch.float32"),
        ("exp_avg_scales", torch.full((64, 1), torch.nan), "exp_avg_scales"),
    ],
)
def test_damage(key: str, value: Tensor, message: str) -> None:
    params = parameters()
    optimizer = trained(quantize_state(AdamW(params)), params)
    saved = optimizer.state_dict()
    before = [x.clone() for x in bits([], optimizer)]
    saved["state"][0] = {**saved["state"][0], key: value}
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert same(bits([], optimizer), before)


@pytest.mark.parametrize("end", ["codes", "scales"])
def test_codes_or_scales_alone(end: str) -> None:
    params = parameters()
    optimizer = trained(quantize_state(AdamW(params)), params)
    saved = optimizer.state_dict()
    before = [x.clone() for x in bits([], optimizer)]
    saved["state"][0] = {key: x for key, x in saved["state"][0].items() if key != f"exp_avg_{end}"}
    other = "scales" if end == "codes" else "codes"
    with pytest.raises(ValueError, match=f"got exp_avg_{other} alone, expected codes and scales together"):
        optimizer.load_state_dict(saved)
    assert same(bits([], optimizer), before)


def test_hooks() -> None:
    params = parameters()
    optimizer = trained(quantize_state(AdamW(params)), params)
    seen: list[Any] = []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append(o))
    optimizer.register_state_dict_post_hook(lambda o, d: {**d, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, d: seen.append(d["more"]))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [optimizer, 1, "loaded"]


def test_a_stable_embedding_keeps_its_floats_alone() -> None:
    """Moments that stay float32 for one parameter say nothing of the same entries of others."""

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


def test_a_failed_load_leaves_what_is_kept() -> None:
    """Entries that the state has in full are kept from then on only if all of it is loaded."""
    params, others = parameters(), parameters()
    saved = trained(quantize_state(AdamW(params), keep=("exp_avg",)), params).state_dict()
    saved["state"][1] = {**saved["state"][1], "exp_avg_sq_scales": torch.full((40, 2, 2), torch.nan)}
    again = trained(quantize_state(AdamW(others)), others)
    with pytest.raises(ValueError, match="exp_avg_sq_scales"):
        again.load_state_dict(saved)
    trained(again, others, range(1))
    assert "exp_avg_codes" in again.state[others[0]]


@pytest.mark.parametrize("codec", BLOCKWISE)
@pytest.mark.parametrize(("saved_as", "loaded_as"), [(("squares",), ()), ((), ("squares", "moment"))])
def test_other_signs(codec: str, saved_as: tuple[str, ...], loaded_as: tuple[str, ...]) -> None:
    """Codes of signed and unsigned entries have the same shapes with most codecs, and other values."""
    params = parameters()
    saved = trained(quietly(Custom(params), codec=codec, unsigned=saved_as), params).state_dict()
    again = quietly(Custom(parameters()), codec=codec, unsigned=loaded_as)
    with pytest.raises(ValueError, match=r"got squares saved as .*signed, expected .*signed; pass .* unsigned="):
        again.load_state_dict(saved)
    assert not again.state
    again = quietly(Custom(parameters()), codec=codec, unsigned=[*saved_as, "of_no_entry"])
    again.load_state_dict(saved)


@pytest.mark.parametrize("signs", [None, 3, [3]])
def test_without_signs(signs: Any) -> None:
    params = parameters()
    optimizer = trained(quantize_state(AdamW(params)), params)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["unsigned"] = signs
    with pytest.raises(ValueError, match="got state saved with unsigned="):
        optimizer.load_state_dict(saved)


def test_floats_are_copies() -> None:
    """A state dict in floats, and what was loaded, share no memory with the optimizer; torch's own would."""
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


@pytest.mark.parametrize("damaged", [{}, {"state": {}}, {"param_groups": 3, "state": {}}, {"param_groups": [{}]}, None])
def test_no_state_dict(damaged: Any) -> None:
    params = parameters()
    optimizer = trained(quantize_state(AdamW(params)), params)
    before = [x.clone() for x in bits([], optimizer)]
    with pytest.raises(ValueError, match="load what"):
        optimizer.load_state_dict(damaged)
    assert same(bits([], optimizer), before)


@pytest.mark.parametrize("entries", [3, {3: torch.zeros(1)}])
def test_no_entries(entries: Any) -> None:
    params = parameters()
    optimizer = trained(quantize_state(AdamW(params)), params)
    saved = optimizer.state_dict()
    saved["state"][0] = entries
    with pytest.raises(ValueError, match="expected a dict of entries by name"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.complex64, 3])
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
    """They are quantized where the parameter is of it, too."""

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
