"""The quickstart run: 8-bit AdamW against 32-bit AdamW, and checkpoints on other numbers of ranks.

Trains the same model from the same seed under torchrun, with 32-bit state and with 8-bit state. Trains the first half
of the 8-bit run again on one rank and resumes the second half on three, which has to give the same bits. Resumes under
another kind of sharding, too, and prints a table. Exits with 1 if a loss or a tensor is not as expected.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lm import checkpoint, metrics, options

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parent / "configs" / "quickstart.yaml"

MAX_HELDOUT_LOSS = 2.7  # nats per byte
MAX_LOSS_GAP = 0.01  # relative difference of the held-out losses
MAX_RESUMED_GAP = 1e-3  # relative difference of the first loss after resuming under FSDP1, which sums in its own order


class Quickstart:
    """The runs, in subfolders of one folder.

    Attributes:
        failures: results that are not as expected, a line each.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.middle = options.load(["--config", str(CONFIG)]).checkpoint_interval
        self.gpus = torch.cuda.device_count()
        self.failures: list[str] = []

    def run(self) -> None:
        """Trains, resumes, and prints the table."""
        ranks = min(self.gpus or 2, 2)
        runs = {
            "32-bit": self._train("32-bit", ranks, "--optimizer", "adamw", "--checkpoint-interval", "0"),
            "8-bit": self._train("8-bit", ranks),
        }
        saved = str(checkpoint.complete(self.output / "8-bit" / "checkpoints")[0])
        if not self.gpus or self.gpus >= 3:
            self._repeat("8-bit on 1 rank", 1, "--stop-at-step", str(self.middle))
            self._repeat("8-bit resumed on 3 ranks", 3, "--resume", saved)
        self._resume_under_fsdp1(saved, ranks)
        plot = self.output / "loss.png"
        metrics.plot_losses({name: self.output / name / "metrics.jsonl" for name in runs}, plot)
        print("AdamW    codec   held-out loss [nats per byte]   weights, state [bytes per parameter]")
        for name, found in runs.items():
            weights, state = found["weight_bytes_per_parameter"], found["state_bytes_per_parameter"]
            loss = found["heldout_loss"] or float("nan")  # JSON holds NaN as null
            print(f"{name:8} {found['codec']:5}{loss:32.4f}{weights:31.3f}{state:8.3f}")
            gap = loss / (runs["32-bit"]["heldout_loss"] or float("nan")) - 1
            self._expect(loss < MAX_HELDOUT_LOSS and abs(gap) < MAX_LOSS_GAP, f"{name}: loss {loss}, {gap:+.2%}")
        print(f"plot: {plot}\ncheckpoint: {runs['8-bit']['checkpoint']}")

    def _expect(self, holds: bool, got: str) -> None:
        if not holds:
            self.failures.append(got)

    def _repeat(self, name: str, ranks: int, *arguments: str) -> None:
        """Trains a half of the 8-bit run on another number of ranks, and compares all losses and tensors."""
        self._train(name, ranks, *arguments)
        losses, of_run = self._losses(name), self._losses("8-bit")
        last = checkpoint.complete(self.output / name / "checkpoints")[-1].name
        paths = (self.output / run / "checkpoints" / last for run in (name, "8-bit"))
        found, wanted = (checkpoint.contents(path) for path in paths)
        same = sum(loss == of_run[step] for step, loss in losses.items())
        equal = sum(found.get(tensor) == data for tensor, data in wanted.items())
        said = (
            f"{name}, steps {min(losses)} to {max(losses)}: {same} of {len(losses)} losses and {equal} of "
            f"{len(wanted)} tensors of weights and state equal those of the run on 2 ranks, bit for bit"
        )
        print(f"{said}\n")
        self._expect((same, equal) == (len(losses), len(wanted)), said)

    def _resume_under_fsdp1(self, saved: str, ranks: int) -> None:
        """Resumes the 8-bit run for one step under another sharding."""
        name, step = "8-bit resumed under fsdp1", self.middle + 1
        until = ("--backend", "fsdp1", "--no-ordered", "--stop-at-step", str(step), "--checkpoint-interval", "0")
        verified = self._train(name, ranks, "--resume", saved, "--verify", *until)["verified"]
        before, after = self._losses("8-bit")[step], self._losses(name)[step]
        said = (
            f"{name}: {verified['codes']} tensors of codes and {verified['scales']} of scales equal bit for bit; the "
            f"next step's loss is {after:.6f}, it was {before:.6f}"
        )
        print(f"{said}\n")
        self._expect(verified["codes"] > 0 and abs(after - before) <= MAX_RESUMED_GAP * before, said)

    def _train(self, name: str, ranks: int, *arguments: str) -> dict[str, Any]:
        """Runs launch/train.py under torchrun and returns its summary."""
        output = self.output / name
        shutil.rmtree(output, ignore_errors=True)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks), str(HERE / "train.py")]
        print(f"{name}: {ranks} ranks: {' '.join(arguments)}", flush=True)
        job = [*launcher, "--config", str(CONFIG), "--output", str(output), *arguments]
        done = subprocess.run(job, env={"OMP_NUM_THREADS": "1", **os.environ})
        if done.returncode:
            sys.exit(f"quickstart: the run {name!r} failed with exit code {done.returncode}")
        summary: dict[str, Any] = json.loads((output / "summary.json").read_text(encoding="utf-8"))
        return summary

    def _losses(self, name: str) -> dict[int, float]:
        rows = metrics.read(self.output / name / "metrics.jsonl")
        return {row["step"]: row["train_loss"] for row in rows if "train_loss" in row}


def main() -> int:
    """Runs the quickstart and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default="runs/quickstart", help="folder of the runs, which are replaced")
    quickstart = Quickstart(parser.parse_args().output)
    began = time.monotonic()
    quickstart.run()
    print(f"took {time.monotonic() - began:.0f} s")
    for line in quickstart.failures:
        print(f"quickstart: failed: {line}", file=sys.stderr)
    return 1 if quickstart.failures else 0


if __name__ == "__main__":
    sys.exit(main())
