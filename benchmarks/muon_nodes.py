"""Counts the bytes of Muon's directions between nodes of 8 GPUs, and each rank's share of Newton-Schulz.

    python benchmarks/muon_nodes.py [--json]

Matrices go to owners by the code that steps; nothing is sent. Llama's matrices lie on FSDP2 over all ranks, and on HSDP
whose shard groups are the nodes, where each replica computes all matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, cast

import numpy as np

import results
from decoder import Architecture
from results import Cell, Column
from shardopt.kernels.newton_schulz import QUINTIC, NewtonSchulz
from shardopt.layout import Division, Region
from shardopt.step.muon.matrices import BYTES, Matrix, waves_of

NODE = 8
MEMORY = 512 << 20
NEWTON_SCHULZ = NewtonSchulz((QUINTIC,) * 5, 1e-7)
MODELS = {
    "Llama 8B, 8 nodes": (Architecture(32, 4096, 14336, 1024, 128256, modern=True), 8),
    "Llama 70B, 64 nodes": (Architecture(80, 8192, 28672, 1024, 128256, modern=True), 64),
}


class Ranks:
    """Ranks by name, of which this one is the first."""

    rank = 0

    def __init__(self, name: str) -> None:
        self.name = name


def shapes(kind: Architecture) -> Iterator[tuple[int, int]]:
    """The matrices of a model that Muon steps."""
    for _ in range(kind.layers):
        yield from [(kind.hidden, kind.hidden), (kind.key_value, kind.hidden)] * 2
        yield from [(kind.mlp, kind.hidden)] * 2
        yield kind.hidden, kind.mlp


def matrices(kind: Architecture, ranks: int) -> list[Matrix]:
    """The matrices with rows divided among so many ranks, as FSDP2 divides them."""
    group, found = Ranks("shards"), []
    for number, (rows, cols) in enumerate(shapes(kind)):
        size = -(-rows // ranks)
        ends = [min(rank * size, rows) for rank in range(ranks + 1)]
        regions = tuple(Region(a * cols, b - a, cols, cols) for a, b in pairwise(ends))
        division = Division(cast(Any, group), regions)
        found.append(
            Matrix(number, 0, cast(Any, None), rows, cols, 0, 0, division, regions, number, 0, 1.0, NEWTON_SCHULZ,
                   None, ((0, 0),) * ranks)
        )  # fmt: skip
    return found


def count(kind: Architecture, ranks: int) -> tuple[float, float]:
    """Bytes that the nodes of a replica receive from others in a step, and the most multiplications of a rank.

    Args:
        kind: the model.
        ranks: the number of ranks that divide a matrix.
    """
    received, flops = 0.0, np.zeros(ranks)
    for wave in waves_of(matrices(kind, ranks), MEMORY, "cuda"):
        for matrix, owner in zip(wave.matrices, wave.owners, strict=True):
            held = BYTES * np.array([matrix.space(rank) for rank in range(ranks)], np.float64)
            nodes = np.arange(ranks) // NODE
            # There and back, between the owner and the ranks on other nodes.
            received += 2 * held[nodes != owner // NODE].sum()
            flops[owner] += matrix.flops
    return received, flops.max()


def main() -> None:
    arguments = results.parser(__doc__).parse_args()

    def rows() -> Iterator[list[Cell]]:
        for name, (kind, nodes) in MODELS.items():
            numel = sum(a * b for a, b in shapes(kind))
            for way, ranks in (("FSDP2", nodes * NODE), ("HSDP", NODE)):  # a node is a replica, and receives nothing
                received, flops = count(kind, ranks)
                peers = min(ranks - 1, 32)
                yield [f"{name}: {way}", received / 1e9, received / nodes / 1e9, received / numel, flops / 1e12, peers]

    columns = [
        Column(""),
        Column("between nodes", "GB", 1),
        Column("into a node", "GB", 2),
        Column("bytes per element", digits=2),
        Column("of a rank, at most", "T multiplications", 2),
        Column("ranks at a time", digits=0),
    ]
    notes = [
        "Counted, not run: directions and results of a step, in bfloat16, for nodes of 8 GPUs. FSDP's traffic is more.",
    ]
    title = "Muon: bytes between nodes"
    results.report(arguments.json, "muon_nodes", title, columns, rows(), notes=notes, device="counted")


if __name__ == "__main__":
    main()
