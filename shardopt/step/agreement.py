"""Comparison of plans among ranks that exchange data in a step: they raise together if plans differ.

Each rank describes the parameters for which a step exchanges data with other ranks, or would with other options: flat
shards, column shards, rules with sums, Muon. AdamW under FSDP2 exchanges nothing, and needs no check. Before the first
step, each set of ranks compares a digest of its descriptions. Every step begins with a consistency check of each set:
an all-reduce of some integers, by which a rank says whether its description is unchanged, and which parameters have a
gradient. If a description changed, say by an option, the set's ranks compare digests again. Ranks that belong to
several sets then tell all of them whether they found a difference, so that no rank waits for a rank that has raised.

A set that exchanges no data has no check in steps of a single parameter, nor on a GPU. On a GPU, where the host has to
wait for a result, a rank reads the result of the all-reduce only if its own answers have changed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Container, Mapping, Sequence
from copy import copy
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt.kernels.dispatch_cuda import use_in_current_stream
from shardopt.layout import RankGroup, all_reduce_any

_DIGEST_BYTES = 16
_GRADIENT = "a gradient"  # key in a description: whether the parameter has a gradient
_HELD_ELSEWHERE = "parameters of which this rank holds no part"
_READ_HERE_ONLY = "options or gradients (ranks on GPUs that changed nothing do not read this, and will time out)"
#: Indices of the first three answers in a check; answers about gradients follow.
_AS_AGREED, _CHANGED, _SEVERAL = range(3)

#: A rank's answers in a check: int32, 1-D. 1 for yes, and 0 for no or nothing to say. First the three answers above,
#: then per parameter whether it has a gradient, and per parameter whether it has none.
Answers = npt.NDArray[np.int32]


class PlanEntry(NamedTuple):
    """A parameter, or a slice of a flat one, whose data a set of ranks exchanges; they compare digests of all entries.

    Attributes:
        parameter: the parameter's index in the step.
        device: the parameter's device.
        name: the parameter's name in errors, which may differ on other ranks.
        properties: the properties that must be equal on all ranks, by their names in errors.
        sizes_messages: whether the sizes of exchanged messages depend on whether the parameter has a gradient.
        may_have_gradient: whether this rank can have a gradient, which it cannot if it has no elements.
        needs_all_gradients: whether a gradient must exist on all ranks of the set, where it may, or on none of them.
    """

    parameter: int
    device: torch.device
    name: str
    properties: dict[str, Any]
    sizes_messages: bool
    may_have_gradient: bool
    needs_all_gradients: bool


class _Outcome(Enum):
    """The result of the check of a set of ranks, on this rank."""

    equal = auto()
    equal_and_linked = auto()  # a rank of the set belongs to another set, too
    differs = auto()  # as all ranks of the set have learnt
    differs_here_only = auto()  # on a GPU, where a rank that changed nothing does not read what was found


class StepPlan:
    """This rank's descriptions of the parameters whose data a step exchanges, and their comparison with other ranks'.

    Args:
        sets: for each set of ranks, its entries, in an order that is equal on all ranks of the set.
        with_gradient: the indices of the parameters that have a gradient on this rank.
        is_single: whether the step is of one parameter; see :func:`shardopt.step.plan.plan_of`.
    """

    def __init__(
        self, sets: Mapping[RankGroup, list[PlanEntry]], with_gradient: Container[int], *, is_single: bool
    ) -> None:
        self.is_single = is_single
        self.sets = {ranks: sets[ranks] for ranks in sorted(sets, key=order_of)}
        self._devices = {  # of the all-reduces: a GPU if a parameter is on it, else the CPU
            ranks: next((entry.device for entry in entries if entry.device.type != "cpu"), torch.device("cpu"))
            for ranks, entries in self.sets.items()
        }
        self._on_gpus: dict[RankGroup, tuple[Answers, Tensor]] = {}  # the last answers, here and on the GPU
        self._digests: dict[RankGroup, bytes] = {}
        self._set_gradients(with_gradient)

    def with_gradients(self, with_gradient: Container[int]) -> StepPlan:
        """The plan of a step in which these parameters, by their indices, have a gradient on this rank."""
        plan = copy(self)
        plan._set_gradients(with_gradient)
        return plan

    def _set_gradients(self, with_gradient: Container[int]) -> None:
        """Computes this rank's digests, if they depend on gradients, and its answers."""
        self._with_gradient = with_gradient
        if not self._digests or any(entry.sizes_messages for entries in self.sets.values() for entry in entries):
            self._digests = {ranks: self._digest(entries) for ranks, entries in self.sets.items()}
        # For each set that has a check, this rank's answers if nothing changed; in one order on all ranks.
        self._checks = {ranks: self._answers(ranks) for ranks in self.sets if self._is_checked(ranks)}

    def _is_checked(self, ranks: RankGroup) -> bool:
        """Whether a step checks a set: always in a full step on the CPU, otherwise only if the set exchanges data."""
        if not self.is_single and self._devices[ranks].type == "cpu":
            return True
        return any(
            entry.needs_all_gradients or (entry.sizes_messages and entry.parameter in self._with_gradient)
            for entry in self.sets[ranks]
        )

    def _answers(self, ranks: RankGroup) -> Answers:
        """This rank's answers to a set of ranks if its description did not change."""
        may_have = {each.parameter: each.may_have_gradient for each in self.sets[ranks] if each.needs_all_gradients}
        has = [may and index in self._with_gradient for index, may in may_have.items()]
        lacks = [may and index not in self._with_gradient for index, may in may_have.items()]
        return np.array([True, False, len(self.sets) > 1, *has, *lacks], np.int32)

    def _digest(self, entries: Sequence[PlanEntry]) -> bytes:
        """The digest of entries, with whether parameters have a gradient where the sizes of messages depend on it."""
        described = [self._described(entry) if entry.sizes_messages else entry.properties for entry in entries]
        return digest_of(json.dumps(described))

    def _described(self, entry: PlanEntry) -> dict[str, Any]:
        """An entry's properties, and whether the parameter has a gradient, if it may."""
        if not entry.may_have_gradient:
            return entry.properties
        return {**entry.properties, _GRADIENT: entry.parameter in self._with_gradient}

    def agree(self, agreed: StepPlan | None) -> StepPlan:
        """Runs the consistency checks of all sets of ranks, compares changed descriptions, and returns this plan.

        Called once per step, with the last plan that the ranks agreed on, or None in the first step. Collective.

        Raises:
            RuntimeError: the descriptions differ, or only some ranks have a gradient of a parameter. Nothing was
                changed.
        """
        if agreed is not None:
            self._on_gpus = agreed._on_gpus
        last = {} if agreed is None else agreed._digests
        sets = list(self.sets)
        if last.keys() != self._digests.keys():  # also sets that this rank has left, as their other ranks check
            sets = sorted(dict.fromkeys([*sets, *last]), key=order_of)
        outcomes: dict[RankGroup, _Outcome] = {}
        for ranks in sets:
            has_changed = last.get(ranks) != self._digests.get(ranks)
            if has_changed or ranks in self._checks:
                outcomes[ranks] = self._check_set(ranks, agreed, has_changed=has_changed)
        linked = [ranks for ranks, outcome in outcomes.items() if outcome is _Outcome.equal_and_linked]
        differing = [ranks for ranks, outcome in outcomes.items() if outcome is _Outcome.differs]
        is_read_here_only = _Outcome.differs_here_only in outcomes.values()
        if all_reduce_any(linked, bool(differing) or is_read_here_only):
            self._on_gpus.clear()  # the next check is read, too
            # Of all sets that differ, although the error names one difference: the sets' other ranks wait.
            found = [self._first_difference(ranks) for ranks in differing]
            found.append(_READ_HERE_ONLY if is_read_here_only else _HELD_ELSEWHERE)
            raise RuntimeError(
                f"got ranks that differ in {next(filter(None, found))}, expected the same on all ranks that step "
                "parts of the same parameters; give their optimizers the same parameters, in the same order and with "
                "the same options, and gradients to all of them or to none; this step changed nothing on this rank"
            )
        return self

    def _check_set(self, ranks: RankGroup, agreed: StepPlan | None, *, has_changed: bool) -> _Outcome:
        """Runs the check of a set of ranks and, in the first step and after a change, compares digests. Collective.

        ``has_changed`` says whether this rank's description for the set differs from the one in ``agreed``.
        """
        plan = self if agreed is None or ranks in self.sets else agreed  # the latter: a set that this rank has left
        device, answers = plan._devices[ranks], self._checks.get(ranks)
        if has_changed:  # say only "changed", in a message of the last agreed length, which other ranks expect
            answers = None if agreed is None else agreed._checks.get(ranks)
            if answers is not None:
                answers = np.zeros_like(answers)
                answers[_CHANGED] = 1
        found = None if answers is None else self._all_reduced(ranks, answers, device)
        if found is not None and _differ(found):
            return _Outcome.differs_here_only if device.type == "cuda" else _Outcome.differs
        # Without answers (a first step, or no check in the last plan), the ranks that changed compare digests at once.
        if answers is None or (found is not None and found[_CHANGED]):
            if not _are_equal(ranks, self._digests.get(ranks, bytes(_DIGEST_BYTES))):
                return _Outcome.differs
            answers = self._checks.get(ranks)
            found = None if answers is None else self._all_reduced(ranks, answers, device)
            if found is not None and _differ(found):
                return _Outcome.differs
        # Ranks on GPUs do not all read what was found, so that they cannot tell others.
        is_linked = found is not None and device.type != "cuda" and found[_SEVERAL]
        return _Outcome.equal_and_linked if is_linked else _Outcome.equal

    def _all_reduced(self, ranks: RankGroup, answers: Answers, device: torch.device) -> Answers | None:
        """All-reduces (maximum) the answers of a set of ranks, in a tensor on a device. Collective.

        Returns:
            The answers' maxima. None if this rank does not read them: on a GPU, for which the host would have to wait,
            if its answers are those of its last check, or while a CUDA graph is captured.
        """
        if device.type != "cuda":
            message = torch.from_numpy(answers.copy())
            ranks.all_reduce_max(message)
            return message.numpy()
        if torch.cuda.is_current_stream_capturing():  # a replay of the graph could not report a difference
            return None
        is_new = ranks not in self._on_gpus or not np.array_equal(self._on_gpus[ranks][0], answers)
        if is_new:
            self._on_gpus[ranks] = answers, torch.from_numpy(answers.copy()).to(device)
        _, on_gpu = self._on_gpus[ranks]
        use_in_current_stream(device, (on_gpu,))
        message = on_gpu.clone()
        ranks.all_reduce_max(message)
        return np.asarray(message.cpu().numpy()) if is_new else None

    def _first_difference(self, ranks: RankGroup) -> str | None:
        """Gathers the descriptions of all ranks of a set; returns their first difference, if any. Collective."""
        description = [[entry.name, self._described(entry)] for entry in self.sets.get(ranks, ())]
        of_ranks = {rank: json.loads(text) for rank, text in ranks.all_gather(json.dumps(description).encode()).items()}
        first, *others = sorted(of_ranks)
        for rank in others:
            for (name, ours), (_, theirs) in zip(of_ranks[first], of_ranks[rank], strict=False):
                for key in [*ours, *(key for key in theirs if key not in ours)]:
                    if key == _GRADIENT and (key not in ours or key not in theirs):
                        continue  # a rank has no elements of the parameter
                    our_value, their_value = ours.get(key), theirs.get(key)
                    if our_value != their_value:
                        return f"{key} of {name}: {our_value!r} on rank {first} and {their_value!r} on rank {rank}"
            counts = len(of_ranks[first]), len(of_ranks[rank])
            if counts[0] != counts[1]:
                return f"their parameters: {counts[0]} on rank {first} and {counts[1]} on rank {rank}"
        return None


def digest_of(text: str) -> bytes:
    """The digest by which ranks compare a text."""
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


def order_of(ranks: RankGroup) -> tuple[object, ...]:
    """Sort key by which all ranks order sets of ranks equally, although ranks know different sets. Small ones first."""
    groups = ranks.global_ranks_by_group
    sizes = tuple(map(len, groups))
    return (math.prod(sizes), len(groups), groups[0] if len(groups) == 1 else sizes)


def _differ(found: Answers) -> bool:
    """Whether only some of the ranks changed their description, or have a gradient, by the all-reduced answers."""
    has, lacks = found[_SEVERAL + 1 :].reshape(2, -1)
    return bool((found[_AS_AGREED] and found[_CHANGED]) or (has & lacks).any())


def _are_equal(ranks: RankGroup, digest: bytes) -> bool:
    """Whether all ranks have the same digest: one all-reduce (maximum) of its words and their complements tells."""
    words = np.frombuffer(digest, dtype="<u2").astype(np.int32)
    message = torch.from_numpy(np.concatenate([words, 0xFFFF - words]))
    ranks.all_reduce_max(message)
    return not bool((message.view(2, -1).sum(0) != 0xFFFF).any())
