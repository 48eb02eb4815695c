"""Bytes per parameter under DeepSpeed, as allocated while the optimizer steps, for every stage and offload: a table.

Each piece of memory is counted once, and what part it plays is looked up in DeepSpeed's own attributes; the kinds are
those of ``shardopt.memory_report``, with float32 masters as master weights and staging as offload buffers. On the CPU
accelerator the device's memory is the host's, so the part says on which side a piece would stand with a GPU: the
optimizer's state, masters, their gradients and the staging buffers in the host's memory if ``offload_optimizer`` is on,
the parameters' partitions if ``offload_param`` is; all else on the device. Of all other tensors that are alive only the
sum is told, in MB: buffers whose size the config or the largest parameter fixes (buckets).

ZeRO 0 to 2 hold all weights on each rank: they are per parameter of the model. All else is per parameter that a rank
owns.

    torchrun --nproc_per_node 2 benchmarks/deepspeed_memory.py --json  # DeepSpeed compiles its CPU Adam the first time
    torchrun --nproc_per_node 2 benchmarks/deepspeed_memory.py --no-peers
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from torch import Tensor, nn

import results
import shardopt  # noqa: F401  its types are known to DeepSpeed from here on
from results import Cell, Column
from shardopt.estimate.table import COLUMNS
from shardopt.report import MemoryReport, MemoryUse
from shardopt.report.memory import kind_of

NO_MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    stage: int
    offload: tuple[str, ...]
    dtype: str
    master_bits: int | None = None  # of bf16 parameters without float32 masters

    @property
    def model(self) -> str:
        if self.dtype == "float32":
            return "fp32"
        return "bf16, fp32 masters" if self.master_bits is None else f"bf16, {self.master_bits} bits"

    def settings(self, peer: bool) -> dict[str, Any]:
        """A config of ours, or of what DeepSpeed has instead: torch.optim's AdamW, or its own on the CPU."""
        params: dict[str, Any] = {"lr": 1e-4}
        if peer and "optimizer" not in self.offload:
            params["torch_adam"] = True
        if not peer and self.master_bits is not None:
            params["master_weight_bits"] = self.master_bits
        zero: dict[str, Any] = {f"offload_{what}": {"device": "cpu"} for what in self.offload}
        bf16 = {"enabled": self.dtype == "bfloat16"} if self.master_bits is None else NO_MASTERS
        return {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW" if peer else "AdamW8bit", "params": params},
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": 1_000_000,
                "stage3_param_persistence_threshold": 0,
                **zero,
            },
            "bf16": bf16,
        }


def cases() -> list[Case]:
    """All that DeepSpeed has."""
    found = [Case(0, (), "float32"), Case(0, (), "bfloat16")]
    kinds: list[tuple[str, int | None]] = [("float32", None), ("bfloat16", None), ("bfloat16", 32), ("bfloat16", 24)]
    offloads: list[tuple[str, ...]] = [(), ("optimizer",), ("optimizer", "param")]
    for stage, offload, (dtype, bits) in itertools.product((1, 2, 3), offloads, kinds):
        if stage == 3 or "param" not in offload:
            found.append(Case(stage, offload, dtype, bits))
    return found


@dataclass
class Found:
    """Result of :func:`measure`.

    Attributes:
        report: weights, gradients, masters, staging and state by the side where they would stand with a GPU.
        rest: bytes of all other tensors that were made.
        numel: elements of the model.
        owned: elements that this rank's optimizer steps, with padding.
    """

    report: MemoryReport
    rest: int
    numel: int
    owned: int

    @property
    def total(self) -> int:
        return self.report.device.total + self.report.host.total


def masters(engine: Any) -> list[Tensor]:
    """The tensors that the optimizer steps."""
    wrapper = engine.optimizer
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        if hasattr(wrapper, name):
            return list(getattr(wrapper, name))
    return [param for group in engine.basic_optimizer.param_groups for param in group["params"]]


def roles(engine: Any) -> Iterator[tuple[str, bool, Iterable[Any]]]:
    """Kinds, whether they are the host's, and tensors that are such; memory that is of several is of the first."""
    wrapper, optimizer = engine.optimizer, engine.basic_optimizer
    zero = engine.config.get("zero_optimization", {})
    host, params_on_host = "offload_optimizer" in zero, "offload_param" in zero
    params = list(engine.module.parameters())
    yield "parameters", params_on_host, [getattr(param, "ds_tensor", param) for param in params]
    held = masters(engine)
    yield "master_weights", host, held
    yield "gradients", host, [master.grad for master in held]
    yield "gradients", host, [getattr(wrapper, "grad_partitions_flat_buffer", None)]
    yield "gradients", False, [param.grad for param in params]
    yield "offload_buffers", host, getattr(wrapper, "param_buffer_of_bit16_for_cpu_offload_groups", [])
    for state in optimizer.state.values():
        for key, entry in state.items():
            yield kind_of(key), host, [entry]


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Bytes of the pieces of memory in which tensors stand, by address."""
    found = {}
    for x in tensors:
        if isinstance(x, Tensor) and x.device.type == "cpu" and not x.is_sparse:
            storage = x.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


@contextmanager
def nothing_before() -> Iterator[None]:
    """Inside, ``gc.get_objects`` gives only what was made there; walks and collections are as short as that."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def count(engine: Any) -> Found:
    """Counts what is alive."""
    numel = sum(getattr(param, "ds_numel", param.numel()) for param in engine.module.parameters())
    report = MemoryReport(numel)
    counted: set[int] = set()
    for kind, on_host, tensors in roles(engine):
        use = report.host if on_host else report.device
        for address, nbytes in storages(tensors).items():
            if address not in counted:
                counted.add(address)
                setattr(use, kind, getattr(use, kind) + nbytes)
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of attributes that are looked at only to see whether a thing is a tensor
        alive = storages(x for x in gc.get_objects() if isinstance(x, Tensor))
    rest = sum(nbytes for address, nbytes in alive.items() if address not in counted)
    return Found(report, rest, numel, sum(master.numel() for master in masters(engine)))


@nothing_before()
def measure(model: nn.Module, settings: dict[str, Any], loss_of: Callable[[Any], Tensor]) -> Found:
    """Takes two steps; looks when all gradients of the second are there, before they are used.

    Args:
        model: what to train.
        settings: DeepSpeed's config.
        loss_of: the loss of an engine.

    Returns:
        What is most, if DeepSpeed steps one piece after another.
    """
    import deepspeed

    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]
    found: list[Found] = []
    inner = engine.basic_optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        found.append(count(engine))
        return inner(*args, **kwargs)

    for current in range(2):
        engine.backward(loss_of(engine))
        if current == 1:
            engine.basic_optimizer.step = step
        engine.step()
    engine.basic_optimizer.step = inner
    engine.destroy()
    return max(found, key=lambda each: each.total)


def measure_case(case: Case, layers: int, width: int, *, peer: bool) -> Found:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    dtype = getattr(torch, case.dtype)
    return measure(
        model, case.settings(peer), lambda engine: engine(torch.ones(1, width, dtype=dtype)).float().square().mean()
    )


def row(case: Case, ours: Found, theirs: Found | None) -> list[Cell]:
    def per_parameter(found: Found, kind: str, use: MemoryUse) -> float:
        whole = kind == "parameters" and case.stage < 3
        return float(getattr(use, kind)) / (found.numel if whole else found.owned)

    def kind_in_words(kind: str) -> str:
        device, host = (per_parameter(ours, kind, use) for use in (ours.report.device, ours.report.host))
        return " + ".join([*([f"{device:.4g}"] if device else []), *([f"{host:.4g} host"] if host else [])]) or "0"

    def totals(found: Found | None) -> list[Cell]:
        if found is None:
            return [None, None]
        uses = (found.report.device, found.report.host)
        return [sum(per_parameter(found, kind, use) for kind in COLUMNS) for use in uses]

    offload = f", offload of {' and '.join(case.offload)}" if case.offload else ""
    return [f"ZeRO {case.stage}{offload}, {case.model}", *totals(ours), *totals(theirs), *map(kind_in_words, COLUMNS)]


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--no-peers", action="store_true", help="leave out torch.optim.AdamW and DeepSpeedCPUAdam")
    args = parser.parse_args()
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)  # what DeepSpeed uses of torch
    # Collectives go through gloo; DeepSpeed would compile a faster one. DeepSpeed's module's attribute "torch" is not
    # this one.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    dist.init_process_group("gloo")
    rows: list[list[Cell]] = []
    fixed = 0.0
    for case in cases():
        if case.stage not in args.stages:
            continue
        ours = measure_case(case, args.layers, args.width, peer=False)
        peer = not args.no_peers and case.master_bits != 24
        theirs = measure_case(case, args.layers, args.width, peer=True) if peer else None
        fixed = max(fixed, ours.rest / 1e6)
        rows.append(row(case, ours, theirs))
    first, ranks = dist.get_rank() == 0, dist.get_world_size()
    dist.destroy_process_group()
    if not first:
        return
    names = ("AdamW8bit, device", "AdamW8bit, host", "peer, device", "peer, host")
    columns = [Column(""), *(Column(name, "bytes", 2) for name in names), *map(Column, COLUMNS.values())]
    notes = [
        f"Per owned parameter, on rank 0 of {ranks}; {args.layers} matrices of {args.width} x {args.width}; DeepSpeed "
        f"{deepspeed.__version__}. The peer is torch's AdamW, with offload DeepSpeedCPUAdam; without float32 masters "
        f"its moments are bfloat16. Buffers of a fixed size: {fixed:.1f} MB at most."
    ]
    title = "DeepSpeed ZeRO: bytes per parameter while the optimizer steps"
    results.report(args.json, "deepspeed_memory", title, columns, rows, notes=notes)


if __name__ == "__main__":
    main()
