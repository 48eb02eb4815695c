"""A step takes the memory of the codes and of one chunk: state in full never exists, not in the first step either."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardopt import quantize_state
from shardopt.state import slice_spec
from shardopt.wrapper.chunks import BYTES_PER_ELEMENT
from wrapped import ELEMENTWISE

COUNT, SHAPE = 16, (64, 256)

#: Temporaries of the codec: for one entry of one parameter, or a strip of it.
CODING_PER_ELEMENT = 64
CODING = CODING_PER_ELEMENT * math.prod(SHAPE)


class Allocations(TorchDispatchMode):
    """Counts the bytes of all storages that operators make inside, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @property
    def live(self) -> int:
        self._live = {key: each for key, each in self._live.items() if not each[0].expired()}
        return sum(nbytes for _, nbytes in self._live.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:
                storage = x.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.live)
        return result


def problem() -> list[Parameter]:
    params = [Parameter(torch.zeros(SHAPE)) for _ in range(COUNT)]
    for param in params:
        param.grad = torch.randn(SHAPE)
    return params


def test_what_is_counted() -> None:
    x = torch.zeros(1000)
    with Allocations() as allocations:
        y = x + 1
        y += (x * 2)[:10].sum()
        z = y[:10]
    assert allocations.peak == 8000 + 4
    del y
    assert allocations.live == 4000
    del z
    assert allocations.live == 0


def working_memory(chunk: int) -> int:
    return chunk * BYTES_PER_ELEMENT * math.prod(SHAPE)


@pytest.mark.parametrize("name", ["torch AdamW foreach", "torch AdamW amsgrad", "torch SGD momentum"])
@pytest.mark.parametrize("chunk", [1, 4])
def test_peak(name: str, chunk: int) -> None:
    params = problem()
    optimizer = quantize_state(ELEMENTWISE[name](params), working_memory=working_memory(chunk))
    with Allocations() as first:
        optimizer.step()
    codes = first.live
    moments = {"torch AdamW amsgrad": 3, "torch SGD momentum": 1}.get(name, 2)
    assert codes < 1.15 * moments * COUNT * math.prod(SHAPE)
    assert first.peak <= codes + working_memory(chunk) + CODING
    with Allocations() as second:
        optimizer.step()
    assert second.live < 1000 * COUNT  # codes and scales stay where they are
    assert second.peak <= working_memory(chunk) + CODING


def test_coding_takes_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large a parameter is, its codes are computed for so many elements at a time."""
    monkeypatch.setattr(slice_spec, "CODED_AT_A_TIME", 1 << 14)
    param = Parameter(torch.zeros(64, 4096))
    param.grad = torch.randn(64, 4096)
    optimizer = quantize_state(torch.optim.AdamW([param]))
    optimizer.step()
    with Allocations() as allocations:
        optimizer.step()
    assert allocations.peak < BYTES_PER_ELEMENT * param.numel() + CODING_PER_ELEMENT * (1 << 14)


def test_loading_takes_one_chunk_more() -> None:
    make = ELEMENTWISE["torch AdamW foreach"]
    bare = make(problem())
    bare.step()
    saved = bare.state_dict()
    optimizer = quantize_state(make(problem()), working_memory=0)
    with Allocations() as allocations:
        optimizer.load_state_dict(saved)
    assert allocations.live < 1.15 * 2 * COUNT * math.prod(SHAPE)
    assert allocations.peak <= allocations.live + working_memory(1) + CODING
