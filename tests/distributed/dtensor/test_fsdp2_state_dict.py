"""State dicts of sharded optimizers: torch's functions for them, the plain methods, and torch.optim's states."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import shardopt
from helpers import EIGHT_BIT
from ranks.models import WAYS, make_net, named_parameters
from ranks.pool import Pool
from ranks.runs import single, snapshot_of, step_with, trained
from ranks.snapshot import assert_same, entries, in_full
from slow_cases import slow

STEPS = 2

OPTIONS = {
    "sharded": {},
    "sharded on the host": {"cpu_offload": True},
    "flattened": {"flatten_optimizer_state_dict": True},
    "full": {"full_state_dict": True},
    "from rank 0": {"full_state_dict": True, "cpu_offload": True, "broadcast_from_rank0": True},
}


def _round_trip(way: str, rule: str, codec: str, options: dict[str, bool]) -> None:
    model, optimizer = trained(way, STEPS, rule, codec=codec)
    asked = StateDictOptions(**{**options, "broadcast_from_rank0": False})
    tensors = get_model_state_dict(model, options=asked), get_optimizer_state_dict(model, optimizer, options=asked)
    loaded, loaded_optimizer = trained(way, 0, rule, codec=codec)
    set_model_state_dict(loaded, tensors[0], options=StateDictOptions(**options))
    set_optimizer_state_dict(loaded, loaded_optimizer, tensors[1], options=StateDictOptions(**options))
    assert_same(snapshot_of(loaded, loaded_optimizer), single(STEPS, rule, codec=codec))
    step_with(loaded, loaded_optimizer, STEPS)
    assert_same(snapshot_of(loaded, loaded_optimizer), single(STEPS + 1, rule, codec=codec))


ROUND_TRIPS = [
    ("sharded", 2, "fsdp columns"),
    ("sharded on the host", 4, "fsdp tp"),
    ("flattened", 4, "hsdp"),
    ("full", 2, "fsdp columns"),
    ("from rank 0", 4, "fsdp tp"),
]
ALL_WORLDS = [(1, "single"), (2, "fsdp columns"), (3, "tp"), (4, "fsdp"), (4, "fsdp tp"), (4, "hsdp")]


@pytest.mark.parametrize(
    ("options", "world_size", "way"),
    [*ROUND_TRIPS, *slow(((options, *world) for options in OPTIONS for world in ALL_WORLDS), besides=ROUND_TRIPS)],
)
def test_round_trip(ranks: Pool, world_size: int, way: str, options: str) -> None:
    ranks.run(world_size, _round_trip, way, "adamw", "log8", OPTIONS[options])


@pytest.mark.parametrize("codec", ["dynamic8", "bf16", "fp32"])
@pytest.mark.parametrize("rule", ["lion", "momentum", "normuon"])
def test_round_trip_of_other_rules(ranks: Pool, rule: str, codec: str) -> None:
    ranks.run(3, _round_trip, "fsdp columns", rule, codec, {})


@pytest.mark.ranks(4)
@pytest.mark.parametrize("way", ["fsdp", "fsdp columns", "fsdp tp", "hsdp columns"])
def test_state_dict_and_load_state_dict(way: str) -> None:
    model, optimizer = trained(way, STEPS)
    state_dict = optimizer.state_dict()
    before = snapshot_of(model, optimizer)
    loaded, loaded_optimizer = trained(way, 0)
    set_model_state_dict(loaded, get_model_state_dict(model))
    loaded_optimizer.load_state_dict(state_dict)
    step_with(loaded, loaded_optimizer, STEPS)
    assert_same(snapshot_of(model, optimizer), before)
    assert_same(snapshot_of(loaded, loaded_optimizer), single(STEPS + 1))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("way", ["fsdp", "fsdp columns", "fsdp tp", "tp"])
def test_state_of_a_fresh_optimizer(way: str) -> None:
    model, optimizer = trained(way, 0)
    with torch.no_grad():
        model.up.weight.mul_(0.0)  # some zeros are negative now
    before = {name: in_full(param.detach()).clone() for name, param in named_parameters(model).items()}
    state = get_optimizer_state_dict(model, optimizer)["state"]
    after = {name: in_full(param.detach()) for name, param in named_parameters(model).items()}
    assert_same(after, before)
    stepped = trained("single", 1)
    names = list(entries(named_parameters(stepped[0]), stepped[1]))
    assert list(entries(named_parameters(model), optimizer)) == names
    assert {f"{name}/{entry}" for name in state for entry in state[name]} == {name for name in names if "/" in name}


CODECS = (*EIGHT_BIT, "bf16")


def _torch_adamw(model: nn.Module) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        step_with(model, optimizer, step)
    return optimizer


def _quantize_on_load(way: str, codec: str, through_torch: bool) -> None:
    """A sharded state of torch.optim.AdamW is loaded to the same bits as the same state in full, unsharded."""
    model = WAYS[way](make_net())
    state_dict = _torch_adamw(model).state_dict()
    optimizer = shardopt.AdamW(model.parameters(), codec=codec, min_quantized_numel=64)
    if through_torch:
        torch_optimizer = torch.optim.AdamW(model.parameters())
        torch_optimizer.load_state_dict(state_dict)
        set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, torch_optimizer))
    else:
        optimizer.load_state_dict(state_dict)
    whole = make_net()
    with torch.no_grad():
        for param, sharded in zip(whole.parameters(), model.parameters(), strict=True):
            param.copy_(in_full(sharded))
    in_whole = {
        index: {key: in_full(value) for key, value in state.items()} for index, state in state_dict["state"].items()
    }
    whole_optimizer = shardopt.AdamW(whole.parameters(), codec=codec, min_quantized_numel=64)
    whole_optimizer.load_state_dict({**state_dict, "state": in_whole})
    for step in (STEPS, STEPS + 1):
        assert_same(snapshot_of(model, optimizer), snapshot_of(whole, whole_optimizer))
        step_with(model, optimizer, step)
        step_with(whole, whole_optimizer, step)


@pytest.mark.parametrize(
    ("way", "codec"),
    [
        *(("fsdp columns", codec) for codec in CODECS),
        *((way, "log8") for way in ("fsdp", "fsdp columns tp")),
        *slow((way, codec) for way in ("fsdp", "fsdp columns tp") for codec in CODECS if codec != "log8"),
    ],
)
def test_a_state_of_torch_adamw_is_quantized_on_load(ranks: Pool, way: str, codec: str) -> None:
    ranks.run(4, _quantize_on_load, way, codec, False)


@pytest.mark.parametrize("way", ["fsdp", "fsdp columns", "tp"])
def test_a_state_of_torch_adamw_through_torchs_functions(ranks: Pool, way: str) -> None:
    ranks.run(3, _quantize_on_load, way, "log8", True)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("way", "codec"),
    [
        *(("fsdp columns", codec) for codec in CODECS),
        *((way, "log8") for way in ("fsdp", "fsdp tp")),
        *slow((way, codec) for way in ("fsdp", "fsdp tp") for codec in CODECS if codec != "log8"),
    ],
)
def test_dequantized_state_dict(way: str, codec: str) -> None:
    model, optimizer = trained(way, STEPS, codec=codec)
    _, whole_optimizer = trained("single", STEPS, codec=codec)
    got, expected = (x.state_dict(dequantize=True)["state"] for x in (optimizer, whole_optimizer))
    for index, state in got.items():
        assert_same({key: in_full(value) for key, value in state.items()}, expected[index])
    torch_optimizer = torch.optim.AdamW(model.parameters())
    torch_optimizer.load_state_dict(optimizer.state_dict(dequantize=True))
    step_with(model, torch_optimizer, STEPS)
