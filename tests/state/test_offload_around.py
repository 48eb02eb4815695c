"""Offloaded state beside what else happens around a step: released gradients, clipping, errors, reports."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardopt
from helpers import RULES, everything
from ranks.models import loss_of, make_batch, make_net
from ranks.offload import offload_from_cpu
from ranks.snapshot import assert_same
from shardopt import _C
from shardopt.codec import CODECS
from shardopt.kernels.dispatch import CpuCall, LossScaling, Tables, addresses
from shardopt.kernels.streamed import EXTENT, STATE_MOVES, StreamedCall, StreamedTables
from shardopt.kernels.transfers import HostTransfers
from shardopt.state import residency
from test_offload import CHUNK, OFFLOADS, assert_equal, make, run, set_gradients


@pytest.fixture(autouse=True)
def from_cpu() -> Iterator[None]:
    with offload_from_cpu(CHUNK):
        yield


@pytest.mark.parametrize("offload", OFFLOADS)
def test_gradient_release(offload: str) -> None:
    models = [make_net(), make_net()]
    expected, got = (
        RULES["adamw"].make(model.parameters(), min_quantized_numel=64, offload=how)
        for model, how in zip(models, (None, offload), strict=True)
    )
    shardopt.release_gradients(models[1], got)
    for step in range(3):
        for model, optimizer in zip(models, (expected, got), strict=True):
            loss_of(model, make_batch(step)).backward()
            optimizer.step()
            assert optimizer is expected or all(param.grad is None for param in model.parameters())
            optimizer.zero_grad()
        got.synchronize()
        assert_same(everything(got), everything(expected))


def test_state_that_cannot_be_stepped_is_told_in_the_backward_pass() -> None:
    model = make_net()
    optimizer = RULES["adamw"].make(model.parameters(), min_quantized_numel=64, offload="step")
    shardopt.release_gradients(model, optimizer)
    loss_of(model, make_batch(0)).backward()
    optimizer.step()
    optimizer.state[model.up.weight]["exp_avg_codes"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match="got state exp_avg_codes"):
        loss_of(model, make_batch(0)).backward()


def test_what_fails_in_the_other_thread_is_raised_by_the_step() -> None:
    class Failing(HostTransfers):
        def give_back(self, slot: Any, copies: Any) -> object:
            raise OSError("no way back")

    with offload_from_cpu(CHUNK, Failing):
        model = nn.Linear(64, 64, bias=False)
        optimizer = RULES["adamw"].make(model.parameters(), min_quantized_numel=64, offload="step")
        shardopt.release_gradients(model, optimizer)
        model(torch.ones(1, 64)).sum().backward()
        with pytest.raises(OSError, match="no way back"):
            optimizer.step()


@pytest.mark.parametrize("offload", OFFLOADS)
def test_clipping_accumulation_and_skipping(offload: str) -> None:
    models = [make_net(), make_net()]
    optimizers = [
        RULES["adamw"].make(model.parameters(), min_quantized_numel=64, offload=how)
        for model, how in zip(models, (None, offload), strict=True)
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        for step in range(2):
            for micro in range(2):
                loss_of(model, make_batch(10 * step + micro)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            model.up.weight.grad[3, 5] = float("nan")
            if step:
                with pytest.warns(RuntimeWarning, match="skipped 1 gradient elements"):
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
        assert optimizer.nonfinite_count == 2
        optimizer.synchronize()
    assert_same(everything(optimizers[1]), everything(optimizers[0]))


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
    assert runs[1][1]._internals.residency.of(added[1]).offload == "state"


def test_steps_of_nothing_are_counted() -> None:
    """A rank may hold nothing of its parameters."""
    steps = torch.zeros(())
    tables = Tables(np.zeros(0, dtype=_C.kernel_row), addresses([steps]), [None] * len(CODECS))
    streamed = StreamedTables(tables, np.zeros(0, dtype=EXTENT), np.zeros(0, dtype=np.int64))
    call = StreamedCall(streamed, STATE_MOVES, HostTransfers(CHUNK), CHUNK, CpuCall)
    for _ in range(2):
        call.update(True, np.zeros(0, dtype=_C.group_row), LossScaling(None, None))
        call.run(_C.Phase.step)
    assert steps == 2


def test_memory_report() -> None:
    model, optimizer = make("state")
    run(model, optimizer, steps=1)
    report, plain = shardopt.memory_report(optimizer), make(None)
    run(*plain, steps=1)
    expected = shardopt.memory_report(plain[1])
    assert report.host.scales == expected.host.scales
    assert report.host.offload_buffers == 3 * CHUNK
    aligning = report.host.state - expected.host.state
    assert 0 <= aligning < 64 * sum(len(state) for state in optimizer.state.values())


def test_on_the_cpu_there_is_nothing_to_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "FROM_CPU", False)
    model, optimizer = make("state")
    run(model, optimizer, steps=1)
    assert all(optimizer._internals.residency.of(param).offload is None for param in model.parameters())
    assert optimizer._internals.residency.buffer_bytes == {}
