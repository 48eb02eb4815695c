"""Trains the job's model in the standard parametrization and in u-muP, with 8-bit state, in float32, FP16 and FP8.

    OMP_NUM_THREADS=1 python benchmarks/unit_scaling_training.py [--steps N] [--widths 64 128 256] [--json]

Three tables: held-out losses by learning rate and width, for each parametrization; and those by number format at the
best learning rate of the first width, with shares of weight gradients that are zero in FP16 at initialisation. FP16 has
no loss scale and 24-bit master weights, FP8 no scales. "1 of 256" divides the loss by 256, as if the batch had 256
times as many tokens. A run takes five minutes on one core. The text is that of ``launch/train.py``: the source of
Python's standard library.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

import results
from results import ROOT, Cell, Column

sys.path[:0] = [str(ROOT), str(ROOT / "launch")]

from lm import config, data, plan, training  # noqa: E402
from lm.model import ModelConfig, UnitTransformer, build  # noqa: E402
from shardopt import unit  # noqa: E402

LAYERS, HEAD_DIM, CONTEXT, BATCH = 2, 32, 64, 8
OPTIONS = ("--backend", "single", "--device", "cpu", "--layers", LAYERS, "--context", CONTEXT, "--batch", BATCH)
OPTIONS += ("--warmup", 20, "--clip", 0, "--weight-decay", 0, "--eval-windows", 64, "--eval-interval", 0)
OPTIONS += ("--checkpoint-interval", 0, "--optimizer", "adamw", "--betas", 0.9, 0.99, "--codec", "log8")
data.load = functools.cache(data.load)  # of all runs

#: Learning rates by parametrization.
RATES = {"sp": [2.0**-n for n in range(9, 4, -1)], "u-mup": [2.0**n for n in range(-2, 3)]}
FORMATS: dict[str, tuple[Any, ...]] = {
    "fp32": (),
    "fp16": ("--precision", "fp16", "--master-weight-bits", 24),
    "fp8": ("--precision", "fp8"),
}
#: In headings, and in names of files, by parametrization; and in headings by what the loss is divided by.
TITLES = {"sp": "standard", "u-mup": "u-muP"}
FILES = {"sp": "standard", "u-mup": "umup"}
PARTS = {1: "", 256: ", 1 of 256"}


def heldout_loss(parametrization: str, width: int, lr: float, steps: int, *options: Any, parts: int = 1) -> float:
    """Held-out loss at the end of a run, in nats per byte.

    Args:
        parametrization: "sp" or "u-mup".
        width: of the model.
        lr: the peak learning rate.
        steps: of the run.
        options: further ones of the job.
        parts: divides the loss before the backward pass.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        given = ("--parametrization", parametrization, "--dim", width, "--heads", width // HEAD_DIM, "--lr", lr)
        given += ("--steps", steps, "--log-interval", steps, "--output", folder)
        with contextlib.redirect_stderr(io.StringIO()):
            trainer = training.Trainer(plan.prepare(config.load([str(o) for o in (*OPTIONS, *given, *options)])))
            backward = trainer.learner.backward
            trainer.learner.backward = lambda loss: backward(loss / parts)  # type: ignore[method-assign]
            split(trainer.learner.module, parts)
            loss: float = trainer.run()["heldout_loss"]
    return loss


def split(network: torch.nn.Module, parts: int) -> None:
    """Tells a model in u-muP that its loss will be divided."""
    if isinstance(network, UnitTransformer):
        unit.set_split(network, 1, parts)
        network.accumulation = parts


def zeros(parametrization: str, width: int, parts: int) -> list[float]:
    """Share of zeros among the gradients of each matrix at initialisation, in FP16."""
    model_config = ModelConfig(width, LAYERS, width // HEAD_DIM, parametrization=parametrization)
    network = build(model_config, CONTEXT, 0, torch.float16)
    split(network, parts)
    corpus = data.load(None, 0.05)
    windows = data.windows(corpus.train, data.train_offsets(corpus, CONTEXT, BATCH, 0, 1), CONTEXT)
    loss = F.cross_entropy(network(windows[0]).float().flatten(0, 1), windows[1].flatten())
    (loss / parts).backward()
    matrices = [p for n, p in network.named_parameters() if p.ndim > 1 and n != "embedding.weight"]
    return [(p.grad == 0).double().mean().item() for p in matrices]


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    args = parser.parse_args()
    run = f"In nats per byte after {args.steps} steps of {BATCH} x {CONTEXT} bytes, one seed; {LAYERS} layers, AdamW "
    notes = [f"{run}with log8 state."]
    first = args.widths[0]
    best: dict[str, float] = {}
    for name, rates in RATES.items():
        found = {(width, lr): heldout_loss(name, width, lr, args.steps) for width in args.widths for lr in rates}
        best[name] = min(rates, key=lambda lr, found=found: found[first, lr])  # type: ignore[misc]
        rows: list[list[Cell]] = [[f"width {width}", *(found[width, lr] for lr in rates)] for width in args.widths]
        columns = [Column(""), *(Column(f"{lr:.3g}", digits=3) for lr in rates)]
        title = f"Held-out loss by learning rate: {TITLES[name]}"
        results.report(args.json, f"unit_scaling_{FILES[name]}", title, columns, rows, threads=1, notes=notes)
    shown = ", ".join(f"{TITLES[name]} {lr:.3g}" for name, lr in best.items())
    shares = {(name, parts): zeros(name, first, parts) for name in best for parts in PARTS}
    of_zeros = "; ".join(
        f"{TITLES[name]}{PARTS[parts]} {sum(found) / len(found):.2%}, {max(found):.2%}"
        for (name, parts), found in shares.items()
    )
    notes = [
        f"{run}with log8 state, width {first}, learning rates {shown}. FP16 stores parameters with 24-bit masters and "
        "has no loss scale; FP8 is emulated by casts. '1 of 256': the loss is divided by 256.",
        f"Zeros among FP16's weight gradients at initialisation, mean and worst matrix: {of_zeros}.",
    ]
    columns = [Column(""), *(Column(f"{TITLES[name]}{PARTS[parts]}", digits=3) for name in best for parts in PARTS)]

    def of_formats() -> Iterator[list[Cell]]:
        for label, options in FORMATS.items():
            runs = product(best.items(), PARTS)
            yield [label, *(heldout_loss(name, first, lr, args.steps, *options, parts=n) for (name, lr), n in runs)]

    title = "Unit scaling: number formats"
    results.report(args.json, "unit_scaling_formats", title, columns, of_formats(), threads=1, notes=notes)


if __name__ == "__main__":
    main()
