"""Trains two tasks of the quality study on 2 ranks, with gradients reduced in float32, bfloat16 and 8 bits.

    python benchmarks/gradient_training.py [--tasks NAME ...] [--seeds N] [--steps N]

Each rank has its own batches, gloo moves the gradients, and AdamW keeps its state in 8 bits (log8) in all runs.
Printed are held-out losses, and differences from bfloat16 seed by seed with their standard error. The difference
between float32 and bfloat16 says how much of it is noise. A run of 100 steps takes half a minute on two cores.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

if not __package__:
    sys.path[1:1] = [str(Path(__file__).resolve().parents[1] / "launch")]

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import shardopt
from quality.task import BETAS, EPS, WEIGHT_DECAY, lr_factor, task_of

RANKS = 2
BASE = "DDP, bf16"


def bf16_all_reduce(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with classes
    """As torch's bf16_compress_hook, which it has for NCCL alone."""
    half = bucket.buffer().bfloat16().div_(RANKS)
    dist.all_reduce(half)
    done: Future[Tensor] = Future()
    done.set_result(bucket.buffer().copy_(half))
    return done


def wrapped(way: str, model: nn.Module) -> nn.Module:
    """The model on all ranks, with gradients reduced in this way."""
    if way == "FSDP2, 8 bits":
        fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        shardopt.comm.ordered_gradients(model, micro_batches=RANKS, wire="e4m3")
        return model
    replica = DistributedDataParallel(model)
    if way == "DDP, bf16":
        replica.register_comm_hook(None, bf16_all_reduce)
    elif way == "DDP, 8 bits":
        shardopt.comm.ordered_gradients(replica, micro_batches=RANKS, wire="e4m3")
    return replica


WAYS = ("DDP, fp32", BASE, "DDP, 8 bits", "FSDP2, 8 bits")


def train(way: str, name: str, seed: int, steps: int) -> float:
    """Held-out loss of a run, in nats."""
    task = task_of(name, "small")
    problem = task.load(task.settings, Path(tempfile.gettempdir(), "shardopt-quality"))
    model = wrapped(way, problem.model(seed))
    optimizer = shardopt.AdamW8bit(model.parameters(), lr=task.lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    own = 1000 * (1 + dist.get_rank()) + seed  # of this rank's batches
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = task.lr * lr_factor(step, steps)
        problem.loss(model, own, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return problem.evaluate(model)["loss"]


def work(rank: int, port: int, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    for name in arguments.tasks:
        losses: dict[str, list[float]] = {way: [] for way in WAYS}
        for seed in range(arguments.seeds):
            for way in WAYS:
                begin = time.perf_counter()
                losses[way].append(train(way, name, seed, arguments.steps))
                if rank == 0:
                    print(f"{name}, seed {seed}, {way}: {losses[way][-1]:.4f}, {time.perf_counter() - begin:.0f} s")
        if rank == 0:
            report(name, losses)
    dist.destroy_process_group()


def report(name: str, losses: dict[str, list[float]]) -> None:
    print(f"\n| {name} | mean | less bf16, mean +- standard error |\n| --- | --- | --- |")
    for way, found in losses.items():
        differences = [loss - base for loss, base in zip(found, losses[BASE], strict=True)]
        mean = statistics.mean(differences)
        error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
        print(f"| {way} | {statistics.mean(found):.4f} | {mean:+.4f} +- {error:.4f} |")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=("bytes", "tokens"), default=["bytes", "tokens"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    free = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = free.port
    del free
    mp.spawn(work, (port, arguments), nprocs=RANKS)


if __name__ == "__main__":
    main()
