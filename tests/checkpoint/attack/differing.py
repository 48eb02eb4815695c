"""Ranks that differ: in an option, the parameters' order or a gradient, from some step on.

All ranks must refuse by name within a limit of time, or each must end with the bits of a run in which all ranks do as
it does.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from attack.forked import Outcome, fault, ok, shown
from helpers import CASES
from ranks.models import WAYS, make_net, set_gradients
from ranks.runs import SMALL
from shardopt.layout import shard_of

STEPS = 4

_WAYS = ("fsdp", "fsdp columns", "tp", "fsdp1", "fsdp1 flat", "fsdp1 nested", "ddp")
_RULES = ("adamw", "adamw", "lion", "cautious_adamw", "lamb", "muon")
_DIFFERENCES: tuple[tuple[str, Any], ...] = (
    ("codec", "companded8"),
    ("codec", "fp32"),
    ("block_size", 32),
    ("min_quantized_numel", 5000),
    ("min_quantized_numel", 10**9),
    ("order", None),
    ("gradient", None),
    ("gradient", None),
    ("lr", 0.5),
    ("weight_decay", 0.3),
    ("maximize", True),
)


class Attack(NamedTuple):
    """How many ranks, and what is different on one of them."""

    world_size: int
    way: str
    rule: str
    rank: int
    first: int
    option: str
    value: Any
    which: int

    @classmethod
    def of(cls, seed: int, number: int) -> Attack:
        dice = random.Random(f"{seed} {number}")
        size = dice.choice((2, 3, 4))
        option, value = dice.choice(_DIFFERENCES)
        first = 0 if option == "order" else dice.choice((0, 0, 1, 3))
        way, rule = dice.choice(_WAYS), dice.choice(_RULES)
        return cls(size, way, rule, dice.randrange(size), first, option, value, dice.randrange(100))


def judged(told: list[tuple[str, str]]) -> Outcome:
    """The outcome of what the ranks say."""
    kinds = {kind for kind, _ in told}
    if kinds == {"refused"}:
        nameless = [text for _, text in told if " rank" not in text and "expected" not in text]
        return fault("refused without a name", shown(nameless[0])) if nameless else ok("refused", shown(told[0][1]))
    wrong = [text for kind, text in told if kind == "wrong bits"]
    return fault("wrong bits", wrong[0]) if wrong else ok(" and ".join(sorted(kinds)))


def on_rank(attack: Attack) -> tuple[str, str]:
    found = _run(attack, {attack.rank})
    everyone: list[Any] = [None] * attack.world_size
    dist.all_gather_object(everyone, isinstance(found, str))
    if all(everyone):
        return "refused", str(found)
    if attack.option in ("lr", "weight_decay", "maximize") and attack.rule in ("lamb", "muon"):
        return "as told", ""  # sums and directions are of what all ranks have
    same = _run(attack, set(range(attack.world_size)) if dist.get_rank() == attack.rank else set())
    return ("refused alone", found) if isinstance(found, str) else _compared(found, same)


def _compared(found: list[Tensor], expected: list[Tensor] | str) -> tuple[str, str]:
    if isinstance(expected, str):
        return "wrong bits", f"got a step, expected {expected}"
    differing = [index for index, (x, y) in enumerate(zip(found, expected, strict=True)) if not torch.equal(x, y)]
    return ("wrong bits", f"in parameters {differing}") if differing else ("right bits", "")


def _run(attack: Attack, differing: set[int]) -> list[Tensor] | str:
    """This rank's parts of the parameters after a run, or the error of a step."""
    model = WAYS[attack.way](make_net())
    differs = dist.get_rank() in differing
    params = list(model.parameters())
    if attack.rule == "muon":
        params = [p for p in params if len(shard_of(p).global_shape) > 1] or params
    if differs and attack.option == "order":
        params.reverse()
    case = CASES[attack.rule]
    is_option = attack.option not in ("order", "gradient")
    options = {attack.option: attack.value} if differs and is_option and attack.first == 0 else {}
    try:
        optimizer = case.make(params, **{**SMALL, **options})
        for step in range(STEPS):
            set_gradients(model, step)
            if differs and step >= attack.first:
                if attack.option == "gradient":
                    given = [p for p in params if p.grad is not None]
                    given[attack.which % len(given)].grad = None
                elif is_option:
                    for group in optimizer.param_groups:
                        group[attack.option] = attack.value
            optimizer.step()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return [shard_of(p).local(p.detach()).clone() for p in model.parameters()]
