"""Seconds and bytes of saving and loading a decoder under FSDP2: 8-bit AdamW against torch's, interleaved.

Contenders take turns, saving, saving asynchronously and loading; medians over the rounds of the slowest rank's time are
reported. The last is the measure of the others. DCP is torch.distributed.checkpoint with ``get_state_dict`` and
``set_state_dict``, which are timed with it. All write to the disk for good (fsync) and read what the system has in its
cache. An asynchronous save blocks for the copy; its future is kept until the next one, as in a training loop. "copy" is
a plain copy of as many bytes as a rank saves, between two tensors that were written before.

    torchrun --nproc_per_node 2 benchmarks/checkpoint.py --json
    python benchmarks/checkpoint.py --numel 10_000_000
    python benchmarks/checkpoint.py --numel 400_000_000 --dtype bfloat16 --master-weight-bits 24
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

import results
import shardopt.checkpoint
from measuring import Decoder, among_ranks, seconds_of, set_gradients
from results import Column
from shardopt.checkpoint.index import load_index
from shardopt.checkpoint.storage import folder_at

TIMES = ("save", "async_save returns", "async_save is complete", "load", "plain copy")


@dataclass
class Contender:
    """An optimizer over the model, and a way to save and load both."""

    name: str
    optimizer: Optimizer
    save: Callable[[Path, nn.Module, Optimizer], None]
    async_save: Callable[[Path, nn.Module, Optimizer], Future[Any]]
    load: Callable[[Path, nn.Module, Optimizer], object]
    state_bytes: Callable[[Path], int]  # of the moments, scales and step counts in a checkpoint


def dcp_save(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)


def dcp_async_save(path: Path, model: nn.Module, optimizer: Optimizer) -> Future[Any]:
    weights, state = get_state_dict(model, optimizer)
    saving = dcp.async_save({"model": weights, "optimizer": state}, checkpoint_id=path)
    assert isinstance(saving, Future)
    return saving


def dcp_load(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def dcp_state_bytes(path: Path) -> int:
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {name: x for name, x in stored.items() if isinstance(x, TensorStorageMetadata)}
    sizes = {name: x.size.numel() * x.properties.dtype.itemsize for name, x in tensors.items()}
    return sum(size for name, size in sizes.items() if name.startswith("optimizer."))


def state_bytes(path: Path) -> int:
    tensors = load_index(folder_at(path)).tensors
    return sum(stored.nbytes for name, stored in tensors.items() if name.startswith("optimizer."))


def make_model(numel: int, dtype: torch.dtype) -> Decoder:
    """Each layer is sharded by itself, over all ranks."""
    torch.manual_seed(0)
    model = Decoder(numel).to(dtype)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def contenders(model: nn.Module, master_weight_bits: int | None) -> list[Contender]:
    """All over the same model; their state is that after one step."""
    ours = shardopt.AdamW8bit(model.parameters(), lr=1e-5, master_weight_bits=master_weight_bits)
    torchs = torch.optim.AdamW(model.parameters(), lr=1e-5)
    set_gradients(model)
    for optimizer in (ours, torchs):
        optimizer.step()
    model.zero_grad()
    portable = (shardopt.checkpoint.save, shardopt.checkpoint.async_save, shardopt.checkpoint.load, state_bytes)
    through_dcp = (dcp_save, dcp_async_save, dcp_load, dcp_state_bytes)
    return [
        Contender("AdamW8bit, portable", ours, *portable),
        Contender("AdamW8bit, DCP", ours, *through_dcp),
        Contender("torch AdamW, DCP", torchs, *through_dcp),
    ]


def measure(model: nn.Module, found: list[Contender], folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds in the order of ``TIMES``, bytes, and bytes of state, by contender; after an unmeasured round."""
    times: dict[str, list[tuple[float, ...]]] = {contender.name: [] for contender in found}
    sizes: dict[str, tuple[int, int]] = {}
    saving: dict[str, Future[Any]] = {}
    copies: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for current in range(rounds + 1):
        for contender in found:
            save_s = _time(partial(contender.save, folder, model, contender.optimizer))
            _remove(folder)
            blocked_s, async_save_s = _times_of_async_save(contender, folder, model, saving)
            load_s = _time(partial(contender.load, folder, model, contender.optimizer))
            in_all = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            if contender.name not in copies:
                source = torch.ones(in_all // dist.get_world_size(), dtype=torch.uint8)
                copies[contender.name] = source, source.clone()
            source, target = copies[contender.name]
            copy_s = _time(lambda target=target, source=source: target.copy_(source))  # type: ignore[misc]
            if current:
                times[contender.name].append((save_s, blocked_s, async_save_s, load_s, copy_s))
            sizes[contender.name] = (in_all, contender.state_bytes(folder))
            _remove(folder)
    return {name: [*map(statistics.median, zip(*of, strict=True)), *sizes[name]] for name, of in times.items()}


def _times_of_async_save(
    contender: Contender, folder: Path, model: nn.Module, saving: dict[str, Future[Any]]
) -> tuple[float, float]:
    """Seconds until an asynchronous save returns, and until it is complete; ``saving`` keeps the futures."""

    def begin() -> None:
        saving[contender.name] = contender.async_save(folder, model, contender.optimizer)

    blocked_s = _time(begin)
    return blocked_s, blocked_s + _time(saving[contender.name].result, idle=False)


def _remove(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def _time(work: Callable[[], object], *, idle: bool = True) -> float:
    """Seconds of the slowest rank, once the disk has nothing else to do unless not ``idle``."""
    if idle:
        if dist.get_rank() == 0:
            os.sync()
        dist.barrier()
    return among_ranks([seconds_of(work)])[0]


@contextmanager
def process_group() -> Iterator[None]:
    """Torchrun's, or one of a single process."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@contextmanager
def common_folder(parent: Path | None) -> Iterator[Path]:
    """A folder that rank 0 has made, for checkpoints to be made in."""
    made = [tempfile.mkdtemp(dir=parent) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    try:
        yield Path(made[0]) / "checkpoint"
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(made[0])


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--numel", type=int, default=100_000_000)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the parameters")
    parser.add_argument("--master-weight-bits", type=int, choices=[24, 32], help="of AdamW8bit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's for temporary files)")
    args = parser.parse_args()
    with process_group():
        model = make_model(args.numel, getattr(torch, args.dtype))
        numel = sum(param.numel() for param in model.parameters())
        with common_folder(args.folder) as folder:
            measured = measure(model, contenders(model, args.master_weight_bits), folder, args.rounds)
        first, ranks = dist.get_rank() == 0, dist.get_world_size()
    if not first:
        return
    threads = torch.get_num_threads()
    columns = [Column(""), *(Column(name, "s", 3) for name in TIMES)]
    columns += [Column("size", "MB", 1), Column("of them state", "MB", 1)]
    rows = [[name, *cells[:-2], *(x / 1e6 for x in cells[-2:])] for name, cells in measured.items()]
    (ours, *_, last), contender = measured.values(), list(measured)
    save, blocked, complete, _, copy, _, state = ours
    goals = [
        results.at_most("async_save returns, in plain copies", blocked / copy, 1.2),
        results.at_most("async_save is complete, in saves", complete / save, 1.5),
        results.at_most(f"state of {contender[0]} over that of {contender[-1]}", state / last[-1], 0.27),
    ]
    name = (
        "checkpoint" + (f"_{ranks}_ranks" if ranks > 1 else "") + ("" if args.dtype == "float32" else f"_{args.dtype}")
    )
    masters = f", {args.master_weight_bits}-bit masters" if args.master_weight_bits else ""
    notes = [f"{numel:,} parameters of {args.dtype}{masters}, FSDP2, ranks: {ranks}; medians of {args.rounds} rounds."]
    results.report(args.json, name, "Checkpoints", columns, rows, threads=threads, goals=goals, notes=notes)


if __name__ == "__main__":
    main()
