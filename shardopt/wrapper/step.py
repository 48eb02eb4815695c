"""One step of an optimizer, chunk by chunk: decode, let it step these parameters alone, encode.

Every call of the inner ``step()`` advances counters in the optimizer and its param groups; a chunked step, which has
several calls, must advance them once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

from shardopt.wrapper.chunks import TransferUnit
from shardopt.wrapper.coding import State, decoded, encoded
from shardopt.wrapper.entries import Entries


def step_chunks(optimizer: Optimizer, entries: Entries, chunks: Sequence[Sequence[TransferUnit]]) -> None:
    """Takes a step. Ranks that hold parts of the same parameters must all call, with the same chunks."""
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
        except Exception as error:  # after any error, ranks that share blocks with this one must not wait for it
            failure = error
        new = encoded(entries, chunk, floats, [state or {} for state in stored], failure)
    finally:
        for index, target in given:
            optimizer.state.pop(target, None)
            state = stored[index] if new[index] is None else new[index]
            if state is not None:
                chunk[index].put_state(optimizer.state, state)


def _step_decoded(
    optimizer: Optimizer,
    entries: Entries,
    chunk: Sequence[TransferUnit],
    stored: Sequence[State | None],
    given: list[tuple[int, Tensor]],
    floats: list[State | None],
) -> None:
    """Steps a chunk. Fills ``given`` with the optimizer's tensors, by index, and ``floats`` with their states."""
    before: dict[int, Tensor] = {}
    for index, (unit, state) in enumerate(zip(chunk, stored, strict=True)):
        if not unit.has_gradient:
            continue
        target = unit.target()
        given.append((index, target))
        if state:
            optimizer.state[target] = unit.to_target(decoded(entries, unit, state))
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
            floats[index] = new = unit.from_target(left)
            if index in before:
                entries.keep_copies(unit, new, before[index])


@contextmanager
def _only(optimizer: Optimizer, given: Sequence[tuple[TransferUnit, Tensor]]) -> Iterator[None]:
    """Inside, the optimizer's param groups have these tensors alone."""
    groups = optimizer.param_groups
    whole: list[dict[str, Any]] = [
        {key: group[key] for key in ("params", "param_names") if key in group} for group in groups
    ]
    for number, (group, lists) in enumerate(zip(groups, whole, strict=True)):
        targets = [(unit.position, target) for unit, target in given if unit.group == number]
        group["params"] = [target for _, target in targets]
        if "param_names" in lists:
            group["param_names"] = [lists["param_names"][position] for position, _ in targets]
    try:
        yield
    finally:
        for group, lists in zip(groups, whole, strict=True):
            group.update(lists)


#: Keys of a param group, and attributes of an optimizer, that are no counters. Neither are hooks, whose attributes
#: begin with ``_optimizer_``.
_PARAMS = frozenset(["params", "param_names"])
_ATTRIBUTES = frozenset(["defaults", "param_groups", "state"])


class _Saved(NamedTuple):
    """A value, and a copy of its content if it is a tensor, list, dict or set."""

    value: Any
    content: Any = None


_Values = dict[str, _Saved]


class Counters:
    """Lets each chunk of a step begin with the same counters, and the step end as if it had been one call.

    Counters are the values of param groups (``step``, ``k``, ``weight_sum``, ``lr_max``); and, among the optimizer's
    attributes and the state's entries with a text as key, numbers, tensors of one element, and lists, sets and dicts by
    text of these. Dicts by parameters are no counters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before = [_values(group) for group in optimizer.param_groups]
        self._holders: tuple[MutableMapping[Any, Any], ...] = (vars(optimizer), optimizer.state)
        self._others = [_saved_values(_counters_in(holder, _names(holder))) for holder in self._holders]
        self._names: list[list[str]] = []  # looked up once per step: state has a key for each parameter, too
        self._after: dict[int, _Values] = {}

    def restore(self) -> None:
        """Sets all counters to their values before the step."""
        for group, values in zip(self._optimizer.param_groups, self._before, strict=True):
            _put(group, values)
        self._names = self._names or [_names(holder) for holder in self._holders]
        for holder, values, names in zip(self._holders, self._others, self._names, strict=True):
            for key in _counters_in(holder, names):
                if key in values:
                    holder[key] = _restored(values[key])
                else:
                    del holder[key]

    def keep(self, groups: Collection[int]) -> None:
        """Remembers the counters of param groups after a chunk with their parameters was stepped."""
        self._after.update({index: _values(self._optimizer.param_groups[index]) for index in groups})

    def finish(self) -> None:
        """Gives each param group the counters that the last chunk with its parameters left."""
        for index, values in self._after.items():
            _put(self._optimizer.param_groups[index], values)


def _values(group: Mapping[str, Any]) -> _Values:
    """The values of a group, with copies of their contents."""
    return _saved_values({key: value for key, value in group.items() if key not in _PARAMS})


def _put(group: dict[str, Any], values: _Values) -> None:
    for key in group.keys() - values.keys() - _PARAMS:
        del group[key]
    group.update({key: _restored(saved) for key, saved in values.items()})


def _names(holder: Mapping[Any, Any]) -> list[str]:
    """The text keys among an optimizer's attributes, or in its state, that may stand for counters."""
    names = (key for key in holder if isinstance(key, str))
    return [key for key in names if key not in _ATTRIBUTES and not key.startswith("_optimizer_")]


def _counters_in(holder: Mapping[Any, Any], names: Sequence[str]) -> dict[str, Any]:
    return {key: holder[key] for key in names if key in holder and _counts(holder[key])}


def _counts(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not isinstance(value, Parameter)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _counts(x) for key, x in value.items())
    if isinstance(value, list | tuple | set):
        return all(map(_counts, value))
    return value is None or isinstance(value, int | float | str)


def _saved_values(values: Mapping[str, Any]) -> _Values:
    return {key: _saved(value) for key, value in values.items()}


def _saved(value: Any) -> _Saved:
    if isinstance(value, Tensor) and not isinstance(value, Parameter):
        return _Saved(value, value.detach().clone())
    if isinstance(value, list):
        return _Saved(value, [_saved(x) for x in value])
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return _Saved(value, _saved_values(value))
    return _Saved(value, set(value) if isinstance(value, set) else None)


def _restored(saved: _Saved) -> Any:
    """The value as it was. Tensors, lists, dicts and sets stay the same objects, as schedulers hold on to them."""
    value, content = saved
    if content is None:
        return value
    if isinstance(value, Tensor):
        value.copy_(content)
    elif isinstance(value, list):
        value[:] = [_restored(x) for x in content]
    else:
        value.clear()
        value.update({key: _restored(x) for key, x in content.items()} if isinstance(value, dict) else content)
    return value
