"""Shards of parameters: what they say of other ranks, when they are asked for, and that no pickle has them."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch.nn import Parameter

from shardopt.layout import (
    Division,
    FlatShard,
    Region,
    Shard,
    UnknownShardError,
    assign,
    assign_later,
    assigned,
    shard_of,
)


def test_who_holds_all_of_it() -> None:
    assert Shard((6, 10), (6, 10)).division is None
    assert FlatShard((6, 10), 0, 60).division is None
    whole, parts = Region(0, 6, 10, 10), (Region(0, 3, 10, 10), Region(30, 3, 10, 10))
    assert Division(None, (whole, whole)).is_copied  # type: ignore[arg-type]
    assert not Division(None, parts).is_copied  # type: ignore[arg-type]
    for shard in (Shard((6, 10), (3, 10)), Shard((6, 10), (6, 5)), FlatShard((6, 10), 0, 59)):
        with pytest.raises(UnknownShardError, match=r"division to say which ranks hold the rest"):
            _ = shard.division


def test_a_shard_that_is_assigned_when_it_is_asked_for() -> None:
    params = [torch.zeros(2, 3) for _ in range(2)]
    calls = []

    def read() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise RuntimeError("not yet")
        if len(calls) > 2:
            for param in params:
                assign(param, Shard((4, 3), (2, 3)))

    assign(params[0], Shard((9, 3), (2, 3)))
    assign_later(params, read)
    assert calls == []
    with pytest.raises(RuntimeError, match="not yet"):
        shard_of(params[0])
    assert assigned(params[0]) is None
    assert [shard_of(param).global_shape for param in params] == [(4, 3), (4, 3)]
    assign(params[1], Shard((5, 3), (2, 3)))
    assert shard_of(params[1]).global_shape == (5, 3)
    assert calls == [0, 1, 2]


def test_a_parameter_is_pickled_without_its_shard() -> None:
    """Frameworks put parameters into their checkpoints; a shard knows of process groups, which cannot be pickled."""
    param = Parameter(torch.arange(6.0))
    assign(param, FlatShard((2, 6), 0, 6, (6,), exchange=threading.Lock()))  # type: ignore[arg-type]
    assert assigned(pickle.loads(pickle.dumps(param))) is None
    assert assigned(copy.deepcopy(param)) in (None, assigned(param))
    assign_later([param], threading.Lock().acquire)
    assert assigned(pickle.loads(pickle.dumps(param))) is None
