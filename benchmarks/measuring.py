"""Parts that benchmarks share: contenders in turn, so that changes of pace hit all alike; ranks of gloo; a model."""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

Name = TypeVar("Name")


def seconds_of(act: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that a call takes, by a clock."""
    start = clock()
    act()
    return clock() - start


def in_turn(
    acts: Mapping[Name, Callable[[], object]],
    rounds: int,
    *,
    unmeasured: int = 2,
    at_once: int = 1,
    before: Callable[[Name], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Name, list[float]]:
    """Seconds of each act in each round.

    Args:
        acts: what takes turns (A B C A B C ...).
        rounds: turns that are measured.
        unmeasured: rounds before them.
        at_once: calls in one turn, whose median counts.
        before: called with an act's name before each call, outside of its time.
        clock: gives seconds; time.process_time where other programs take the cores.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in acts}
    for current in range(unmeasured + rounds):
        for name, act in acts.items():
            turn = []
            for _ in range(at_once):
                if before is not None:
                    before(name)
                turn.append(seconds_of(act, clock))
            if current >= unmeasured:
                seconds[name].append(statistics.median(turn))
    return seconds


def on_ranks(ranks: int, work: Callable[..., Any], *args: Any) -> Any:
    """Calls a function on so many new processes of one thread, and returns what it returns on the first."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (ranks, Path(folder), work, args), ranks)  # type: ignore[no-untyped-call]
        return torch.load(Path(folder) / "result", weights_only=False)


def _rank(rank: int, ranks: int, folder: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    result = work(*args)
    if rank == 0:
        torch.save(result, folder / "result")
    dist.barrier()
    dist.destroy_process_group()


def among_ranks(numbers: list[float], op: Any = dist.ReduceOp.MAX) -> list[float]:
    """The largest of all ranks' numbers, one by one; or what another operation makes of them."""
    together = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(together, op)
    return together.tolist()


class Layer(nn.Module):
    """The parameters of a layer of GPT-2."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.mlp_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)


class Decoder(nn.Module):
    """The parameters of a GPT-2 of about so many, in about 12 layers, which is all that optimizers and shards see."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        hidden = max(1, round((numel / 144) ** 0.5 / 128)) * 128
        layers = max(1, round((numel - 1024 * hidden) / (12 * hidden**2)))
        self.embedding = nn.Embedding(1024, hidden)
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)


def set_gradients(model: nn.Module) -> None:
    """Gives each parameter of which this rank holds anything a gradient, sharded like it."""
    for param in model.parameters():
        if param.numel():
            param.grad = param.detach() * 1e-2
