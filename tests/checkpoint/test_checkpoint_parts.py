"""The mathematics below a checkpoint, against plain counting: rectangles that fill a tensor, and rules."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from attack.index_file import read_index, write_index
from attack.recut import recut
from attack.rules import check_rule, files_of_elements
from checkpoint_folder import values_of
from shardopt.checkpoint import CheckpointError, load, read_header, save

FILES = 30

#: Offsets and extents.
Rectangle = tuple[list[int], list[int]]


def _cut_up(rng: random.Random, shape: list[int]) -> list[Rectangle]:
    """Rectangles that fill the shape, cut anywhere."""
    rectangles: list[Rectangle] = [([0] * len(shape), list(shape))]
    for _ in range(rng.randint(0, 6) if shape else 0):
        index, dim = rng.randrange(len(rectangles)), rng.randrange(len(shape))
        offsets, extents = rectangles[index]
        if extents[dim] < 2:
            continue
        at = rng.randint(1, extents[dim] - 1)
        lower, upper, begin = list(extents), list(extents), list(offsets)
        lower[dim], upper[dim], begin[dim] = at, extents[dim] - at, offsets[dim] + at
        rectangles[index : index + 1] = [(offsets, lower), (begin, upper)]
    return rectangles


def _in_parts(shape: list[int], rectangles: list[Rectangle]) -> dict[str, Any]:
    return {"dtype": "uint8", "shape": shape, "parts": [[0, *rectangle] for rectangle in rectangles]}


def _accepts(folder: Path, content: dict[str, Any], line: dict[str, Any]) -> bool:
    """Whether an index may have this line."""
    write_index(folder, {**content, "tensors": {**content["tensors"], "extra.x": line}})
    try:
        read_header(folder)
    except CheckpointError:
        return False
    return True


@pytest.fixture
def index(tmp_path: Path) -> dict[str, Any]:
    """The index of a checkpoint in tmp_path, with room for another tensor of 10,000 bytes."""
    save(tmp_path, nn.Linear(2, 1), room=torch.ones(2500))
    content = read_index(tmp_path)
    del content["tensors"]["extra.room"]
    return content


def test_rectangles_against_counting(tmp_path: Path, index: dict[str, Any]) -> None:
    """Some are one longer, shorter, or further on."""
    rng = random.Random(0)
    found = {True: 0, False: 0}
    for _ in range(500):
        shape = [rng.choice([0, 1, 2, 3, 4, 5]) for _ in range(rng.choice([0, 1, 2, 2, 3, 3, 4, 5]))]
        rectangles = _cut_up(rng, shape)
        for _ in range(rng.choice([0, 0, 1, 2]) if shape else 0):
            corner = rng.choice(rng.choice(rectangles))
            corner[rng.randrange(len(shape))] += rng.choice([-1, 1])
        rng.shuffle(rectangles)
        line = _in_parts(shape, rectangles)
        try:
            check_rule(line, 1)
            files_of_elements(line)
            expected = True
        except ValueError:
            expected = False
        assert _accepts(tmp_path, index, line) == expected, line
        found[expected] += 1
    assert min(found.values()) > 100


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
def test_rules_against_their_description(tmp_path: Path, make: Any) -> None:
    """Each element is in the file where the description, element by element, has it; and is found there."""
    rng = random.Random(make.__name__)
    lines = {f"extra.{number}": {"start": rng.randrange(3), **make(rng)} for number in range(100)}
    tensors = {name: values_of(line.pop("shape"), torch.uint8, seed) for seed, (name, line) in enumerate(lines.items())}
    save(tmp_path, nn.Identity(), **{name.removeprefix("extra."): tensor for name, tensor in tensors.items()})
    recut(tmp_path, FILES, lambda content, name, number: lines[name])
    found = load(tmp_path, nn.Identity()).extra
    for name, tensor in tensors.items():
        assert torch.equal(found[name.removeprefix("extra.")], tensor), (name, tensor.shape, lines[name])
