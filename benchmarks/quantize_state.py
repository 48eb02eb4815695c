"""Losses of an MLP under optimizers whose state quantize_state keeps in 8 bits, beside those of the bare optimizers.

    python benchmarks/quantize_state.py [name ...]

Prints the loss after 300 steps with state in float32, log8 and dynamic8, for each optimizer of tests/support/wrapped.py
whose package is installed (timm, pytorch-optimizer, schedulefree).
"""

from __future__ import annotations

import argparse
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import torch

import shardopt

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from wrapped import SEPARABLE, TOGETHER, final_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="optimizers, by their names in the table; default: all")
    names = parser.parse_args().names
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, MLP 64-128-128-64, 300 steps, block_size 128")
    print(f"{'optimizer':36} {'fp32':>8} {'log8':>8} {'dynamic8':>8}")
    for name, make in {**SEPARABLE, **TOGETHER}.items():
        if find_spec(name.split()[0]) is None or (names and name not in names):
            continue
        memory = None if name in TOGETHER else 0
        losses = [final_loss(lambda optimizer: optimizer, make)]
        for codec in ("log8", "dynamic8"):
            losses.append(
                final_loss(
                    lambda optimizer: shardopt.quantize_state(optimizer, codec=codec, working_memory=memory),  # noqa: B023
                    make,
                )
            )
        print(f"{name:36} " + " ".join(f"{loss:8.5f}" for loss in losses), flush=True)


if __name__ == "__main__":
    main()
