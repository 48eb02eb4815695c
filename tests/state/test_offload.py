"""State in the host's memory, during steps or between them: the bits of a step without offload, within the budget.

The option ``offload``, and ``optimizer.offload()``, ``reload()`` and ``reset_state()``.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardopt
from helpers import CASES, CODEC_NAMES, RULES, everything, through_a_file
from ranks.models import loss_of, make_batch, make_net
from ranks.offload import HostTransfers, LateTransfers, late_transfers, offload_from_cpu
from ranks.snapshot import assert_same
from shardopt import _C
from shardopt.optim import ShardedOptimizer
from shardopt.state import host_memory, residency
from slow_cases import slow

BF16 = torch.bfloat16
CHUNK = 16384
OFFLOADS = ("state", "step")


@pytest.fixture(autouse=True)
def from_cpu() -> Iterator[None]:
    with offload_from_cpu(CHUNK):
        yield


class Shapes(nn.Module):
    """Rows longer than a chunk, many rows, rows with short last blocks, a long vector, small ones, and nothing."""

    SHAPES = ((3, 9001), (200, 300), (70, 33), (20000,), (7,), (), (0, 5), (40, 3, 3, 7))

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        made = [torch.randn(shape, generator=generator).to(dtype) for shape in self.SHAPES]
        self.weights = nn.ParameterList([nn.Parameter(x) for x in made])


def make(offload: str | None, rule: str = "adamw", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Prodigy has one learning rate for all groups."""
    model = Shapes(dtype)
    params = list(model.parameters())
    lr = {} if rule == "prodigy" else {"lr": 2e-3}
    groups = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.03, "block_size": 32, **lr}]
    return model, CASES[rule].make(groups, offload=offload, **{"min_quantized_numel": 64, **options})


def set_gradients(model: nn.Module, step: int, leave_out: int | None = None) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for place, param in enumerate(model.parameters()):
        gradient = torch.randn(param.shape, generator=generator).to(param.dtype) * 0.1
        param.grad = None if place == leave_out else gradient


def run(model: nn.Module, optimizer: ShardedOptimizer, first: int = 0, steps: int = 4) -> None:
    """Steps of which one leaves out a parameter, with a learning rate that changes."""
    for step in range(first, first + steps):
        set_gradients(model, step, leave_out=1 if step == 1 else None)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()


def assert_equal(got: tuple[nn.Module, ShardedOptimizer], expected: tuple[nn.Module, ShardedOptimizer]) -> None:
    """Equal parameters and state, and estimates of Prodigy."""
    got[1].synchronize()
    assert_same(everything(got[1]), everything(expected[1]))
    estimates = [[group.get("d") for group in optimizer.param_groups] for _, optimizer in (got, expected)]
    assert estimates[0] == estimates[1]


def scale_weights(optimizer: ShardedOptimizer) -> None:
    """Reads and writes all bits of the weights, while copies are under way if state is offloaded."""
    weights = optimizer.full_precision_parameters()
    optimizer.load_full_precision_parameters({param: 1.001 * x for param, x in weights.items()})


SAME_BITS: list[tuple[str, str, dict[str, Any]]] = [
    *((offload, "adamw", {"codec": codec}) for codec, offload in zip(CODEC_NAMES, cycle(OFFLOADS), strict=False)),
    ("state", "lion", {}),
    ("step", "sgd", {"codec": "fp32"}),
    ("step", "ademamix", {}),
    ("state", "lamb", {}),
    ("state", "muon_in_waves", {}),
    ("state", "normuon", {"dtype": BF16, "master_weight_bits": 24}),
    ("state", "muon", {"dtype": BF16, "stochastic_rounding": True, "codec": "fp32"}),
    ("step", "repaid_adamw", {"codec": "companded8"}),
    ("state", "adamw", {"dtype": BF16, "master_weight_bits": 24}),
    ("step", "adamw", {"dtype": torch.float16, "master_weight_bits": 32}),
    *((offload, "adamw", {"dtype": BF16, "stochastic_rounding": True}) for offload in OFFLOADS),
    *((offload, "prodigy", {}) for offload in OFFLOADS),
]
ALL = [(offload, rule, {"codec": codec}) for offload, rule, codec in product(OFFLOADS, RULES, CODEC_NAMES)]


@pytest.mark.parametrize(("offload", "rule", "options"), [*SAME_BITS, *slow(ALL, besides=SAME_BITS)], ids=str)
def test_same_bits(offload: str, rule: str, options: dict[str, Any]) -> None:
    """With copies that come at the last moment that is allowed. Every byte is copied once, through small slots.

    A step copies the state in and out; or parameters and gradients in, and parameters out.
    """
    runs = [make(how, rule, **options) for how in (None, offload)]
    run(*runs[0], steps=1)
    if "master_weight_bits" in options:
        scale_weights(runs[0][1])
    run(*runs[0], first=1, steps=3)
    with offload_from_cpu(CHUNK, late_transfers(offload)):
        model, optimizer = runs[1]
        run(model, optimizer, steps=1)
        transfers = LateTransfers.latest
        copied = transfers.bytes_in, transfers.bytes_out
        if "master_weight_bits" in options:
            scale_weights(optimizer)
        run(model, optimizer, first=1, steps=3)
        assert_equal(runs[1], runs[0])
    assert transfers.nbytes <= 3 * CHUNK
    assert transfers.most_in_flight == 3, "copies in, kernels and copies out have a slot each"
    if rule == "adamw":
        entries = [(key, x) for state in optimizer.state.values() for key, x in state.items() if x.numel()]
        state = sum(x.nbytes for key, x in entries if key != "step")
        weights = sum(param.nbytes for param in model.parameters())
        assert copied == ((state, state) if offload == "state" else (2 * weights, weights))
    assert rule != "prodigy" or optimizer.param_groups[0]["d"] > RULES[rule].hyper["d0"]


@pytest.mark.parametrize("is_released", [False, True])
def test_muon_has_matrices_only(is_released: bool) -> None:
    """All rows are in waves: the batches, which count the steps, have none. Released gradients make steps of one."""
    runs = []
    for offload in (None, "state"):
        model = make_net()
        params = [param for param in model.parameters() if param.ndim == 2]
        model.requires_grad_(False)
        for param in params:
            param.requires_grad_(True)
        optimizer = CASES["muon"].make(params, offload=offload, min_quantized_numel=64)
        if is_released:
            shardopt.release_gradients(model, optimizer)
        for step in range(3):
            loss_of(model, make_batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert {optimizer._internals.residency.decide(param).offload for param in params} == {offload}
        runs.append((model, optimizer))
    assert_equal(runs[1], runs[0])


@pytest.mark.parametrize(
    ("before", "after", "way"),
    [("step", None, "checkpoint"), ("state", "step", "state dict"), (None, "state", "checkpoint")],
)
def test_a_run_turns_it_on_or_off(tmp_path: Path, before: str | None, after: str | None, way: str) -> None:
    """Saved state has the entries of a run without offload."""
    first, second = make(before), make(after)
    run(*first, steps=2)
    run(*second, first=7, steps=1)  # it has state elsewhere already
    if way == "checkpoint":
        shardopt.checkpoint.save(tmp_path, *first)
        shardopt.checkpoint.load(tmp_path, *second)
    else:
        second[0].load_state_dict(first[0].state_dict())
        second[1].load_state_dict(through_a_file(first[1].state_dict()))
    assert all(group["offload"] == after for group in second[1].param_groups)
    assert_equal(second, first)
    for pair in (first, second):
        run(*pair, first=2, steps=2)
    assert_equal(second, first)
    kinds = {second[1]._internals.residency.decide(param).offload for param in second[0].parameters() if param.numel()}
    assert kinds == {after}


def test_state_lies_in_one_piece_of_memory() -> None:
    """Small parameters next to each other are one copy."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(64, 64)) for _ in range(20)])
    optimizer = shardopt.AdamW8bit(model, offload="state", min_quantized_numel=0)
    counted: list[int] = []

    class Counting(HostTransfers):
        def fetch(self, slot: Any, copies: Any, after: object) -> None:
            counted.append(len(copies.home))
            super().fetch(slot, copies, after)

    with offload_from_cpu(1 << 20, Counting):
        for param in model:
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert counted == [1]


# Around a step -------------------------------------------------------------------------------------


def test_state_that_cannot_be_stepped_is_told_in_the_backward_pass() -> None:
    model = make_net()
    optimizer = RULES["adamw"].make(model.parameters(), min_quantized_numel=64, offload="step")
    shardopt.release_gradients(model, optimizer)
    loss_of(model, make_batch(0)).backward()
    optimizer.step()
    optimizer.state[model.up.weight]["exp_avg_codes"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match="got state exp_avg_codes"):
        loss_of(model, make_batch(0)).backward()


@pytest.mark.parametrize("offload", OFFLOADS)
def test_nonfinite_raises_and_changes_nothing(offload: str) -> None:
    model, optimizer = make(offload, nonfinite="raise")
    run(model, optimizer, steps=1)
    optimizer.synchronize()
    before = copy.deepcopy(everything(optimizer))
    set_gradients(model, 1)
    model.weights[0].grad[1, 5000] = float("inf")
    with pytest.raises(FloatingPointError):
        optimizer.step()
    optimizer.synchronize()
    assert_same(everything(optimizer), before)


def test_state_that_was_loaded_later_moves_in() -> None:
    """And parameters that were added later get places of their own."""
    runs = [make(how) for how in (None, "state")]
    added = [nn.Parameter(torch.ones(64, 200)) for _ in runs]
    for pair, param in zip(runs, added, strict=True):
        run(*pair, steps=2)
        pair[1].load_state_dict(copy.deepcopy(pair[1].state_dict()))
        pair[1].add_param_group({"params": [param]})
        param.grad = torch.full_like(param, 0.5)
        run(*pair, first=2, steps=2)
    assert_equal(runs[1], runs[0])
    assert torch.equal(added[0], added[1])
    assert runs[1][1]._internals.residency.decide(added[1]).offload == "state"


def test_on_the_cpu_there_is_nothing_to_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "can_offload", lambda device: device.type == "cuda")
    model, optimizer = make("state")
    run(model, optimizer, steps=1)
    assert all(optimizer._internals.residency.decide(param).offload is None for param in model.parameters())
    assert optimizer._internals.residency.buffer_bytes == {}


# offload(), reload() and reset_state() between steps ------------------------------------------------------------------


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
        ("prodigy", {}, "saved and loaded asleep"),
        ("nadam", {}, "saved and loaded asleep"),
    ],
)
def test_asleep_between_steps(rule: str, options: dict[str, Any], sleep: str) -> None:
    expected, got = make(None, rule, **options), make(None, rule, **options)
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


def test_released_gradients_wake_it() -> None:
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
    states = optimizer.state.values()
    seen = [weakref.ref(x) for state in states for key, x in state.items() if key != "step" and x.numel()]
    optimizer.offload()
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
    with pytest.raises(MemoryError, match="got 0 MiB of available host memory"):
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
    used, new = make(offload, rule, **options), make(None, rule, **options)
    run(*used, steps=3)
    if asleep:
        used[1].offload()
    used[1].reset_state()
    assert not used[1].state
    new[0].load_state_dict(used[0].state_dict())
    for group, of in zip(new[1].param_groups, used[1].param_groups, strict=True):
        group["lr"] = of["lr"]
    for pair in (used, new):
        run(*pair, first=5, steps=2)
    assert_equal(used, new)


# Host memory -------------------------------------------------------------------------------------------

SIZE = 1 << 20  # bytes of float32 Adam state of a parameter()
FROZEN = {"requires_grad": False}


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Memory that the host says it has, to be changed."""
    found = [100 * SIZE]
    monkeypatch.setattr(host_memory, "_available_host_bytes", lambda: found[0])
    return found


def parameter(**options: Any) -> nn.Parameter:
    return nn.Parameter(torch.ones(256, 512), **options)


def over(*params: nn.Parameter, **options: Any) -> ShardedOptimizer:
    return shardopt.AdamW8bit(params, **{"codec": "fp32", "offload": "state", **options})


def stepped(optimizer: ShardedOptimizer, *params: nn.Parameter) -> None:
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.synchronize()
    optimizer.zero_grad()


def offloads(optimizer: ShardedOptimizer, *params: nn.Parameter) -> list[str | None]:
    return [optimizer._internals.residency.decide(param).offload for param in params]


def test_too_little_host_memory_is_told_at_once(available: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    available[0] = 1 << 20
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    params = [parameter()]
    with pytest.raises(
        MemoryError,
        match=r"got 1 MiB of available host memory, expected 2 MiB, 1 MiB for each of 2 ranks here",
    ):
        shardopt.AdamW8bit(params, offload="state", codec="fp32")
    shardopt.AdamW8bit(params, codec="fp32")


@pytest.mark.parametrize("failing", ["too little", "allocation"])
def test_a_second_try_needs_the_memory_too(failing: str, available: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    param = parameter()
    optimizer = over(param)
    with monkeypatch.context() as patch:
        if failing == "too little":
            patch.setattr(host_memory, "_available_host_bytes", lambda: SIZE - 1)
        else:
            patch.setattr(host_memory, "_PAGE", 1 << 60)
        for _ in range(2):
            with pytest.raises(MemoryError, match="expected 1 MiB"):
                stepped(optimizer, param)
            assert bool((param == 1).all())
            assert not optimizer.state[param]
    stepped(optimizer, param)
    assert offloads(optimizer, param) == ["state"]


def test_frozen_parameters_take_nothing(available: list[int]) -> None:
    """No host memory, until they are stepped or have state."""
    available[0] = 2 * SIZE
    frozen, first, second = parameter(**FROZEN), parameter(), parameter()
    optimizer = over(frozen, first, second)
    stepped(optimizer, first, second)
    assert offloads(optimizer, frozen, first, second) == [None, "state", "state"]
    assert not optimizer.state.get(frozen)
    frozen.requires_grad_(True)
    stepped(optimizer, frozen, first, second)
    assert offloads(optimizer, frozen, first, second) == ["state"] * 3
    available[0] = 100 * SIZE
    others = [parameter(**FROZEN) for _ in range(3)]
    other = over(*others)
    assert offloads(other, *others) == [None] * 3
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert offloads(other, *others) == ["state"] * 3


def test_memory_for_all_param_groups_is_checked(available: list[int]) -> None:
    available[0] = 2 * SIZE
    params = [parameter() for _ in range(4)]
    optimizer = over(params[0])
    optimizer.add_param_group({"params": params[1:2], "offload": None})
    optimizer.add_param_group({"params": params[2:3]})
    with pytest.raises(MemoryError, match="got 2 MiB of available host memory, expected 3 MiB;"):
        optimizer.add_param_group({"params": params[3:]})
    stepped(optimizer, *params[:3])
    assert offloads(optimizer, *params[:3]) == ["state", None, "state"]
    optimizer.add_param_group({"params": params[3:]})  # the others have theirs now


def test_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the context of the GPU that copies from it, until the owner is gone; a refusal says what to do."""
    calls: list[tuple[object, ...]] = []
    errors = [0, 2]
    monkeypatch.setattr(_C, "pin_cuda", lambda *call: calls.append(call) or errors.pop(0), raising=False)
    monkeypatch.setattr(_C, "unpin_cuda", lambda *call: calls.append(call), raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # raises in a build without CUDA
    gpu = torch.device("cuda", 1)
    likes = [torch.empty(n, device="meta") for n in (1250, 0, 3)]
    *others, last = host_memory.allocate_host_tensors(likes, pin=gpu)
    ((_, address, nbytes),) = calls
    assert (address % 4096, nbytes, last.data_ptr()) == (0, 8192, address + 5056)
    del others
    gc.collect()
    assert calls == [(1, address, nbytes)]
    del last
    gc.collect()
    assert calls == [(1, address, nbytes), (1, address)]
    with pytest.raises(MemoryError, match=r"got CUDA error 2 .* offload=None"):
        host_memory.allocate_host_tensors(likes, pin=gpu)
    assert len(calls) == 3


def test_replaced_parameters_let_their_memory_go(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def noted(likes: Any, **options: Any) -> list[Tensor]:
        homes = host_memory.allocate_host_tensors(likes, **options)
        alive.extend(map(weakref.ref, homes))
        return homes

    monkeypatch.setattr(residency, "allocate_host_tensors", noted)
    param = parameter()
    optimizer = over(param)
    for _ in range(3):
        optimizer.state.clear()
        param = optimizer.param_groups[0]["params"][0] = parameter()
        stepped(optimizer, param)
        gc.collect()
        assert offloads(optimizer, param) == ["state"]
        assert sum(ref() is not None for ref in alive) == 2
