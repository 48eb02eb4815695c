"""Wrapping by FSDP1 tells parameters what optimizer.attach(model) would tell them, and keeps no model alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import shardopt
from ranks.flat import bare_shapes, gathered, gathered_parameters, remember_bare
from ranks.models import FSDP1_WAYS, Odds, Tied, fsdp1, make_net, make_odds, set_gradients
from ranks.pool import Pool
from ranks.runs import snapshot_of, step_with
from ranks.snapshot import assert_same, assert_same_on_rank_0
from shardopt.layout import FlatBuffer, FlatShard, UnknownShardError, shard_of

SMALL = {"min_quantized_numel": 32}
STOCHASTIC = {"stochastic_rounding": True, "stochastic_rounding_seed": 7}
BF16 = torch.bfloat16


def _wrap(model: nn.Module, **options: Any) -> nn.Module:
    bare = bare_shapes(model)
    return remember_bare(FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options), bare)


def _ignoring(**options: Any) -> nn.Module:
    model = make_net()
    return _wrap(model, ignored_modules=[model.down], **options)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "odds": lambda **options: make_odds(**options)[1],
    "tied": lambda **options: fsdp1(Tied(), ["mix"], **options),
    "auto": lambda **options: _wrap(make_net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear, nn.Conv1d}), **options),
    "ignoring": _ignoring,
    "twice": lambda **options: _wrap(_wrap(make_net(), **options), **options),
}


def _described(param: Tensor) -> Any:
    shard = shard_of(param)
    if isinstance(shard, FlatBuffer):
        return shard.local_shape, [(s.name, s.number, s.offset, _flat(s.shard)) for s in shard.segments]
    return _flat(shard) if isinstance(shard, FlatShard) else (shard.global_shape, shard.local_shape)


def _flat(shard: FlatShard) -> Any:
    return shard.global_shape, shard.start, shard.end, shard.cuts, shard.exchange


def _as_attached(make: Callable[[], nn.Module]) -> None:
    model = make()
    params = list(model.parameters())
    optimizer = shardopt.AdamW8bit(params)
    found = [_described(param) for param in params]
    optimizer.attach(model)
    assert found == [_described(param) for param in params]


def _made(name: str, orig: bool) -> nn.Module:
    return MODELS[name](use_orig_params=orig)


def _sharded(way: str) -> nn.Module:
    return FSDP1_WAYS[way](make_net())


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_what_attach_says(ranks: Pool, name: str, orig: bool) -> None:
    ranks.run(3, _as_attached, partial(_made, name, orig))


@pytest.mark.parametrize("way", FSDP1_WAYS)
def test_every_strategy(ranks: Pool, way: str) -> None:
    ranks.run(4, _as_attached, partial(_sharded, way))


@pytest.mark.ranks(2)
def test_the_outermost_module_counts() -> None:
    """Whoever wraps last knows best, also after attach()."""
    model = Odds()
    unit = model.units[3] = _wrap(model.units[3])
    optimizer = shardopt.AdamW8bit(unit.parameters(), **SMALL)
    optimizer.attach(unit)
    assert [segment.name for segment in shard_of(unit._flat_param).segments] == ["weight0", "weight1", "weight2"]
    whole = _wrap(model)
    segments = shard_of(unit._flat_param).segments
    assert [segment.name for segment in segments] == [f"units.3.weight{index}" for index in range(3)]
    assert [segment.number for segment in segments] == [4, 5, 6]
    assert whole.module is model


def _scaling(way: str) -> bool:
    model = _sharded(way)
    return shardopt.AdamW8bit(model.parameters())._step_supports_amp_scaling


@pytest.mark.parametrize(("way", "whole"), [("fsdp1", False), ("fsdp1 flat", False), ("fsdp1 none", True)])
def test_a_grad_scaler_asks_before_the_first_step(ranks: Pool, way: str, whole: bool) -> None:
    assert ranks.run(2, _scaling, way) == [whole, whole]


def _in_pieces(orig: bool) -> tuple[nn.Module, nn.Module]:
    """Only some layers are units, and no unit has all."""
    whole, model = Odds().to(BF16), Odds().to(BF16)
    bare = bare_shapes(model)
    for index in (0, 3):
        model.units[index] = fsdp1(model.units[index], [], use_orig_params=orig)
    return whole, remember_bare(model, bare)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("orig", "options"), [(True, {}), (False, {}), (True, STOCHASTIC)])
def test_a_model_in_pieces(orig: bool, options: dict[str, Any]) -> None:
    whole, model = _in_pieces(orig)
    optimizer, expected = (shardopt.AdamW8bit(m.parameters(), **SMALL, **options) for m in (model, whole))
    for step in range(3):
        step_with(model, optimizer, step)
        step_with(whole, expected, step)
    assert_same_on_rank_0(gathered(model, optimizer), lambda: snapshot_of(whole, expected))


@pytest.mark.ranks(2)
def test_a_model_in_pieces_and_noise() -> None:
    """Noise depends on which of all parameters each is; a unit does not know what stands beside it."""
    _, model = _in_pieces(False)
    optimizer = shardopt.AdamW8bit(model.parameters(), **SMALL, **STOCHASTIC)
    before = gathered_parameters(model)
    set_gradients(model, 0)
    for _ in range(2):
        with pytest.raises(UnknownShardError, match=r"call optimizer\.attach\(model\) with the whole model"):
            optimizer.step()
    assert not any(optimizer.state.values())
    assert_same(gathered_parameters(model), before)
    optimizer.attach(model)
    optimizer.step()
    assert all(optimizer.state[param] for param in model.parameters())


@pytest.mark.ranks(2)
def test_a_unit_of_its_own_and_noise() -> None:
    """An optimizer that has no other parameters than a unit's needs to know of none."""
    wholes, models = [make_net(BF16) for _ in range(2)], [_wrap(make_net(BF16)) for _ in range(2)]
    outer = nn.ModuleList([nn.Linear(2, 2), *models])
    for whole, model in zip(wholes, outer[1:], strict=True):
        optimizer, expected = (shardopt.AdamW8bit(m.parameters(), **SMALL, **STOCHASTIC) for m in (model, whole))
        for step in range(2):
            step_with(model, optimizer, step)
            step_with(whole, expected, step)
        assert_same_on_rank_0(gathered(model, optimizer), lambda w=whole, e=expected: snapshot_of(w, e))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("orig", [True, False])
def test_two_models(orig: bool) -> None:
    """One optimizer has the parameters of both."""
    wholes, models = [make_net(seed=s) for s in (0, 1)], [fsdp1(make_net(seed=s), use_orig_params=orig) for s in (0, 1)]
    optimizer, expected = (
        shardopt.AdamW8bit([p for model in each for p in model.parameters()], **SMALL) for each in (models, wholes)
    )
    for step in range(3):
        for each, stepped in ((models, optimizer), (wholes, expected)):
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
def test_a_model_that_cannot_be_read() -> None:
    """FSDP1 over what cannot be stepped here is nobody's business until one of our optimizers has to."""
    model = nn.Sequential(nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last))
    wrapped = _wrap(model, use_orig_params=True)
    theirs = torch.optim.AdamW(wrapped.parameters())
    assert shardopt.memory_report(theirs).numel == sum(param.numel() for param in wrapped.parameters())
