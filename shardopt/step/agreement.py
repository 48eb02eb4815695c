"""Comparison of plans among ranks that step parts of the same parameters: they raise together if plans differ.

Before its first step each rank describes the parameters of which others hold parts; the ranks compare a digest of the
descriptions. Every message of later steps begins with a roll, in which a rank says whether its description is still the
agreed one, and which parameters have a gradient. On the CPU, a message that is only a roll comes before all others
among ranks that orthogonalize matrices together, among ranks of which one belongs to several sets, and among holders of
column shards that exchange no data in a step. Directions to be orthogonalized are sent without a roll.
A rank whose description changed, say by an option, first sends a message of the agreed shape, whose roll says so. The
ranks compare digests again if all descriptions changed, and raise if only some did. A rank that raises first sends such
messages to the sets of ranks that it has sent no message of the step.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from shardopt.layout import Exchange

_DIGEST_BYTES = 16
_GRADIENT = "a gradient"  # key in a line: whether the parameter has a gradient


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


class Plan:
    """The description of a step's parameters of which other ranks have parts.

    Args:
        lines: by the ranks that must agree, in an order that is equal on all of them.
        stepped: the indices of the parameters that have a gradient on this rank.
        listening: ranks that can send a message with only a roll, and whether they do so, if no one of them belongs to
            several sets of ranks, in a step in which they exchange no data.
        orthogonalized: by the ranks that send a message with only a roll in any case, the indices of the parameters
            that they orthogonalize together, of which they must have gradients on all ranks or on none.
        on_difference: called before an error is raised.
        single: whether the step is of one parameter, whose gradient is complete.

    Attributes:
        digests: by the ranks that must agree. Another dict if a digest has changed.
        pending: the first messages of this step to each set of ranks that this rank has not sent yet, in their order.
        told: the listening ranks to which :meth:`Agreement.agree` has sent this step's roll.
        overlapping: the sets of ranks of which one rank belongs to several sets, as found by comparing digests.
        single: see above.
    """

    def __init__(
        self,
        lines: Mapping[Exchange, Sequence[Line]],
        stepped: Container[int],
        listening: Mapping[Exchange, bool] = MappingProxyType({}),
        orthogonalized: Mapping[Exchange, Sequence[int]] = MappingProxyType({}),
        on_difference: Callable[[], object] = lambda: None,
        *,
        single: bool = False,
    ) -> None:
        self._lines, self._on_difference, self.single = lines, on_difference, single
        self.pending: list[Reduction] = []
        self.told: set[Exchange] = set()
        self._unread: dict[Exchange, Callable[[], bool]] = {}
        self.overlapping: set[Exchange] = set()
        self._listening, self._orthogonalized = listening, orthogonalized
        self._rolling = sorted({*listening, *orthogonalized}, key=order_of)
        self.digests: dict[Exchange, bytes] = {}
        self.step(stepped)

    def step(self, stepped: Container[int]) -> None:
        """Takes the indices of the parameters that have a gradient on this rank."""
        self._stepped = stepped
        if not self.digests or any(line.is_sized for lines in self._lines.values() for line in lines):
            digests = {ranks: self._digest(lines) for ranks, lines in self._lines.items()}
            if digests != self.digests:
                self.digests = digests

    def _digest(self, lines: Sequence[Line]) -> bytes:
        text = [self._said(line, always=False) for line in lines]
        return digest_of(json.dumps(text))

    def _said(self, line: Line, *, always: bool) -> dict[str, Any]:
        if not line.is_held or not (line.is_sized or always):
            return line.says
        return {**line.says, _GRADIENT: line.tensor in self._stepped}

    def roll(self, ranks: Exchange, indices: Sequence[int]) -> Tensor:
        """This rank's answers in a roll, (1 + parameters, 2): yes and no, to "as agreed" and to "has a gradient"."""
        is_held = {line.tensor: line.is_held for line in self._lines.get(ranks, ())}
        answers = [(1, 0), *((i in self._stepped, i not in self._stepped) if is_held[i] else (0, 0) for i in indices)]
        return torch.tensor(answers, dtype=torch.int32, device="cpu")

    def rolls(self, spoken: Container[Exchange]) -> list[OnlyRoll]:
        """The messages that are only rolls, in an order that is equal on all ranks.

        Args:
            spoken: the ranks that exchange data of blocks in this step.
        """
        listening = self._listening
        return [
            OnlyRoll(ranks, 2 * (1 + len(self._orthogonalized.get(ranks, ()))), torch.int32)
            for ranks in self._rolling
            if ranks in self._orthogonalized or ranks in self.overlapping or (listening[ranks] and ranks not in spoken)
        ]

    def start(self, pending: Iterable[Reduction]) -> None:
        """Takes the first messages of a step to each set of ranks, in their order."""
        self.pending = list(pending)
        self._unread.clear()

    def sent(self, ranks: Exchange, differs: Callable[[], bool]) -> None:
        """Notes that this rank sends a message with a roll.

        Args:
            ranks: to which ranks.
            differs: waits for the message, and says whether the ranks' answers differ.
        """
        if ranks in self._unread:  # another rank may have raised after its first message
            self.check(ranks, differs=self._unread[ranks]())
        self.pending = [opening for opening in self.pending if opening.ranks != ranks]
        self._unread[ranks] = differs

    def check(self, ranks: Exchange, *, differs: bool) -> None:
        """Takes what :meth:`sent` asked for. Raises RuntimeError, on all ranks, if answers differ."""
        self._unread.pop(ranks, None)
        if differs:
            self.refuse([ranks])

    def tell(self, opening: Reduction) -> bool:
        """Sends a message that says only that the description changed; returns whether it changed on all ranks."""
        self.pending = [pending for pending in self.pending if pending.ranks != opening.ranks]
        return opening.say_changed()

    def listen(self, opening: OnlyRoll) -> bool:
        """Sends this rank's roll as agreed; returns whether all ranks gave the same answers."""
        self.pending.remove(opening)
        answers = self.roll(opening.ranks, self._orthogonalized.get(opening.ranks, ()))
        opening.ranks.all_reduce_max(answers)
        return not bool(answers.prod(1).any())

    def compare(self, changed: Iterable[Exchange]) -> None:
        """Raises RuntimeError if changed descriptions differ. All ranks of each set must call this."""
        if differing := self._differing(changed, ()):
            self.refuse(differing)

    def refuse(self, known: Iterable[Exchange], changed: Iterable[Exchange] = ()) -> NoReturn:
        """Raises the error that names the first difference, after telling sets that have had no message in this step.

        Args:
            known: the sets of ranks that have told each other of a difference, all of which call this.
            changed: the ranks whose descriptions changed, and which this rank has told so.
        """
        differing, compared = set(known), set(changed)
        differing.update(others for others, differs in self._unread.items() if others not in differing and differs())
        self.pending = [opening for opening in self.pending if opening.ranks not in differing]
        for sends_data in (False, True):  # other ranks compare descriptions after all rolls, and before they send data
            for opening in self.pending:
                if sends_data or isinstance(opening, OnlyRoll):
                    (compared if self.tell(opening) else differing).add(opening.ranks)
            differing, compared = self._differing(compared - differing, differing), set()
        self._raise(sorted(differing, key=order_of))

    def _differing(self, compared: Iterable[Exchange], known: Iterable[Exchange]) -> set[Exchange]:
        """The sets of ranks whose descriptions differ, besides those that are known to."""
        found = set(known)
        for ranks in sorted(compared, key=order_of):
            # A rank that has found a difference has no description in common with others, so that these raise, too.
            if not self._is_common(ranks, bytes(_DIGEST_BYTES) if found else self.digests[ranks]):
                found.add(ranks)
        return found

    def _is_common(self, ranks: Exchange, digest: bytes) -> bool:
        """Whether all ranks have the same digest; notes whether one of them belongs to several sets."""
        words = np.frombuffer(digest, dtype="<u2").astype(np.int32)
        message = torch.from_numpy(np.concatenate([words, 0xFFFF - words, np.array([len(self.digests) > 1], np.int32)]))
        ranks.all_reduce_max(message)
        (self.overlapping.add if message[-1] else self.overlapping.discard)(ranks)
        return not bool((message[:-1].view(2, -1).sum(0) != 0xFFFF).any())

    def _raise(self, differing: Sequence[Exchange]) -> NoReturn:
        self._on_difference()
        found = [self._first_difference(ranks) for ranks in differing]
        difference = next(filter(None, found), "parameters of which this rank holds no part, or that were changed back")
        raise RuntimeError(
            f"got ranks that differ in {difference}, expected the same on all ranks that step parts of the "
            "same parameters; give their optimizers the same parameters, in the same order and with the same options, "
            "and gradients to all of them or to none. Blocks that no other rank shares may have been stepped"
        )

    def _first_difference(self, ranks: Exchange) -> str | None:
        description = [[line.known_as, self._said(line, always=True)] for line in self._lines.get(ranks, ())]
        of_ranks = {rank: json.loads(text) for rank, text in ranks.gathered(json.dumps(description).encode()).items()}
        return _difference(of_ranks)


def digest_of(text: str) -> bytes:
    """The digest by which ranks compare a text."""
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


def order_of(ranks: Exchange) -> tuple[object, ...]:
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


class Roll:
    """The roll at the beginning of a message, in a view of the message.

    Args:
        plan: the description that the ranks agreed on.
        ranks: the ranks that exchange the message.
        answers: the view, integers, (1 + parameters, 2).
        indices: the parameters whose gradients the roll names.
    """

    def __init__(self, plan: Plan, ranks: Exchange, answers: Tensor, indices: Sequence[int]) -> None:
        self._plan, self._ranks, self._answers, self._indices = plan, ranks, answers, indices
        #: This rank's answers, on the device of the message.
        self.own = answers.new_zeros(answers.shape)
        self._is_new = False

    def step(self) -> None:
        """Takes this step's answers from the plan, which knows the gradients."""
        self.own.copy_(self._plan.roll(self._ranks, self._indices))
        self._is_new = True

    def enter(self) -> None:
        """Writes this rank's answers into the message."""
        self._answers.copy_(self.own)

    def check(self) -> None:
        """Reads all ranks' answers. On a GPU, whose stream the host must wait for, only if this rank's are new.

        Raises:
            RuntimeError: answers differ.
        """
        self._plan.check(self._ranks, differs=self._differs())

    def sent(self) -> None:
        """Notes that the message is being sent."""
        self._plan.sent(self._ranks, self._differs)

    def _differs(self) -> bool:
        is_new, self._is_new = self._is_new, False
        if self._answers.is_cuda and (not is_new or torch.cuda.is_current_stream_capturing()):
            return False
        yes, no = self._answers.cpu().numpy().T
        return bool(np.any((yes != 0) & (no != 0)))


class Reduction(NamedTuple):
    """The shape of a message for an all-reduce.

    Attributes:
        ranks: the ranks.
        numel: elements of the message, which begins with a roll.
        dtype: the message's dtype: int32 for a maximum, int64 for a sum.
    """

    ranks: Exchange
    numel: int
    dtype: torch.dtype

    def say_changed(self) -> bool:
        """Sends a message that says only that the description changed; returns whether it changed on all ranks."""
        message = torch.zeros(self.numel, dtype=self.dtype, device="cpu")
        message[1] = 1
        if self.dtype == torch.int64:
            self.ranks.all_reduce_sum(message)
        else:
            self.ranks.all_reduce_max(message)
        return not bool(message[0])


class OnlyRoll(Reduction):
    """The shape of a message that is only a roll."""


class Agreement:
    """The descriptions that the ranks agreed on last.

    Attributes:
        opened: those of a plan that was agreed on and whose first messages are known; None if there is no such plan.
    """

    def __init__(self) -> None:
        self._digests: dict[Exchange, bytes] | None = None
        self.opened: dict[Exchange, bytes] | None = None
        self._openings: list[Reduction] = []
        self._overlapping: set[Exchange] = set()

    @property
    def was_made(self) -> bool:
        """Whether the ranks have agreed before."""
        return self._digests is not None

    def agree(self, plan: Plan) -> None:
        """Compares the descriptions in the first step, or if this rank's changed.

        Raises:
            RuntimeError: the descriptions differ.
        """
        if plan.digests is self._digests:
            return
        plan.overlapping = self._overlapping
        if plan.digests != self._digests:
            agreed = self._digests or {}
            own = {ranks for ranks in {*agreed, *plan.digests} if agreed.get(ranks) != plan.digests.get(ranks)}
            changed = own & plan.digests.keys()
            plan.start(self._openings)
            # Other ranks of a set whose description is unchanged go on, and would take a message for their step's.
            for opening in self._openings:
                if isinstance(opening, OnlyRoll):
                    plan.told.add(opening.ranks)
                if opening.ranks in own and opening in plan.pending:
                    alike = plan.tell(opening)
                elif isinstance(opening, OnlyRoll) and opening in plan.pending:
                    alike = plan.listen(opening)
                else:
                    continue
                if not alike:
                    plan.refuse([opening.ranks], changed)
            plan.compare(changed)
        self._digests, self.opened = plan.digests, None

    def open_by(self, plan: Plan, openings: list[Reduction]) -> None:
        """Takes the shapes of the first messages of a step by a plan that was agreed on."""
        self.opened, self._openings = plan.digests, openings
