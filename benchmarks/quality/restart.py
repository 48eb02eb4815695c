"""Trains launch/lm's job undisturbed, and again with restarts on other numbers of ranks; compares the bits of both.

    python benchmarks/quality/restart.py [--steps N] [--output FOLDER] [--results FILE] [JOB OPTIONS ...]

The job's gradients are ordered, so that the second run, which goes on from its portable checkpoints, has to have the
losses of the first at every step, and the bits of its weights and state at the end. Writes what was compared to
results/restart.json, and exits with 1 where the runs differ. A run of the default length takes 20 minutes of two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if not __package__:
    _BENCHMARKS = Path(__file__).resolve().parents[1]
    sys.path[0:1] = [str(_BENCHMARKS), str(_BENCHMARKS.parent / "launch")]

import torch

from lm import checkpoint, metrics

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results" / "restart.json"
STEPS = 5000
#: Ranks, and the share of the steps after which the run stops on them.
LEGS = ((2, 0.3), (4, 0.4), (1, 1.0))
#: The model and the schedule of the task `long`; 4 micro-batches, which 1, 2 and 4 ranks divide.
JOB = (
    *("--device", "cpu", "--dim", "128", "--layers", "2", "--heads", "4", "--context", "64", "--batch", "16"),
    *("--lr", "2e-3", "--clip", "1", "--ordered", "--micro-batches", "4", "--optimizer", "adamw8bit"),
    *("--log-interval", "1", "--verify", "--eval-windows", "256"),
)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, help="folder of both runs (default: a temporary one)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given, options = parser.parse_known_args(argv)
    output = given.output or Path(tempfile.mkdtemp(prefix="shardopt-restart-"))
    job = [*JOB, "--steps", str(given.steps), "--warmup", str(given.steps // 10), *options]
    job += ["--eval-interval", str(max(1, given.steps // 20)), "--checkpoint-interval", str(given.steps)]
    undisturbed, restarted = output / "undisturbed", output / "restarted"
    _train(1, [*job, "--output", str(undisturbed)])
    for ranks, share in LEGS:
        stop = round(share * given.steps)
        _train(ranks, [*job, "--output", str(restarted), "--resume", "auto", "--stop-at-step", str(stop)])
    found = compared(undisturbed, restarted, given.steps)
    given.results.parent.mkdir(parents=True, exist_ok=True)
    given.results.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0 if found["same"] else 1


def _train(ranks: int, options: list[str]) -> None:
    """Runs the job: in one process alone, else under torchrun with FSDP2."""
    script = str(ROOT / "launch" / "train.py")
    if ranks == 1:
        command = [sys.executable, script, "--backend", "single", *options]
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*launcher, script, "--backend", "fsdp2", *options]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)


def compared(undisturbed: Path, restarted: Path, steps: int) -> dict[str, Any]:
    """The curves of two runs, and their tensors at the end, by digests.

    Returns:
        For JSON: the legs of the restarted run, how many losses and tensors were compared, the first step with another
        loss or None, and "same": whether nothing differs.
    """
    one, other = (_losses(folder / "metrics.jsonl") for folder in (undisturbed, restarted))
    differing = [key for key in sorted(one.keys() | other.keys()) if one.get(key) != other.get(key)]
    last = Path("checkpoints", f"step-{steps:08d}")
    digests, others = (checkpoint.read_header(folder / last)["digests"] for folder in (undisturbed, restarted))
    return {
        "steps": steps,
        "legs": [[ranks, round(share * steps)] for ranks, share in LEGS],
        "training_losses": sum(kind == "train_loss" for _, kind in one),
        "heldout_losses": sum(kind == "heldout_loss" for _, kind in one),
        "tensors": len(digests),
        "first_difference": differing[0][0] if differing else None,
        "same": not differing and digests == others,
        "last_heldout_loss": one.get((steps, "heldout_loss")),
        "torch": torch.__version__,
    }


def _losses(path: Path) -> dict[tuple[int, str], float]:
    """Losses of a run by step and kind."""
    rows = metrics.read(path)
    return {(row["step"], kind): row[kind] for row in rows for kind in ("train_loss", "heldout_loss") if kind in row}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
