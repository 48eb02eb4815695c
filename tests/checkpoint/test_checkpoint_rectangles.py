"""Whether rectangles fill a tensor, against counting every element."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from shardopt.checkpoint.rectangles import Rectangle, fill


def _counted(shape: list[int], rectangles: list[Rectangle]) -> bool:
    count = np.zeros(shape, dtype=int)
    for offsets, extents in rectangles:
        if any(o < 0 or o + e > s for o, e, s in zip(offsets, extents, shape, strict=True)):
            return False
        count[tuple(slice(o, o + e) for o, e in zip(offsets, extents, strict=True))] += 1
    return bool((count == 1).all())


def _cut_up(rng: random.Random, shape: list[int]) -> list[Rectangle]:
    """Rectangles that fill the shape, cut anywhere."""
    rectangles: list[Rectangle] = [((0,) * len(shape), tuple(shape))]
    for _ in range(rng.randint(0, 6)):
        index, dim = rng.randrange(len(rectangles)), rng.randrange(len(shape))
        offsets, extents = rectangles[index]
        if extents[dim] < 2:
            continue
        at = rng.randint(1, extents[dim] - 1)
        lower, upper, begin = list(extents), list(extents), list(offsets)
        lower[dim], upper[dim], begin[dim] = at, extents[dim] - at, offsets[dim] + at
        rectangles[index : index + 1] = [(offsets, tuple(lower)), (tuple(begin), tuple(upper))]
    return rectangles


def _moved(rng: random.Random, rectangle: Rectangle) -> Rectangle:
    """A rectangle that is one longer, shorter, or further on."""
    numbers = [list(rectangle[0]), list(rectangle[1])]
    which, dim = rng.randrange(2), rng.randrange(len(rectangle[0]))
    numbers[which][dim] += rng.choice([-1, 1])
    numbers[1] = [max(extent, 0) for extent in numbers[1]]
    return tuple(numbers[0]), tuple(numbers[1])


def test_against_counting() -> None:
    rng = random.Random(0)
    found = {True: 0, False: 0}
    for _ in range(4000):
        shape = [rng.randint(1, 5) for _ in range(rng.choice([1, 2, 2, 3, 3, 4, 5]))]
        rectangles = _cut_up(rng, shape)
        for _ in range(rng.choice([0, 0, 1, 2])):
            index = rng.randrange(len(rectangles))
            rectangles[index] = _moved(rng, rectangles[index])
        rng.shuffle(rectangles)
        expected = _counted(shape, rectangles)
        assert fill(shape, rectangles) == expected, (shape, rectangles)
        found[expected] += 1
    assert min(found.values()) > 500


@pytest.mark.parametrize("is_turned", [False, True])
def test_many_staggered_columns(is_turned: bool) -> None:
    """Each of 30,000 columns is cut once, at an index of its own: each upper part lies beside all the others."""
    count = 30_000
    upper = [((0, i), (i + 1, 1)) for i in range(count)]
    columns = upper + [((i + 1, i), (count - i, 1)) for i in range(count)]
    rectangles: list[Rectangle] = [(o[::-1], e[::-1]) if is_turned else (o, e) for o, e in columns]
    random.Random(0).shuffle(rectangles)
    shape = (count, count + 1) if is_turned else (count + 1, count)
    begin = time.process_time()
    assert fill(shape, rectangles)
    place = rectangles.index(next(each for each in rectangles if each[0] == (0, 0)))
    rectangles[place] = ((1, 0) if is_turned else (0, 1)), rectangles[place][1]  # in the next column
    assert not fill(shape, rectangles)
    assert time.process_time() - begin < 6  # 0.5 s; comparing each with each takes 20 s


@pytest.mark.parametrize(
    ("shape", "rectangles", "expected"),
    [
        ((), [((), ())], True),
        ((), [], False),
        ((0, 3), [], True),
        ((0, 3), [((0, 0), (0, 3))], True),
        ((0, 3), [((0, 4), (0, 3))], False),
        ((2, 3), [((0, 0), (2, 3)), ((2, 0), (0, 3))], True),
        ((2, 3), [((0, 0), (3, 2))], False),
        ((2, 3), [((0,), (6,))], False),
        ((2, 3), [((0, 0), (2, -3))], False),
        ((4,), [((0,), (2,)), ((0,), (2,))], False),
        (
            (1 << 40,) * 10,
            [((0,) * 10, (1 << 39, *(1 << 40,) * 9)), ((1 << 39, *(0,) * 9), (1 << 39, *(1 << 40,) * 9))],
            True,
        ),
        ((2**62, 2), [((0, 0), (2**62, 1)), ((0, 1), (2**62, 1))], True),
    ],
)
def test_odd_cases(shape: tuple[int, ...], rectangles: list[Rectangle], expected: bool) -> None:
    assert fill(shape, rectangles) == expected
