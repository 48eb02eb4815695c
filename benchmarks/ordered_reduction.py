"""Time of ordered gradient sums beside torch's reduce-scatter, on gloo, and the bytes that each rank sends.

    python benchmarks/ordered_reduction.py [--elements N] [--rounds N] [--ranks N ...] [--json]

A round reduces once in each way, one after another; printed are medians over the rounds of milliseconds, and of the
ratio to torch's reduce-scatter in float32 of the same round. Elements are those of a whole gradient, of rows of 1,024.
"mid" is a pass after which the sums wait for more micro-batches, "last" the pass that writes the mean. All ranks run on
this machine, with a thread each.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

import results
from measuring import in_turn, on_ranks
from results import Cell, Column
from shardopt.comm.progress import Progress
from shardopt.comm.reduction import Reduction
from shardopt.comm.wire import WIRES

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
            progress = Progress(Module(), passes * size, size)
            reduction = Reduction(progress, wire, [(rows * size, ROW)], [group])  # type: ignore[arg-type]
            found[f"{wire}, {kind}"] = lambda reduction=reduction: reduction.reduce_scatter(gradient, out)
    return found


#: By the way of reduction: milliseconds, their ratio to torch's in float32, and the share of the bytes that it sends.
Figures = dict[str, tuple[float, float, float]]


def measure(elements: int, rounds: int) -> Figures:
    """Measures on all ranks."""
    acts = ways(elements)
    sent = {name: bytes_sent(act) for name, act in acts.items()}

    def together(act: Callable[[], object]) -> None:
        act()
        dist.barrier()

    waits = {name: partial(together, act) for name, act in acts.items()}
    times = in_turn(waits, rounds, unmeasured=0, before=lambda _: dist.barrier())
    whole = 4 * elements * (dist.get_world_size() - 1) // dist.get_world_size()
    found: Figures = {}
    for name, seconds in times.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, times[BASE], strict=True))
        found[name] = statistics.median(seconds) * 1e3, ratio, sent[name] / whole
    return found


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--elements", type=int, default=1 << 23)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments = parser.parse_args()
    by_size: dict[int, Figures] = {
        size: on_ranks(size, measure, arguments.elements, arguments.rounds) for size in arguments.ranks
    }
    columns = [Column(""), *(Column(f"{size} ranks", digits=2) for size in by_size)]
    columns.append(Column("sent, of float32's", digits=3))
    columns += [Column(f"median, {size} ranks", "ms", 2) for size in by_size]
    rows: list[list[Cell]] = []
    for name, (_, _, sent) in next(iter(by_size.values())).items():
        ratios = (of_size[name][1] for of_size in by_size.values())
        rows.append([name, *ratios, sent or None, *(of_size[name][0] for of_size in by_size.values())])
    notes = [
        f"Time over torch's float32 reduce-scatter; {arguments.elements:,} elements in rows of {ROW:,}, gloo, "
        f"{arguments.rounds} rounds. 'mid' is a pass after which sums wait, 'last' one that writes the mean."
    ]
    results.report(arguments.json, "ordered_reduction", "Ordered gradients", columns, rows, threads=1, notes=notes)


if __name__ == "__main__":
    main()
