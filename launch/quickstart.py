"""The quickstart run: 8-bit AdamW against 32-bit AdamW, and checkpoints on other numbers of ranks.

Trains the same model from the same seed under torchrun: with 32-bit state, with 8-bit state, and in 5 bytes per
parameter (bfloat16 weights, 24-bit masters, 8-bit state, gradients freed as they are used). Trains the first half of
the 8-bit run again on another number of ranks and resumes the second half on a third, which has to give the same bits.
Resumes under another kind of sharding, too, and prints a table. Exits with 1 if a loss or a tensor is not as expected.
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

from lm import checkpoint, config, metrics

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parent / "configs" / "quickstart.yaml"

MAX_HELDOUT_LOSS = 2.3  # nats per byte
MAX_LOSS_GAP = 0.01  # relative difference of the held-out losses from 32-bit's
MAX_RESUMED_GAP = 1e-3  # relative difference of the first loss after resuming under FSDP1, which sums in its own order

FIVE_BYTES = ("--precision", "bf16", "--master-weight-bits", "24", "--release-gradients", "--no-ordered")

Summary = dict[str, Any]


class Quickstart:
    """The runs, in subfolders of one folder."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.options = config.load(["--config", str(CONFIG)])
        self.gpus = torch.cuda.device_count()
        counts = [count for count in range(1, 1 + (self.gpus or 2)) if not self.options.micro_batches % count]
        self.ranks = counts[-1]
        self.middle = self.options.checkpoint_interval

    def run(self) -> list[str]:
        """Trains, resumes, prints the table, and returns the failures, a line each."""
        wide = self._train("32-bit", self.ranks, "--optimizer", "adamw", "--checkpoint-interval", "0")
        narrow = self._train("8-bit", self.ranks, "--verify")
        small = self._train("5 bytes", self.ranks, *FIVE_BYTES, "--checkpoint-interval", "0")
        runs = {"32-bit": wide, "8-bit": narrow, "5 bytes": small}
        saved = checkpoint.complete(self.output / "8-bit" / "checkpoints")[0]
        wrong = _losses_wrong(runs)
        others = [count for count in (1, 3, 2) if count != self.ranks and count <= (self.gpus or 3)]
        if others:
            again, resumed = others[0], others[-1]
            wrong += self._repeat(f"8-bit on {_ranks(again)}", again, "--stop-at-step", str(self.middle))
            wrong += self._repeat(f"8-bit resumed on {_ranks(resumed)}", resumed, "--resume", str(saved))
        else:
            print("one GPU: no run on another number of ranks to compare with, whose bits a CPU would not have\n")
        wrong += self._resume(saved, self.ranks, "fsdp1")
        plot = self.output / "loss.png"
        rows = {name: self.output / name / "metrics.jsonl" for name in runs}
        metrics.plot_losses(rows, plot)
        self._print_table(runs)
        print(f"plot: {plot}\ncheckpoint: {narrow['checkpoint']}")
        return wrong

    def _repeat(self, name: str, ranks: int, *options: str) -> list[str]:
        """Trains a half of the 8-bit run on another number of ranks, and returns what differs, a line each."""
        self._train(name, ranks, "--verify", *options)
        losses, of_run = self._train_losses(name), self._train_losses("8-bit")
        other = [step for step, loss in losses.items() if loss != of_run[step]]
        last = checkpoint.complete(self.output / name / "checkpoints")[-1]
        digests, wanted = (
            checkpoint.read_header(self.output / run / "checkpoints" / last.name)["digests"] for run in (name, "8-bit")
        )
        changed = [tensor for tensor, digest in wanted.items() if digests.get(tensor) != digest]
        print(
            f"{name}, steps {min(losses)} to {max(losses)}: {len(losses) - len(other)} of {len(losses)} losses and "
            f"{len(wanted) - len(changed)} of {len(wanted)} tensors of weights and state equal those of the run on "
            f"{_ranks(self.ranks)}, bit for bit\n"
        )
        wrong = [f"{name}: {len(other)} losses differ, first in step {other[0]}"] if other else []
        return wrong + ([f"{name}: {len(changed)} tensors differ, such as {changed[0]}"] if changed else [])

    def _resume(self, saved: Path, ranks: int, backend: str) -> list[str]:
        """Resumes for one step under another sharding, and returns the failures, a line each."""
        name = f"resumed-on-{ranks}-{backend}"
        step = self.middle + 1
        until = ("--backend", backend, "--no-ordered", "--stop-at-step", str(step), "--checkpoint-interval", "0")
        summary = self._train(name, ranks, "--resume", str(saved), "--verify", *until)
        verified = summary["verified"]
        wrong = []
        if not (verified["codes"] and verified["scales"]):
            wrong.append(f"{saved} has no codes and scales to compare")
        before, after = self._train_losses("8-bit")[step], self._train_losses(name)[step]
        print(
            f"resumed on {_ranks(ranks)} under {backend}, saved on {verified['world_size']} under "
            f"{self.options.backend}: {verified['codes']} tensors of codes and {verified['scales']} of scales equal "
            f"bit for bit; the next step's loss is {after:.6f}, it was {before:.6f}\n"
        )
        if abs(after - before) > MAX_RESUMED_GAP * before:
            wrong.append(f"the loss after resuming on {_ranks(ranks)} under {backend} is {after}, it was {before}")
        return wrong

    def _train(self, name: str, ranks: int, *options: str) -> Summary:
        """Runs launch/train.py under torchrun and returns its summary."""
        output = self.output / name
        shutil.rmtree(output, ignore_errors=True)
        device = "cuda" if self.gpus else "cpu"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]
        job = [str(HERE / "train.py"), "--config", str(CONFIG), "--output", str(output)]
        job += ["--device", device, *options]
        print(f"{name}: {_ranks(ranks)} on {device}: {' '.join(options)}", flush=True)
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        done = subprocess.run(launcher + job, env=environment)
        if done.returncode:
            sys.exit(f"quickstart: the run {name!r} failed with exit code {done.returncode}")
        summary: Summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
        return summary

    def _train_losses(self, name: str) -> dict[int, float]:
        """The loss of each step."""
        rows = metrics.read(self.output / name / "metrics.jsonl")
        return {row["step"]: row["train_loss"] for row in rows if "train_loss" in row}

    def _print_table(self, runs: dict[str, Summary]) -> None:
        print(
            f"{'AdamW':8} {'codec':8} {'held-out loss':>14} {'weights':>8} {'gradients':>10} {'state':>8} {'step':>12}"
        )
        print(f"{'':8} {'':8} {'nats per byte':>14} {'bytes per parameter':>28} {'ms':>12}")
        for name, summary in runs.items():
            released = summary["options"]["release_gradients"]
            weights, state = summary["weight_bytes_per_parameter"], summary["state_bytes_per_parameter"]
            gradients = "released" if released else f"{weights:.3f}"
            step = "in backward" if released else f"{summary['optimizer_ms']:.3f}"
            print(
                f"{name:8} {summary['codec']:8} {summary['heldout_loss']:14.4f} {weights:8.3f} {gradients:>10} "
                f"{state:8.3f} {step:>12}"
            )


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def _losses_wrong(runs: dict[str, Summary]) -> list[str]:
    wrong = []
    for name, summary in runs.items():
        # "not <" rather than ">=", so that NaN fails; JSON holds NaN as null.
        if summary["heldout_loss"] is None or not summary["heldout_loss"] < MAX_HELDOUT_LOSS:
            wrong.append(
                f"the held-out loss of {name} is {summary['heldout_loss']}, expected less than {MAX_HELDOUT_LOSS}"
            )
    if not wrong:
        for name, summary in runs.items():
            gap = summary["heldout_loss"] / runs["32-bit"]["heldout_loss"] - 1
            if abs(gap) > MAX_LOSS_GAP:
                wrong.append(f"{name} is {gap:+.2%} off 32-bit, expected at most {MAX_LOSS_GAP:.0%}")
    return wrong


def main() -> int:
    """Runs the quickstart and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help="folder of the runs; earlier runs in it are replaced")
    given = parser.parse_args()
    output = given.output or Path(config.load(["--config", str(CONFIG)]).output)
    began = time.monotonic()
    wrong = Quickstart(output).run()
    print(f"took {time.monotonic() - began:.0f} s")
    for line in wrong:
        print(f"quickstart: failed: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
