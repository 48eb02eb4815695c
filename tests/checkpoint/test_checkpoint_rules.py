"""The rules of the index, by which files have elements, against their description element by element."""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from attack.rules import box, check_rule, files_of_elements
from shardopt.checkpoint.index import StoredTensor, partition_from_json, partition_to_json

FILES = 30


def _of_grid(rng: Random) -> dict[str, Any]:
    """Cuts by a mesh of up to three dimensions, in any order, several of them perhaps of one dimension."""
    shape = [rng.randint(1, 7) for _ in range(rng.randint(1, 4))]
    ways = [rng.randint(2, 3) for _ in range(rng.randint(0, 3))]
    cuts = [[rng.randrange(len(shape)), each, math.prod(ways[i + 1 :])] for i, each in enumerate(ways)]
    rng.shuffle(cuts)
    return {"shape": shape, "cuts": cuts}


def _of_range(rng: Random) -> dict[str, Any]:
    """Ranges of a tensor, perhaps with dimensions behind; they may end before the tensor does, or long after it."""
    shape = [rng.randint(1, 6) for _ in range(rng.randint(0, 4))]
    dims = rng.randint(0, len(shape))
    numbers = [rng.randint(1, 6), rng.randint(1, 3), rng.randint(0, 40), rng.randint(1, 40), dims]
    return {"shape": shape, "range": numbers}


def _of_scales(rng: Random) -> dict[str, Any]:
    row_numel, block_size = rng.randint(1, 30), rng.randint(1, 12)
    shape = [rng.randint(1, 5), -(-row_numel // block_size), *rng.choice([[], [2]])]
    numbers = [rng.randint(1, 6), rng.randint(1, 3), rng.randint(0, 40), rng.randint(1, 60), 2]
    return {"shape": shape, "range": [*numbers, [row_numel, block_size]]}


@pytest.mark.parametrize("make", [_of_grid, _of_range, _of_scales])
def test_parts_and_holders(make: Any) -> None:
    rng = Random(make.__name__)
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
