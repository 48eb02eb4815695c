"""Time of ordered gradient sums beside torch's reduce-scatter, on gloo, and the bytes that each rank sends.

    python benchmarks/ordered_reduction.py [--elements N] [--rounds N] [--ranks N ...] [--json]

A round reduces once in each way, one after another; printed are medians over the rounds of milliseconds, and of the
ratio to torch's reduce-scatter in float32 of the same round. Elements are those of a whole gradient, of rows of 1,024.
"mid" is a pass after which the sums wait for more micro-batches, "last" the pass that writes the mean. All ranks run on
this machine, with a thread each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn import Parameter

import results
from results import Cell, Column
from shardopt.comm.progress import Progress
from shardopt.comm.reduction import Reduction
from shardopt.comm.wire import WIRES, Wire

ROW = 1024
BASE = "torch, fp32"


def bytes_sent(act: Callable[[], object]) -> int:
    """Runs a function; returns the bytes that its messages take from this rank to others."""
    sent, original, size = [], dist.all_to_all_single, dist.get_world_size()

    def counted(out: Tensor, message: Tensor, **options: object) -> None:
        sent.append(message.nbytes // size * (size - 1))
        original(out, message, **options)

    dist.all_to_all_single = counted
    act()
    dist.all_to_all_single = original
    return sum(sent)


def ways(elements: int) -> dict[str, Callable[[], object]]:
    """Functions that reduce a gradient, by name. Torch's own has no bytes that could be counted here."""
    size, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    rows = elements // ROW // size
    gradient, out = torch.randn(size, rows * ROW), torch.empty(rows * ROW)
    half, half_out = gradient.bfloat16(), out.bfloat16()
    found: dict[str, Callable[[], object]] = {
        BASE: lambda: dist.reduce_scatter_tensor(out, gradient.view(-1)),
        "torch, bf16": lambda: dist.reduce_scatter_tensor(half_out, half.view(-1)),
    }
    for wire in WIRES:
        for kind, passes in (("mid", 1 << 30), ("last", 1)):
            progress = Progress([("weight", Parameter(torch.empty(0)))], passes * size, size)
            reduction = Reduction(progress, Wire(wire, [(rows, ROW)]), group, None)  # type: ignore[arg-type]
            found[f"{wire}, {kind}"] = lambda reduction=reduction: reduction.push(gradient, out)
    return found


#: By the way of reduction: the ratio to torch's float32 time, and the share of the bytes that it sends.
Figures = dict[str, tuple[float, float]]


def work(rank: int, size: int, port: int, arguments: argparse.Namespace, figures: SimpleQueue[Figures]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    acts = ways(arguments.elements)
    sent = {name: bytes_sent(act) for name, act in acts.items()}
    times: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(arguments.rounds):
        for name, act in acts.items():
            dist.barrier()
            begin = time.perf_counter()
            act()
            dist.barrier()
            times[name].append(time.perf_counter() - begin)
    if rank == 0:
        whole = 4 * arguments.elements * (size - 1) // size
        print(f"\n| {size} ranks, {arguments.elements:,} elements | ms | ratio | sent, of float32's |")
        print("| --- | --- | --- | --- |")
        row: Figures = {}
        for name, found in times.items():
            ratio = statistics.median(a / b for a, b in zip(found, times[BASE], strict=True))
            part = f"{sent[name] / whole:.3f}" if sent[name] else ""
            row[name] = ratio, sent[name] / whole
            print(f"| {name} | {statistics.median(found) * 1e3:.2f} | {ratio:.2f} | {part} |", flush=True)
        figures.put(row)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 23)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    results.add_argument(parser)
    arguments = parser.parse_args()
    queue: SimpleQueue[Figures] = mp.get_context("spawn").SimpleQueue()
    by_size: dict[int, Figures] = {}
    for size in arguments.ranks:
        free = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = free.port
        del free
        mp.spawn(work, (size, port, arguments, queue), nprocs=size)
        by_size[size] = queue.get()
    columns = [Column(""), *(Column(f"{size} ranks", digits=2) for size in by_size)]
    columns.append(Column("sent, of float32's", digits=3))
    rows: list[list[Cell]] = []
    for name, (_, sent) in next(iter(by_size.values())).items():
        if name != BASE:
            rows.append([name, *(of_size[name][0] for of_size in by_size.values()), sent or None])
    notes = [
        f"Time over torch's float32 reduce-scatter; {arguments.elements:,} elements in rows of {ROW:,}, gloo, "
        f"{arguments.rounds} rounds. 'mid' is a pass after which sums wait, 'last' one that writes the mean."
    ]
    results.write(arguments.json, "ordered_reduction", "Ordered gradients", columns, rows, threads=1, notes=notes)


if __name__ == "__main__":
    main()
