"""One step: each parameter's state is decoded, the optimizer steps that parameter alone, and the state is encoded."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shardopt.layout import Shard, shard_of
from shardopt.wrapper.entries import Entries

#: Keys of a param group that each parameter has its own of.
_PARAMS = frozenset(["params", "param_names"])
#: State entries that count steps, with their values before the first one.
_COUNTS = {"step": 0, "mu_product": 1}


def step_all(entries: Entries, *, elementwise: bool) -> None:
    """Takes a step of all parameters that have gradients.

    Each call of the inner ``step()`` advances counters, and all calls together must advance them once: every parameter
    begins with the same values of its param group, and of the numbers among the optimizer's attributes.
    """
    optimizer, groups = entries.inner, entries.inner.param_groups
    numbers = {key: x for key, x in vars(optimizer).items() if type(x) in (int, float)}
    try:
        for group in groups:
            listed = list(zip(group["params"], group.get("param_names", group["params"]), strict=False))
            stepped = [(param, name) for param, name in listed if param.grad is not None]
            options: dict[str, Any] = {}
            for param, name in stepped or [(None, None)]:  # steps without gradients are counted, too
                vars(optimizer).update(numbers)
                options = {key: _copied(x) for key, x in group.items() if key not in _PARAMS}
                names = {"param_names": [] if param is None else [name]} if "param_names" in group else {}
                optimizer.param_groups = [{**options, "params": [], **names}]
                if param is None:
                    optimizer.step()
                else:
                    _step_parameter(entries, param, elementwise=elementwise)
                options = {key: x for key, x in optimizer.param_groups[0].items() if key not in _PARAMS}
            _put(group, options)
    finally:
        optimizer.param_groups = groups


def make_state(entries: Entries, *, elementwise: bool) -> None:
    """Takes a step of which only state is left, with step counts of zero: weights and counters are restored."""
    optimizer, groups = entries.inner, entries.inner.param_groups
    numbers = {key: x for key, x in vars(optimizer).items() if type(x) in (int, float)}
    before = [{key: _copied(x) for key, x in group.items() if key not in _PARAMS} for group in groups]
    stepped = [param for group in groups for param in group["params"] if param.grad is not None]
    weights = [param.detach().clone() for param in stepped]
    step_all(entries, elementwise=elementwise)
    vars(optimizer).update(numbers)
    for group, options in zip(groups, before, strict=True):
        for key in group.keys() - options.keys() - _PARAMS:
            del group[key]
        _put(group, options)
    for param, value in zip(stepped, weights, strict=True):
        param.copy_(value)
        for key in _COUNTS.keys() & optimizer.state.get(param, {}).keys():
            old = optimizer.state[param][key]
            new = _COUNTS[key]
            optimizer.state[param][key] = torch.full_like(old, new) if isinstance(old, Tensor) else type(old)(new)


def _step_parameter(entries: Entries, param: Tensor, *, elementwise: bool) -> None:
    """Steps one parameter. If that fails, its state is as it was."""
    optimizer, shard, states = entries.inner, shard_of(param), entries.inner.state
    target = _stand_in(shard, param) if elementwise and not shard.plain else param
    stored = new = states.pop(param, {})
    if stored:
        states[target] = entries.decoded(shard, target, stored)
    try:
        optimizer.param_groups[0]["params"] = [target]
        optimizer.step()
        new = entries.encoded(shard, target, states.get(target, {}), stored)
    finally:
        states.pop(target, None)
        if new:
            states[param] = new


def _stand_in(shard: Shard, param: Tensor) -> Tensor:
    """The plain local tensor of a DTensor, with the same memory and its gradient."""
    target = Parameter(shard.local(param).detach(), requires_grad=param.requires_grad)
    assert param.grad is not None
    target.grad = shard.local_gradient(param.grad)
    return target


def _copied(value: Any) -> Any:
    """A copy of a param group's value that a step may change in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, list | dict | set) else value


def _put(group: MutableMapping[str, Any], options: MutableMapping[str, Any]) -> None:
    """Gives a param group what steps made of its values. Tensors stay the same objects: schedulers hold on to them."""
    for key, value in options.items():
        present = group.get(key)
        if isinstance(present, Tensor) and isinstance(value, Tensor):
            present.copy_(value)
        else:
            group[key] = value
