"""Ranks that differ where they step parts of the same parameters: all of them refuse, by name, and none hangs.

Gradients may be zero on some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import shardopt
from helpers import limited
from ranks.models import WAYS, make_net, set_gradients
from ranks.runs import SMALL, trained
from shardopt.layout import shard_of
from shardopt.optim import ShardedOptimizer
from slow_cases import slow

_RULES: dict[str, Callable[..., ShardedOptimizer]] = {
    "adamw": shardopt.AdamW8bit,
    "raising": lambda params, **options: shardopt.AdamW8bit(params, nonfinite="raise", **options),
    "cautious": lambda params, **options: shardopt.AdamW8bit(params, cautious=True, **options),
    "lamb": shardopt.LAMB8bit,
    "prodigy": shardopt.Prodigy8bit,
    "muon": lambda params, **options: limited(  # in several waves
        shardopt.Muon8bit([{"params": params, "algorithm": "muon", "weight_decay": 0.0}], **options), 20_000
    ),
}


class _Differs:
    """An optimizer of a model; rank 1's differs from a step on."""

    def __init__(self, way: str, rule: str, option: str, value: Any, first: int) -> None:
        self.model, self.first = WAYS[way](make_net()), first
        self.option, self.value = option, value
        params = [p for p in self.model.parameters() if len(shard_of(p).global_shape) > 1 or rule != "muon"]
        if self.differs(0) and option == "order":
            params = params[::-1]
        options = {option: value} if self.differs(0) and option in shardopt.state.options.DEFAULTS else {}
        self.optimizer = _RULES[rule](params, **{**SMALL, **options})
        self.optimizer.attach(self.model)  # ranks of DDP share the work

    def differs(self, step: int) -> bool:
        return dist.get_rank() == 1 and step >= self.first

    def step(self, step: int) -> None:
        set_gradients(self.model, step)
        if self.differs(step) and self.option == "gradient":
            held = [p for p in self.optimizer.param_groups[0]["params"] if p.grad is not None and p.grad.numel()]
            held[0].grad = None  # of the embedding, or of another parameter in several flat shards
        elif self.differs(step) and self.option in self.optimizer.param_groups[0]:
            self.optimizer.param_groups[0][self.option] = self.value
        self.optimizer.step()


_OPTIONS = [
    ("codec", "companded8"),
    ("codec", "fp32"),
    ("block_size", 64),
    ("min_quantized_numel", 10**9),
    ("order", None),
    ("gradient", None),
]


_WAYS = [
    ("fsdp1", "adamw"),
    ("fsdp1 flat", "adamw"),
    ("tp", "adamw"),
    ("tp", "raising"),
    ("fsdp columns", "adamw"),
    ("fsdp1", "lamb"),
    ("fsdp", "lamb"),
    ("fsdp", "cautious"),
    ("tp", "prodigy"),
    ("fsdp", "muon"),
    ("fsdp1", "muon"),
    ("ddp", "muon"),
]
#: An optimizer's order is that of its first step.
_ALL = [(*way, *option, first) for way in _WAYS for option in _OPTIONS for first in (0, 2)]
_ALL = [case for case in _ALL if case[2] != "order" or case[4] == 0]


@pytest.mark.parametrize(("way", "rule", "option", "value", "first"), [*_ALL[::6], *slow(_ALL, besides=_ALL[::6])])
@pytest.mark.ranks(3, timeout=30)
def test_all_refuse(way: str, rule: str, option: str, value: Any, first: int) -> None:
    """Of 11 cases of each way every sixth, so that ways that follow each other meet others of them."""
    run = _Differs(way, rule, option, value, first)
    for step in range(first):
        run.step(step)
    named = {"gradient": "a gradient of", "order": " of "}.get(option, f"{option} of")
    with pytest.raises(RuntimeError, match=f"{named}.*on rank 0 and.*on rank 1, expected the same"):
        run.step(first)
    dist.barrier()  # no message is left over


@pytest.mark.ranks(2, timeout=30)
@pytest.mark.parametrize(("way", "rule"), [("tp", "raising"), ("fsdp columns", "adamw")])
def test_new_tables_on_one_rank(way: str, rule: str) -> None:
    """One rank makes its tables anew in a step in which messages become shorter."""
    run = _Differs(way, rule, "", None, 9)
    for step in range(4):
        if step == 2 and dist.get_rank() == 1:
            run.optimizer._internals.invalidate_steps()
        set_gradients(run.model, step)
        if step == 2:
            next(run.model.parameters()).grad = None
        run.optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["fsdp columns", "fsdp1 flat", "zero"])
def test_a_first_step_of_a_warm_up_counts_where_gradients_are_zero(way: str) -> None:
    """Of shards whose rows no token has met, or of a rank's parameters under ZeRO."""
    model, optimizer = trained(way, 0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    set_gradients(model, 0)
    inner = getattr(optimizer, "optim", optimizer)
    for param in (param for group in inner.param_groups for param in group["params"]) if dist.get_rank() != 1 else ():
        if param.grad is not None:
            getattr(param.grad, "_local_tensor", param.grad).zero_()
    optimizer.step()
    assert {float(entries["step"]) for entries in inner.state.values() if entries} == {1.0}
