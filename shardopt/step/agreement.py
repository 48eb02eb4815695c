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
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt.kernels.dispatch_cuda import use_in_current_stream
from shardopt.layout import RankGroup, all_reduce_any

_DIGEST_BYTES = 16
_GRADIENT = "a gradient"  # key in a line: whether the parameter has a gradient
_HELD_ELSEWHERE = "parameters of which this rank holds no part"
_READ_HERE_ONLY = "options or gradients (ranks on GPUs that changed nothing do not read this, and will time out)"
#: Indices of the first three answers in a check; answers about gradients follow.
_AS_AGREED, _CHANGED, _SEVERAL = range(3)

#: A rank's answers in a check: int32, 1-D. 1 for yes, and 0 for no or nothing to say. First the three answers above,
#: then per parameter whether it has a gradient, and per parameter whether it has none.
Answers = npt.NDArray[np.int32]


class Line(NamedTuple):
    """The description of a parameter for a set of ranks that exchange its data; ranks compare digests of all lines.

    Attributes:
        tensor: the index of the optimizer's parameter in the step.
        device: the parameter's device.
        known_as: the parameter's name in errors, which may differ on other ranks.
        says: the properties that must be equal on all ranks, by their names in errors.
        is_sized: whether the sizes of exchanged messages depend on whether the parameter has a gradient.
        is_held: whether this rank has elements of the parameter, and so may have a gradient.
        is_joint: whether all ranks of the set or none must have a gradient of the parameter.
    """

    tensor: int
    device: torch.device
    known_as: str
    says: dict[str, Any]
    is_sized: bool
    is_held: bool
    is_joint: bool


class StepPlan:
    """This rank's descriptions of the parameters whose data a step exchanges, and their comparison with other ranks'.

    Args:
        sets: for each set of ranks, the parameters' descriptions, in an order that is equal on all ranks of the set.
        stepped: the indices of the parameters that have a gradient on this rank.
        on_difference: is called when ranks differ, before the error is raised.
        single: whether the step is of one parameter; see :func:`shardopt.step.plan.plan_of`.

    Attributes:
        digests: for each set of ranks, the digest of its descriptions.
        checks: for each set that has a check, this rank's answers if nothing changed; in one order on all ranks.
        devices: for each set of ranks, the device of the tensors that its checks all-reduce.
        single: see above.
    """

    def __init__(
        self,
        sets: Mapping[RankGroup, list[Line]],
        stepped: Container[int],
        on_difference: Callable[[], None],
        *,
        single: bool,
    ) -> None:
        self._sets = {ranks: sets[ranks] for ranks in sorted(sets, key=order_of)}
        self.devices = {ranks: _device_of(lines) for ranks, lines in self._sets.items()}
        self.digests: dict[RankGroup, bytes] = {}
        self.single, self._on_difference = single, on_difference
        self._on_gpus: dict[RankGroup, tuple[Answers, Tensor]] = {}  # the last answers, here and on the GPU
        self._take(stepped)

    def with_gradients(self, stepped: Container[int]) -> StepPlan:
        """The plan of a step in which these parameters, by their indices, have a gradient on this rank."""
        plan = copy(self)
        plan._take(stepped)
        return plan

    def _take(self, stepped: Container[int]) -> None:
        self._stepped = stepped
        if not self.digests or any(line.is_sized for lines in self._sets.values() for line in lines):
            self.digests = {ranks: self._digest(lines) for ranks, lines in self._sets.items()}
        self.checks = {ranks: self._answers(lines) for ranks, lines in self._sets.items() if self._is_checked(lines)}

    def _is_checked(self, lines: Sequence[Line]) -> bool:
        if not self.single and _device_of(lines).type == "cpu":
            return True
        return any(line.is_joint or (line.is_sized and line.tensor in self._stepped) for line in lines)

    def _answers(self, lines: Sequence[Line]) -> Answers:
        is_held = {line.tensor: line.is_held for line in lines if line.is_joint}
        has = [here and index in self._stepped for index, here in is_held.items()]
        lacks = [here and index not in self._stepped for index, here in is_held.items()]
        return np.array([True, False, len(self._sets) > 1, *has, *lacks], np.int32)

    def _digest(self, lines: Sequence[Line]) -> bytes:
        return digest_of(json.dumps([self._said(line, always=False) for line in lines]))

    def _said(self, line: Line, *, always: bool) -> dict[str, Any]:
        if not line.is_held or not (line.is_sized or always):
            return line.says
        return {**line.says, _GRADIENT: line.tensor in self._stepped}

    def agree(self, agreed: StepPlan | None) -> StepPlan:
        """Runs the consistency checks of all sets of ranks, and compares changed descriptions. Called once per step.

        Args:
            agreed: the last plan that the ranks agreed on; None in the first step.

        Returns:
            This plan, on which the ranks have now agreed.

        Raises:
            RuntimeError: the descriptions differ, or only some ranks have a gradient of a parameter. Nothing was
                changed.
        """
        now, before, changed = self.digests, {} if agreed is None else agreed.digests, set[RankGroup]()
        if now is not before:
            changed = {ranks for ranks in {*before, *now} if before.get(ranks) != now.get(ranks)}
        if agreed is not None:
            self._on_gpus = agreed._on_gpus
        sets = list(self.checks)
        if changed:
            sets = [x for x in sorted(dict.fromkeys([*now, *before]), key=order_of) if x in changed or x in self.checks]
        differing: list[RankGroup] = []
        joined: list[RankGroup] = []  # the sets in which at least one rank belongs to another set, too
        otherwise = _HELD_ELSEWHERE
        for ranks in sets:
            plan = self if agreed is None or ranks in now else agreed
            device, answers = plan.devices[ranks], self.checks.get(ranks)
            if ranks in changed:  # say only "changed", in a message of the last agreed length, which other ranks expect
                answers = None if agreed is None else agreed.checks.get(ranks)
                if answers is not None:
                    answers = np.zeros_like(answers)
                    answers[_CHANGED] = 1
            found = None if answers is None else self._reduced(ranks, answers, device)
            if found is not None and _differ(found):
                if device.type == "cuda":
                    otherwise = _READ_HERE_ONLY
                else:
                    differing.append(ranks)
                continue
            if found is None or found[_CHANGED]:
                if not _are_equal(ranks, now.get(ranks, bytes(_DIGEST_BYTES))):
                    differing.append(ranks)
                    continue
                if ranks not in self.checks:
                    continue
                found = self._reduced(ranks, self.checks[ranks], device)
                if _differ(found):
                    differing.append(ranks)
            if found[_SEVERAL]:
                joined.append(ranks)
        if all_reduce_any(joined, bool(differing) or otherwise is _READ_HERE_ONLY):
            self._on_gpus.clear()  # the next check is read, too
            self._refuse(differing, otherwise)
        return self

    def _reduced(self, ranks: RankGroup, answers: Answers, device: torch.device) -> Answers:
        """All-reduces (maximum) the answers of a set of ranks, in a tensor on a device.

        On a GPU the host would have to wait for the result: a rank reads it only if its own answers differ from those
        in its last check. Otherwise it returns zeros, which mean that it has seen no difference.
        """
        if device.type != "cuda":
            message = torch.from_numpy(answers.copy())
            ranks.all_reduce_max(message)
            return message.numpy()
        found = np.zeros_like(answers)
        if torch.cuda.is_current_stream_capturing():  # a replay of the graph could not report a difference
            return found
        said, there = self._on_gpus.get(ranks, (None, None))
        is_new = said is None or not np.array_equal(said, answers)
        if there is None or is_new:
            there = torch.from_numpy(answers.copy()).to(device)
            self._on_gpus[ranks] = answers, there
        use_in_current_stream(device, (there,))
        message = there.clone()
        ranks.all_reduce_max(message)
        if is_new:
            found = np.asarray(message.cpu().numpy())
            found[_SEVERAL] = 0  # ranks that do not read it cannot tell others what they found
        return found

    def _refuse(self, differing: Iterable[RankGroup], otherwise: str) -> NoReturn:
        """Raises the error that names the first difference.

        Args:
            differing: the sets of ranks that have found a difference, all of which call this.
            otherwise: what differs if this rank is in none of these sets.
        """
        self._on_difference()
        found = [self._first_difference(ranks) for ranks in sorted(differing, key=order_of)]
        difference = next(filter(None, found), otherwise)
        raise RuntimeError(
            f"got ranks that differ in {difference}, expected the same on all ranks that step parts of the "
            "same parameters; give their optimizers the same parameters, in the same order and with the same options, "
            "and gradients to all of them or to none; this step changed nothing on this rank"
        )

    def _first_difference(self, ranks: RankGroup) -> str | None:
        description = [[line.known_as, self._said(line, always=True)] for line in self._sets.get(ranks, ())]
        of_ranks = {rank: json.loads(text) for rank, text in ranks.all_gather(json.dumps(description).encode()).items()}
        return _difference(of_ranks)


def _device_of(lines: Sequence[Line]) -> torch.device:
    """The device on which ranks all-reduce their checks of some parameters: a GPU if a parameter is on it, else CPU."""
    return next((line.device for line in lines if line.device.type != "cpu"), torch.device("cpu"))


def digest_of(text: str) -> bytes:
    """The digest by which ranks compare a text."""
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


def order_of(ranks: RankGroup) -> tuple[object, ...]:
    """Sort key by which all ranks order sets of ranks equally, although ranks know different sets. Small ones first."""
    groups = ranks.global_ranks_by_group
    sizes = tuple(map(len, groups))
    return (math.prod(sizes), len(groups), groups[0] if len(groups) == 1 else sizes)


def _difference(of_ranks: Mapping[int, Sequence[Any]]) -> str | None:
    """The first difference among the ranks' descriptions, if there is one."""
    first, *others = sorted(of_ranks)
    for rank in others:
        for (name, ours), (_, theirs) in zip(of_ranks[first], of_ranks[rank], strict=False):
            for key in [*ours, *(key for key in theirs if key not in ours)]:
                if key == _GRADIENT and (key not in ours or key not in theirs):
                    continue  # a rank has no elements of the parameter
                if ours.get(key) != theirs.get(key):
                    return f"{key} of {name}: {ours.get(key)!r} on rank {first} and {theirs.get(key)!r} on rank {rank}"
        counts = len(of_ranks[first]), len(of_ranks[rank])
        if counts[0] != counts[1]:
            return f"their parameters: {counts[0]} on rank {first} and {counts[1]} on rank {rank}"
    return None


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
