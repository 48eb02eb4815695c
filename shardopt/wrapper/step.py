"""One step of an optimizer, chunk by chunk: decode, let it step these parameters alone, encode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from shardopt.wrapper.chunks import TransferUnit
from shardopt.wrapper.coding import State, decoded, encoded
from shardopt.wrapper.counters import Counters
from shardopt.wrapper.entries import Entries


def step_chunks(optimizer: Optimizer, entries: Entries, chunks: Sequence[Sequence[TransferUnit]]) -> None:
    """Takes a step. Ranks that hold parts of the same parameters must all call this, with the same chunks."""
    counters = Counters(optimizer) if len(chunks) > 1 else None
    stepped = False
    for number, chunk in enumerate(chunks, 1):
        groups = {unit.group for unit in chunk if unit.has_gradient}
        steps = bool(groups) or (number == len(chunks) and not stepped)  # counters count steps without gradients, too
        if counters is not None and stepped and steps:
            counters.restore()
        _step_chunk(optimizer, entries, chunk, steps=steps)
        stepped |= steps
        if counters is not None:
            counters.keep(groups)
    if counters is not None:
        counters.finish()


def _step_chunk(optimizer: Optimizer, entries: Entries, chunk: Sequence[TransferUnit], *, steps: bool) -> None:
    stored: list[State | None] = [
        unit.state_in(optimizer.state[unit.param]) if unit.param in optimizer.state else None for unit in chunk
    ]
    given: list[tuple[int, Tensor]] = []
    floats: list[State | None] = [None] * len(chunk)
    new: list[State | None] = [None] * len(chunk)
    failure: Exception | None = None
    try:
        try:
            if steps:
                _step_decoded(optimizer, entries, chunk, stored, given, floats)
        except Exception as error:  # whatever it is, ranks that share blocks with this one must not wait for it
            failure = error
        new = encoded(entries, chunk, floats, [own or {} for own in stored], failure)
    finally:
        for index, target in given:
            optimizer.state.pop(target, None)
            own = stored[index] if new[index] is None else new[index]
            if own is not None:
                chunk[index].put_state(optimizer.state, own)


def _step_decoded(
    optimizer: Optimizer,
    entries: Entries,
    chunk: Sequence[TransferUnit],
    stored: Sequence[State | None],
    given: list[tuple[int, Tensor]],
    floats: list[State | None],
) -> None:
    """Steps a chunk; fills in the tensors that the optimizer was given, by index, and their states in floats."""
    before: dict[int, Tensor] = {}
    for index, (unit, own) in enumerate(zip(chunk, stored, strict=True)):
        if not unit.has_gradient:
            continue
        target = unit.target()
        given.append((index, target))
        if own:
            optimizer.state[target] = unit.to_target(decoded(entries, unit, own))
        elif (
            entries.looks_for_copies
            and unit.shard.plain
            and unit.shard.holders is None
            and entries.is_quantized(unit.shard)
        ):
            before[index] = unit.param.detach().clone()
    with _only(optimizer, [(chunk[index], target) for index, target in given]):
        optimizer.step()
    for index, target in given:
        unit, left = chunk[index], optimizer.state.get(target)
        if left is not None:
            floats[index] = state = unit.from_target(left)
            if index in before:
                entries.keep_copies(unit, state, before[index])


@contextmanager
def _only(optimizer: Optimizer, given: Sequence[tuple[TransferUnit, Tensor]]) -> Iterator[None]:
    """Inside, the optimizer's param groups have these tensors alone."""
    groups = optimizer.param_groups
    whole: list[dict[str, Any]] = [
        {key: group[key] for key in ("params", "param_names") if key in group} for group in groups
    ]
    for number, (group, lists) in enumerate(zip(groups, whole, strict=True)):
        own = [(unit.position, target) for unit, target in given if unit.group == number]
        group["params"] = [target for _, target in own]
        if "param_names" in lists:
            group["param_names"] = [lists["param_names"][position] for position, _ in own]
    try:
        yield
    finally:
        for group, lists in zip(groups, whole, strict=True):
            group.update(lists)
