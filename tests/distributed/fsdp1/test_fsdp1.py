"""FSDP1 beside ``test_layouts.py``: other models, models in part, attach(), exchanges, and errors on all ranks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import shardopt
from ranks.collectives import counted_collectives
from ranks.flat import bare_shapes, forget_shards, gathered, gathered_parameters, pieces, remember_bare, shared_blocks
from ranks.models import Odds, Tied, fsdp1, loss_of, make_batch, make_net, make_odds, set_gradients
from ranks.runs import make_optimizer, snapshot_of, step_with, trained
from ranks.snapshot import assert_same, assert_same_on_rank_0
from shardopt.layout import UnknownShardError

SMALL = {"min_quantized_numel": 32}
STOCHASTIC = {"stochastic_rounding": True, "stochastic_rounding_seed": 7}
BF16 = torch.bfloat16


def _wrap(model: nn.Module, **options: Any) -> nn.Module:
    bare = bare_shapes(model)
    return remember_bare(FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options), bare)


def _in_pieces(model: nn.Module, **options: Any) -> nn.Module:
    """Only some layers are units, no unit has all, and the other layers are whole on every rank."""
    bare = bare_shapes(model)
    for index in (0, 3):
        model.units[index] = fsdp1(model.units[index], [], **options)
    return remember_bare(model, bare)


#: Makes a model, and wraps it.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., nn.Module]]] = {
    "tied": (Tied, lambda model, **options: fsdp1(model, ["mix"], **options)),
    "auto": (make_net, lambda model, **o: _wrap(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear, nn.Conv1d}), **o)),
    "ignoring": (make_net, lambda model, **options: _wrap(model, ignored_modules=[model.down], **options)),
    "twice": (make_net, lambda model, **o: remember_bare(_wrap(_wrap(model, **o), **o), bare_shapes(make_net()))),
    "in pieces": (Odds, _in_pieces),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, orig: bool) -> None:
    """With noise, which depends on a parameter's place in the model: wrapping says it, and attach() says the same."""
    make, wrap = MODELS[name]
    for late in (False, True):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(make().to(BF16))
        whole, model = models[0], wrap(models[1], use_orig_params=orig)
        unknown = name in ("in pieces", "ignoring") and not (orig or late)  # places in the model
        options = SMALL if unknown else {**SMALL, **STOCHASTIC}
        if late:
            forget_shards(model)
        optimizer, expected = (shardopt.AdamW8bit(m.parameters(), **options) for m in (model, whole))
        if late:
            optimizer.attach(model)
        for step in range(2):
            step_with(model, optimizer, step)
            step_with(whole, expected, step)
        assert_same_on_rank_0(gathered(model, optimizer), lambda w=whole, e=expected: snapshot_of(w, e))


@pytest.mark.ranks(2)
def test_a_model_in_pieces_and_noise() -> None:
    """Noise depends on which of all parameters each is; a unit does not know what stands beside it."""
    model = _in_pieces(Odds().to(BF16), use_orig_params=False)
    optimizer = shardopt.AdamW8bit(model.parameters(), **SMALL, **STOCHASTIC)
    before = gathered_parameters(model)
    set_gradients(model, 0)
    for _ in range(2):
        with pytest.raises(UnknownShardError, match=r"call optimizer\.attach\(model\) with the whole model"):
            optimizer.step()
    assert not any(optimizer.state.values())
    assert_same(gathered_parameters(model), before)


@pytest.mark.ranks(2)
def test_units_of_their_own() -> None:
    """An optimizer that has no other parameters than a unit's needs to know of none; another has those of both."""
    wholes, models = [make_net(BF16) for _ in range(2)], [_wrap(make_net(BF16)) for _ in range(2)]
    for whole, model in zip(wholes, nn.ModuleList([nn.Linear(2, 2), *models])[1:], strict=True):
        optimizer, expected = (shardopt.AdamW8bit(m.parameters(), **SMALL, **STOCHASTIC) for m in (model, whole))
        step_with(model, optimizer, 0)
        step_with(whole, expected, 0)
        assert_same_on_rank_0(gathered(model, optimizer), lambda w=whole, e=expected: snapshot_of(w, e))
    for each in (models, wholes):
        stepped = shardopt.AdamW8bit([p for model in each for p in model.parameters()], **SMALL)
        for step in range(2):
            for model in each:
                set_gradients(model, step)
            stepped.step()
    for model, whole in zip(models, wholes, strict=True):
        assert_same(gathered_parameters(model), {n: p.detach() for n, p in whole.named_parameters()})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("orig", [True, False])
def test_a_model_is_let_go(orig: bool) -> None:
    """Parameters that an optimizer still has keep no model alive, before and after they were asked for their shards."""
    for steps in (0, 1):
        model = make_odds(use_orig_params=orig)[1]
        optimizer = shardopt.AdamW8bit(model.parameters(), **SMALL)
        for step in range(steps):
            step_with(model, optimizer, step)
        alive = weakref.ref(model)
        del model
        gc.collect()
        assert alive() is None
    optimizer = shardopt.AdamW8bit(make_odds(use_orig_params=orig)[1].parameters(), **SMALL)
    gc.collect()
    with pytest.raises(UnknownShardError, match="that does not say which elements it holds"):
        optimizer.step()


@pytest.mark.ranks(2)
def test_made_before_wrapping() -> None:
    """``use_orig_params=True`` keeps the parameters."""
    model = make_net()
    optimizer = make_optimizer("single", model)
    optimizer.attach(model)  # no FSDP1 unit yet: nothing to learn
    model = fsdp1(model)
    for step in range(3):
        step_with(model, optimizer, step)
    assert_same(gathered(model, optimizer), snapshot_of(*trained("single", 3)))


def _tiny() -> nn.Module:
    """With four ranks, two of them hold nothing at all."""
    return fsdp1(nn.Sequential(nn.Linear(1, 1)), [])


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("tiny", "orig"), [(False, True), (False, False), (True, True)])
def test_wrapped_before_the_import(tiny: bool, orig: bool) -> None:
    """Ranks without any gradient say so, too."""
    model = _tiny() if tiny else make_odds(use_orig_params=orig)[1]
    forget_shards(model)
    optimizer = shardopt.AdamW8bit(model.parameters())
    before = [param.detach().clone() for param in model.parameters()]
    set_gradients(model, 0)
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        assert "FullyShardedDataParallel" in str(caught.value)
        assert "import shardopt before wrapping the model, or call optimizer.attach(model) once" in str(caught.value)
    assert not any(optimizer.state.values())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.ranks(4)
def test_ranks_with_nothing() -> None:
    """A rank that holds nothing takes part, has no state, and saves and loads that."""
    model, whole = _tiny(), nn.Sequential(nn.Linear(1, 1))
    with FullyShardedDataParallel.summon_full_params(model):
        whole.load_state_dict({name: x.detach().clone() for name, x in model.module.named_parameters()})
    optimizer, expected = (shardopt.AdamW8bit(m.parameters(), nonfinite="raise") for m in (model, whole))
    for step in range(3):
        step_with(model, optimizer, step)
        step_with(whole, expected, step)
        optimizer.load_state_dict(optimizer.state_dict())
    held = sum(piece.numel for piece in pieces(model))
    assert bool(optimizer.state_dict()["state"]) is bool(held)
    assert held or dist.get_rank() > 0
    assert_same_on_rank_0(gathered(model, optimizer), lambda: snapshot_of(whole, expected))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("orig", [True, False])
def test_strided_weights(orig: bool) -> None:
    """FSDP1 flattens such weights in the order of memory, which is not that of their elements.

    It is nobody's business until one of our optimizers has to step them.
    """
    wrapped = _wrap(nn.Sequential(nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)), use_orig_params=orig)
    theirs = torch.optim.AdamW(wrapped.parameters())
    assert shardopt.memory_report(theirs).numel == sum(param.numel() for param in wrapped.parameters())
    optimizer = shardopt.AdamW8bit(wrapped.parameters())
    for call in (lambda: optimizer.attach(wrapped), optimizer.step):
        with pytest.raises(RuntimeError, match=r"0\.weight.*contiguous"):
            call()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("orig", [True, False])
def test_gradients_that_are_not_shared_out_yet_are_refused(orig: bool) -> None:
    model = fsdp1(make_net(), use_orig_params=orig)
    optimizer = make_optimizer("fsdp1", model)
    with model.no_sync():
        loss_of(model, make_batch(0, dist.get_rank())).backward()
    with pytest.raises(RuntimeError, match=r"got a gradient of shape .* expected"):
        optimizer.step()


#: A layout, a rule and options, and how many collectives there are in each step.
EXCHANGES: list[tuple[int, str, str, dict[str, Any], int | None]] = [
    (3, "fsdp1", "adamw", {}, 2),
    (3, "fsdp1 flat", "adamw", {}, 2),
    (3, "fsdp1", "momentum", {"codec": "dynamic8", "block_size": 16}, 1),
    (3, "fsdp1", "adamw", {"nonfinite": "raise"}, 3),  # one to agree that gradients are finite
    (3, "fsdp1", "adamw", {"codec": "fp32"}, 0),
    (3, "fsdp1 none", "adamw", {}, 0),
    (3, "fsdp1 none flat", "adamw", {}, 0),
    (3, "zero", "adamw", {}, None),
    (4, "fsdp1 nested", "adamw", {"codec": "companded8"}, 1),
    (4, "fsdp1 nested", "lion", {}, 1),
    (1, "fsdp1", "adamw", {}, 0),
]


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_one_collective_per_round(world_size: int) -> None:
    """However many parameters there are, and whether or not anything has a gradient; before the first, one to agree."""
    for _, way, rule, options, rounds in (case for case in EXCHANGES if case[0] == world_size):
        model, optimizer = trained(way, 0, rule, **options)
        names = []
        for step in range(3):
            with counted_collectives() as collectives:
                step_with(model, optimizer, step) if step < 2 else optimizer.step()
            names.append([name for name, _ in collectives])
        if rounds is None:  # ZeRO's own
            assert all(name.startswith("broadcast") for step in names for name in step)
        else:
            agreed = world_size > 1 and "none" not in way
            assert names == [["allreduce"] * (rounds + agreed), *[["allreduce"] * rounds] * 2], (way, rule, options)


@pytest.mark.ranks(4)
def test_bytes_of_a_round() -> None:
    """Two extremes of four bytes, per cut block and moment, on all ranks."""
    model, optimizer = trained("fsdp1", 0)
    with counted_collectives() as collectives:
        step_with(model, optimizer, 0)
    shared = shared_blocks(model, 128)
    roll = 8 * (1 + sum(1 for blocks in shared.values() if blocks))
    shapes = {name: torch.Size(shape) for name, shape in model.bare_shapes.items() if len(shape) > 1}
    cut = sum(len(shared[name]) for name, shape in shapes.items() if shape[1:].numel() >= 32)
    assert cut > 0
    assert collectives[1][1] - roll == cut * 2 * 2 * 4
