"""Portable checkpoints at thousands of ranks: what one rank computes, keeps in memory and reads.

One process plays ranks of a job that saves Llama 8B or 70B (bf16 weights with 24-bit masters, AdamW8bit) under a
sharding, and ranks of jobs on as many, half as many and twice as many ranks that load the checkpoint. Tensors are on
the meta device; descriptions, plans, index, tables and reads are real, what other ranks tell is computed. Each row is a
process of its own. Memory is the peak of the resident set, less what it was before: the simulation's own is in it.

    python benchmarks/scale.py --json               # all rows
    python benchmarks/scale.py --model 70b --sharding fsdp2 --ranks 4096
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import results
import shardopt
from results import Cell, Column
from shardopt.checkpoint.contents import model_key, state_key
from shardopt.checkpoint.data_file import DataFiles, placed
from shardopt.checkpoint.index import INDEX_NAME, Index, StoredFile, dump_index, load_index
from shardopt.checkpoint.items import Chunks, parameter_chunks, state_chunks
from shardopt.checkpoint.plan import _DIGEST_BYTES, Plan, plan_save
from shardopt.checkpoint.ranks import Ranks
from shardopt.checkpoint.reading import find_reads
from shardopt.checkpoint.table import encoded
from shardopt.layout import FlatShard
from shardopt.layout import Shard as ShardOf
from shardopt.sharding.dtensor import DTensorShard
from shardopt.state.slice_spec import SliceSpec

SHARDINGS = ("fsdp2", "hsdp", "fsdp2+tp", "fsdp1", "zero3")
META = torch.device("meta")
TP = 8


class Parameter(NamedTuple):
    """A parameter: its name and shape, its layer, and the dimension that tensor parallel cuts."""

    name: str
    shape: tuple[int, ...]
    layer: int
    tp_dim: int | None


def llama(model: str) -> list[Parameter]:
    """The parameters of Llama 3 8B or 70B."""
    dim, layers, hidden = {"8b": (4096, 32, 14336), "70b": (8192, 80, 28672)}[model]
    kv, vocab = 1024, 128256
    found = [Parameter("embed.weight", (vocab, dim), -1, 0)]
    for layer in range(layers):
        shapes: dict[str, tuple[tuple[int, ...], int | None]] = {
            "attention.wq.weight": ((dim, dim), 0),
            "attention.wk.weight": ((kv, dim), 0),
            "attention.wv.weight": ((kv, dim), 0),
            "attention.wo.weight": ((dim, dim), 1),
            "feed_forward.w1.weight": ((hidden, dim), 0),
            "feed_forward.w2.weight": ((dim, hidden), 1),
            "feed_forward.w3.weight": ((hidden, dim), 0),
            "attention_norm.weight": ((dim,), None),
            "ffn_norm.weight": ((dim,), None),
        }
        found += [Parameter(f"layers.{layer}.{name}", shape, layer, cut) for name, (shape, cut) in shapes.items()]
    return [*found, Parameter("norm.weight", (dim,), -1, None), Parameter("output.weight", (vocab, dim), -1, 0)]


class Mesh:
    """A mesh of all ranks as seen from one of them: what shards ask a DeviceMesh."""

    device_type = "cpu"

    def __init__(self, shape: tuple[int, ...], rank: int) -> None:
        self.mesh = torch.arange(math.prod(shape)).reshape(shape)
        self.shape, self.ndim = shape, len(shape)
        self._coordinate = [int(x) for x in np.unravel_index(rank, shape)]

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def get_coordinate(self) -> list[int]:
        return self._coordinate


class World(NamedTuple):
    """All ranks as seen from one of them: what flat shards ask a process group."""

    rank: int
    numbers: range
    device_type: str = "cpu"


class Simulated(Ranks):
    """A rank whose peers describe the same tensors: what they would tell is computed from what this rank tells."""

    def __init__(self, rank: int, size: int, wanted: int, strides: list[Any]) -> None:
        self.rank, self.size = rank, size
        self._wanted, self.sent = wanted, 0
        ranks = np.arange(size)
        offsets = [sum(ranks // stride % ways * stride for ways, stride in each) for each in strides]
        self._starts = np.stack([ranks - offset for offset in offsets], axis=1)

    def from_rank(self, source: int, message: bytes) -> bytes:
        return message

    def exchange(self, work: Callable[[], tuple[Any, bytes]]) -> tuple[Any, list[bytes]]:
        result, message = work()
        self.sent += len(message)
        digest, numbers = message[:_DIGEST_BYTES], np.frombuffer(message[_DIGEST_BYTES:], dtype="<i8")
        rows = np.zeros((self.size, len(numbers)), dtype="<i8")
        rows[:, 2:] = self._starts
        rows[0, 0] = self._wanted  # the elements that all ranks hold together
        if self.rank:
            rows[self.rank] = numbers
        return result, [digest + row.tobytes() for row in rows]


def shards(parameters: list[Parameter], sharding: str, ranks: int, rank: int) -> Iterator[tuple[Parameter, ShardOf]]:
    """The shard of each parameter on a rank."""
    if sharding in ("fsdp2", "hsdp", "fsdp2+tp"):
        tp = min(TP, ranks)
        shape = {"fsdp2": (ranks,), "hsdp": (2, ranks // 2), "fsdp2+tp": (ranks // tp, tp)}[sharding]
        mesh: Any = Mesh(shape, rank)
        known: dict[Any, ShardOf] = {}  # as shard_of_dtensor keeps them
        for parameter in parameters:
            placements: tuple[Placement, ...] = (Shard(0),) if sharding == "fsdp2" else (Replicate(), Shard(0))
            if sharding == "fsdp2+tp":
                placements = {
                    0: (_StridedShard(0, split_factor=tp), Shard(0)),
                    1: (Shard(0), Shard(1)),
                    None: (Shard(0), Replicate()),
                }[parameter.tp_dim]
            key = parameter.shape, placements
            if key not in known:
                known[key] = DTensorShard(parameter.shape, mesh, placements)
            yield parameter, known[key]
        return
    world: Any = World(rank, range(ranks))
    begins: dict[int, int] = {}
    totals: dict[int, int] = {}
    for parameter in parameters:
        totals[parameter.layer] = totals.get(parameter.layer, 0) + math.prod(parameter.shape)
    for parameter in parameters:
        numel = math.prod(parameter.shape)
        first = begins.get(parameter.layer, 0) if sharding == "fsdp1" else 0
        begins[parameter.layer] = first + numel
        size = -(-(totals[parameter.layer] if sharding == "fsdp1" else numel) // ranks)
        yield parameter, FlatShard.equal(parameter.shape, first, size, world)


def tensors(parameters: list[Parameter], sharding: str, ranks: int, rank: int) -> dict[str, Chunks]:
    """The tensors of a rank, in the form in which :func:`shardopt.checkpoint.save` plans with them."""
    optimizer = shardopt.AdamW8bit([torch.nn.Parameter(torch.zeros(1))], master_weight_bits=24)
    group = optimizer.param_groups[0]
    moments = optimizer.rule(group).moments
    found: dict[str, Chunks] = {}
    for parameter, shard in shards(parameters, sharding, ranks, rank):
        local = torch.empty(shard.local_shape, dtype=torch.bfloat16, device=META)
        found[model_key(parameter.name)] = parameter_chunks(shard, local)
        spec = SliceSpec.of(shard, torch.bfloat16, group, moments)
        for entry, chunks in state_chunks(spec, spec.new(META)).items():
            found[state_key(parameter.name, entry)] = chunks
    return found


def planned(parameters: list[Parameter], sharding: str, ranks: int, rank: int) -> tuple[Plan, Simulated]:
    """A rank's plan of a save."""
    held = tensors(parameters, sharding, ranks, rank)
    wanted, strides = 0, set()
    for chunks in held.values():
        assert chunks.placed is not None
        strides.add(chunks.placed.partition.strides)
        ways = math.prod(ways for ways, _ in chunks.placed.partition.strides)
        wanted += math.prod(chunks.shape) * ranks // ways
    own = sum(x.numel() for chunks in held.values() for x in chunks.written.values())
    peers = Simulated(rank, ranks, wanted - (own if rank else 0), sorted(strides))
    groups = [{"parameters": [parameter.name for parameter in parameters], "options": {"lr": 1e-3}}]
    return plan_save(held, groups, [], peers), peers


class Simulation:
    """A folder with the checkpoint that all ranks have saved: its index is a file, tables are made when opened."""

    def __init__(self, folder: Path, parameters: list[Parameter], sharding: str, ranks: int, plan: Plan) -> None:
        self._folder, self._made = folder, (parameters, sharding, ranks)
        self._tables: dict[int, tuple[int, bytes]] = {}
        data, table = self._table(0, plan)
        files: list[StoredFile | None] = [StoredFile(data, len(table), zlib.crc32(table))] * ranks
        header = {"extra": {}, "optimizer": "AdamW8bit", "param_groups": plan.groups}
        self.index = Index(header, "0" * 16, files, plan.tensors)
        self.text = dump_index(self.index)
        (folder / INDEX_NAME).write_bytes(self.text)

    def _table(self, rank: int, plan: Plan | None = None) -> tuple[int, bytes]:
        if rank not in self._tables:
            plan = planned(*self._made, rank)[0] if plan is None else plan
            chunks = list(placed(f"{'0' * 16}-{rank}.bin", plan.own))
            end = chunks[-1][1].position + chunks[-1][1].bytes if chunks else 0
            self._tables[rank] = end, encoded([x for x, _, _ in chunks], [chunk for _, chunk, _ in chunks])
        return self._tables[rank]

    def make_tables(self, index: Index, numbers: list[int]) -> int:
        """Makes tables before they are timed, and gives their lengths to the index; returns their bytes together."""
        for number in numbers:
            data, table = self._table(number)
            index.files[number] = StoredFile(data, len(table), zlib.crc32(table))
        return sum(len(self._tables[number][1]) for number in numbers)

    # The part of the interface of a Folder that reading needs.

    def shown(self, name: str) -> str:
        return name

    def __str__(self) -> str:
        return "simulation"

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def size(self, name: str) -> int:
        data, table = self._tables[int(name[17:-4])]
        return data + len(table)

    def open(self, name: str) -> Any:
        return _OpenTable(*self._tables[int(name[17:-4])])


class _OpenTable(NamedTuple):
    data: int
    table: bytes

    def read_into(self, buffer: memoryview, position: int) -> int:
        part = self.table[position - self.data :][: len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None: ...


class Measured(NamedTuple):
    """Seconds, and MiB by which the resident set at its peak is larger than before all phases."""

    seconds: float
    mib: float


@contextmanager
def measured(found: dict[str, Any], name: str) -> Iterator[None]:
    """Measures a phase."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = found.setdefault("resident before", _status("VmRSS"))
    begin = time.perf_counter()
    yield
    seconds = time.perf_counter() - begin
    found[name] = Measured(seconds, (_status("VmHWM") - before) / 1024)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))


def row(model: str, sharding: str, ranks: int, folder: Path) -> dict[str, Any]:
    """Measures what a rank in the middle does."""
    parameters = llama(model)
    tensors(parameters[-1:], sharding, ranks, 0)  # imports and caches
    found: dict[str, Any] = {}
    rank = ranks // 2
    with measured(found, "describe and plan"):
        plan, peers = planned(parameters, sharding, ranks, rank)
    found["bytes told"] = peers.sent
    found["tensors"] = len(plan.tensors)
    found["listed"] = sum(stored.partition is None for stored in plan.tensors.values())
    del plan
    folder.mkdir(exist_ok=True)
    saved = Simulation(folder, parameters, sharding, ranks, planned(parameters, sharding, ranks, 0)[0])
    found["index"] = len(saved.text)
    with measured(found, "load index"):
        index = load_index(saved)  # type: ignore[arg-type]
    for name, size in (("same", ranks), ("half", ranks // 2), ("double", 2 * ranks)):
        held = tensors(parameters, sharding, size, size // 2)
        numbers = sorted(
            {
                number
                for tensor, chunks in held.items()
                for offsets, x in chunks.held.items()
                for number in index.tensors[tensor].files_of((offsets, tuple(x.shape)))
            }
        )
        size = saved.make_tables(index, numbers)
        with measured(found, f"find reads, {name}"), DataFiles(saved, index) as files:  # type: ignore[arg-type]
            find_reads(files, index, held)
        found[f"tables, {name}"] = (len(numbers), size)
        del held
    with measured(found, "optimizer's tables"):
        kept = list(shards(parameters, sharding, ranks, rank))
        blocks = [s.cut_blocks(_grid(p)) for p, s in kept if isinstance(s, FlatShard) and len(p.shape) > 1]
    found["cut blocks"] = sum(map(len, blocks))
    if sharding in ("fsdp1", "zero3"):
        found["largest exchange"] = max(len(each) for each in blocks) * 4 * 4  # two extremes of two moments, int32
    return found


def _grid(parameter: Parameter) -> Any:
    from shardopt.layout import BlockGrid

    return BlockGrid(parameter.shape, 128)


PHASES = ("describe and plan", "load index", "find reads, same", "find reads, half", "find reads, double")


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--model", nargs="+", default=["8b", "70b"], choices=["8b", "70b"])
    parser.add_argument("--sharding", nargs="+", default=list(SHARDINGS), choices=SHARDINGS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 512, 4096])
    parser.add_argument("--folder", type=Path, default=Path("scale.tmp"), help="for the index; stays")
    parser.add_argument("--row", action="store_true", help="measure one row in this process, and print JSON")
    args = parser.parse_args()
    if args.row:
        torch.set_num_threads(1)
        print(json.dumps(row(args.model[0], args.sharding[0], args.ranks[0], args.folder)))
        return

    def rows() -> Iterator[list[Cell]]:
        for model, sharding, ranks in itertools.product(args.model, args.sharding, args.ranks):
            options = [
                "--row",
                "--model",
                model,
                "--sharding",
                sharding,
                "--ranks",
                str(ranks),
                "--folder",
                args.folder,
            ]
            done = subprocess.run([sys.executable, __file__, *options], check=True, capture_output=True, text=True)
            found = json.loads(done.stdout)
            assert found["listed"] == 0, "a tensor has no rule"
            tables = [found[f"tables, {which}"] for which in ("same", "half", "double")]
            of_tables = "; ".join(f"{count} {size / 1024:,.0f}" for count, size in tables)
            cut = "{:.3f}, {:.0f}; {}".format(*found["optimizer's tables"], found["cut blocks"])
            times = itertools.chain.from_iterable(found[phase] for phase in PHASES)
            name = f"{model} {sharding} {ranks:,}"
            yield [name, found["index"] / 1024, found["bytes told"], *times, of_tables, cut]

    columns = [Column("model, sharding, ranks"), Column("index", "KiB", 0), Column("told", "B", 0)]
    for phase in PHASES:
        columns += [Column(phase, "s", 3), Column(f"{phase}, memory", "MiB", 0)]
    columns += [Column("files and KiB of tables: same; half; double"), Column("shards: s, MiB; cut blocks")]
    title = "Checkpoints of Llama: what one rank does to save, and to load on as many, half and twice as many ranks"
    results.report(args.json, "scale", title, columns, rows())


if __name__ == "__main__":
    main()
