"""How far 8-bit optimizers drift from float32 ones when both run freely on the same gradients.

    python benchmarks/free_running.py [--rule NAME ... | all] [--codec NAME ...] [--elements N] [--scenario NAME ...]
        [--json]

For each rule, codec and scenario two figures after 200 steps:

    mean    mean |difference| / mean |movement|
    worst   largest |difference| / largest single update that float32 made

Float32 is torch.optim's optimizer where torch has the rule, else shardopt's with ``codec="fp32"``. Gradients are drawn
per step, the same for all codecs; nothing is fed back. ``eps`` is the default (AdamW: 1e-8) times the gradients' scale,
so that it weighs the same at every scale; there is no weight decay, which would only add movement.

With bitsandbytes installed (``pip install bitsandbytes``), rules that it has get two rows more: its 8-bit optimizer,
and its float32 one, which shows that the rule is the same. bitsandbytes' LAMB and LARS are other rules, so its 8-bit
classes are compared with its float32 classes, without the limit ``max_unorm`` that only the latter apply. bitsandbytes
quantizes tensors of 4,096 elements or more, in blocks of 256 of the flattened tensor.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import results
import shardopt
from optimizers import CASES, torch_class
from results import Cell, Column

COLS = 512
STEPS = 200
#: Name in the table: options.
CODECS: dict[str, dict[str, Any]] = {
    "log8": {"codec": "log8"},
    "log8, repaid": {"codec": "log8", "repay": True},
    "log4": {"codec": "log4"},
    "log4, not repaid": {"codec": "log4", "repay": False},
    "companded8": {"codec": "companded8"},
    "companded8, 32": {"codec": "companded8", "block_size": 32},
    "dynamic8, 256": {"codec": "dynamic8", "block_size": 256},
    "bf16": {"codec": "bf16"},
    "fp32": {"codec": "fp32"},
}
#: Codecs that only some rules have, and these rules.
FOR_ADAM, ADAM = ("log8, repaid", "log4", "log4, not repaid"), ("AdamW", "Adam")
#: Without weight decay, a cautious one is none.
RULES = {case: rule for case, rule in CASES.items() if case != "AdamW cautious decay"}
#: Standard deviation of the first weights where updates are in proportion to a parameter's norm; 0 for other rules.
FIRST_WEIGHTS = {"LAMB": 0.02, "LARS": 0.02}


class Peer(NamedTuple):
    """Classes of bitsandbytes for a rule, and what they take beside the parameters."""

    eight_bit: str
    exact: str
    options: dict[str, Any]
    is_other_rule: bool = False


_MOMENTUM = {"lr": 1e-3, "momentum": 0.9}
#: By rule. AdEMAMix32bit keeps no slow average (bitsandbytes issue 2075), AdEMAMix with its default of 32 bits does.
PEERS = {
    "AdamW": Peer("AdamW8bit", "AdamW32bit", {}),
    "AdEMAMix": Peer("AdEMAMix8bit", "AdEMAMix", {}),
    "Adagrad": Peer("Adagrad8bit", "Adagrad32bit", {}),
    "RMSprop": Peer("RMSprop8bit", "RMSprop32bit", {}),
    "SGD momentum": Peer("SGD8bit", "SGD32bit", _MOMENTUM),
    "Lion": Peer("Lion8bit", "Lion32bit", {}),
    "LAMB": Peer("LAMB8bit", "LAMB32bit", {}, is_other_rule=True),
    "LARS": Peer("LARS8bit", "LARS32bit", _MOMENTUM, is_other_rule=True),
}
HAS_PEER = importlib.util.find_spec("bitsandbytes") is not None

Gradients = Callable[[int], Tensor]


class Drift(NamedTuple):
    """How far a codec is from float32 in the end; see the module's text."""

    mean: float
    worst: float


class Scenario(NamedTuple):
    """A stream of gradients, and the drift that log8 may have on it."""

    make: Callable[[int, Generator], Gradients]  # of rows and a source of random numbers
    limit: Drift
    scale: float = 1.0


def iid(rows: int, generator: Generator) -> Gradients:
    """Every element standard normal."""
    return lambda t: torch.randn(rows, COLS, generator=generator)


def log_normal(rows: int, generator: Generator) -> Gradients:
    """Every coordinate at a scale of its own, log-normal with s = 2."""
    scale = torch.exp(2 * torch.randn(rows, COLS, generator=generator))
    return lambda t: scale * torch.randn(rows, COLS, generator=generator)


def half_sparse(rows: int, generator: Generator) -> Gradients:
    """Half of the coordinates, chosen at random, have a gradient in 5% of the steps only."""
    sparse = torch.rand(rows, COLS, generator=generator) < 0.5

    def gradients(t: int) -> Tensor:
        on = torch.rand(rows, COLS, generator=generator) < 0.05
        return torch.randn(rows, COLS, generator=generator) * (on | ~sparse)

    return gradients


def rare_rows(rows: int, generator: Generator) -> Gradients:
    """Every row, as of an embedding, has gradients in 5% of the steps only, and then in all its elements."""

    def gradients(t: int) -> Tensor:
        on = torch.rand(rows, 1, generator=generator) < 0.05
        return torch.randn(rows, COLS, generator=generator) * on

    return gradients


def spike(rows: int, generator: Generator) -> Gradients:
    """In one step, half-way, all gradients are 1e4 times as large."""
    return lambda t: torch.randn(rows, COLS, generator=generator) * (1e4 if t == STEPS // 2 else 1.0)


SCENARIOS: dict[str, Scenario] = {
    "iid": Scenario(iid, Drift(0.0125, 1.5)),
    "iid at 1e-7": Scenario(iid, Drift(0.0125, 1.5), scale=1e-7),
    "iid at 1e5": Scenario(iid, Drift(0.0125, 1.5), scale=1e5),
    "log-normal": Scenario(log_normal, Drift(0.08, 10)),
    "half sparse": Scenario(half_sparse, Drift(0.05, 5)),
    "rare rows": Scenario(rare_rows, Drift(0.015, 2)),
    "one step of 1e4": Scenario(spike, Drift(0.03, 5)),
}


class Run:
    """An optimizer and its parameter."""

    def __init__(self, make: Callable[..., Optimizer], start: Tensor, scale: float, **options: Any) -> None:
        self.param = Parameter(start.clone())
        self.largest_update = 0.0
        self._start = start
        self._optimizer = make([self.param], **options)
        (group,) = self._optimizer.param_groups
        group.update({"weight_decay": 0.0} if "weight_decay" in group else {})
        group.update({"eps": group["eps"] * scale} if "eps" in group else {})

    def step(self, gradient: Tensor) -> None:
        before = self.param.detach().clone()
        self.param.grad = gradient
        self._optimizer.step()
        self.largest_update = max(self.largest_update, float((self.param.detach() - before).abs().max()))

    def drift_from(self, exact: Run) -> Drift:
        difference = (self.param.detach() - exact.param.detach()).abs()
        movement = float((exact.param.detach() - exact._start).abs().mean())
        return Drift(float(difference.mean()) / movement, float(difference.max()) / exact.largest_update)


def measure(
    scenario: Scenario, elements: int = 65536, seed: int = 0, rule: str = "AdamW", codecs: Iterable[str] = CODECS
) -> dict[str, Drift]:
    """Runs a rule with codecs, and bitsandbytes' if it is installed, beside float32; the drift by row of the table."""
    rows = -(-elements // COLS)
    gradients = scenario.make(rows, Generator().manual_seed(seed))
    start = FIRST_WEIGHTS.get(rule, 0.0) * torch.randn(rows, COLS, generator=Generator().manual_seed(seed + 1))
    name, options = RULES[rule]
    codecs = [codec for codec in codecs if rule in ADAM or codec not in FOR_ADAM]
    ours, theirs = getattr(shardopt, name), torch_class(name, options)
    if theirs is None:
        exact = Run(ours, start, scenario.scale, codec="fp32", **options)
    else:
        exact = Run(theirs, start, scenario.scale, **options)
    runs = {
        codec: Run(ours, start, scenario.scale, min_quantized_numel=0, **options, **CODECS[codec]) for codec in codecs
    }
    yardsticks = dict.fromkeys(runs, exact)
    if HAS_PEER and rule in PEERS:
        import bitsandbytes

        peer = PEERS[rule]
        eight_bit, float32 = (getattr(bitsandbytes.optim, kind) for kind in (peer.eight_bit, peer.exact))
        runs[peer.eight_bit] = Run(eight_bit, start, scenario.scale, **peer.options)
        unlimited = {"max_unorm": 0.0} if peer.is_other_rule else {}
        runs[peer.exact] = Run(float32, start, scenario.scale, **peer.options, **unlimited)
        yardsticks[peer.eight_bit] = runs[peer.exact] if peer.is_other_rule else exact
        yardsticks[peer.exact] = exact
    for t in range(1, STEPS + 1):
        gradient = gradients(t) * scenario.scale
        for run in (exact, *runs.values()):
            run.step(gradient)
    return {row: run.drift_from(yardsticks[row]) for row, run in runs.items()}


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--rule", nargs="+", choices=[*RULES, "all"], default=["AdamW"])
    parser.add_argument("--codec", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--elements", type=int, default=262144, help="parameters (default: %(default)s)")
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    arguments = parser.parse_args()
    if HAS_PEER:
        peer = f"bitsandbytes {importlib.metadata.version('bitsandbytes')}"
    else:
        peer = "bitsandbytes is not installed, so its rows are left out"

    def rows() -> Iterator[list[Cell]]:
        for rule in RULES if "all" in arguments.rule else arguments.rule:
            drifts = [
                measure(SCENARIOS[name], arguments.elements, rule=rule, codecs=arguments.codec)
                for name in arguments.scenario
            ]
            for codec in drifts[0]:
                yield [f"{rule}, {codec}", *(x for of_codecs in drifts for x in of_codecs[codec])]

    columns = [Column("")]
    for name in arguments.scenario:
        columns += [Column(name, digits=4), Column(f"{name}, worst", digits=2)]
    notes = [
        f"{STEPS} steps, {arguments.elements:,} parameters, blocks of 128; {peer}. "
        "First the mean difference to float32."
    ]
    title = "Drift of free-running 8-bit optimizers"
    results.report(arguments.json, "free_running", title, columns, rows(), notes=notes)


if __name__ == "__main__":
    main()
