"""Cost of agreeing, among the ranks of FSDP1, on the scales of the blocks that their shards cut.

Medians over the rounds of the slowest rank's time for a step, and of the time in its collectives. After it, or without
torchrun, the same is counted for 70 billion parameters on 512 ranks: torch's FSDP1 and shardopt run as they would
there, on tensors without data.

    torchrun --nproc_per_node 4 benchmarks/exchange.py --json
    python benchmarks/exchange.py
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import results as figures
import shardopt
from decoder import Architecture, Decoder, set_gradients
from measuring import among_ranks
from results import Cell, Column
from shardopt.layout import FlatShard
from shardopt.optim import ShardedOptimizer
from shardopt.sharding.exchange import RanksExchange
from shardopt.state.flat_encoding import shared_blocks
from shardopt.state.tensor_state import flat_slices
from shardopt.step.agreement import Plan
from shardopt.step.cut_blocks import FlatCuts

RANKS_ON_PAPER = 512
ON_PAPER = {
    f"70B, vocabulary of {vocabulary}": Architecture(80, 8192, 28672, 1024, vocabulary, modern=True)
    for vocabulary in (32000, 128256)
}


@dataclass
class Count:
    """Data that the ranks exchange in a step."""

    model: str
    parameters: int
    units: int  # of FSDP1: each layer, and the rest
    ranks: int
    cut_blocks: int  # between any two ranks
    own_cut_blocks: int  # of which one rank holds a part: the first, on paper one in the middle
    round_bytes: int  # what the all-reduces of one round carry
    rounds: int

    @property
    def messages(self) -> int:
        """That a rank sends per step if the all-reduce is a ring."""
        return self.rounds * 2 * (self.ranks - 1)

    @property
    def sent_bytes(self) -> float:
        """That a rank sends per step, in the ring and in every other way that is as good."""
        return self.rounds * 2 * self.round_bytes * (self.ranks - 1) / self.ranks

    @property
    def share(self) -> float:
        """Of the float32 gradients that the rank sends per step for FSDP1's reduce-scatter."""
        return self.sent_bytes / max(4 * self.parameters * (self.ranks - 1) / self.ranks, 1)


@dataclass
class Times:
    """Medians, in seconds."""

    step: float
    collectives: float  # of the rank that waits least for the others
    collectives_waiting: float  # of the one that waits most


def shard(model: Decoder) -> nn.Module:
    """FSDP1, each layer a unit."""
    wrap = partial(FullyShardedDataParallel, use_orig_params=True, device_id=torch.device("cpu"))
    for index, layer in enumerate(model.layers):
        model.layers[index] = wrap(layer)
    return wrap(model)


def make_optimizer(model: nn.Module) -> ShardedOptimizer:
    optimizer = shardopt.AdamW8bit(model.parameters(), lr=1e-5)
    optimizer.attach(model)
    return optimizer


def count(name: str, parameters: int, model: nn.Module, optimizer: ShardedOptimizer) -> Count:
    """Asks the code that steps."""
    (group,) = optimizer.param_groups
    parts = [part for param in group["params"] for part in flat_slices(optimizer._internals.state_of(param, group))]
    cuts = FlatCuts(Plan({}, ()), list(enumerate(parts)), torch.device("cpu"))
    nbytes = sum(form.numel * form.dtype.itemsize for form in cuts.openings())
    numbers = [shared_blocks(part) for part in parts]
    own = 0
    for part, blocks in zip(parts, numbers, strict=True):
        assert isinstance(part.shard, FlatShard)
        first, end = part.shard.blocks(part.grid)
        own += sum(first <= block < end for block in blocks)
    units = sum(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    rounds = 0 if not cuts else 2 if cuts.relative else 1
    total = sum(map(len, numbers))
    return Count(name, parameters, units, dist.get_world_size(), total, own, nbytes, rounds)


def count_on_paper(name: str, architecture: Architecture) -> Count:
    """Shards the model among ranks that do not exist."""
    dist.init_process_group("fake", rank=RANKS_ON_PAPER // 2 + 1, world_size=RANKS_ON_PAPER, store=FakeStore())
    try:
        with FakeTensorMode():
            model = Decoder(architecture)
            numel = sum(param.numel() for param in model.parameters())
            sharded = shard(model)
        return count(name, numel, sharded, make_optimizer(sharded))
    finally:
        dist.destroy_process_group()


class Stopwatch:
    """Times all calls of a method."""

    def __init__(self, owner: type, name: str) -> None:
        self.calls = 0
        self.seconds = 0.0
        method: Callable[..., None] = getattr(owner, name)

        def timed(*args: Any) -> None:
            start = time.perf_counter()
            method(*args)
            self.seconds += time.perf_counter() - start
            self.calls += 1

        setattr(owner, name, timed)


def measure(model: nn.Module, rounds: int, expected: Count) -> Times:
    """Steps, after two unmeasured rounds."""
    optimizer = make_optimizer(model)
    set_gradients(model)
    watch = Stopwatch(RanksExchange, "all_reduce_max")
    steps, collectives = [], []
    for current in range(rounds + 2):
        watch.calls, watch.seconds = 0, 0.0
        dist.barrier()
        start = time.perf_counter()
        optimizer.step()
        took = time.perf_counter() - start
        if current >= 2:  # the first step agrees on more
            assert watch.calls == expected.rounds, f"{watch.calls} collectives in a step"
            steps.append(took)
            collectives.append(watch.seconds)
    return Times(
        step=median(among_ranks(steps)),
        collectives=median(among_ranks(collectives, dist.ReduceOp.MIN)),
        collectives_waiting=median(among_ranks(collectives)),
    )


def run(numel: int, rounds: int) -> tuple[Count, Times]:
    """Measures on the ranks of torchrun."""
    torch.manual_seed(0)
    model = Decoder(Architecture.of_numel(numel))
    numel = sum(param.numel() for param in model.parameters())
    sharded = shard(model)
    found = count("measured", numel, sharded, make_optimizer(sharded))
    return found, measure(sharded, rounds, found)


def main() -> None:
    parser = figures.parser(__doc__)
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--paper", action=argparse.BooleanOptionalAction, default=True, help="also count 512 ranks")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")

    first, counts, times = True, [], None
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        found, times = run(args.numel, args.rounds)
        counts.append(found)
        first = dist.get_rank() == 0
        dist.destroy_process_group()
    if not first:
        return
    if args.paper:
        counts += [count_on_paper(name, architecture) for name, architecture in ON_PAPER.items()]
    columns = [Column(""), Column("cut blocks", digits=0), Column("a round", "bytes", 0), Column("rounds", digits=0)]
    columns += [Column(name, "ms", 1) for name in ("step", "collectives", "collectives, longest")]
    columns += [Column("parameters", digits=0), Column("units", digits=0), Column("own cut blocks", digits=0)]
    columns += [Column("messages", digits=0), Column("sent", "bytes", 0), Column("sent, of gradients")]
    rows: list[list[Cell]] = []
    for c in counts:
        taken: list[Cell] = [None] * 3
        if times and c is counts[0]:
            taken = [1e3 * x for x in (times.step, times.collectives, times.collectives_waiting)]
        sizes = c.parameters, c.units, c.own_cut_blocks, c.messages, c.sent_bytes, c.share
        rows.append([f"{c.ranks} ranks, {c.model}", c.cut_blocks, c.round_bytes, c.rounds, *taken, *sizes])
    notes = [
        f"FSDP1, log8, blocks of 128, medians of {args.rounds} rounds. Collectives: on the rank that waits least for "
        "the others; longest: on the one that waits most. A rank sends messages and bytes in each step by a ring; of "
        "gradients: of what FSDP1 itself sends."
    ]
    threads = torch.get_num_threads()
    figures.report(args.json, "exchange", "The exchange of cut blocks", columns, rows, threads=threads, notes=notes)


if __name__ == "__main__":
    main()
