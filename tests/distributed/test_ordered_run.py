"""Whole runs with ordered gradients and the exact norm: one set of weights and state on any number of ranks.

Runs that change their number of ranks: ``tests/launch/test_ordered.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch.distributed as dist

import shardopt
from ordered_problem import WAYS, WIRES, loss_of, make_model
from ranks.offload import offload_from_cpu, slow_steps
from ranks.pool import Pool
from ranks.runs import snapshot_of
from ranks.snapshot import Snapshot, assert_same
from slow_cases import slow
from versions import needs_fsdp2_on_the_cpu

OPTIMIZERS = {
    "adamw8bit": lambda model: shardopt.AdamW8bit(model.parameters(), lr=1e-2, min_quantized_numel=1024),
    "held": lambda model: shardopt.AdamW8bit(model.parameters(), lr=1e-2, min_quantized_numel=1024, offload="step"),
    "fp32": lambda model: shardopt.AdamW(model.parameters(), lr=1e-2, codec="fp32"),
    "lamb": lambda model: shardopt.LAMB8bit(model.parameters(), lr=1e-2, min_quantized_numel=1024),
    "muon8bit": lambda model: shardopt.Muon8bit(shardopt.muon_groups(model, lr=1e-2, adamw_lr=1e-2)),
}
#: Every wire format, number of micro-batches and optimizer; each wire with each number, each optimizer with one wire.
RUNS = [(wire, micro_batches, "adamw8bit") for wire in WIRES for micro_batches in (12, 24)]
RUNS += [("fp32", 12, "fp32"), ("bf16", 12, "lamb"), ("fp32", 12, "muon8bit"), ("fp32", 12, "held")]

Run = tuple[str, int, str]


def _result(way: str, run: Run) -> tuple[list[float], Snapshot]:
    """The norms of three steps, and all that the run ends with."""
    wire, micro_batches, name = run
    model, is_held, norms = WAYS[way](make_model()), name == "held", []
    bare = getattr(model, "module", model)
    with offload_from_cpu(), slow_steps(0.002):
        shardopt.comm.ordered_gradients(model, micro_batches=micro_batches, wire=wire)  # type: ignore[arg-type]
        optimizer = OPTIMIZERS[name](bare)
        if is_held:  # gradients go to the host's memory once they are the mean over all micro-batches
            shardopt.release_gradients(model, optimizer, overlap_forward=True)
        for step in range(3):
            for number in range(dist.get_rank(), micro_batches, dist.get_world_size()):
                loss_of(model, number, step).backward()
            assert is_held == all(param.grad is None for param in model.parameters())
            clips = optimizer if is_held or step % 2 else None
            norms.append(float(shardopt.clip_grad_norm_(model.parameters(), 0.5, optimizer=clips)))
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
    return norms, snapshot_of(bare, optimizer)


def _results(way: str, runs: Sequence[Run]) -> list[tuple[list[float], Snapshot]]:
    return [_result(way, run) for run in runs]


@pytest.fixture(scope="module")
def wanted(ranks: Pool) -> list[tuple[list[float], Snapshot]]:
    """Runs in one process, where nothing is held."""
    runs = [(*run, "adamw8bit" if name == "held" else name) for *run, name in RUNS]
    return ranks.run(1, _results, "plain", runs)[0]


CASES = [(way, world_size) for way in ("ddp", "fsdp") for world_size in (1, 2, 3, 4)]
#: By default each of the cases above and HSDP meet every third run, so that DDP and FSDP meet all of them.
PARTS = [(*case, slice((place + place // 4) % 3, None, 3)) for place, case in enumerate(CASES)]
PARTS += [("hsdp", 4, slice(1, None, 3))]


@needs_fsdp2_on_the_cpu
@pytest.mark.parametrize(("way", "world_size", "part"), [*PARTS, *slow((*case, slice(None)) for case in CASES)])
def test_same_bits(
    ranks: Pool, wanted: list[tuple[list[float], Snapshot]], way: str, world_size: int, part: slice
) -> None:
    runs = RUNS[part]
    for actual in ranks.run(world_size, _results, way, runs):
        for run, (norms, state), (wanted_norms, wanted_state) in zip(runs, actual, wanted[part], strict=True):
            assert norms == wanted_norms, run
            assert max(norms) > 0.5, "a norm that clips nothing"
            assert_same(state, wanted_state)
