"""Changes of an optimizer between steps: of its groups, options, parameters, state, and of tensors' storage."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ranks.layouts import values
from shardopt.optim import ShardedOptimizer
from step_problem import kept, params_of, put, put_data, set_option


@contextmanager
def resized(tensor: Tensor, nbytes: int) -> Iterator[None]:
    """Inside, its storage has that size; then its memory is as it was."""
    storage, saved = tensor.untyped_storage(), tensor.detach().clone()
    whole = storage.nbytes()
    storage.resize_(nbytes)
    try:
        yield
    finally:
        storage.resize_(whole)
        with torch.no_grad():
            tensor.copy_(saved)


@contextmanager
def cut_in_place(tensor: Tensor, nbytes: int) -> Iterator[None]:
    """Inside, its storage has that size, at the address where it was: an allocator may give the address again."""
    storage = tensor.untyped_storage()
    words = (ctypes.c_uint64 * 8).from_address(storage._cdata)
    (at,) = (i for i, word in enumerate(words) if word == storage.nbytes())
    whole, words[at] = words[at], nbytes
    assert storage.nbytes() == nbytes
    try:
        yield
    finally:
        words[at] = whole


def replace_state(optimizer: ShardedOptimizer) -> None:
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    for param, entries in optimizer.state.items():
        kept.append(entries)
        state[param] = {key: value.clone() for key, value in entries.items()}
    optimizer.state = state


def swap_names(optimizer: ShardedOptimizer) -> None:
    """Swaps tensors between names, in the same order."""
    param = params_of(optimizer)[1]
    state = optimizer.state[param]
    names = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}
    optimizer.state[param] = {names.get(key, key): value.abs_() for key, value in state.items()}
    kept.append(state)


def swap_parameters(optimizer: ShardedOptimizer) -> None:
    """Swaps states between parameters, in the same order."""
    *_, first, second = params_of(optimizer)
    others = {first: second, second: first}
    kept.append(optimizer.state)
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    state.update({others.get(param, param): entries for param, entries in optimizer.state.items()})
    optimizer.state = state


def clear_state(optimizer: ShardedOptimizer) -> None:
    kept.extend(optimizer.state.values())
    optimizer.state.clear()


def clear_entries(optimizer: ShardedOptimizer) -> None:
    entries = optimizer.state[params_of(optimizer)[0]]
    kept.append(dict(entries))
    entries.clear()


def with_data(change: Callable[[Tensor], Tensor]) -> Callable[[ShardedOptimizer], None]:
    """Changes a parameter's data; its state begins anew."""

    def changed(optimizer: ShardedOptimizer) -> None:
        param = params_of(optimizer)[2]
        param.grad = None
        param.data = change(param.data)
        clear_state(optimizer)

    return changed


def turn(optimizer: ShardedOptimizer) -> None:
    """Another order of the same memory."""
    param = params_of(optimizer)[2]
    param.grad = None
    param.data = param.data.view(256, 40).T


def to_bfloat16(optimizer: ShardedOptimizer) -> None:
    for param in params_of(optimizer):
        kept.append(param.data)
        param.grad = None
        param.data = param.data.bfloat16()


def set_format(**options: Any) -> Callable[[ShardedOptimizer], None]:
    """Changes an option on which the state depends; the state begins anew."""

    def change(optimizer: ShardedOptimizer) -> None:
        optimizer.param_groups[0].update(options)
        clear_state(optimizer)

    return change


def share_memory(optimizer: ShardedOptimizer) -> None:
    """Moves all state in place."""
    for entries in optimizer.state.values():
        for tensor in entries.values():
            kept.append(tensor.detach().clone())
            tensor.share_memory_()


#: Besides those that tests/checkpoint/attack/cached_steps.py makes of one parameter or state entry.
CHANGES: dict[str, Callable[[ShardedOptimizer], object]] = {
    "nothing": lambda optimizer: None,
    "add_param_group": lambda optimizer: optimizer.add_param_group(
        {"params": [Parameter(values((50, 128), 9, torch.float32))], "lr": 0.1}
    ),
    "group removed": lambda optimizer: kept.append(optimizer.param_groups.pop()),
    "group replaced": lambda optimizer: optimizer.param_groups.__setitem__(0, dict(optimizer.param_groups[0], lr=0.3)),
    "parameter removed": lambda optimizer: kept.append(optimizer.param_groups[0]["params"].pop(1)),
    "parameter appended": lambda optimizer: optimizer.param_groups[0]["params"].append(
        Parameter(values((60, 128), 9, torch.float32))
    ),
    "parameters moved": lambda optimizer: optimizer.param_groups[1]["params"].append(
        optimizer.param_groups[0]["params"].pop()
    ),
    "parameters reversed": lambda optimizer: optimizer.param_groups[0]["params"].reverse(),
    "state replaced": replace_state,
    "state cleared": clear_state,
    "a parameter's state cleared": clear_entries,
    "step replaced": lambda optimizer: put(optimizer, 1, "step", lambda x: x + 5),
    "names swapped": swap_names,
    "parameters swapped": swap_parameters,
    "data of codes": lambda optimizer: put_data(optimizer, 0, "exp_avg_codes", lambda x: x.roll(1, 0)),
    "state in shared memory": share_memory,
    "shape of a parameter": with_data(lambda x: x.view(256, 40)),
    "strides of a parameter": turn,
    "dtype of the parameters": to_bfloat16,
    "lr": set_option(0, lr=0.3),
    "betas": set_option(1, betas=(0.5, 0.6)),
    "eps": set_option(0, eps=0.1),
    "weight_decay": set_option(1, weight_decay=0.5),
    "maximize": set_option(0, maximize=True),
    "nonfinite": set_option(0, nonfinite="propagate"),
    "an option of its user": set_option(0, initial_lr=0.1),
    "block_size": set_format(block_size=64),
    "codec": set_format(codec="companded8"),
    "min_quantized_numel": set_format(min_quantized_numel=10**6),
}
