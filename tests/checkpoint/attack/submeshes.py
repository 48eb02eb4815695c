"""Clips and steps parameters on meshes of some of the ranks; others leave them out, or hold empty DTensors.

Each rank compares the norm and its parts of the weights with one process that has everything.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import combinations
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import Parameter

import shardopt
from attack.forked import Outcome, fault, ok, shown
from helpers import CASES
from ranks.layouts import distribute, values
from ranks.runs import SMALL

STEPS = 4
FOUND = "a difference was found"
SHAPES = ((16, 128), (5, 200), (33, 66), (4, 6, 64), (7,))
RULES = ("adamw", "adamw", "lamb", "stable_adamw", "prodigy", "muon")


class Param(NamedTuple):
    """A parameter: its shape, the ranks of its mesh (none: plain, the same on all), and who else has it, empty."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    placement: Placement
    empty: frozenset[int]
    idle: frozenset[int]  # steps in which it has no gradient

    def is_on(self, rank: int) -> bool:
        return not self.ranks or rank in self.ranks or rank in self.empty


class Attack(NamedTuple):
    """Parameters to step, on how many ranks, how they are clipped, and which ranks change an option before a step."""

    world_size: int
    params: tuple[Param, ...]
    rule: str
    norm_type: float
    by_optimizer: bool
    changed_by: frozenset[int]
    changed_at: int

    def is_told(self, rank: int) -> bool:
        """Whether a rank shares a parameter of which parts are exchanged in each step with one that alone changes."""
        sharded = (p.ranks for p in self.params if isinstance(p.placement, Shard) and len(p.ranks) > 1)
        return self.rule != "adamw" and any(self.changed_by | {rank} <= set(ranks) for ranks in sharded)

    @classmethod
    def of(cls, seed: int, number: int) -> Attack:
        dice = Random(f"submeshes {seed} {number}")
        size = dice.choice((2, 3, 4, 4))
        world = tuple(range(size))
        rule = dice.choice(RULES)
        is_dense = dice.random() < 0.7  # others than the holders leave a parameter out, or have it without elements
        params = [Param((10, 128), world, Shard(dice.randrange(2)), frozenset(), frozenset())] if is_dense else []
        for _ in range(dice.randint(1, 4)):
            shape = dice.choice(SHAPES[:2] if rule == "muon" else SHAPES)
            ranks = tuple(sorted(dice.sample(world, dice.randint(1, size))))
            placement = dice.choice((Shard(0), Shard(0), Shard(min(1, len(shape) - 1)), Replicate()))
            empty = frozenset(rank for rank in world if rank not in ranks and (not is_dense or dice.random() < 0.5))
            idle = frozenset(step for step in range(1, STEPS) if dice.random() < 0.3)
            params.append(Param(shape, ranks, placement, empty, idle))
        if not is_dense or (rule != "muon" and dice.random() < 0.6):  # through which a rank without parts gets the norm
            params.append(Param(SHAPES[0] if rule == "muon" else (7,), (), Replicate(), frozenset(), frozenset()))
        norm_type, by_optimizer = dice.choice((2.0, math.inf)), dice.random() < 0.5
        by_all = dice.random() < 0.6
        changed_by = frozenset(world) if by_all else frozenset({dice.randrange(size)})
        changed_at = dice.randrange(1, STEPS) if by_all else STEPS - 1  # ranks that raise take no further step
        return cls(size, tuple(params), rule, norm_type, by_optimizer, changed_by, changed_at)


def judged(told: list[str]) -> Outcome:
    """The outcome of what the ranks say."""
    wrong = {text for text in told if text and text != FOUND}
    if FOUND in told and not wrong:
        return ok(FOUND)
    if all("expected" in text or text == FOUND for text in told):  # ranks that read a note hear only of an error
        return ok("refused", shown(told[0]))
    return fault("wrong", shown(sorted(wrong))) if wrong else ok("right bits")


def on_rank(attack: Attack) -> str:
    """Says what is wrong on this rank first; goes on, as other ranks may be right and wait for this one."""
    wrong: list[str] = []
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    whole = [Parameter(values(p.shape, i)) for i, p in enumerate(attack.params)]
    mine = {
        i: Parameter(_part(attack, i, whole[i].detach().clone(), world))
        for i, p in enumerate(attack.params)
        if p.is_on(rank)
    }
    make = CASES[attack.rule].make
    try:
        optimizer, single = make(list(mine.values()), **SMALL), make(whole, **SMALL)
        for step in range(STEPS):
            for i, p in enumerate(attack.params):
                gradient = None if step in p.idle else values(p.shape, 100 * step + i + 50)
                whole[i].grad = gradient
                if i in mine:
                    mine[i].grad = None if gradient is None else _part(attack, i, gradient.clone(), world)
            norms = [
                shardopt.clip_grad_norm_(
                    params, 1.0, attack.norm_type, optimizer=stepped if attack.by_optimizer else None
                )
                for params, stepped in ((list(mine.values()), optimizer), (whole, single))
            ]
            if not torch.equal(*norms):
                wrong.append(f"rank {rank}, step {step}: got the norm {float(norms[0])}, not {float(norms[1])}")
            if step == attack.changed_at and rank in attack.changed_by:
                for stepped in (optimizer, single):
                    stepped.param_groups[0]["stochastic_rounding_seed"] = 7
            optimizer.step()
            single.step()
            for i, param in mine.items():
                if not torch.equal(_local(param), _local(_part(attack, i, whole[i].detach(), world))):
                    wrong.append(f"rank {rank}, step {step}: other weights in parameter {i}")
        if len(attack.changed_by) < attack.world_size and attack.is_told(rank):
            wrong.append(f"rank {rank}: heard of no difference")
    except (RuntimeError, ValueError) as error:
        heard = "got ranks that differ in", "see the error of those ranks"
        if any(text in str(error) for text in heard) and len(attack.changed_by) < attack.world_size:
            return wrong[0] if wrong else FOUND
        wrong.append(f"rank {rank}: {type(error).__name__}: {error}")
    return wrong[0] if wrong else ""


def _part(attack: Attack, index: int, whole: Tensor, world: dist.ProcessGroup) -> Tensor:
    param = attack.params[index]
    if not param.ranks:
        return whole.clone()
    return distribute(whole, _meshes(attack.world_size, world)[param.ranks], [param.placement])


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


@lru_cache(maxsize=4)
def _meshes(world_size: int, world: dist.ProcessGroup) -> dict[tuple[int, ...], Any]:
    """A mesh of each set of ranks: all ranks make all of them."""
    sets = [ranks for count in range(1, world_size + 1) for ranks in combinations(range(world_size), count)]
    return {ranks: DeviceMesh("cpu", list(ranks)) for ranks in sets}
