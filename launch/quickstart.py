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
    """The runs, in subfolders of one folder.

    Attributes:
        failures: results that are not as expected, a line each.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.options = config.load(["--config", str(CONFIG)])
        self.gpus = torch.cuda.device_count()
        self.ranks = max(n for n in range(1, 1 + (self.gpus or 2)) if self.options.micro_batches % n == 0)
        self.failures: list[str] = []

    def run(self) -> None:
        """Trains, resumes, and prints the table."""
        runs = {
            "32-bit": self._train("32-bit", self.ranks, "--optimizer", "adamw", "--checkpoint-interval", "0"),
            "8-bit": self._train("8-bit", self.ranks, "--verify"),
            "5 bytes": self._train("5 bytes", self.ranks, *FIVE_BYTES, "--checkpoint-interval", "0"),
        }
        self._compare_losses(runs)
        middle = self.options.checkpoint_interval
        saved = str(checkpoint.complete(self.output / "8-bit" / "checkpoints")[0])
        others = [count for count in (1, 3, 2) if count != self.ranks and count <= (self.gpus or 3)]
        if others:
            self._repeat(f"8-bit on {_ranks(others[0])}", others[0], "--stop-at-step", str(middle))
            self._repeat(f"8-bit resumed on {_ranks(others[-1])}", others[-1], "--resume", saved)
        else:
            print("one GPU: no run on another number of ranks to compare with, whose bits a CPU would not have\n")
        self._resume_under_fsdp1(saved, middle + 1)
        plot = self.output / "loss.png"
        metrics.plot_losses({name: self.output / name / "metrics.jsonl" for name in runs}, plot)
        _print_table(runs)
        print(f"plot: {plot}\ncheckpoint: {runs['8-bit']['checkpoint']}")

    def _compare_losses(self, runs: dict[str, Summary]) -> None:
        losses = {name: summary["heldout_loss"] for name, summary in runs.items()}
        for name, loss in losses.items():
            # "not <" rather than ">=", so that NaN fails; JSON holds NaN as null.
            if loss is None or not loss < MAX_HELDOUT_LOSS:
                self.failures.append(f"the held-out loss of {name} is {loss}, expected less than {MAX_HELDOUT_LOSS}")
            elif losses["32-bit"] and abs(gap := loss / losses["32-bit"] - 1) > MAX_LOSS_GAP:
                self.failures.append(f"{name} is {gap:+.2%} off 32-bit, expected at most {MAX_LOSS_GAP:.0%}")

    def _repeat(self, name: str, ranks: int, *options: str) -> None:
        """Trains a half of the 8-bit run on another number of ranks, and compares all losses and tensors."""
        self._train(name, ranks, "--verify", *options)
        losses, of_run = self._losses(name), self._losses("8-bit")
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
        if other:
            self.failures.append(f"{name}: {len(other)} losses differ, first in step {other[0]}")
        if changed:
            self.failures.append(f"{name}: {len(changed)} tensors differ, such as {changed[0]}")

    def _resume_under_fsdp1(self, saved: str, step: int) -> None:
        """Resumes the 8-bit run for one step under another sharding."""
        name, where = f"resumed-on-{self.ranks}-fsdp1", f"{_ranks(self.ranks)} under fsdp1"
        until = ("--backend", "fsdp1", "--no-ordered", "--stop-at-step", str(step), "--checkpoint-interval", "0")
        verified = self._train(name, self.ranks, "--resume", saved, "--verify", *until)["verified"]
        before, after = self._losses("8-bit")[step], self._losses(name)[step]
        print(
            f"resumed on {where}, saved on {verified['world_size']} under "
            f"{self.options.backend}: {verified['codes']} tensors of codes and {verified['scales']} of scales equal "
            f"bit for bit; the next step's loss is {after:.6f}, it was {before:.6f}\n"
        )
        if not (verified["codes"] and verified["scales"]):
            self.failures.append(f"{saved} has no codes and scales to compare")
        if abs(after - before) > MAX_RESUMED_GAP * before:
            self.failures.append(f"the loss after resuming on {where} is {after}, it was {before}")

    def _train(self, name: str, ranks: int, *options: str) -> Summary:
        """Runs launch/train.py under torchrun and returns its summary."""
        output = self.output / name
        shutil.rmtree(output, ignore_errors=True)
        device = "cuda" if self.gpus else "cpu"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]
        job = [str(HERE / "train.py"), "--config", str(CONFIG), "--output", str(output), "--device", device, *options]
        print(f"{name}: {_ranks(ranks)} on {device}: {' '.join(options)}", flush=True)
        done = subprocess.run(launcher + job, env={"OMP_NUM_THREADS": "1", **os.environ})
        if done.returncode:
            sys.exit(f"quickstart: the run {name!r} failed with exit code {done.returncode}")
        summary: Summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
        return summary

    def _losses(self, name: str) -> dict[int, float]:
        """The loss of each step."""
        rows = metrics.read(self.output / name / "metrics.jsonl")
        return {row["step"]: row["train_loss"] for row in rows if "train_loss" in row}


def _print_table(runs: dict[str, Summary]) -> None:
    print(f"{'AdamW':8} {'codec':8} {'held-out loss':>14} {'weights':>8} {'gradients':>10} {'state':>8} {'step':>12}")
    print(f"{'':8} {'':8} {'nats per byte':>14} {'bytes per parameter':>28} {'ms':>12}")
    for name, summary in runs.items():
        weights, state = summary["weight_bytes_per_parameter"], summary["state_bytes_per_parameter"]
        gradients, step = f"{weights:.3f}", f"{summary['optimizer_ms'] or 0:.3f}"
        if summary["options"]["release_gradients"]:
            gradients, step = "released", "in backward"
        print(
            f"{name:8} {summary['codec']:8} {summary['heldout_loss']:14.4f} {weights:8.3f} {gradients:>10} "
            f"{state:8.3f} {step:>12}"
        )


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def main() -> int:
    """Runs the quickstart and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = Path(config.load(["--config", str(CONFIG)]).output)
    parser.add_argument("--output", type=Path, default=default, help="folder of the runs; earlier ones are replaced")
    quickstart = Quickstart(parser.parse_args().output)
    began = time.monotonic()
    quickstart.run()
    print(f"took {time.monotonic() - began:.0f} s")
    for line in quickstart.failures:
        print(f"quickstart: failed: {line}", file=sys.stderr)
    return 1 if quickstart.failures else 0


if __name__ == "__main__":
    sys.exit(main())
