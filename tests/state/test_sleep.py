"""offload(), reload() and reset_state(): the bits of a run that never slept, and of a new optimizer."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import shardopt
from helpers import RULES, everything
from ranks.models import loss_of, make_batch, make_net
from ranks.offload import offload_from_cpu
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer
from shardopt.state import host_memory
from test_offload import BF16, CHUNK, assert_equal, make, run, set_gradients


@pytest.fixture(autouse=True)
def from_cpu() -> Iterator[None]:
    with offload_from_cpu(CHUNK):
        yield


def addresses(optimizer: ShardedOptimizer) -> list[int]:
    states = optimizer.state.values()
    return [x.data_ptr() for state in states for key, x in state.items() if key != "step" and x.numel()]


def slept(optimizer: ShardedOptimizer) -> None:
    """Each entry goes to memory of its own and back to another place: addresses tell."""
    before = addresses(optimizer)
    optimizer.offload()
    there = addresses(optimizer)
    optimizer.offload()
    assert addresses(optimizer) == there, "twice is once"
    assert not before or {*before}.isdisjoint(there)
    optimizer.reload()
    after = addresses(optimizer)
    optimizer.reload()
    assert addresses(optimizer) == after
    assert not before or {*there}.isdisjoint(after)


#: Between steps, each gives the bits of nothing at all.
SLEEPS: dict[str, Callable[[ShardedOptimizer], object]] = {
    "offload and reload": slept,
    "reload alone": ShardedOptimizer.reload,
    "woken by the step": ShardedOptimizer.offload,
    "saved and loaded asleep": lambda optimizer: (
        optimizer.offload(),
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    ),
    "weights read and written asleep": lambda optimizer: (
        optimizer.offload(),
        optimizer.load_full_precision_parameters(optimizer.full_precision_parameters()),
    ),
}


@pytest.mark.parametrize(
    ("rule", "options", "sleep"),
    [
        *(("adamw", {"codec": "log4", "dtype": BF16, "master_weight_bits": 24}, sleep) for sleep in SLEEPS),
        ("ademamix", {"codec": "fp32"}, "offload and reload"),
        ("lamb", {}, "woken by the step"),
        ("prodigy", {}, "saved and loaded asleep"),
        ("nadam", {}, "saved and loaded asleep"),
    ],
)
def test_same_bits(rule: str, options: dict[str, Any], sleep: str) -> None:
    expected, got = make(None, rule, **options), make(None, rule, **options)
    if rule == "prodigy":
        for group in (*expected[1].param_groups, *got[1].param_groups):
            group["lr"] = 1.0
    for step in range(4):
        SLEEPS[sleep](got[1])  # also without any state
        for model, optimizer in (expected, got):
            set_gradients(model, step, leave_out=1 if step < 2 else None)
            optimizer.step()
    assert_equal(got, expected)


@pytest.mark.parametrize("offload", ["state", "step"])
def test_state_that_lives_in_the_hosts_memory_stays(offload: str) -> None:
    expected, got = make(None), make(offload)
    for pair in (expected, got):
        run(*pair, steps=2)
    got[1].synchronize()
    before = addresses(got[1])
    for move in (got[1].offload, got[1].reload):
        move()
        assert addresses(got[1]) == before
    for pair in (expected, got):
        run(*pair, first=2, steps=2)
    assert_equal(got, expected)


def test_released_gradients() -> None:
    """The first step of a backward pass wakes all of them."""
    results = []
    for sleeps in (False, True):
        model = make_net()
        optimizer = RULES["adamw"].make(model.parameters(), min_quantized_numel=64)
        shardopt.release_gradients(model, optimizer)
        for step in range(3):
            loss_of(model, make_batch(step)).backward()
            optimizer.step()
            if sleeps:
                optimizer.offload()
            if sleeps and step == 1:
                optimizer.reload()
        results.append(everything(optimizer))
    assert_same(*results)


def test_nothing_of_the_old_places_is_kept() -> None:
    """Not by the tables of the last step either."""
    model, optimizer = make(None)
    run(model, optimizer, steps=2)
    for move in (optimizer.offload, optimizer.reload):
        states = optimizer.state.values()
        seen = [weakref.ref(x) for state in states for key, x in state.items() if key != "step" and x.numel()]
        move()
        gc.collect()
        assert [ref for ref in seen if ref() is not None] == []


def test_memory_is_reported_and_kept() -> None:
    model, optimizer = make(None)
    run(model, optimizer, steps=1)
    awake = shardopt.memory_report(optimizer).host
    size = sum(x.nbytes for state in optimizer.state.values() for key, x in state.items() if key != "step")
    optimizer.offload()
    places = addresses(optimizer)
    asleep = shardopt.memory_report(optimizer).host
    assert asleep.state + asleep.scales == awake.state + awake.scales
    assert 0 <= asleep.offload_buffers - awake.offload_buffers < 4096 + 64 * len(places)
    optimizer.reload()
    assert shardopt.memory_report(optimizer).host.offload_buffers == asleep.offload_buffers + size
    optimizer.offload()
    assert addresses(optimizer) == places


def test_too_little_memory_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make(None)
    run(model, optimizer, steps=1)
    before = addresses(optimizer)
    monkeypatch.setattr(host_memory, "_available_host_bytes", lambda: 1000)
    with pytest.raises(MemoryError, match="got 1000 bytes of available host memory"):
        optimizer.offload()
    assert addresses(optimizer) == before
    assert not optimizer._internals.residency.asleep
    run(model, optimizer, first=1, steps=1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_sleep_and_wake(copied: Callable[[Any], Any]) -> None:
    expected = make(None)
    run(*expected, steps=2)
    expected[1].offload()
    got = copied(expected)
    assert got[1]._internals.residency.asleep
    for pair in (expected, got):
        run(*pair, first=2, steps=2)
    assert_equal(got, expected)


@pytest.mark.parametrize(
    ("rule", "options", "offload", "asleep"),
    [
        ("adamw", {"dtype": BF16, "master_weight_bits": 24}, "step", False),
        ("prodigy", {}, "state", False),
        ("nadam", {}, None, True),
    ],
)
def test_reset_state(rule: str, options: dict[str, Any], offload: str | None, asleep: bool) -> None:
    """As a new optimizer of the same weights and options."""
    used = make(offload, rule, **options)
    if rule == "prodigy":
        for group in used[1].param_groups:
            group["lr"] = 1.0
    for step in range(3):
        set_gradients(used[0], step)
        used[1].step()
        used[1].param_groups[1]["betas"] = (0.8, 0.999)
    if asleep:
        used[1].offload()
    used[1].reset_state()
    assert not used[1].state
    new = make(None, rule, **options)
    new[0].load_state_dict(used[0].state_dict())
    for group, of in zip(new[1].param_groups, used[1].param_groups, strict=True):
        group.update({key: of[key] for key in ("lr", "betas") if key in of})
    for step in (5, 6):
        for model, optimizer in (used, new):
            set_gradients(model, step)
            optimizer.step()
    assert_equal(used, new)
    estimates = [[group.get("d") for group in optimizer.param_groups] for _, optimizer in (used, new)]
    assert estimates[0] == estimates[1]
