"""Comparison of plans among ranks that exchange data in a step: they raise together if plans differ.

Each rank describes the parameters for which a step exchanges data with other ranks, or would with other options: flat
shards, column shards, rules with sums, Muon. AdamW under FSDP2 has none, and no check. Before the first step the ranks
of each set compare a digest of their descriptions. Every step begins with a consistency check of each set: an all-
reduce of some integers, in which a rank says whether its description is still the agreed one, and which parameters have
a gradient. If a description changed, say by an option, the set's ranks compare digests again. Ranks that belong to
several sets then tell all of them whether they found a difference, so that no rank waits for data from one that raised.

A set that exchanges no data has no check in steps of a single parameter, nor on a GPU. On a GPU only those ranks read
the check whose own answers are new, as the host has to wait for the device.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt.kernels.dispatch_cuda import use_in_current_stream
from shardopt.layout import RankGroup, on_any_rank

_DIGEST_BYTES = 16
_GRADIENT = "a gradient"  # key in a line: whether the parameter has a gradient
_HELD_ELSEWHERE = "parameters of which this rank holds no part"
_READ_HERE_ONLY = "options or gradients (ranks on GPUs that changed nothing do not read this, and will time out)"
#: Places in a check's answers, before those about gradients.
_AS_AGREED, _CHANGED, _SEVERAL = range(3)

#: A rank's answers in a check: int32, 1-D. 1 for yes, and 0 for no or nothing to say. First the three answers above,
#: then per parameter whether it has a gradient, and per parameter whether it has none.
Answers = npt.NDArray[np.int32]


class Line(NamedTuple):
    """A parameter in a description.

    Attributes:
        tensor: the index of the optimizer's parameter in the step.
        known_as: the parameter's name in errors, which may differ on other ranks.
        says: the properties that must be equal on all ranks.
        is_sized: whether messages are longer if the parameter has a gradient.
        is_held: whether this rank has elements of the parameter, and so may have a gradient.
    """

    tensor: int
    known_as: str
    says: dict[str, Any]
    is_sized: bool
    is_held: bool


class Members(NamedTuple):
    """The parameters that a set of ranks steps together.

    Attributes:
        device: of the parameters.
        lines: the set's description, in an order that is equal on all of its ranks.
        joint: the indices of the parameters that all of the ranks or none must have a gradient of.
    """

    device: torch.device
    lines: list[Line]
    joint: dict[int, None]


class StepPlan:
    """The description of a step's parameters of which other ranks have parts.

    Args:
        sets: by the ranks that must agree.
        stepped: the indices of the parameters that have a gradient on this rank.
        on_difference: called before an error is raised.
        single: whether the step is of one parameter, whose gradient is complete: other ranks may step others first.

    Attributes:
        digests: by the ranks that must agree. Another dict if a digest has changed.
        checks: this rank's answers in the checks of a step as agreed, in an order that is equal on all ranks.
        devices: of the messages, by the ranks that must agree.
        single: see above.
    """

    def __init__(
        self,
        sets: Mapping[RankGroup, Members],
        stepped: Container[int],
        on_difference: Callable[[], object] = lambda: None,
        *,
        single: bool = False,
    ) -> None:
        self._sets = {ranks: sets[ranks] for ranks in sorted(sets, key=order_of)}
        self.devices = {ranks: members.device for ranks, members in self._sets.items()}
        self._on_difference, self.single = on_difference, single
        self.digests: dict[RankGroup, bytes] = {}
        self.set_stepped(stepped)

    def set_stepped(self, stepped: Container[int]) -> None:
        """Sets which parameters, by their indices, have a gradient on this rank in this step.

        Computes the digests again if they depend on gradients (:attr:`Line.is_sized`).
        """
        self._stepped = stepped
        if not self.digests or any(line.is_sized for members in self._sets.values() for line in members.lines):
            digests = {ranks: self._digest(members.lines) for ranks, members in self._sets.items()}
            if digests != self.digests:
                self.digests = digests
        self.checks = {
            ranks: self._answers(members) for ranks, members in self._sets.items() if self._is_checked(members)
        }

    def _is_checked(self, members: Members) -> bool:
        if members.joint or (members.device.type == "cpu" and not self.single):
            return True
        return any(line.is_sized and line.tensor in self._stepped for line in members.lines)

    def _answers(self, members: Members) -> Answers:
        is_held = {line.tensor: line.is_held for line in members.lines}
        has = [is_held[index] and index in self._stepped for index in members.joint]
        lacks = [is_held[index] and index not in self._stepped for index in members.joint]
        return np.array([True, False, len(self._sets) > 1, *has, *lacks], np.int32)

    def _digest(self, lines: Sequence[Line]) -> bytes:
        return digest_of(json.dumps([self._said(line, always=False) for line in lines]))

    def _said(self, line: Line, *, always: bool) -> dict[str, Any]:
        if not line.is_held or not (line.is_sized or always):
            return line.says
        return {**line.says, _GRADIENT: line.tensor in self._stepped}

    def refuse(self, differing: Iterable[RankGroup], otherwise: str) -> NoReturn:
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
        lines = self._sets[ranks].lines if ranks in self._sets else ()
        description = [[line.known_as, self._said(line, always=True)] for line in lines]
        of_ranks = {rank: json.loads(text) for rank, text in ranks.gathered(json.dumps(description).encode()).items()}
        return _difference(of_ranks)


def digest_of(text: str) -> bytes:
    """The digest by which ranks compare a text."""
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


def order_of(ranks: RankGroup) -> tuple[object, ...]:
    """Sort key of sets of ranks: one order on all ranks, though each is in sets of its own. Smaller sets come first."""
    groups = ranks.numbers_in_world
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


class _OnGpu(NamedTuple):
    """A set's check on a GPU.

    Attributes:
        said: this rank's answers.
        own: these answers on the device.
        message: memory for the all-reduce.
    """

    said: Answers
    own: Tensor
    message: Tensor


class Agreement:
    """The descriptions that the ranks agreed on last, and the checks that follow from them.

    Args:
        captured: objects that CUDA graphs keep using: the list grows.
    """

    def __init__(self, captured: list[object]) -> None:
        self._digests: dict[RankGroup, bytes] | None = None
        self._checks: dict[RankGroup, Answers] = {}
        self._devices: dict[RankGroup, torch.device] = {}
        self._on_gpus: dict[RankGroup, _OnGpu] = {}
        self._captured = captured

    @property
    def was_made(self) -> bool:
        """Whether the ranks have agreed before."""
        return self._digests is not None

    def agree(self, plan: StepPlan) -> None:
        """Checks that the descriptions are those agreed on, or compares changed ones. Once per step.

        Raises:
            RuntimeError: the descriptions differ, or only some ranks have a gradient of a parameter. Nothing was
                changed.
        """
        agreed, now = self._digests or {}, plan.digests
        sets, changed = list(plan.checks), set[RankGroup]()
        if now is not self._digests:
            changed = {ranks for ranks in {*agreed, *now} if agreed.get(ranks) != now.get(ranks)}
            sets = [x for x in sorted(dict.fromkeys([*now, *agreed]), key=order_of) if x in plan.checks or x in changed]
        differing: list[RankGroup] = []
        joined: list[RankGroup] = []  # the sets of which one rank belongs to several
        otherwise = _HELD_ELSEWHERE
        for ranks in sets:
            before = self._checks.get(ranks) if ranks in changed else plan.checks[ranks]
            found = None if before is None else self._reduced_answers(plan, ranks, before, changed=ranks in changed)
            if found is not None and _differ(found):
                if self._device_of(plan, ranks).type == "cuda":
                    otherwise = _READ_HERE_ONLY
                else:
                    differing.append(ranks)
                continue
            if found is None or found[_CHANGED]:
                if not _are_equal(ranks, now.get(ranks, bytes(_DIGEST_BYTES))):
                    differing.append(ranks)
                    continue
                if ranks not in plan.checks:
                    continue
                found = self._reduced_answers(plan, ranks, plan.checks[ranks], changed=False)
                if _differ(found):
                    differing.append(ranks)
            if found[_SEVERAL]:
                joined.append(ranks)
        if on_any_rank(joined, bool(differing) or otherwise is _READ_HERE_ONLY, rounds=2):
            self._on_gpus.clear()  # the next check is read, too
            plan.refuse(differing, otherwise)
        self._digests, self._checks, self._devices = now, plan.checks, plan.devices

    def _device_of(self, plan: StepPlan, ranks: RankGroup) -> torch.device:
        """The device of the messages of a set of ranks, which may have left the plan."""
        return plan.devices[ranks] if ranks in plan.devices else self._devices[ranks]

    def _reduced_answers(self, plan: StepPlan, ranks: RankGroup, answers: Answers, *, changed: bool) -> Answers:
        """All-reduces (maximum) the answers of a set of ranks.

        On a GPU the host would have to wait for the result: a rank reads it only if its own answers differ from those
        in its last check. Otherwise it returns zeros, which mean that it has seen no difference.

        Args:
            plan: of this step.
            ranks: the set.
            answers: this rank's.
            changed: whether this rank's description changed: the rank then sends only that, in a message of the length
                last agreed on, which ranks without a change still use.
        """
        if changed:
            answers = np.zeros_like(answers)
            answers[_CHANGED] = 1
        device = self._device_of(plan, ranks)
        if device.type != "cuda":
            message = torch.from_numpy(answers.copy())
            ranks.all_reduce_max(message)
            return message.numpy()
        kept = self._on_gpus.get(ranks)
        is_new = kept is None or not np.array_equal(kept.said, answers)
        if kept is None or is_new:
            own = torch.from_numpy(answers.copy()).to(device)
            kept = self._on_gpus[ranks] = _OnGpu(answers, own, torch.empty_like(own))
        use_in_current_stream(device, (kept.own, kept.message))
        kept.message.copy_(kept.own)
        ranks.all_reduce_max(kept.message)
        if torch.cuda.is_current_stream_capturing():
            self._captured.append(kept)
        found = np.zeros_like(answers)
        if is_new and not torch.cuda.is_current_stream_capturing():
            found = np.asarray(kept.message.cpu().numpy())
            found[_SEVERAL] = 0  # ranks that do not read it cannot tell others what they found
        return found


def _differ(found: Answers) -> bool:
    """Whether ranks gave different answers."""
    has, lacks = found[_SEVERAL + 1 :].reshape(2, -1)
    return bool((found[_AS_AGREED] and found[_CHANGED]) or (has & lacks).any())


def _are_equal(ranks: RankGroup, digest: bytes) -> bool:
    """Whether all ranks of a set have the same digest."""
    words = np.frombuffer(digest, dtype="<u2").astype(np.int32)
    message = torch.from_numpy(np.concatenate([words, 0xFFFF - words]))
    ranks.all_reduce_max(message)
    return not bool((message.view(2, -1).sum(0) != 0xFFFF).any())
