"""Trains the job's model in the standard parametrization and in u-muP, with 8-bit state, in float32, FP16 and FP8.

    OMP_NUM_THREADS=1 python benchmarks/unit_scaling_training.py [--steps N] [--widths 64 128 256] [--plot FILE]

Three tables: held-out losses by learning rate and width; those by number format at the best learning rate of the first
width; and shares of weight gradients that are zero in FP16 at initialisation. FP16 has no loss scale and 24-bit master
weights, FP8 no scales. "1 of 256" divides the loss by 256, as if the batch had 256 times as many tokens. It takes
five minutes on one core. The text is that of ``launch/train.py``: the source of Python's standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "launch")]

from lm import config, data, networks, plan, training  # noqa: E402
from lm.model import ModelConfig  # noqa: E402
from lm.unit_model import UnitTransformer  # noqa: E402
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
    network = networks.build(model_config, CONTEXT, 0, torch.float16)
    split(network, parts)
    corpus = data.load(None, 0.05)
    windows = data.windows(corpus.train, data.train_offsets(corpus, CONTEXT, BATCH, 0, 1), CONTEXT)
    loss = F.cross_entropy(network(windows[0]).float().flatten(0, 1), windows[1].flatten())
    (loss / parts).backward()
    matrices = [p for n, p in network.named_parameters() if p.ndim > 1 and n != "embedding.weight"]
    return [(p.grad == 0).double().mean().item() for p in matrices]


def sweep(widths: list[int], steps: int) -> dict[str, dict[int, dict[float, float]]]:
    """Prints and returns held-out losses by parametrization, width and learning rate."""
    losses: dict[str, dict[int, dict[float, float]]] = {}
    for parametrization, rates in RATES.items():
        print(f"\n| {parametrization} | " + " | ".join(f"{lr:g}" for lr in rates) + " | best |")
        print("| --- " * (len(rates) + 2) + "|")
        losses[parametrization] = {}
        for width in widths:
            found = {lr: heldout_loss(parametrization, width, lr, steps) for lr in rates}
            losses[parametrization][width] = found
            cells = [f"{loss:.3f}" for loss in found.values()] + [f"{min(found, key=found.__getitem__):g}"]
            print(f"| width {width} | " + " | ".join(cells) + " |", flush=True)
    return losses


def plot(losses: dict[str, dict[int, dict[float, float]]], path: str) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(losses), figsize=(9, 4), sharey=True)
    for axis, (parametrization, by_width) in zip(axes, losses.items(), strict=True):
        for width, found in by_width.items():
            axis.plot(list(found), list(found.values()), "o-", label=f"width {width}")
        axis.set(xscale="log", xlabel="learning rate", title=parametrization)
        axis.legend()
    axes[0].set_ylabel("held-out loss [nats per byte]")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--plot", help="PNG of the first table")
    arguments = parser.parse_args()
    widths, steps = arguments.widths, arguments.steps
    print(
        f"{steps} steps of {BATCH} x {CONTEXT} bytes, {LAYERS} layers, AdamW with log8 state, torch {torch.__version__}"
    )
    losses = sweep(widths, steps)
    if arguments.plot:
        plot(losses, arguments.plot)
    width = widths[0]
    best = {name: min(by_width[width], key=by_width[width].__getitem__) for name, by_width in losses.items()}
    shown = ", ".join(f"{name} {lr:g}" for name, lr in best.items())
    print(f"\n| width {width}, lr {shown} | " + " | ".join(f"{name} | 1 of 256" for name in best) + " |")
    print("| --- " * (2 * len(best) + 1) + "|")
    for label, options in FORMATS.items():
        cells = [
            f"{heldout_loss(name, width, lr, steps, *options, parts=parts):.3f}"
            for name, lr in best.items()
            for parts in (1, 256)
        ]
        print(f"| {label} | " + " | ".join(cells) + " |", flush=True)
    shares = [zeros(name, width, parts) for name in best for parts in (1, 256)]
    cells = [f"{100 * sum(found) / len(found):.2f}%, {100 * max(found):.2f}%" for found in shares]
    print("| zeros in FP16 at initialisation: mean, worst matrix | " + " | ".join(cells) + " |")
    print(f"\n{time.process_time():.0f} s of processor time")


if __name__ == "__main__":
    main()
