"""Trains the job's model by Muon in 8 bits, Muon in float32 and AdamW in 8 bits, and compares held-out losses.

    python benchmarks/muon_training.py [--steps N] [--seeds N] [--json]

Learning rates are chosen by one seed, and the losses are those of five others. A run takes a quarter of an hour.
The text is that of ``launch/train.py``: the source of Python's standard library.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import results
from results import ROOT, Cell, Column

MODEL = ("--backend", "single", "--device", "cpu", "--dim", "96", "--layers", "3", "--heads", "3")
TRAINING = (
    "--batch",
    "16",
    "--context",
    "128",
    "--warmup",
    "30",
    "--weight-decay",
    "0.1",
    "--checkpoint-interval",
    "0",
)
SWEEP_SEED = 1000

#: Name, options, and learning rates of which the best is taken.
OPTIMIZERS: dict[str, tuple[tuple[str, ...], tuple[float, ...]]] = {
    "Muon8bit": (("--optimizer", "muon", "--adamw-lr", "0.003"), (0.01, 0.02, 0.04)),
    "Muon, fp32": (("--optimizer", "muon", "--adamw-lr", "0.003", "--codec", "fp32"), (0.01, 0.02, 0.04)),
    "AdamW8bit": (("--optimizer", "adamw", "--betas", "0.9", "0.95"), (0.0015, 0.003, 0.006)),
}


def heldout_loss(options: tuple[str, ...], lr: float, seed: int, steps: int) -> float:
    """Held-out loss at the end of a run of the job, in nats per byte."""
    with tempfile.TemporaryDirectory() as folder:
        run = ("--lr", str(lr), "--seed", str(seed), "--steps", str(steps), "--eval-interval", str(steps))
        command = [
            sys.executable,
            str(ROOT / "launch" / "train.py"),
            *MODEL,
            *TRAINING,
            *options,
            *run,
            "--output",
            folder,
        ]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": path})
        found: float = json.loads(Path(folder, "summary.json").read_text(encoding="utf-8"))["heldout_loss"]
    return found


def spread(values: list[float], sign: str = "") -> str:
    """Mean and standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):{sign}.4f} +- {deviation:.4f}"


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()

    def rows() -> Iterator[list[Cell]]:
        first: list[float] = []
        for name, (options, rates) in OPTIMIZERS.items():
            tried = {lr: heldout_loss(options, lr, SWEEP_SEED, arguments.steps) for lr in rates}
            best = min(tried, key=lambda lr: tried[lr])
            losses = [heldout_loss(options, best, seed, arguments.steps) for seed in range(arguments.seeds)]
            first = first or losses
            less = [loss - other for loss, other in zip(losses, first, strict=True)]
            yield [
                name,
                best,
                spread(losses),
                spread(less, "+"),
                losses,
                ", ".join(f"{lr:g}: {tried[lr]:.4f}" for lr in tried),
            ]

    columns = [Column("optimizer"), Column("lr"), Column("held-out loss"), Column("less Muon8bit's, seed by seed")]
    columns += [Column("each seed's", digits=4), Column("of these rates")]
    notes = ["Mean and standard deviation, nats per byte."]
    title = f"Muon: held-out loss of the job's model, {arguments.steps} steps, {arguments.seeds} seeds"
    results.report(arguments.json, "muon_training", title, columns, rows(), notes=notes)


if __name__ == "__main__":
    main()
