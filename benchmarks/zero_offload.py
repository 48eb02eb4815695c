"""ZeRO-2 with the optimizer in the host's memory: 8-bit AdamW against DeepSpeedCPUAdam, interleaved in one process.

Two engines train the same transformer on the same random tokens and take turns, first the one, then the other. Reported
are medians over the rounds of the slowest rank's time: of the optimizer's own step, what of it the rank's process spent
on a core (that is without what other processes took, and without waiting for other ranks), and of ``engine.step()``,
which also clips, copies and gathers; then bytes of the optimizer's state per parameter that a rank owns.

    torchrun --nproc_per_node 2 benchmarks/zero_offload.py --json
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from torch import Tensor, nn

import results
import shardopt  # noqa: F401  its types are known to DeepSpeed from here on
from measuring import among_ranks
from results import Column

#: By the name that the results give them: config types. DeepSpeed makes of AdamW its DeepSpeedCPUAdam.
TYPES = {"shardopt AdamW8bit": "AdamW8bit", "DeepSpeedCPUAdam": "AdamW"}
HYPER = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
TOKENS = 20000


class Transformer(nn.Module):
    """An encoder of about so many parameters with an output as wide as its vocabulary, tied to the embedding."""

    def __init__(self, numel: int, width: int = 768) -> None:
        super().__init__()
        layers = max(1, round((numel - TOKENS * width) / (12 * width**2)))
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(TOKENS, width)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.layers(self.embedding(tokens[:, :-1])) @ self.embedding.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@dataclass
class Run:
    """An engine and what was measured of it."""

    engine: Any
    optimizer_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)  # of the same, this process on a core
    engine_s: list[float] = field(default_factory=list)

    @property
    def state_bytes(self) -> int:
        state = self.engine.basic_optimizer.state
        return sum(x.nbytes for entries in state.values() for x in entries.values() if isinstance(x, Tensor))

    @property
    def owned(self) -> int:
        return sum(master.numel() for master in self.engine.optimizer.single_partition_of_fp32_groups)


def make_run(kind: str, numel: int, dtype: str) -> Run:
    import deepspeed

    # Collectives go through gloo; DeepSpeed would compile a faster one. DeepSpeed's module's attribute "torch" is not
    # this one.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model = Transformer(numel)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": TYPES[kind], "params": HYPER},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": dtype == "bfloat16"},
    }
    run = Run(deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0])
    assert type(run.engine.basic_optimizer).__name__ == kind.split()[-1]
    inner = run.engine.basic_optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        start, cpu_start = time.perf_counter(), time.process_time()
        found = inner(*args, **kwargs)
        run.optimizer_s[-1] += time.perf_counter() - start
        run.cpu_s[-1] += time.process_time() - cpu_start
        return found

    run.engine.basic_optimizer.step = step
    return run


def train(run: Run, tokens: Tensor) -> None:
    """A step, timed from where all ranks have their gradients."""
    run.engine.backward(run.engine(tokens))
    run.optimizer_s.append(0.0)
    run.cpu_s.append(0.0)
    dist.barrier()
    start = time.perf_counter()
    run.engine.step()
    run.engine_s.append(time.perf_counter() - start)


def measure(numel: int, dtype: str, rounds: int, length: int) -> tuple[dict[str, dict[str, float]], int]:
    """Interleaved rounds after an unmeasured one; the order of the two changes from round to round."""
    runs = {kind: make_run(kind, numel, dtype) for kind in TYPES}
    total = sum(param.numel() for param in runs[next(iter(TYPES))].engine.module.parameters())
    generator = torch.Generator().manual_seed(dist.get_rank())
    for current in range(rounds + 1):
        tokens = torch.randint(TOKENS, (1, length), generator=generator)
        for kind in sorted(runs, reverse=bool(current % 2)):
            train(runs[kind], tokens)
    return {kind: figures_of(run) for kind, run in runs.items()}, total


def figures_of(run: Run) -> dict[str, float]:
    """Milliseconds, medians of the rounds and the fastest; and bytes per parameter that a rank owns."""
    optimizer, cpu, engine = (among_ranks(times[1:]) for times in (run.optimizer_s, run.cpu_s, run.engine_s))
    return {
        "optimizer's step": statistics.median(optimizer) * 1e3,
        "fastest": min(optimizer) * 1e3,
        "CPU time": statistics.median(cpu) * 1e3,
        "engine step": statistics.median(engine) * 1e3,
        "state per parameter": run.state_bytes / run.owned,
    }


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--numel", type=int, default=100_000_000)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the model")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--length", type=int, default=33, help="tokens of a batch")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    measured, numel = measure(args.numel, args.dtype, args.rounds, args.length)
    first, ranks = dist.get_rank() == 0, dist.get_world_size()
    dist.destroy_process_group()
    if not first:
        return
    ours, base = measured.values()
    columns = [Column("optimizer"), *(Column(name, "ms", 1) for name in list(ours)[:4])]
    columns += [Column(name, "bytes", 3) for name in list(ours)[4:]]
    rows = [[kind, *cells.values()] for kind, cells in measured.items()]
    time, state = (ours[name] / base[name] for name in ("optimizer's step", "state per parameter"))
    goals = [
        results.at_most("ratio of the optimizers' times", time, 1.0),
        results.at_most("state, of theirs,", state, 0.27),
    ]
    title = "DeepSpeed ZeRO-2 with offload of the optimizer"
    notes = [f"{numel:,} parameters in {args.dtype}, {ranks} ranks; medians of {args.rounds} rounds."]
    results.report(
        args.json, "zero_offload", title, columns, rows, threads=torch.get_num_threads(), goals=goals, notes=notes
    )


if __name__ == "__main__":
    main()
