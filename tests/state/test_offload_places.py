"""Where state lives: the budget on the device, memory of the host, and parameters that come and go."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shardopt
from ranks.offload import HostTransfers, offload_from_cpu
from shardopt import _C
from shardopt.optim import ShardedOptimizer
from shardopt.state import host_memory
from shardopt.state.options import bytes_of

SIZE = 1 << 20  # bytes of float32 Adam state of a parameter()
FROZEN = {"requires_grad": False}


@pytest.fixture(autouse=True)
def from_cpu() -> Iterator[None]:
    with offload_from_cpu():
        yield


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Memory that the host says it has, to be changed."""
    found = [100 * SIZE]
    monkeypatch.setattr(host_memory, "_available_host_bytes", lambda: found[0])
    return found


def parameter(**options: Any) -> nn.Parameter:
    return nn.Parameter(torch.ones(256, 512), **options)


def make(*params: nn.Parameter, **options: Any) -> ShardedOptimizer:
    return shardopt.AdamW8bit(params, **{"codec": "fp32", "offload": "state", **options})


def step(optimizer: ShardedOptimizer, *params: nn.Parameter) -> None:
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.synchronize()
    optimizer.zero_grad()


def offloads(optimizer: ShardedOptimizer, *params: nn.Parameter) -> list[str | None]:
    return [optimizer._internals.residency.of(param).offload for param in params]


def test_param_groups_share_the_budget() -> None:
    """So all that offload say the same about it: when they are made, and if one is changed by hand."""
    option, value, other, same = "device_state_budget", "1MiB", 0, 1 << 20
    params = [nn.Parameter(torch.ones(100, 64)) for _ in range(3)]
    optimizer = shardopt.AdamW8bit(params[:1], offload="state", device_state_budget=value)
    match = f"{option}: got {value!r}, {other!r} in the param groups that offload, expected one value"
    with pytest.raises(ValueError, match=match):
        optimizer.add_param_group({"params": params[1:2], option: other})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": params[1:2], option: other, "offload": None})
    optimizer.add_param_group({"params": params[2:], option: same, "offload": "step"})
    optimizer.param_groups[2][option] = other
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=match):
        shardopt.AdamW8bit(optimizer.param_groups)
    with pytest.raises(ValueError, match=match):
        optimizer.step()
    assert all(bool((param == 1).all()) for param in params)
    assert not any(optimizer.state.values())
    optimizer.param_groups[2][option] = same
    optimizer.step()


def test_too_little_host_memory_is_told_at_once(available: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    available[0] = 1 << 20
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    params = [parameter()]
    with pytest.raises(
        MemoryError,
        match=r"got 1\.00 MiB of available host memory, expected 2\.00 MiB, 1\.00 MiB for each of 2 ranks here",
    ):
        shardopt.AdamW8bit(params, offload="state", codec="fp32")
    shardopt.AdamW8bit(params, offload="state", codec="fp32", device_state_budget="1MiB")
    shardopt.AdamW8bit(params, codec="fp32")


@pytest.mark.parametrize("failing", ["too little", "allocation"])
def test_a_second_try_needs_the_memory_too(failing: str, available: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    param = parameter()
    optimizer = make(param)
    with monkeypatch.context() as patch:
        if failing == "too little":
            patch.setattr(host_memory, "_available_host_bytes", lambda: SIZE - 1)
        else:
            patch.setattr(host_memory, "_PAGE", 1 << 60)
        for _ in range(2):
            with pytest.raises(MemoryError, match=r"expected (1\.00 MiB|it for the state)"):
                step(optimizer, param)
            assert bool((param == 1).all())
            assert not optimizer.state[param]
    step(optimizer, param)
    assert offloads(optimizer, param) == ["state"]


def test_frozen_parameters_take_nothing(available: list[int]) -> None:
    """Neither host memory nor budget, until they are stepped or have state."""
    available[0] = 2 * SIZE
    frozen, first, second = parameter(**FROZEN), parameter(), parameter()
    optimizer = make(frozen, first, second, device_state_budget=SIZE)
    available[0] = SIZE
    step(optimizer, first, second)
    assert offloads(optimizer, frozen, first, second) == [None, None, "state"]
    assert not optimizer.state.get(frozen)
    frozen.requires_grad_(True)
    step(optimizer, frozen, first, second)
    assert offloads(optimizer, frozen, first, second) == ["state", None, "state"]
    available[0] = 100 * SIZE
    others = [parameter(**FROZEN) for _ in range(3)]
    other = make(*others)
    assert offloads(other, *others) == [None] * 3
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert offloads(other, *others) == ["state"] * 3


def test_budget_over_param_groups_is_checked_as_it_is_spent(available: list[int]) -> None:
    available[0] = 2 * SIZE
    params = [parameter() for _ in range(4)]
    optimizer = make(params[0], device_state_budget=SIZE)
    for param in params[1:3]:
        optimizer.add_param_group({"params": [param]})
    with pytest.raises(MemoryError, match=r"got 2\.00 MiB of available host memory, expected 3\.00 MiB;"):
        optimizer.add_param_group({"params": params[3:]})
    step(optimizer, *params[:3])
    assert offloads(optimizer, *params[:3]) == [None, "state", "state"]
    optimizer.add_param_group({"params": params[3:]})  # the others have theirs now


def test_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the context of the GPU that copies from it, until the owner is gone; a refusal says what to do."""
    calls: list[tuple[object, ...]] = []
    errors = [0, 2]
    monkeypatch.setattr(_C, "pin_cuda", lambda *call: calls.append(call) or errors.pop(0), raising=False)
    monkeypatch.setattr(_C, "unpin_cuda", lambda *call: calls.append(call), raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # raises in a build without CUDA
    gpu = torch.device("cuda", 1)
    host = host_memory._HostMemory(5000, pin=gpu)
    address, nbytes = host.memory.data_ptr(), host.memory.nbytes
    del host
    gc.collect()
    assert calls == [(1, address, nbytes), (1, address)]
    assert (address % 4096, nbytes) == (0, 8192)
    with pytest.raises(MemoryError, match=r"got CUDA error 2 .* device_state_budget"):
        host_memory._HostMemory(5000, pin=gpu)
    assert len(calls) == 3


def test_replaced_parameters_let_their_memory_go(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[host_memory._HostMemory] = weakref.WeakSet()
    original = host_memory._HostMemory.__init__

    def noted(self: host_memory._HostMemory, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        alive.add(self)

    monkeypatch.setattr(host_memory._HostMemory, "__init__", noted)
    param = parameter()
    optimizer = make(param)
    for _ in range(3):
        optimizer.state.clear()
        param = optimizer.param_groups[0]["params"][0] = parameter()
        step(optimizer, param)
        gc.collect()
        assert offloads(optimizer, param) == ["state"]
        assert len(alive) == 1


def test_copies_are_waited_for_before_memory_goes() -> None:
    class Noting(HostTransfers):
        waits = 0

        def synchronize(self) -> None:
            Noting.waits += 1

    with offload_from_cpu(1 << 20, Noting):
        param, other = parameter(), parameter()
        optimizer = make(param)
        step(optimizer, param)
        optimizer.state.clear()
        optimizer.param_groups[0]["params"][0] = other
        before = Noting.waits
        assert offloads(optimizer, other) == ["state"]
        assert Noting.waits == before + 1


def test_sizes() -> None:
    sizes = [(0, 0), (7, 7), ("12", 12), ("2GiB", 2 << 30), ("1.5 MiB", 3 << 19), ("64KiB", 1 << 16)]
    assert [bytes_of(size) for size, _ in sizes] == [expected for _, expected in sizes]
    for wrong in (-1, 1.5, True, "2GB", "GiB", "-1GiB", "1e3", ""):
        with pytest.raises(ValueError, match="expected bytes"):
            bytes_of(wrong)  # type: ignore[arg-type]
