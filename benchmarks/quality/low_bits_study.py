"""Measures the definitions of ``low_bits.py``: drift, fed gradients and training.

    python benchmarks/quality/low_bits_study.py drift|fed|train [--rule adamw|sgd|lion] [--variant NAME ...]
        [--seeds N] [--first-seed N] [--betas B B] [--lr LR] [--weight-decay W] [--json]

``drift``: mean and worst drift, as ``benchmarks/free_running.py`` defines them, on its streams, 8,192 elements.
``fed``: each variant steps on the gradients of a float32 run; its held-out loss over that run's in %, and its drift.
``train``: held-out loss of a byte-level language model over that of "fp32" of the same seed, in %. The variant
"lr * 1.0001" is float32, too, and shows how much a run depends on small changes.

``train`` and ``fed`` print a line per run, then mean, 95% interval (Student's t) and standard deviation over the seeds.
The model has 164,160 parameters (dim 64, 2 layers) and takes 250 steps of 8 x 64 bytes of Python's standard library,
with a warm-up of 20 steps and a cosine to a tenth of the learning rate. One thread.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "launch")]

from low_bits import (  # noqa: E402
    MOMENTUM_VARIANTS,
    VARIANTS,
    LowBitAdamW,
    LowBitLion,
    LowBitOptimizer,
    LowBitSGD,
    Variant,
)

import results  # noqa: E402
from free_running import COLS, SCENARIOS  # noqa: E402
from free_running import STEPS as DRIFT_STEPS  # noqa: E402
from lm import data  # noqa: E402
from lm.model import ModelConfig, Transformer, build  # noqa: E402
from quality.intervals import summary  # noqa: E402
from results import Cell, Column  # noqa: E402

CONTEXT, BATCH, STEPS, WARMUP, FINAL_LR = 64, 8, 250, 20, 0.1
MODEL = ModelConfig(dim=64, layers=2, heads=4)
HELD_OUT = 512  #: windows
CONTROL = "lr * 1.0001"
ELEMENTS = 8192
STREAMS = ("iid", "log-normal", "half sparse", "rare rows", "one step of 1e4")

Make = Callable[..., LowBitOptimizer]
#: Class, variants, learning rate in training.
RULES: dict[str, tuple[Make, dict[str, Variant], float]] = {
    "adamw": (LowBitAdamW, VARIANTS, 2e-3),
    "sgd": (LowBitSGD, MOMENTUM_VARIANTS, 0.1),
    "lion": (LowBitLion, MOMENTUM_VARIANTS, 3e-4),
}


class Job:
    """The training job; `make` takes (param groups, variant, lr, seed), `lr` is the peak."""

    def __init__(self, make: Make, variants: dict[str, Variant], lr: float, weight_decay: float = 0.0) -> None:
        self.make, self.variants, self.lr, self.weight_decay = make, variants, lr, weight_decay
        self.corpus = data.load(None, 0.1)
        self._held_out = data.windows(
            self.corpus.heldout, data.heldout_offsets(self.corpus, CONTEXT, HELD_OUT), CONTEXT
        )

    def train(self, name: str, seed: int, gradients: Callable[[Transformer, int], None] | None = None) -> Transformer:
        """Trains with a variant; `gradients(model, step)`, by default the job's own, sets the parameters' gradients."""
        model = self.model(seed)
        lr = self.lr * 1.0001 if name == CONTROL else self.lr
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors}]
        optimizer = self.make(groups, self.variants["fp32" if name == CONTROL else name], lr=lr, seed=seed)
        for t in range(1, STEPS + 1):
            for group in optimizer.param_groups:
                group["lr"] = lr * schedule(t)
            (gradients or partial(self.backward, seed=seed))(model, t)
            optimizer.step()
        return model

    def model(self, seed: int) -> Transformer:
        return build(MODEL, CONTEXT, seed, torch.float32)

    def backward(self, model: Transformer, t: int, seed: int) -> None:
        offsets = data.train_offsets(self.corpus, CONTEXT, BATCH, seed, t)
        inputs, targets = data.windows(self.corpus.train, offsets, CONTEXT)
        model.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()

    @torch.no_grad()
    def loss(self, model: Transformer) -> float:
        """The held-out loss, nats per byte."""
        parts = zip(*(x.split(64) for x in self._held_out), strict=True)
        return statistics.fmean(float(F.cross_entropy(model(x).flatten(0, 1), y.flatten())) for x, y in parts)

    def fed(self, names: list[str], seed: int) -> dict[str, tuple[float, ...]]:
        """By variant: held-out loss over float32's in %, drift."""
        recorded: list[list[Tensor]] = []

        def record(model: Transformer, t: int) -> None:
            self.backward(model, t, seed)
            recorded.append([p.grad.clone() for p in model.parameters() if p.grad is not None])

        def replay(model: Transformer, t: int) -> None:
            for p, gradient in zip(model.parameters(), recorded[t - 1], strict=True):
                p.grad = gradient

        exact = self.train("fp32", seed, record)
        start, end, loss = flat(self.model(seed)), flat(exact), self.loss(exact)
        found = {}
        for name in names:
            model = self.train(name, seed, replay)
            drift = float((flat(model) - end).abs().mean() / (end - start).abs().mean())
            found[name] = (100 * (self.loss(model) / loss - 1), drift)
        return found

    def trained(self, names: list[str], seed: int) -> dict[str, tuple[float, ...]]:
        """By variant: held-out loss over float32's in %."""
        loss = self.loss(self.train("fp32", seed))
        return {name: (100 * (self.loss(self.train(name, seed)) / loss - 1),) for name in names}


def flat(model: Transformer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def schedule(t: int) -> float:
    if t <= WARMUP:
        return t / WARMUP
    return FINAL_LR + (1 - FINAL_LR) * (1 + math.cos(math.pi * (t - WARMUP) / (STEPS - WARMUP))) / 2


def drift(make: Make, variants: dict[str, Variant], name: str, stream: str, seed: int) -> tuple[float, float]:
    """Mean and worst drift of a variant from float32."""
    scenario = SCENARIOS[stream]
    gradients = scenario.make(ELEMENTS // COLS, torch.Generator().manual_seed(seed))
    params = {key: Parameter(torch.zeros(ELEMENTS // COLS, COLS)) for key in ("fp32", name)}
    optimizers = {key: make([p], variants[key], lr=1e-3, seed=seed) for key, p in params.items()}
    exact, largest = params["fp32"].detach(), 0.0
    for t in range(1, DRIFT_STEPS + 1):
        gradient, before = gradients(t), exact.clone()
        for key, optimizer in optimizers.items():
            params[key].grad = gradient
            optimizer.step()
        largest = max(largest, float((exact - before).abs().max()))
    difference = (params[name].detach() - exact).abs()
    return float(difference.mean() / exact.abs().mean()), float(difference.max()) / largest


def report_drifts(where: Path | None, make: Make, variants: dict[str, Variant], names: list[str], seeds: range) -> None:
    columns = [Column("variant")]
    for stream in STREAMS:
        columns += [Column(stream, digits=3), Column(f"{stream}, worst")]

    def rows() -> Iterator[list[Cell]]:
        for name, seed in product(names, seeds):
            found = (drift(make, variants, name, stream, seed) for stream in STREAMS)
            yield [f"{name}, seed {seed}", *chain.from_iterable(found)]

    title = f"Definitions of low-bit state: drift after {DRIFT_STEPS} steps"
    results.report(where, "low_bits_drift", title, columns, rows(), threads=1)


def report_losses(where: Path | None, job: Job, measure: str, names: list[str], seeds: range) -> None:
    run_all = job.fed if measure == "fed" else job.trained
    runs: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
    for seed in seeds:
        for name, run in run_all(names, seed).items():
            runs[name].append(run)
            print(f"{seed}, {name}: {', '.join(f'{value:+.3f}' for value in run)}", flush=True)
    columns = [Column("state"), Column("mean", "%", 2), Column("95% interval (t), %"), Column("sd", "%", 2)]
    columns += [Column("seeds", digits=0), Column("drift", digits=3)]
    rows: list[list[Cell]] = []
    for name, found in runs.items():
        losses, *drifts = (list(column) for column in zip(*found, strict=True))
        s = summary(losses)
        low, high = s.t
        mean_drift = statistics.fmean(drifts[0]) if drifts else None
        rows.append([name, s.mean, f"{low:+.2f} to {high:+.2f}", s.spread, s.count, mean_drift])
    kind = "_fed" if measure == "fed" else ""
    title = "Definitions of low-bit state: held-out loss over float32's of the same seed"
    results.report(where, f"low_bits{kind}", title, columns, rows, threads=1)


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("measure", choices=("drift", "fed", "train"))
    parser.add_argument("--rule", choices=RULES, default="adamw")
    parser.add_argument("--variant", nargs="+", metavar="NAME", help="default: all of the rule")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--betas", type=float, nargs=2, help="default: the rule's")
    parser.add_argument("--lr", type=float, help="peak in training (default: the rule's)")
    parser.add_argument("--weight-decay", type=float, default=0.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    make, variants, lr = RULES[arguments.rule]
    names = arguments.variant or [name for name in variants if name != "fp32"]
    if unknown := [name for name in names if name not in (*variants, CONTROL)]:
        parser.error(f"--variant: got {unknown}, expected some of {', '.join((*variants, CONTROL))}")
    if arguments.betas:
        make = partial(make, betas=tuple(arguments.betas))
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    if arguments.measure == "drift":
        report_drifts(arguments.json, make, variants, names, seeds)
    else:
        job = Job(make, variants, arguments.lr or lr, arguments.weight_decay)
        report_losses(arguments.json, job, arguments.measure, names, seeds)


if __name__ == "__main__":
    main()
