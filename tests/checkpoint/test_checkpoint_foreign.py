"""Other packages' states come in code by code where both have the same codes, and are coded anew elsewhere.

From state dicts made by hand in the other packages' forms.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

import shardopt
from foreign_states import (
    ALIGNED,
    GROUPS,
    MATRICES,
    NATIVE,
    OTHERS,
    SHAPES,
    STATES,
    assert_imported,
    bitsandbytes_state,
    by_hand,
    companded,
    flashoptim_state,
    from_blocks,
    in_blocks,
    made_up,
    params_of,
    specification,
    stepped,
)
from helpers import everything
from ranks.layouts import values
from ranks.models import WAYS, make_net, named_parameters, set_gradients
from ranks.pool import Pool
from ranks.snapshot import assert_same, snapshot
from shardopt.checkpoint import import_state
from shardopt.optim import ShardedOptimizer


@pytest.mark.parametrize("package", ["bitsandbytes", "torchao"])
def test_dynamic_codes_are_taken_over(package: str) -> None:
    state_dict, decoded = by_hand(package)
    ours = shardopt.AdamW8bit(params_of(), codec="dynamic8", block_size=256, min_quantized_numel=4096)
    report = import_state(ours, state_dict)
    exact = {shape for shape in ALIGNED[256] if package == "bitsandbytes" or math.prod(shape) % 256 == 0}
    assert_imported(ours, decoded, exact)
    for index, shape in enumerate(SHAPES):
        if shape in exact:
            saved, state = state_dict["state"][index], list(ours.state.values())[index]
            if package == "bitsandbytes":
                saved = saved["__bnb_optimizer_quant_state__"]
                codes, scales = (saved["state1"], saved["state2"]), (saved["absmax1"], saved["absmax2"])
            else:
                codes, scales = zip(*((s.codes, s.scale) for s in (saved["exp_avg"], saved["exp_avg_sq"])), strict=True)
            for name, code, scale in zip(("exp_avg", "exp_avg_sq"), codes, scales, strict=True):
                assert torch.equal(state[f"{name}_codes"], code)
                assert torch.equal(state[f"{name}_scales"].flatten(), scale)
    quantized_there = package == "bitsandbytes"
    expected = {
        (16, 512): "exact",
        (33, 130): "requantized" if quantized_there else "quantized",
        (1, 4099): "exact" if quantized_there else "quantized",
        (50, 96): "requantized" if quantized_there else "quantized",
        (6, 5, 8, 32): "exact",
        (5000,): "as float32" if quantized_there else "exact",
        (7,): "exact",
        (): "exact",
    }
    assert list(report.parameters.values()) == [expected[shape] for shape in SHAPES]


def test_companded_codes_are_taken_over() -> None:
    state_dict, decoded = by_hand("flashoptim")
    ours = shardopt.AdamW8bit(params_of(), codec="companded8", block_size=32)
    report = import_state(ours, state_dict)
    for index, (param, moments) in enumerate(zip(ours.param_groups[0]["params"], decoded, strict=True)):
        spec, state, saved = specification(ours, param), ours.state[param], state_dict["state"][index]
        own = spec.slices[0].spec
        exact = tuple(param.shape) in ALIGNED[32]
        outcome = "exact" if exact else "requantized" if tuple(param.shape) in MATRICES else "as float32"
        assert report.parameters[f"parameter {index} of param group 0"] == outcome
        if exact:
            for moment in spec.moments:
                assert torch.equal(state[own.codes_name(moment)], saved[f"{moment.name}::quantized"].view(torch.uint8))
                scales = state[own.scales_name(moment)]
                assert torch.equal(scales.flatten(), saved[f"{moment.name}::scales"].float())
        if outcome != "requantized":
            for found, expected in zip(spec.decode(state).values(), moments, strict=True):
                # Signed: q / 127 (which counts twice), 2 - t, the quotient, the product. Unsigned: 1 / 255, s and q
                # times it (which count twice), the square. And the expected value, float64's, is rounded.
                torch.testing.assert_close(found, expected, rtol=8 * 2**-24, atol=0)


def test_scales_of_flashoptim_beside_bfloat16_parameters() -> None:
    """FlashOptim's scales are float16's bits in tensors that say bfloat16."""
    x = made_up((16, 512), 0)
    states = [flashoptim_state(x, bfloat16)[0] for bfloat16 in (False, True)]
    found = []
    for state in states:
        ours = shardopt.AdamW8bit([Parameter(torch.zeros(16, 512))], codec="companded8", block_size=32)
        import_state(ours, {"state": {0: state}, "param_groups": [{"params": [0]}]})
        found.append(everything(ours))
    assert_same(*found)


@pytest.mark.parametrize(("codec", "block_size"), [("log8", 128), ("dynamic8", 128), ("companded8", 64), ("bf16", 128)])
@pytest.mark.parametrize("package", STATES)
def test_other_codecs_code_anew(package: str, codec: str, block_size: int) -> None:
    state_dict, decoded = by_hand(package)
    ours = shardopt.AdamW8bit(params_of(), codec=codec, block_size=block_size)
    report = import_state(ours, state_dict)
    if package == "flashoptim":
        decoded = [flashoptim_as_decoded_here(state) for state in state_dict["state"].values()]
    assert_imported(ours, decoded, set())
    assert "exact" not in {report.parameters[f"parameter {i} of param group 0"] for i in range(len(MATRICES))}


def flashoptim_as_decoded_here(state: dict[str, Tensor]) -> list[Tensor]:
    """With the roundings of companded8."""
    found = []
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        codes, scales = state[f"{name}::quantized"], state[f"{name}::scales"]
        blocks = in_blocks(codes.view(torch.uint8), 32)
        x = shardopt.codec.get_codec("companded8").decode(blocks, scales.float()[:, None], signed=signed)
        found.append(from_blocks(x if signed else x * x, codes))
    return found


def test_float32_state_takes_any_codec_in() -> None:
    state_dict, decoded = by_hand("bitsandbytes")
    ours = shardopt.AdamW(params_of(), codec="fp32")
    report = import_state(ours, state_dict)
    assert_imported(ours, decoded, set(SHAPES))
    assert report.counts == {"as float32": 6, "exact": 2}


def test_another_map_is_no_codec_of_ours() -> None:
    x = made_up((16, 512), 1)
    state, _ = bitsandbytes_state(x)
    inner = state["__bnb_optimizer_quant_state__"]
    table = inner["qmap1"] = inner["qmap1"].clone()
    table[200] = torch.nextafter(table[200], torch.tensor(1.0))
    ours = shardopt.AdamW8bit([Parameter(torch.zeros(16, 512))], codec="dynamic8", block_size=256)
    report = import_state(ours, {"state": {0: state}, "param_groups": [{"params": [0], "betas": (0.9, 0.99)}]})
    assert report.counts == {"requantized": 1}
    decoded = [
        from_blocks(
            inner[f"qmap{i}"][in_blocks(inner[f"state{i}"], 256).int()] * inner[f"absmax{i}"][:, None], x.signed
        )
        for i in (1, 2)
    ]
    assert_imported(ours, [decoded], set())


# --- hyper-parameters, names, reports


@pytest.mark.parametrize("package", STATES)
def test_hyper_parameters_are_taken_over(package: str) -> None:
    state_dict, _ = by_hand(package)
    state_dict["param_groups"][0] |= {"unheard_of": 7, "maximize": True}
    ours = shardopt.AdamW8bit(params_of(), lr=1.0, nonfinite="raise", block_size=64)
    report = import_state(ours, state_dict)
    group = ours.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.5, (0.8, 0.99), 1e-7, 0.25)
    assert isinstance(group["lr"], float)
    assert (group["nonfinite"], group["block_size"], group["maximize"]) == ("raise", 64, True)
    assert "unheard_of" not in group
    assert report.source == package
    ignored = ("unheard_of=7 of param group 0",)
    assert report.ignored[-1:] == ignored
    if package == "flashoptim":
        assert report.ignored == ("master_bytewidth=3 of param group 0", "quantize=True of param group 0", *ignored)
        assert group["initial_lr"] == 1.0
    else:
        assert report.ignored == ignored
    assert str(report).startswith(f"imported the state of {len(SHAPES)} parameters from {package}: ")
    assert "ignored: " in str(report)


def test_a_learning_rate_in_a_tensor_stays_one() -> None:
    state_dict, _ = by_hand("bitsandbytes")
    ours = shardopt.AdamW8bit(params_of(), lr=torch.tensor(1.0))
    import_state(ours, state_dict)
    assert torch.equal(ours.param_groups[0]["lr"], torch.tensor(0.5))


def one_moment(package: str, name: str, **group: Any) -> dict[str, Any]:
    """The state dict of Lion or SGD with one parameter of 16 x 512."""
    x = made_up((16, 512), 1)
    if package == "bitsandbytes":
        state, _ = bitsandbytes_state(x, count=1)
    else:
        coded = companded(x.signed, True)
        state = {f"{name}::quantized": coded.codes, f"{name}::scales": coded.scales}
    return {"state": {0: state}, "param_groups": [{"params": [0], "lr": 0.1, "weight_decay": 0.0, **group}]}


@pytest.mark.parametrize("package", ["bitsandbytes", "flashoptim"])
def test_lion(package: str) -> None:
    group = {"betas": (0.9, 0.98)} | ({"eps": 0.0} if package == "bitsandbytes" else {})
    codec, size = NATIVE[package]
    ours = shardopt.Lion8bit([Parameter(torch.zeros(16, 512))], codec=codec, block_size=size)
    report = import_state(ours, one_moment(package, "exp_avg", **group))
    assert report.counts == {"exact": 1}
    assert ours.param_groups[0]["betas"] == (0.9, 0.98)


@pytest.mark.parametrize("package", ["bitsandbytes", "flashoptim"])
def test_sgd(package: str) -> None:
    group = {"betas": (0.7, 0), "eps": 0.0} if package == "bitsandbytes" else {"momentum": 0.7, "dampening": 0.0}
    codec, size = NATIVE[package]
    ours = shardopt.SGD8bit([Parameter(torch.zeros(16, 512))], momentum=0.9, codec=codec, block_size=size)
    report = import_state(ours, one_moment(package, "momentum_buffer", **group))
    assert report.counts == {"exact": 1}
    assert (ours.param_groups[0]["momentum"], ours.param_groups[0]["dampening"]) == (0.7, 0.0)
    assert report.ignored == ()


def test_low_bits_begin_anew() -> None:
    state, _ = flashoptim_state(made_up((16, 512), 1))
    state["error_bits"] = torch.ones(16, 512, dtype=torch.bfloat16)
    param = Parameter(values((16, 512), 1, torch.bfloat16))
    ours = shardopt.AdamW8bit([param], codec="companded8", block_size=32, master_weight_bits=24)
    report = import_state(ours, {"state": {0: state}, "param_groups": [{"params": [0]}]}, names={"w": param})
    assert report.ignored == ("error_bits of w",)
    assert report.parameters == {"w": "exact"}
    assert not ours.state[param]["master_low_bits"].any()


def torch_optimizers() -> dict[str, tuple[Any, type[ShardedOptimizer], dict[str, Any]]]:
    return {
        "adamw": (torch.optim.AdamW, shardopt.AdamW8bit, {"lr": 0.1, "weight_decay": 0.1}),
        "adam": (torch.optim.Adam, shardopt.Adam8bit, {"lr": 0.1, "weight_decay": 0.1}),
        "sgd": (torch.optim.SGD, shardopt.SGD8bit, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
        "rmsprop": (torch.optim.RMSprop, shardopt.RMSprop8bit, {"lr": 0.1, "momentum": 0.9, "centered": True}),
        "adagrad": (torch.optim.Adagrad, shardopt.Adagrad8bit, {"lr": 0.1, "lr_decay": 0.1}),
        "adamax": (torch.optim.Adamax, shardopt.Adamax8bit, {"lr": 0.1, "betas": (0.8, 0.99)}),
        "nadam": (torch.optim.NAdam, shardopt.NAdam8bit, {"lr": 0.1, "momentum_decay": 0.1}),
        "radam": (torch.optim.RAdam, shardopt.RAdam8bit, {"lr": 0.1, "weight_decay": 0.1}),
    }


@pytest.mark.parametrize("rule", torch_optimizers())
def test_torch(rule: str) -> None:
    theirs_class, ours_class, hyper = torch_optimizers()[rule]
    theirs = theirs_class(params_of(), **hyper)
    stepped(theirs)
    switches = {key: value for key, value in hyper.items() if key in ("momentum", "centered")}  # of moments
    other, loaded = (ours_class(params_of(), **switches) for _ in range(2))
    report = import_state(other, theirs.state_dict())
    loaded.load_state_dict(theirs.state_dict())
    assert_same(everything(other), everything(loaded))
    assert report.source == "torch.optim"
    assert report.counts == {"quantized": len(MATRICES), "exact": len(OTHERS)}
    assert report.ignored == ()
    assert {key: other.param_groups[0][key] for key in hyper} == hyper


def test_parameters_are_found_by_name() -> None:
    """In the dict of get_optimizer_state_dict, in whatever order the optimizer has them."""
    theirs_model, ours_model = make_net(), make_net()
    theirs = torch.optim.AdamW(theirs_model.parameters(), lr=0.1)
    set_gradients(theirs_model, 0)
    theirs.step()
    state_dict = get_optimizer_state_dict(theirs_model, theirs)
    names = named_parameters(ours_model)
    ours = shardopt.AdamW8bit(list(names.values())[::-1], min_quantized_numel=64)
    report = import_state(ours, state_dict, names=names)
    assert list(report.parameters) == list(names)[::-1]
    for name, param in names.items():
        spec = specification(ours, param)
        expected = spec.encode({m.name: state_dict["state"][name][m.name] for m in spec.moments})
        assert_same({k: v for k, v in ours.state[param].items() if k != "step"}, expected)
    in_order = shardopt.AdamW8bit(ours_model.parameters(), min_quantized_numel=64)
    import_state(in_order, state_dict)
    assert_same(snapshot(names, in_order), snapshot(names, ours))
    with pytest.raises(ValueError, match="same param groups, of the same model"):
        import_state(ours, state_dict, names={f"x.{name}": param for name, param in names.items()})


# --- into sharded optimizers


def by_hand_for(package: str, names: dict[str, Tensor]) -> dict[str, Any]:
    """A state dict for these parameters."""
    states = {i: STATES[package](made_up(tuple(p.shape), i))[0] for i, p in enumerate(names.values())}
    group = {"lr": 0.5, "weight_decay": 0.25, **GROUPS[package], "params": list(states)}
    return {"state": states, "param_groups": [group]}


def import_sharded(way: str, package: str, codec: str, size: int) -> None:
    """Imports into a model sharded in this way, and compares it and its next step with the unsharded one."""
    found = []
    for each in ("single", way):
        model = WAYS[each](make_net())
        names = named_parameters(model)
        ours = shardopt.AdamW8bit(names.values(), codec=codec, block_size=size, min_quantized_numel=64)
        report = import_state(ours, by_hand_for(package, names), names=names)
        imported = snapshot(names, ours)
        set_gradients(model, 1)
        ours.step()
        found.append((report, imported, snapshot(names, ours)))
    whole, parts = found
    assert parts[0] == whole[0]
    assert_same(parts[1], whole[1])
    assert_same(parts[2], whole[2])


WORLDS = [
    (3, "fsdp columns"),
    (4, "fsdp tp"),
    (2, "fsdp offload"),
    *(pytest.param(*world, marks=pytest.mark.slow) for world in [(2, "fsdp"), (4, "fsdp"), (2, "hsdp of one")]),
]


@pytest.mark.parametrize("package", STATES)
@pytest.mark.parametrize(("world_size", "way"), WORLDS)
def test_shards_take_their_parts(ranks: Pool, world_size: int, way: str, package: str) -> None:
    """Rows of 66 and 192, columns cut within blocks."""
    for codec, size in (NATIVE[package], ("log8", 128)):
        ranks.run(world_size, import_sharded, way, package, codec, size)


def import_torch_sharded(way: str, full: bool) -> None:
    """A full state dict of torch.optim, and one sharded as the parameters are."""
    theirs_model, ours_model, single = WAYS[way](make_net()), WAYS[way](make_net()), make_net()
    theirs = torch.optim.AdamW(theirs_model.parameters(), lr=0.1)
    set_gradients(theirs_model, 0)
    theirs.step()
    options = StateDictOptions(full_state_dict=full)
    state_dict = get_optimizer_state_dict(theirs_model, theirs, options=options)
    assert any(isinstance(x, DTensor) for s in state_dict["state"].values() for x in s.values()) != full
    names = named_parameters(ours_model)
    ours = shardopt.AdamW8bit(names.values(), min_quantized_numel=64)
    report = import_state(ours, state_dict, names=names)
    expected = shardopt.AdamW8bit(single.parameters(), min_quantized_numel=64)
    whole = get_optimizer_state_dict(theirs_model, theirs, options=StateDictOptions(full_state_dict=True))
    assert import_state(expected, whole, names=named_parameters(single)) == report
    assert_same(snapshot(names, ours), snapshot(named_parameters(single), expected))
    if not full:
        with pytest.raises(ValueError, match="expected whole tensors"):
            import_state(expected, state_dict)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize(("world_size", "way"), [(2, "fsdp"), (3, "fsdp columns")])
def test_torch_into_shards(ranks: Pool, world_size: int, way: str, full: bool) -> None:
    ranks.run(world_size, import_torch_sharded, way, full)
