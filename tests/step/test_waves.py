"""Who computes which matrix, and when: a pure function of the matrices."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.kernels.newton_schulz import QUINTIC, NewtonSchulz
from shardopt.layout import Division, Region
from shardopt.layout.division import ranges
from shardopt.step.muon.matrices import LIVE_WAVES, Matrix, Wave, waves_of


def matrix(rows: int, cols: int, ranks: int, **own: Any) -> Matrix:
    """A matrix of a parameter by itself, in equal ranges; or whole on the only rank."""
    size, numel = -(-rows * cols // ranks), rows * cols
    regions = tuple(ranges([min(rank * size, numel) for rank in range(ranks + 1)]))
    division = Division(cast(Any, "all"), regions) if ranks > 1 else None
    given: dict[str, Any] = {"spec": None, "start": 0, "first": 0, "group": 0, "scale": 1.0, "row_decay": None}
    given |= {"division": division, "regions": regions, "newton_schulz": NewtonSchulz((QUINTIC,) * 5, 1e-7)}
    return Matrix(rows=rows, cols=cols, row_ranges=((0, 0),) * ranks, **{**given, **own})


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
        if one.division is not None:
            taken[owner] += sum(sizes)
    return taken


@settings(deadline=None)
@given(matrices=parameters(), memory=st.integers(0, 60_000))
def test_waves(matrices: list[Matrix], memory: int) -> None:
    """Every matrix once and slices whole, within the memory, in no more waves than need be; ranks have equal work."""
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


def test_ranks_that_differ_have_waves_of_their_own() -> None:
    parts, whole = tuple(ranges([0, 300, 600])), Region(0, 30, 20, 20)
    one, other = (Division(cast(Any, name), parts) for name in ("one", "other"))
    copies = Division(cast(Any, "one"), (whole, whole))
    matrices = [
        matrix(30, 20, 2, tensor=i, part=0, number=i, division=d, regions=d.regions if d else (whole,))
        for i, d in enumerate([one, None, other, copies, one, None, copies])
    ]
    waves = waves_of(matrices, 10**9, "cpu")
    assert [sorted(m.tensor for m in wave.matrices) for wave in waves] == [[0, 4], [1, 5], [2], [3, 6]]
