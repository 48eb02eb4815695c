"""How ranks divide a parameter: regions and the parts of matrices in them, and shards that say which they are."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
from collections.abc import Iterator

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


def elements(region: Region) -> list[int]:
    """Indices in the flattened parameter, in the order in which the region's elements lie on their rank."""
    return [region.first + row * region.stride + col for row in range(region.rows) for col in range(region.cols)]


def intervals(end: int) -> list[tuple[int, int]]:
    """All intervals ``[a, b)`` within ``[0, end)``, one empty one included."""
    return [(0, 0), *itertools.combinations(range(end + 1), 2)]


def regions() -> Iterator[tuple[Region, int, int, int]]:
    """All regions of small parameters, with their matrices: of some columns of some rows, of any range."""
    for rows, width in itertools.product((1, 2, 4), (1, 3)):
        for (top, bottom), (left, right) in itertools.product(intervals(rows), intervals(width)):
            some, cols = bottom - top, right - left
            region = Region(top * width + left if some * cols else 0, some, cols, width)
            yield from ((region, first * width, last * width, rows * width) for first, last in intervals(rows))
    for (first, end), matrix in itertools.product(intervals(9), intervals(9)):
        yield Region(first, 1, end - first, end - first), *matrix, 9


def test_elements_within_matrices() -> None:
    """Their view of a matrix shares its memory, also where the tensor begins in the midst of its storage."""
    for region, start, end, numel in regions():
        part = region.within(start, end)
        expected = [element for element in elements(region) if start <= element < end]
        assert elements(part) == expected, f"{region} within {start} to {end}"
        assert part.numel == len(expected)
        matrix = torch.arange(-5, numel)[5 + start : 5 + end]
        view = part.of(matrix, start)
        assert view.shape == (part.rows, part.cols)
        assert view.flatten().tolist() == expected
        assert view.untyped_storage().data_ptr() == matrix.untyped_storage().data_ptr()


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
