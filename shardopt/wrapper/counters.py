"""Counters in param groups and in an optimizer: every call of ``step()`` advances them, and one step is many calls."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

#: Keys of a param group that a step does not count in.
_PARAMS = frozenset(["params", "param_names"])

_Values = dict[str, tuple[Any, Any]]


class Counters:
    """Lets each chunk of a step begin with the same counters, and the step end as if it had been one call.

    Counters are the values of param groups (``step``, ``k``, ``weight_sum``, ``lr_max``) and the numbers among the
    optimizer's attributes.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before = [_values(group) for group in optimizer.param_groups]
        self._numbers = {name: x for name, x in vars(optimizer).items() if isinstance(x, int | float)}
        self._after: dict[int, _Values] = {}

    def restore(self) -> None:
        """Sets all counters to what they were before the step."""
        for group, values in zip(self._optimizer.param_groups, self._before, strict=True):
            _put(group, values)
        for name, number in self._numbers.items():
            setattr(self._optimizer, name, number)

    def keep(self, groups: Collection[int]) -> None:
        """Takes note of the counters of param groups of which a chunk has just been stepped."""
        self._after.update({index: _values(self._optimizer.param_groups[index]) for index in groups})

    def finish(self) -> None:
        """Gives each param group the counters that the last chunk with its parameters left."""
        for index, values in self._after.items():
            _put(self._optimizer.param_groups[index], values)


def _values(group: dict[str, Any]) -> _Values:
    """The values of a group, each with a copy of it."""
    return {key: (value, _copy(value)) for key, value in group.items() if key not in _PARAMS}


def _put(group: dict[str, Any], values: _Values) -> None:
    for key in group.keys() - values.keys() - _PARAMS:
        del group[key]
    for key, (value, copied) in values.items():
        if isinstance(value, Tensor):  # in place: schedulers and compiled steps hold on to it
            value.copy_(copied)
            group[key] = value
        else:
            group[key] = _copy(copied)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, list | dict | set) else value
