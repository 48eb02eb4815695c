"""Comparison of plans among ranks that step parts of the same parameters: they raise together if plans differ.

Before its first step each rank describes the parameters of which others hold parts; the ranks compare a digest of the
descriptions. Every message of later steps begins with a roll, in which a rank says whether its description is still the
agreed one, and which parameters have a gradient. Ranks that hold column shards on the CPU and exchange no data in a
step send a message that is only a roll. A rank whose description changed, say by an option, first sends a message of
the agreed shape, whose roll says so. The ranks compare digests again if all descriptions changed, and raise if only
some did. A rank that raises first sends such messages to the sets of ranks that it has sent no message of the step.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from shardopt.layout import Exchange

_DIGEST_BYTES = 16
#: Answers in a short roll; 0 is neither.
YES, NO = 1, 2
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
        listening: ranks that send a message with only a roll in a step in which they exchange no data.
        single: whether the step is of one parameter, whose gradient is complete.

    Attributes:
        digests: by the ranks that must agree. Another dict if a digest has changed.
        pending: the first messages of this step to each set of ranks that this rank has not sent yet, in their order.
        told: the listening ranks to which :meth:`Agreement.agree` has sent this step's roll.
        listening: see above, in an order that is equal on all ranks.
        single: see above.
    """

    def __init__(
        self,
        lines: Mapping[Exchange, Sequence[Line]],
        stepped: Container[int],
        listening: Iterable[Exchange] = (),
        *,
        single: bool = False,
    ) -> None:
        self._lines, self.single = lines, single
        self.pending: list[Opening] = []
        self.told: set[Exchange] = set()
        self._unread: dict[Exchange, Callable[[], bool]] = {}
        self.listening = sorted(listening, key=order_of)
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

    def short_roll(self, ranks: Exchange, indices: Sequence[int]) -> Tensor:
        """The roll as one byte per answer, for messages that are not added up."""
        yes, no = self.roll(ranks, indices).unbind(1)
        return (YES * yes + NO * no).to(torch.uint8)

    def start(self, pending: Iterable[Opening]) -> None:
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
            self.refuse(ranks)

    def tell(self, opening: Opening) -> bool:
        """Sends a message that only says that the description changed; returns whether it changed on all ranks."""
        self.pending = [pending for pending in self.pending if pending.ranks != opening.ranks]
        return opening.say_changed()

    def listen(self, opening: OnlyRoll) -> bool:
        """Sends a message that says that the description did not change; returns whether it changed on no rank."""
        self.pending.remove(opening)
        return opening.say(changed=False)

    def compare(self, changed: Iterable[Exchange]) -> None:
        """Raises RuntimeError if changed descriptions differ. All ranks of each set must call this."""
        if differing := self._differing(changed, ()):
            self._raise(differing)

    def refuse(self, ranks: Exchange, changed: Iterable[Exchange] = ()) -> NoReturn:
        """Raises the error that names the first difference, after telling sets that have had no message in this step.

        Args:
            ranks: those that have told each other of a difference, all of which call this.
            changed: the ranks whose descriptions changed, and which this rank has told so.
        """
        differing, compared = {ranks}, set(changed) - {ranks}
        differing.update(others for others, differs in self._unread.items() if others != ranks and differs())
        self.pending = [opening for opening in self.pending if opening.ranks != ranks]
        while self.pending:
            opening = self.pending[0]
            (compared if self.tell(opening) else differing).add(opening.ranks)
        self._raise(self._differing(compared - differing, differing))

    def _differing(self, compared: Iterable[Exchange], known: Iterable[Exchange]) -> list[Exchange]:
        """The sets of ranks whose descriptions differ, besides those that are known to."""
        found = list(known)
        for ranks in sorted(compared, key=order_of):
            # A rank that has found a difference has no description in common with others, so that these raise, too.
            if not is_common(ranks, bytes(_DIGEST_BYTES) if found else self.digests[ranks]):
                found.append(ranks)
        return sorted(found, key=order_of)

    def _raise(self, differing: Sequence[Exchange]) -> NoReturn:
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


def is_common(ranks: Exchange, digest: bytes) -> bool:
    """Whether all ranks have the same digest. All of them must call this."""
    words = torch.from_numpy(np.frombuffer(digest, dtype="<u2").astype(np.int32))
    both = torch.stack([words, 0xFFFF - words])
    ranks.all_reduce_max(both)
    return not bool((both.sum(0) != 0xFFFF).any())


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


class Opening(Protocol):
    """The shape of the first message of a step to some ranks."""

    @property
    def ranks(self) -> Exchange:
        """The ranks."""

    def say_changed(self) -> bool:
        """Sends a message that only says that the description changed; returns whether it changed on all ranks."""


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
        """See :class:`Opening`."""
        return self.say(changed=True)

    def say(self, *, changed: bool) -> bool:
        """Sends a message that only says whether the description changed; returns whether all ranks say the same."""
        message = torch.zeros(self.numel, dtype=self.dtype, device="cpu")
        message[int(changed)] = 1
        if self.dtype == torch.int64:
            self.ranks.all_reduce_sum(message)
        else:
            self.ranks.all_reduce_max(message)
        return not bool(message[int(not changed)])


class OnlyRoll(Reduction):
    """The message of ranks that exchange no data in this step."""


class Agreement:
    """The descriptions that the ranks agreed on last.

    Attributes:
        opened: those of a plan that was agreed on and whose first messages are known; None if there is no such plan.
    """

    def __init__(self) -> None:
        self._digests: dict[Exchange, bytes] | None = None
        self.opened: dict[Exchange, bytes] | None = None
        self._openings: list[Opening] = []

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
                elif isinstance(opening, OnlyRoll):
                    alike = plan.listen(opening)
                else:
                    continue
                if not alike:
                    plan.refuse(opening.ranks, changed)
            plan.compare(changed)
        self._digests, self.opened = plan.digests, None

    def open_by(self, plan: Plan, openings: list[Opening]) -> None:
        """Takes the shapes of the first messages of a step by a plan that was agreed on."""
        self.opened, self._openings = plan.digests, openings
