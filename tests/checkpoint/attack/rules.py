"""The rules by which an index says which file has which element, by their description alone and element by element."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Json = dict[str, Any]
Files = npt.NDArray[np.int64]

#: Elements of a tensor that is read in full; tensors of the attacks that load are far smaller.
MOST_ELEMENTS = 1 << 20


def check_rule(tensor: Json, count: int) -> None:
    """Raises ValueError if the format forbids a tensor's line in an index of ``count`` files; looks at no element."""
    shape = tensor["shape"]
    demand(sizes(shape) and len(shape) <= 64, "shape")
    if "parts" in tensor:
        demand(tensor.keys() == {"dtype", "shape", "parts"} and isinstance(tensor["parts"], list), "keys")
        for part in tensor["parts"]:
            demand(isinstance(part, list) and len(part) == 3, "a part")
            file, offsets, extents = part
            demand(sizes([file]) and file < count, "the file of a part")
            demand(sizes(offsets) and sizes(extents), "corners of a part")
            demand(len(offsets) == len(extents) == len(shape), "dimensions of a part")
            demand(all(a + b <= c for a, b, c in zip(offsets, extents, shape, strict=True)), "a part outside")
        demand(sum(math.prod(part[2]) for part in tensor["parts"]) == math.prod(shape), "parts do not fill")
        return
    steps = _checked_cuts(tensor) if "cuts" in tensor else _checked_range(tensor)
    demand(sizes([tensor["start"]]), "start")
    last = tensor["start"] + sum((ways - 1) * stride for ways, stride in steps)
    demand(0 in shape or last < count, "a file that is not listed")


def files_of_elements(tensor: Json) -> Files:
    """The number of the file of each element of a tensor that is not empty and not large; checked by `check_rule`."""
    shape = tensor["shape"]
    if "parts" in tensor:
        found = np.full(shape, -1, dtype=np.int64)
        for file, offsets, extents in tensor["parts"]:
            inside = box(offsets, extents)
            demand(bool((found[inside] == -1).all()), "parts overlap")
            found[inside] = file
        demand(bool((found >= 0).all()), "elements in no part")
        return found
    if "cuts" in tensor:
        found = np.full(shape, tensor["start"], dtype=np.int64)
        for dim, extent in enumerate(shape):
            cuts = [(ways, stride) for of, ways, stride in tensor["cuts"] if of == dim]
            along = np.array([_along(cuts, position, extent) for position in range(extent)], dtype=np.int64)
            found[...] += along.reshape([-1] + [1] * (len(shape) - dim - 1))
        return found
    ways, stride, first, size, dims = tensor["range"][:5]
    counted = shape[:dims]
    numbers = []
    for element in range(math.prod(counted)):
        place = element
        if len(tensor["range"]) == 6:
            row_numel, block_size = tensor["range"][5]
            row, block = divmod(element, shape[1])
            place = row * row_numel + block * block_size
        numbers.append(tensor["start"] + stride * min((first + place) // size, ways - 1))
    leading = np.array(numbers, dtype=np.int64).reshape(counted + [1] * (len(shape) - dims))
    return np.broadcast_to(leading, shape)


def box(offsets: Any, extents: Any) -> Any:
    """The index of a rectangle in an array, which gives a view of a scalar, too."""
    return (..., *(slice(a, a + b) for a, b in zip(offsets, extents, strict=True)))


def demand(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def sizes(value: Any) -> bool:
    """Whether a value is a list of whole numbers below 2**63."""
    return isinstance(value, list) and all(map(whole, value))


def _checked_cuts(tensor: Json) -> list[tuple[int, int]]:
    demand(tensor.keys() == {"dtype", "shape", "start", "cuts"} and isinstance(tensor["cuts"], list), "keys")
    for cut in tensor["cuts"]:
        demand(sizes(cut) and len(cut) == 3, "a cut")
        demand(cut[0] < len(tensor["shape"]) and cut[1] > 0 and cut[2] > 0, "numbers of a cut")
    return [(ways, stride) for _, ways, stride in tensor["cuts"]]


def _checked_range(tensor: Json) -> list[tuple[int, int]]:
    demand(tensor.keys() == {"dtype", "shape", "start", "range"} and isinstance(tensor["range"], list), "keys")
    numbers, block = tensor["range"][:5], tensor["range"][5:]
    demand(len(numbers) == 5 and len(block) < 2 and sizes(numbers), "a range")
    ways, stride, _, size, dims = numbers
    demand(ways > 0 and stride > 0 and size > 0 and dims <= len(tensor["shape"]), "numbers of a range")
    if block:
        demand(sizes(block[0]) and len(block[0]) == 2 and 0 not in block[0] and dims == 2, "a block")
        row_numel, block_size = block[0]
        demand(tensor["shape"][1] == (row_numel + block_size - 1) // block_size, "blocks of a row")
    return [(ways, stride)]


def _along(cuts: list[tuple[int, int]], position: int, extent: int) -> int:
    """How much the cuts of a dimension add to the file's number at a position."""
    added = 0
    for ways, stride in cuts:
        length = (extent + ways - 1) // ways
        index = position // length
        added += index * stride
        position -= index * length
        extent = min(length, extent - index * length)
    return added
