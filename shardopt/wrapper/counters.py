"""Counters in param groups and in an optimizer: every call of ``step()`` advances them, and one step is many calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

#: Keys of a param group, and attributes of an optimizer, that a step does not count in. Hooks are not among counters
#: either: their attributes begin with ``_optimizer_``.
_PARAMS = frozenset(["params", "param_names"])
_ATTRIBUTES = frozenset(["defaults", "param_groups", "state"])


class _Saved(NamedTuple):
    """A value, and what was in it if it is a tensor, list, dict or set."""

    value: Any
    content: Any = None


_Values = dict[str, _Saved]


class Counters:
    """Lets each chunk of a step begin with the same counters, and the step end as if it had been one call.

    Counters are the values of param groups (``step``, ``k``, ``weight_sum``, ``lr_max``), and among the optimizer's
    attributes and what its state has by a text in place of a parameter: numbers, tensors of one, and lists, sets and
    dicts by text of these. Dicts by parameters are not.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before = [_values(group) for group in optimizer.param_groups]
        self._holders: tuple[MutableMapping[Any, Any], ...] = (vars(optimizer), optimizer.state)
        self._others = [_saved_values(_counters_in(holder, _names(holder))) for holder in self._holders]
        self._names: list[list[str]] = []  # looked up once per step: state has a key for each parameter, too
        self._after: dict[int, _Values] = {}

    def restore(self) -> None:
        """Sets all counters to what they were before the step."""
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
        """Takes note of the counters of param groups of which a chunk has just been stepped."""
        self._after.update({index: _values(self._optimizer.param_groups[index]) for index in groups})

    def finish(self) -> None:
        """Gives each param group the counters that the last chunk with its parameters left."""
        for index, values in self._after.items():
            _put(self._optimizer.param_groups[index], values)


def _values(group: Mapping[str, Any]) -> _Values:
    """The values of a group, each with a copy of it."""
    return _saved_values({key: value for key, value in group.items() if key not in _PARAMS})


def _put(group: dict[str, Any], values: _Values) -> None:
    for key in group.keys() - values.keys() - _PARAMS:
        del group[key]
    group.update({key: _restored(saved) for key, saved in values.items()})


def _names(holder: Mapping[Any, Any]) -> list[str]:
    """The texts among the keys of an optimizer's attributes, or of its state, that may stand for counters."""
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
