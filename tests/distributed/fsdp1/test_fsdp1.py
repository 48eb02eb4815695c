"""FSDP1: given the same gradients, the bits of one rank, whatever the strategy, the ranks and the blocks they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers import CASES, CODEC_NAMES, RULES
from ranks.flat import bare_shapes, gathered, gathered_parameters, pieces, remember_bare
from ranks.models import FEW_WORLDS, FSDP1_WAYS, Odds, fsdp1, make_odds, set_gradients
from ranks.pickling import from_all_ranks
from ranks.pool import Pool
from ranks.runs import single, snapshot_of, step_with, trained
from ranks.snapshot import assert_same, assert_same_on_rank_0, snapshot
from shardopt.optim import ShardedOptimizer
from slow_cases import slow
from weight_formats import FORMATS

STEPS = 3
BF16 = torch.bfloat16
#: Options of bfloat16 weights.
WEIGHTS = {name: weights.options for name, weights in FORMATS.items() if weights.dtype is BF16}
FEW_WAYS = {
    1: ("fsdp1", "fsdp1 flat"),
    2: ("fsdp1", "fsdp1 grad flat", "fsdp1 none", "fsdp1 nested"),
    3: ("fsdp1 flat", "fsdp1 grad", "fsdp1 none flat", "fsdp1 nested flat", "fsdp1 bf16"),
    4: ("fsdp1", "fsdp1 flat", "fsdp1 hybrid", "fsdp1 hybrid flat", "fsdp1 nested"),
}


def _as_single(way: str, rule: str, options: dict[str, Any]) -> None:
    got = snapshot_of(*trained(way, STEPS, rule, **options))
    assert_same_on_rank_0(got, lambda: single(STEPS, rule, **options))


@pytest.mark.parametrize(("world_size", "way"), [(world, way) for world, ways in FEW_WAYS.items() for way in ways])
def test_given_gradients(ranks: Pool, world_size: int, way: str) -> None:
    ranks.run(world_size, _as_single, way, "adamw", {})


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("way", FSDP1_WAYS)
@pytest.mark.parametrize(("rule", "codec"), [("adamw", "dynamic8"), ("lion", "companded8"), ("nesterov", "log8")])
def test_given_gradients_sweep(ranks: Pool, world_size: int, way: str, rule: str, codec: str) -> None:
    if world_size == 4 or "hybrid" not in way:
        ranks.run(world_size, _as_single, way, rule, {"codec": codec})


def run_odds(
    make: Callable[[Any], ShardedOptimizer], steps: int = STEPS, dtype: torch.dtype = torch.float32, **wrapping: Any
) -> None:
    """Steps both models with the same gradients, and compares what they are and their optimizers hold."""
    whole, model = make_odds(dtype, **wrapping)
    optimizer = make(model)
    expected = make(whole)
    for step in range(steps):
        step_with(model, optimizer, step)
        if dist.get_rank() == 0:
            step_with(whole, expected, step)
    assert_same_on_rank_0(gathered(model, optimizer), lambda: snapshot_of(whole, expected))


def _odds(orig: bool, rule: str, codec: str, block_sizes: list[int], dtype: torch.dtype, options: Any) -> None:
    for block_size in block_sizes:
        own = {"codec": codec, "block_size": block_size, "min_quantized_numel": 32, **options}
        run_odds(lambda m, own=own: CASES[rule].make(m.parameters(), **own), dtype=dtype, use_orig_params=orig)


ODD_CASES: list[tuple[str, str, int, bool]] = [
    *(("adamw", "log8", world_size, orig) for world_size in (2, 3, 4) for orig in (True, False)),
    *(("adamw", codec, *on) for codec in ("companded8", "dynamic8", "bf16", "fp32") for on in FEW_WORLDS),
    *(("lion", codec, *on) for codec in ("log8", "dynamic8") for on in FEW_WORLDS),
    *(("momentum", codec, *on) for codec in ("log8", "companded8", "fp32") for on in FEW_WORLDS),
    *(
        (rule, "log8", *on)
        for rule in ("ademamix", "adan", "amsgrad", "adamax", "adagrad", "lamb", "lars", "cautious_adamw")
        for on in FEW_WORLDS[:1]
    ),
    *(
        (rule, "log8", *on)
        for rule in ("centered_rmsprop_momentum", "adopt", "stable_adamw", "lamb")
        for on in FEW_WORLDS[1:2]
    ),
    *(("prodigy", codec, *on) for codec, on in (("log8", FEW_WORLDS[0]), ("bf16", FEW_WORLDS[1]))),
    *(("repaid_adamw", codec, *on) for codec, on in zip(("log8", "companded8"), FEW_WORLDS, strict=False)),
    ("ademamix", "bf16", *FEW_WORLDS[0]),
    ("muon", "log8", 3, True),
    ("muon_in_waves", "dynamic8", 4, True),
]


@pytest.mark.parametrize(
    ("rule", "codec", "world_size", "orig", "block_size"),
    [
        param
        for place, case in enumerate(ODD_CASES)
        for param in (
            [(*case, 16), (*case, 128)]
            if case[:2] == ("adamw", "log8")
            else [(*case, (16, 128)[place % 2]), *slow([(*case, (128, 16)[place % 2])])]
        )
    ],
)
def test_odd_shapes(ranks: Pool, world_size: int, orig: bool, rule: str, codec: str, block_size: int) -> None:
    """Blocks that three and four ranks share; units with fewer elements than ranks; padding.

    By default AdamW with log8 in blocks of 16 and of 128, the others in one of these in turn.
    """
    ranks.run(world_size, _odds, orig, rule, codec, [block_size], torch.float32, {})


@pytest.mark.parametrize(("world_size", "orig"), [(2, True), *FEW_WORLDS])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_bfloat16_weights(ranks: Pool, world_size: int, orig: bool, weights: str) -> None:
    """The noise of stochastic rounding does not depend on the sharding."""
    ranks.run(world_size, _odds, orig, "adamw", "log8", [16], BF16, WEIGHTS[weights])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("rule", RULES)
def test_sweep(ranks: Pool, world_size: int, orig: bool, codec: str, rule: str) -> None:
    for options in ({}, *WEIGHTS.values()):
        ranks.run(world_size, _odds, orig, rule, codec, [64], BF16, options)
    ranks.run(world_size, _odds, orig, rule, codec, [16, 128, 4096], torch.float32, {})


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [3, 4])
def test_odd_shapes_are_odd(world_size: int) -> None:
    """Assumptions of the tests about the model of odd shapes: cut blocks of many owners, and ranks with nothing."""
    world_size = dist.get_world_size()
    for orig in (True, False):
        _, model = make_odds(use_orig_params=orig)
        everyone = from_all_ranks({p.name: p.numel for p in pieces(model)})
        owners = {name: sum(1 for own in everyone if own[name]) for name in everyone[0]}
        assert owners["units.4.weight0"] == owners["units.5.weight0"] == world_size  # one block of 128 each
        assert owners["units.1.weight0"] < world_size or world_size < 4
        assert any(count < world_size for count in owners.values())


@pytest.mark.ranks(3)
def test_the_tests_put_parameters_together() -> None:
    """The pieces of which the tests put a whole together are where FSDP itself says."""
    for orig in (True, False):
        whole, model = make_odds(use_orig_params=orig)
        found = gathered_parameters(model)
        assert_same(found, {name: param.detach() for name, param in whole.named_parameters()})
        for piece in pieces(model):
            assert torch.equal(piece.of(piece.tensor), found[piece.name].reshape(-1)[piece.start :][: piece.numel])


def _by_kind(model: nn.Module) -> ShardedOptimizer:
    """Three param groups with options of their own."""
    named: dict[str, nn.Parameter] = {}
    if hasattr(model, "bare_shapes"):
        named = {piece.name: piece.tensor for piece in pieces(model)}
    else:
        named = dict(model.named_parameters())
    own: list[list[Any]] = [[], [], []]
    for index, param in enumerate(named.values()):
        own[index % 3].append(param)
    groups = [
        {"params": own[1], "lr": 3e-2, "codec": "companded8", "block_size": 32, "weight_decay": 0.0},
        {"params": own[0], "betas": (0.8, 0.9)},
        {"params": own[2], "codec": "dynamic8", "block_size": 16, "stochastic_rounding": True, "maximize": True},
    ]
    return RULES["adamw"].make(groups, min_quantized_numel=32)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 4])
def test_param_groups(world_size: int) -> None:
    run_odds(_by_kind, dtype=BF16)


@pytest.mark.ranks
@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_in_turns(world_size: int, orig: bool) -> None:
    """Parameters that have a gradient in some steps only: whole units of them."""
    whole, model = make_odds(use_orig_params=orig)
    options = {"min_quantized_numel": 32, "block_size": 16}
    optimizer, expected = (RULES["adamw"].make(m.parameters(), **options) for m in (model, whole))
    units = {name: name.rpartition(".")[0] for name in model.bare_shapes}
    numbers = {unit: number for number, unit in enumerate(dict.fromkeys(units.values()))}
    for step in range(5):
        for each, stepped in ((model, optimizer), (whole, expected)):
            set_gradients(each, step)
            named = {p.name: p.tensor for p in pieces(model)} if each is model else dict(whole.named_parameters())
            for name, param in named.items():
                if (numbers[units[name]] + step) % 3 == 0 or step == 3:
                    param.grad = None
            stepped.step()
    assert_same_on_rank_0(gathered(model, optimizer), lambda: snapshot(dict(whole.named_parameters()), expected))


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_frozen_parameters(world_size: int) -> None:
    """One parameter in a unit and one whole unit do not require gradients."""
    models = [Odds() for _ in range(2)]
    for model in models:
        for name in ("units.3.weight0", "units.4.weight0", "own.weight1"):
            model.get_parameter(name).requires_grad_(False)
    whole, model = models[0], fsdp1(models[1], [f"units.{index}" for index in range(7)])
    optimizer, expected = (RULES["adamw"].make(m.parameters(), min_quantized_numel=32) for m in (model, whole))
    for step in range(STEPS):
        set_gradients(model, step)
        optimizer.step()
        set_gradients(whole, step)
        for param in whole.parameters():
            if not param.requires_grad:
                param.grad = None
        expected.step()
    assert_same_on_rank_0(gathered(model, optimizer), lambda: snapshot(dict(whole.named_parameters()), expected))


@pytest.mark.ranks(3)
def test_parameters_beside_units() -> None:
    """Only some layers are FSDP1 units; the others are whole on every rank."""
    whole, model = Odds(), Odds()
    bare = bare_shapes(model)
    model.units[0] = fsdp1(model.units[0], [])
    model.units[3] = fsdp1(model.units[3], [], use_orig_params=False)
    remember_bare(model, bare)
    optimizer, expected = (RULES["adamw"].make(m.parameters(), min_quantized_numel=32) for m in (model, whole))
    for step in range(STEPS):
        step_with(model, optimizer, step)
        step_with(whole, expected, step)
    assert_same_on_rank_0(gathered(model, optimizer), lambda: snapshot_of(whole, expected))
