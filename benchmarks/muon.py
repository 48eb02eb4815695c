"""Muon on shards: whose bits, how much the ranks send, how long a step takes, how much memory, and how exact it is.

    python benchmarks/muon.py bits traffic memory direction
    python benchmarks/muon.py time --rounds 7 --width 128 --layers 2

Each part prints a table; the ranks are processes that this one starts, with gloo.

bits: whether the weights after some steps of Muon8bit on a small model of odd sizes, in several waves, are those of the
unsharded run, to the bit, on all ranks. The gradient of an element is the same in every way of sharding.
traffic: the collectives that one step issues under FSDP2, and what they send from one rank to others, at most. Matrix
products are left out, because sizes alone decide what is sent.
time: medians of the slowest rank's time, one thread per rank; then of one process. Optimizers take turns.
memory: what PyTorch's allocator hands out during a step, beyond what was taken before, at its peak.
direction: see muon_direction.py.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import shardopt
from decoder import Architecture, Decoder
from exchange import shard as fsdp1
from muon_direction import print_direction
from shardopt.kernels.newton_schulz import NewtonSchulz
from step_cpu import commit, machine

ODD = Architecture(1, 130, 350, 65, 97, modern=True)
ODD_WAVES = {"orthogonalize_memory": "768KiB", "min_quantized_numel": 64}
STEPS = 3
REALISTIC = Architecture(4, 512, 1408, 256, 1024, modern=True)
Wrap = Callable[[nn.Module], nn.Module]


def small(width: int, layers: int) -> Architecture:
    return Architecture(layers, width, 11 * width // 4, width // 2, 256, modern=True)


def make(architecture: Architecture) -> nn.Module:
    """A model with the same weights in every process."""
    torch.manual_seed(0)
    return Decoder(architecture)


def matrices(model: nn.Module) -> list[Tensor]:
    """The parameters that Muon steps."""
    return [param for group in shardopt.muon_groups(model) if group["algorithm"] == "muon" for param in group["params"]]


def set_gradients(params: Iterable[Tensor], values: Iterable[Tensor], step: int = 0) -> None:
    """Gives each parameter a gradient whose elements depend on the elements of another tensor alone."""
    for param, value in zip(params, values, strict=True):
        param.grad = torch.remainder(value * 1021.0 + 0.618 * step, 1.0) - 0.5 if param.numel() else None


# Ranks.


def on_ranks(ranks: int, work: Callable[..., Any], *args: Any) -> Any:
    """Calls a function on so many new processes, and returns what it returns on the first."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (ranks, Path(folder), work, args), ranks)
        return torch.load(Path(folder) / "result", weights_only=False)


def _rank(rank: int, ranks: int, folder: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    result = work(*args)
    if rank == 0:
        torch.save(result, folder / "result")
    dist.barrier()
    dist.destroy_process_group()


def among_ranks(numbers: list[float], op: Any = dist.ReduceOp.MAX) -> list[float]:
    together = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(together, op)
    return together.tolist()


# Ways of sharding.


def mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("first", "second")[: len(sizes)])


def fsdp2(model: nn.Module, over: DeviceMesh | None = None) -> nn.Module:
    """Each layer is a unit."""
    for layer in model.layers:
        fully_shard(layer, mesh=over)
    return fully_shard(model, mesh=over)


def tensor_parallel(model: nn.Module, over: DeviceMesh) -> nn.Module:
    plan: dict[str, Any] = {f"layers.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "gate", "up")}
    plan |= {f"layers.*.{name}": RowwiseParallel() for name in ("out", "down")}
    return parallelize_module(model, over, plan)


def fsdp2_tensor_parallel(model: nn.Module) -> nn.Module:
    both = mesh(2, dist.get_world_size() // 2)
    return fsdp2(tensor_parallel(model, both["second"]), both["first"])


#: How a model is wrapped, and the numbers of ranks.
WAYS: dict[str, tuple[Wrap, tuple[int, ...]]] = {
    "plain": (lambda model: model, (1,)),
    "DDP": (DistributedDataParallel, (1, 2, 3, 4)),
    "FSDP2": (fsdp2, (1, 2, 3, 4)),
    "HSDP": (lambda model: fsdp2(model, mesh(2, dist.get_world_size() // 2)), (2, 4)),
    "TP": (lambda model: tensor_parallel(model, mesh(dist.get_world_size())), (1, 2, 3, 4)),
    "FSDP2 x TP": (fsdp2_tensor_parallel, (2, 4)),
    "FSDP1": (fsdp1, (1, 2, 3, 4)),
    "ZeroRedundancy": (DistributedDataParallel, (1, 2, 3, 4)),
}
TORCHS = "torch.optim.Muon"


# bits


def run(way: str, wrap: Wrap) -> dict[str, Tensor]:
    """The whole weights after a run."""
    model = wrap(make(ODD))
    if way == TORCHS:
        params = matrices(model)
        optimizer: Optimizer = torch.optim.Muon(params, lr=1e-2)
    else:
        params = list(model.parameters())
        groups = shardopt.muon_groups(model, lr=1e-2)
        if way == "ZeroRedundancy":
            optimizer = ZeroRedundancyOptimizer(groups, shardopt.Muon8bit, **ODD_WAVES)
        else:
            optimizer = shardopt.Muon8bit(groups, **ODD_WAVES)
    start = [param.detach().clone() for param in params]
    for step in range(STEPS):
        set_gradients(params, start, step)
        optimizer.step()
    return whole(model)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The weights by name, gathered."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return _copies(model)
    return _copies(model)


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {
        name.removeprefix("module.").replace("_fsdp_wrapped_module.", ""): (
            param.full_tensor().detach() if isinstance(param, DTensor) else param.detach().clone()
        )
        for name, param in model.named_parameters()
    }


def compare(expected: dict[str, Tensor], torchs: dict[str, Tensor]) -> tuple[dict[str, bool], float]:
    """Whether the weights have the expected bits, by way of sharding; and torch.optim.Muon's greatest difference."""
    same = {}
    for way, (wrap, worlds) in WAYS.items():
        if dist.get_world_size() in worlds:
            got = run(way, wrap)
            equal = got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)
            same[way] = bool(among_ranks([equal], dist.ReduceOp.MIN)[0])
    got, start = run(TORCHS, fsdp2), dict(make(ODD).named_parameters())
    moved = {name: (x - start[name].detach()).norm() for name, x in torchs.items()}
    return same, max(float((got[name] - x).norm() / moved[name]) for name, x in torchs.items() if moved[name])


def print_bits() -> None:
    torch.set_num_threads(1)
    expected, torchs = run("plain", lambda model: model), run(TORCHS, lambda model: model)
    start = dict(make(ODD).named_parameters())
    assert not any(torch.equal(expected[name], start[name]) for name in expected), "a parameter did not move"
    worlds = (1, 2, 3, 4)
    found = {ranks: on_ranks(ranks, compare, expected, torchs) for ranks in worlds}
    print(f"the bits of the unsharded run, after {STEPS} steps of Muon8bit (log8), {ODD}")
    print(f"{'ranks':30}" + "".join(f"{ranks:>10}" for ranks in worlds))
    for way in WAYS:
        answers = ({True: "yes", False: "NO", None: "-"}[found[ranks][0].get(way)] for ranks in worlds)
        print(f"{way:30}" + "".join(f"{answer:>10}" for answer in answers))
    print(f"{TORCHS + ', FSDP2, differs':30}" + "".join(f"{found[ranks][1]:10.2%}" for ranks in worlds))
    print("differs: from its own unsharded run, the most of any matrix, share of the way that the matrix moved")


# traffic

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Collectives(TorchDispatchMode):
    """Counts the collectives of all ranks that this rank issues, from Python or from PyTorch's C++.

    Attributes:
        calls: how many.
        sent: bytes that leave this rank: of an all-to-all, what is for others; of an all-gather of n bytes to R ranks,
            (R - 1) n; of an all-reduce 2 (R - 1) / R n.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.sent = 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensors call their collectives, and come here with plain tensors
        space, _, name = func.name().partition("::")
        if space in ("c10d", "_c10d_functional") and name != "wait_tensor":
            self.calls += 1
            self.sent += _sent(name, args)
        if func in _PRODUCTS:
            left, right = args[-2:]
            return left.new_zeros(left.shape[0], right.shape[1])
        return func(*args, **(kwargs or {}))


def _sent(name: str, args: Any) -> float:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if name == "alltoall_base_":
        _, x, _, _, splits, *_ = args
        own = splits[rank] * x.stride(0) * x.itemsize if splits else x.nbytes / ranks
        return float(x.nbytes - own)
    if name in ("_allgather_base_", "all_gather_into_tensor"):
        return float((ranks - 1) * args[name.startswith("_")].nbytes)
    if name in ("allreduce_", "all_reduce", "all_reduce_"):
        x = args[0][0] if isinstance(args[0], list) else args[0]
        return float(2 * (ranks - 1) / ranks * x.nbytes)
    raise NotImplementedError(f"{name}: got a collective whose bytes are not counted, expected one of FSDP2's Muons")


def contenders(**options: Any) -> dict[str, Callable[[list[Tensor]], Optimizer]]:
    return {
        "shardopt.Muon8bit": lambda params: shardopt.Muon8bit(params, **options),
        "shardopt.Muon fp32": lambda params: shardopt.Muon(params, **options),
        TORCHS: lambda params: torch.optim.Muon(params),
    }


def count() -> dict[str, list[float]]:
    """Bytes and collectives of a step, by optimizer, the greatest of any rank."""
    makers = {f"{name}, 512MiB": maker for name, maker in contenders().items() if name == "shardopt.Muon8bit"}
    makers["shardopt.Muon8bit, 24MiB"] = contenders(orthogonalize_memory="24MiB")["shardopt.Muon8bit"]
    makers[TORCHS] = contenders()[TORCHS]
    found = {}
    for name, maker in makers.items():
        params = matrices(fsdp2(make(REALISTIC)))
        optimizer = maker(params)
        set_gradients(params, params)
        with Collectives():
            optimizer.step()
        with Collectives() as collectives:
            optimizer.step()
        found[name] = among_ranks([collectives.sent, collectives.calls])
    return found


def print_traffic() -> None:
    shapes = [tuple(param.shape) for param in matrices(make(REALISTIC))]
    numel = sum(rows * cols for rows, cols in shapes)
    print(f"what a step sends under FSDP2, at most from any rank; N = {numel:,} in {len(shapes)} matrices, {REALISTIC}")
    print(f"{'ranks':>5} {'':26}{'bytes':>14}{'bytes / N':>11}{'of 4 N / R':>12}{'collectives':>13}{'per matrix':>12}")
    for ranks in (2, 4):
        for name, (sent, calls) in on_ranks(ranks, count).items():
            print(
                f"{ranks:5} {name:26}{sent:14,.0f}{sent / numel:11.3f}{sent * ranks / (4 * numel):12.3f}"
                f"{calls:13.0f}{calls / len(shapes):12.2f}"
            )


# time


def measure(architecture: Architecture, rounds: int, ranks: int) -> dict[str, float]:
    """Median seconds of a step by optimizer, after one unmeasured round."""
    steps: dict[str, Callable[[], Any]] = {}
    for name, maker in contenders().items():
        model = make(architecture)
        params = matrices(fsdp2(model) if ranks else model)
        set_gradients(params, [param.detach() for param in params])
        steps[name] = maker(params).step
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            if ranks:
                dist.barrier()
            begin = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - begin)
    medians = {}
    for name, of_name in seconds.items():
        medians[name] = statistics.median((among_ranks(of_name) if ranks else of_name)[1:])
    return medians


def print_time(architecture: Architecture, rounds: int) -> None:
    print(f"ms per step of the matrices, medians of {rounds} rounds, and to torch.optim.Muon's; {architecture}")
    print(f"{'':34}" + "".join(f"{name:>28}" for name in contenders()))
    found = {
        f"FSDP2, {ranks} ranks of one thread": on_ranks(ranks, measure, architecture, rounds, ranks) for ranks in (2, 4)
    }
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found[f"one process, {threads} thread{'s' * (threads > 1)}"] = measure(architecture, rounds, 0)
    for case, medians in found.items():
        cells = (f"{taken * 1e3:20.1f} ({taken / medians[TORCHS]:5.2f})" for taken in medians.values())
        print(f"{case:34}" + "".join(cells))


# memory


def peak_of(step: Callable[[], Any]) -> int:
    """Bytes that a call takes beyond what was taken before it, at its peak."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    taken = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        taken += event.nbytes()
        peak = max(peak, taken)
    return peak


def peaks(architecture: Architecture, budgets: list[str], ranks: int) -> list[float]:
    """Greatest peak of any rank, by budget, in the second step."""
    found = []
    for budget in budgets:
        model = make(architecture)
        params = matrices(fsdp2(model) if ranks else model)
        set_gradients(params, [param.detach() for param in params])
        optimizer = shardopt.Muon8bit(params, orthogonalize_memory=budget)
        optimizer.step()
        found.append(float(peak_of(optimizer.step)))
    return among_ranks(found) if ranks else found


def print_memory(architecture: Architecture) -> None:
    budgets = ["512KiB", "768KiB", "1MiB", "2MiB", "512MiB"]
    shapes = [tuple(param.shape) for param in matrices(make(architecture))]
    numel = sum(rows * cols for rows, cols in shapes)
    least = max(2 * rows * cols + NewtonSchulz.workspace(rows, cols) for rows, cols in shapes)
    print(f"peak of a step, bytes, by orthogonalize_memory; {architecture}")
    print(f"the directions of all matrices {2 * numel:,}; the largest matrix, whole, and its workspace {least:,}")
    print(f"{'':24}" + "".join(f"{budget:>12}" for budget in budgets))
    print(f"{'one process':24}" + "".join(f"{peak:12,.0f}" for peak in peaks(architecture, budgets, 0)))
    two = on_ranks(2, peaks, architecture, budgets, 2)
    print(f"{'FSDP2, 2 ranks, the most':24}" + "".join(f"{peak:12,.0f}" for peak in two))
    for codec in ("log8", "companded8", "dynamic8", "fp32"):
        params = matrices(make(architecture))
        set_gradients(params, [param.detach() for param in params])
        optimizer = shardopt.Muon(params, codec=codec, ns_steps=1)
        optimizer.step()
        state = (x for param in params for key, x in optimizer.state[param].items() if key != "step")
        print(f"bytes of state per parameter of a matrix, {codec:12}{sum(x.nbytes for x in state) / numel:8.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["bits", "traffic", "time", "memory", "direction"])
    parser.add_argument("--rounds", type=int, default=7, help="of time")
    parser.add_argument("--width", type=int, default=128, help="of the model in time and memory")
    parser.add_argument("--layers", type=int, default=2, help="of the model in time and memory")
    args = parser.parse_args()
    architecture = small(args.width, args.layers)
    parts: dict[str, Callable[[], None]] = {
        "bits": print_bits,
        "traffic": print_traffic,
        "time": lambda: print_time(architecture, args.rounds),
        "memory": lambda: print_memory(architecture),
        "direction": print_direction,
    }
    print(f"{machine()}, commit {commit()}")
    for part in args.parts:
        print(f"\n{part}: ", end="", flush=True)
        parts[part]()


if __name__ == "__main__":
    main()
