"""Losses of an MLP under optimizers whose state quantize_state keeps in 8 bits, beside those of the bare optimizers.

    python benchmarks/quantize_state.py [name ...]

Prints the loss after 300 steps with state in float32, log8 and dynamic8, for each optimizer of tests/support/wrapped.py
whose package is installed (timm, pytorch-optimizer, schedulefree).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

import results
import shardopt
from results import Cell, Column

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from wrapped import SEPARABLE, Make, network, train_mode

CODECS = ("log8", "dynamic8")


def final_loss(wrap: Callable[[Optimizer], Optimizer], make: Make, steps: int = 300) -> float:
    """The network's loss on a fixed task after training."""
    model = network()
    optimizer = wrap(make(list(model.parameters())))
    train_mode(optimizer)
    generator = torch.Generator().manual_seed(7)
    teacher: Tensor = torch.randn(64, 64, generator=generator) / 8
    torch.manual_seed(3)  # for optimizers that draw
    for step in range(steps + 1):
        x = torch.randn(256, 64, generator=generator if step < steps else torch.Generator().manual_seed(8))
        if step == steps and hasattr(optimizer, "eval"):
            optimizer.eval()
        loss = (model(x) - torch.tanh(x @ teacher)).square().mean()
        if step < steps:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return float(loss.detach())


def losses(names: list[str]) -> Iterator[list[Cell]]:
    """Of each optimizer whose package is installed, with its state as it is and by codec."""
    for name, make in SEPARABLE.items():
        if find_spec(name.split()[0]) is None or (names and name not in names):
            continue
        wraps = [partial(shardopt.quantize_state, codec=codec) for codec in CODECS]
        yield [name, final_loss(lambda optimizer: optimizer, make), *(final_loss(wrap, make) for wrap in wraps)]


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("names", nargs="*", help="optimizers, by their names in the table; default: all")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    columns = [Column("optimizer"), *(Column(codec, digits=5) for codec in ("fp32", *CODECS))]
    notes = ["Loss of an MLP 64-128-128-64 after 300 steps; blocks of 128."]
    title = "quantize_state: losses with state in 8 bits"
    results.report(args.json, "quantize_state", title, columns, losses(args.names), threads=1, notes=notes)


if __name__ == "__main__":
    main()
