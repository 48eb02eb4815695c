"""The mathematics below a checkpoint, against plain counting: rectangles that fill a tensor, rules, digests."""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from typing import Any

import numpy as np
import pytest
import torch

from attack.rules import box, check_rule, files_of_elements
from checkpoint_folder import values_of
from shardopt.checkpoint.copies import digest
from shardopt.checkpoint.index import StoredTensor, partition_from_json, partition_to_json
from shardopt.checkpoint.rectangles import Rectangle, fill

FILES = 30


def _counted(shape: list[int], rectangles: list[Rectangle]) -> bool:
    count = np.zeros(shape, dtype=int)
    for offsets, extents in rectangles:
        if any(o < 0 or o + e > s for o, e, s in zip(offsets, extents, shape, strict=True)):
            return False
        count[box(offsets, extents)] += 1
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


def test_rectangles_against_counting() -> None:
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


def test_many_staggered_columns() -> None:
    """Each of 30,000 columns is cut once, at an index of its own: each upper part lies beside all the others."""
    count = 30_000
    upper = [((0, i), (i + 1, 1)) for i in range(count)]
    columns = upper + [((i + 1, i), (count - i, 1)) for i in range(count)]
    rectangles: list[Rectangle] = random.Random(0).sample(columns, len(columns))
    shape = (count + 1, count)
    begin = time.process_time()
    assert fill(shape, rectangles)
    place = rectangles.index(next(each for each in rectangles if each[0] == (0, 0)))
    rectangles[place] = (0, 1), rectangles[place][1]  # in the next column
    assert not fill(shape, rectangles)
    assert time.process_time() - begin < 6  # 0.5 s; comparing each with each takes 20 s


@pytest.mark.parametrize(
    ("shape", "rectangles", "expected"),
    [
        ((), [((), ())], True),
        ((), [], False),
        ((0, 3), [], True),
        ((0, 3), [((0, 4), (0, 3))], False),
        ((2, 3), [((0, 0), (2, 3)), ((2, 0), (0, 3))], True),
        ((2, 3), [((0,), (6,))], False),
        ((2, 3), [((0, 0), (2, -3))], False),
        ((1 << 40,) * 9, [((i << 39, *(0,) * 8), (1 << 39, *(1 << 40,) * 8)) for i in range(2)], True),
        ((2**62, 2), [((0, 0), (2**62, 1)), ((0, 1), (2**62, 1))], True),
    ],
)
def test_odd_rectangles(shape: tuple[int, ...], rectangles: list[Rectangle], expected: bool) -> None:
    assert fill(shape, rectangles) == expected


def _of_grid(rng: random.Random) -> dict[str, Any]:
    """Cuts by a mesh of up to three dimensions, in any order, several of them perhaps of one dimension."""
    shape = [rng.randint(1, 7) for _ in range(rng.randint(1, 4))]
    ways = [rng.randint(2, 3) for _ in range(rng.randint(0, 3))]
    cuts = [[rng.randrange(len(shape)), each, math.prod(ways[i + 1 :])] for i, each in enumerate(ways)]
    rng.shuffle(cuts)
    return {"shape": shape, "cuts": cuts}


def _of_range(rng: random.Random) -> dict[str, Any]:
    """Ranges of a tensor, perhaps with dimensions behind; they may end before the tensor does, or long after it."""
    shape = [rng.randint(1, 6) for _ in range(rng.randint(0, 4))]
    dims = rng.randint(0, len(shape))
    numbers = [rng.randint(1, 6), rng.randint(1, 3), rng.randint(0, 40), rng.randint(1, 40), dims]
    return {"shape": shape, "range": numbers}


def _of_scales(rng: random.Random) -> dict[str, Any]:
    row_numel, block_size = rng.randint(1, 30), rng.randint(1, 12)
    shape = [rng.randint(1, 5), -(-row_numel // block_size), *rng.choice([[], [2]])]
    numbers = [rng.randint(1, 6), rng.randint(1, 3), rng.randint(0, 40), rng.randint(1, 60), 2]
    return {"shape": shape, "range": [*numbers, [row_numel, block_size]]}


@pytest.mark.parametrize("make", [_of_grid, _of_range, _of_scales])
def test_rules_against_their_description(make: Any) -> None:
    """By which files have elements; element by element."""
    rng = random.Random(make.__name__)
    for _ in range(100):
        line = {"dtype": "float32", "start": rng.randrange(3), **make(rng)}
        check_rule(line, FILES)
        shape, start, files = tuple(line["shape"]), line["start"], files_of_elements(line)
        partition = partition_from_json(line, shape, FILES - start)
        assert json.loads(json.dumps(partition_to_json(partition))).items() <= line.items()
        stored = StoredTensor(torch.float32, shape, start, partition)
        for file in range(start, FILES):
            found = np.zeros(shape, dtype=np.int64)
            for part in partition.parts(shape, file - start):
                found[box(*part)] += 1
            assert (found == (files == file)).all(), (line, file)
        for _ in range(20):
            low = [rng.randrange(extent) for extent in shape]
            extents = tuple(rng.randint(1, extent - a) for a, extent in zip(low, shape, strict=True))
            part = (tuple(low), extents)
            assert stored.files_of(part) == np.unique(files[box(*part)]).tolist(), (line, part)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8], ids=str)
def test_each_flipped_bit_and_each_pair_of_them_changes_a_digest(dtype: torch.dtype) -> None:
    tensor = values_of((7,), dtype)

    def flipped(bit: int, *elements: int) -> int:
        data = tensor.clone()
        for element in elements:
            data.view(torch.uint8).view(len(tensor), -1)[element, bit // 8] ^= 1 << bit % 8
        return digest(data)

    found = [digest(tensor)]
    for bit in range(8 * dtype.itemsize):
        found += [flipped(bit, element) for element in range(len(tensor))]
        found += [flipped(bit, *pair) for pair in itertools.combinations(range(len(tensor)), 2)]
    assert len(set(found)) == len(found)


def test_digests_of_large_tensors() -> None:
    """Signs of columns, rows or all elements, and exchanged parts, in tensors of several sums; wherever they lie."""
    tensor = torch.ones(3 << 15, 64, dtype=torch.float32)
    others = [tensor, -tensor]
    for step in (2, 4, 8):
        signs = torch.where(torch.arange(3 << 15) % step == step - 1, -1.0, 1.0)
        others += [tensor * signs[:, None], tensor * signs[:64]]
    numbers = torch.arange(3 << 20)
    others += [numbers, *(numbers.roll(by) for by in (1, 1 << 20, 1 << 16)), numbers[:-1], numbers.float()]
    assert len({digest(each) for each in others}) == len(others)
    for length in (0, 1, 7, 8, 9, 1000, (8 << 16) + 11):
        data = values_of((length + 3,), torch.uint8)
        assert digest(data[3:]) == digest(data[3:].clone())
        assert digest(data[::2]) == digest(data[::2].clone())
