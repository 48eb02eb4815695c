"""Who computes which matrix, and when: pure functions of the matrices, equal on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.kernels.newton_schulz import QUINTIC, NewtonSchulz
from shardopt.layout import Division, Region
from shardopt.layout.division import ranges
from shardopt.step.muon.matrices import LIVE_WAVES, Matrix, Wave, waves_of

NEWTON_SCHULZ = NewtonSchulz((QUINTIC,) * 5, 1e-7)


class Group(NamedTuple):
    """Ranks as one of them sees them: who it is does not count in comparisons."""

    name: str
    rank: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


def matrix(rows: int, cols: int, ranks: int = 1, **changed: Any) -> Matrix:
    """A matrix of a parameter by itself, in equal ranges; or whole on the only rank."""
    size, numel = -(-rows * cols // ranks), rows * cols
    regions = tuple(ranges([min(rank * size, numel) for rank in range(ranks + 1)]))
    division = Division(cast(Any, Group("all", 0)), regions) if ranks > 1 else None
    given = {"tensor": 0, "part": 0, "spec": None, "start": 0, "first": 0, "number": 0, "group": 0, "scale": 1.0}
    own = {"rows": rows, "cols": cols, "division": division, "regions": regions, "newton_schulz": NEWTON_SCHULZ}
    of_rows = {"row_decay": None, "row_ranges": ((0, 0),) * len(changed.get("regions", regions))}
    return Matrix(**{**given, **own, **of_rows, **changed})


@st.composite
def parameters(draw: st.DrawFn) -> list[Matrix]:
    """The matrices of some parameters on some ranks; some parameters are several."""
    ranks, found = draw(st.integers(1, 4)), []
    for tensor in range(draw(st.integers(1, 8))):
        part = draw(st.integers(0, 1))
        for _ in range(draw(st.integers(1, 3))):
            rows, cols = draw(st.integers(1, 40)), draw(st.integers(1, 40))
            found.append(matrix(rows, cols, ranks, tensor=tensor, part=part, number=draw(st.integers(0, 9))))
    return found


def bytes_by_rank(wave: Wave) -> list[int]:
    """Bytes of the directions of a wave: each rank's own in units of 16 bytes, and again all that an owner gathers."""
    taken = [0] * len(wave.matrices[0].regions)
    for one, owner in zip(wave.matrices, wave.owners, strict=True):
        sizes = [-(-2 * region.rows * region.cols // 256) * 256 for region in one.regions]
        for rank, size in enumerate(sizes):
            taken[rank] += size
        if one.division is not None and not one.division.is_copied:
            taken[owner] += sum(sizes)
    return taken


@settings(deadline=None)
@given(matrices=parameters(), memory=st.integers(0, 60_000))
def test_waves(matrices: list[Matrix], memory: int) -> None:
    """Every matrix once and slices whole, within the memory, in no more waves than need be, alike on all ranks."""
    waves = waves_of(matrices, memory, "cpu")
    assert sorted(id(one) for wave in waves for one in wave.matrices) == sorted(map(id, matrices))
    assert len(waves_of(matrices, 10**9, "cpu")) == 1
    limit = (memory - max(one.workspace("cpu") for one in matrices)) // LIVE_WAVES
    owner_of = {id(m): owner for wave in waves for m, owner in zip(*wave, strict=True)}
    slices = [{(one.tensor, one.part) for one in wave.matrices} for wave in waves]
    assert sum(map(len, slices)) == len(set().union(*slices))
    for wave, inside in zip(waves, slices, strict=True):
        assert list(wave.owners) == sorted(wave.owners)
        assert len(inside) == 1 or max(bytes_by_rank(wave)) <= limit, "a slice that needs more is alone"
    for before, after, inside in zip(waves, waves[1:], slices[1:], strict=False):
        fits = []
        for key in inside:  # the first slice of a wave would have been too much for the one before
            joined = (*before.matrices, *(one for one in after.matrices if (one.tensor, one.part) == key))
            fits.append(max(bytes_by_rank(Wave(joined, tuple(owner_of[id(one)] for one in joined)))) <= limit)
        assert not all(fits)
    loads = dict.fromkeys(range(len(matrices[0].regions)), 0)
    for one in matrices:
        loads[owner_of[id(one)]] += one.flops
    assert max(loads.values()) - min(loads.values()) <= max(one.flops for one in matrices)
    for rank in loads:  # nothing counts that differs between ranks: who they are, and where their parts lie
        group = cast(Any, Group("all", rank))
        own = [_as_seen(one, group, 1000 * rank + 8 * index) for index, one in enumerate(matrices)]
        assert described(waves_of(own, memory, "cpu")) == described(waves)


def described(waves: Sequence[Wave]) -> list[list[tuple[int, int, int]]]:
    return [[(m.tensor, m.start, owner) for m, owner in zip(*wave, strict=True)] for wave in waves]


def _as_seen(one: Matrix, group: Any, first: int) -> Matrix:
    division = one.division and one.division._replace(ranks=group)
    return Matrix(**{**vars(one), "division": division, "first": first})


@pytest.mark.parametrize(("ranks", "every"), [(2, 1), (2, 2), (3, 3), (4, 4), (3, 7), (4, 1)])
def test_ties_go_round(ranks: int, every: int) -> None:
    """Where each step has one matrix, as with released gradients: also if only some parameters are matrices."""
    numbers = range(0, 60 * every, every)
    owners = [waves_of([matrix(30, 20, ranks, number=number)], 10**6, "cpu")[0].owners[0] for number in numbers]
    counts = Counter(owners)
    assert len(counts) == ranks
    assert max(counts.values()) - min(counts.values()) <= 3


def test_ranks_that_differ_have_waves_of_their_own() -> None:
    regions = tuple(ranges([0, 300, 600]))
    one, other = (Division(cast(Any, Group(name, 0)), regions) for name in ("one", "other"))
    copies = Division(cast(Any, Group("one", 0)), (Region(0, 30, 20, 20),) * 2)
    divisions = [one, None, other, copies, one, None, copies]
    matrices = [
        matrix(30, 20, tensor=i, division=d, regions=d.regions if d else (Region(0, 30, 20, 20),))
        for i, d in enumerate(divisions)
    ]
    waves = waves_of(matrices, 10**9, "cpu")
    assert [sorted(m.tensor for m in wave.matrices) for wave in waves] == [[0, 4], [1, 5], [2], [3, 6]]


def test_copies_take_no_memory_twice() -> None:
    """An owner has them already: where ranges need two waves, copies need one."""
    copies = Division(cast(Any, Group("all", 0)), (Region(0, 64, 64, 64),) * 2)
    memory = LIVE_WAVES * 2 * 8192 + matrix(64, 64).workspace("cpu")
    copied = [matrix(64, 64, division=copies, regions=copies.regions, tensor=i, number=i) for i in range(2)]
    assert len(waves_of(copied, memory, "cpu")) == 1
    assert len(waves_of(copied, memory - LIVE_WAVES, "cpu")) == 2
    assert len(waves_of([matrix(64, 64, tensor=i) for i in range(2)], memory, "cpu")) == 1
