"""Models with optimizers to save and to load into, and fingerprints of all their bits."""

from __future__ import annotations

import os
import struct
import time
import warnings
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import shardopt
from ranks.layouts import values
from shardopt.checkpoint import Loaded
from shardopt.optim import ShardedOptimizer


class Small(nn.Module):
    """Quantized matrices of two dtypes, a vector, a matrix of one row, a frozen parameter and buffers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(values((33, 200), seed))
        self.square = nn.Parameter(values((64, 64), seed + 1))
        self.brain = nn.Parameter(values((16, 512), seed + 2).bfloat16())
        self.bias = nn.Parameter(values((33,), seed + 3))
        self.frozen = nn.Parameter(values((4, 4), seed + 4), requires_grad=False)
        self.register_buffer("mean", values((5,), seed + 5))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("scratch", values((5,), 6), persistent=False)  # not saved


class Content(NamedTuple):
    """A model and its optimizer."""

    model: Small
    optimizer: ShardedOptimizer

    def fingerprint(self) -> Hashable:
        """Equal if and only if all bits are: of model, optimizer and the tensors that no state dict has."""
        buffers = dict(self.model.named_buffers())
        return fingerprint([self.model.state_dict(), buffers, self.optimizer.state_dict()])

    def difference(self, other: Hashable) -> str:
        """Where a fingerprint differs from another one of the same kind; empty if nowhere."""
        return difference(self.fingerprint(), other)

    def save(
        self, folder: Path | str, extra: Mapping[str, Any], *, asynchronously: bool = False, staging: Path | None = None
    ) -> None:
        """Saves into a folder. ``extra`` may have ``keep_last``."""
        if asynchronously:
            shardopt.checkpoint.async_save(folder, self.model, self.optimizer, staging_dir=staging, **extra).result()
        else:
            shardopt.checkpoint.save(folder, self.model, self.optimizer, **extra)

    def load(self, folder: Path | str) -> Loaded:
        return shardopt.checkpoint.load(folder, self.model, self.optimizer)


def content(seed: int, steps: int = 2) -> Content:
    """Weights and state filled from a seed, in two param groups with different learning rates."""
    torch.set_num_threads(1)  # a process with other threads cannot be forked safely
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    model = Small(1000 * seed)
    groups = [
        {"params": [model.weight, model.brain, model.bias], "lr": 0.01 + 0.001 * seed},
        {"params": [model.square], "lr": 0.02 + 0.001 * seed, "weight_decay": 0.125},
    ]
    optimizer = shardopt.AdamW8bit(groups, master_weight_bits=24)
    for step in range(steps):
        for index, param in enumerate(p for p in model.parameters() if p.requires_grad):
            param.grad = values(tuple(param.shape), 1000 * seed + 10 * step + index, param.dtype)
        optimizer.step()
        optimizer.zero_grad()
    return Content(model, optimizer)


class Known:
    """The contents of the first seeds, of which a folder holds one, and something else to load into."""

    def __init__(self, count: int) -> None:
        self.contents = [content(k) for k in range(count)]
        self.prints = [content.fingerprint() for content in self.contents]
        self.target = content(99)

    def save(
        self, folder: Path | str, k: int, *, asynchronously: bool = False, staging: Path | None = None, **extra: Any
    ) -> None:
        self.contents[k].save(folder, {"k": k, **extra}, asynchronously=asynchronously, staging=staging)

    def load(self, folder: Path | str) -> tuple[int | None, dict[str, Any]]:
        """The content that was loaded into the target, and the extra values; None for no whole content."""
        extra = self.target.load(folder).extra
        k = self.loaded()
        return (k if k == extra["k"] else None), extra

    def loaded(self) -> int | None:
        """The content that the target has."""
        found = self.target.fingerprint()
        return self.prints.index(found) if found in self.prints else None


def fingerprint(value: Any) -> Hashable:
    """A value's types and bits, NaNs included; of a dict, the order of the keys does not count."""
    if isinstance(value, Tensor):
        bits = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return ("tensor", str(value.dtype), tuple(value.shape), bits)
    if isinstance(value, Mapping):
        items = ((f"{type(key).__name__} {key!s}", fingerprint(item)) for key, item in value.items())
        return ("dict", tuple(sorted(items, key=lambda item: item[0])))
    if isinstance(value, list | tuple):
        return (type(value).__name__, tuple(fingerprint(item) for item in value))
    if isinstance(value, float):
        return ("float", struct.pack("<d", value) if value == value else b"nan")
    return (type(value).__name__, value)


def difference(got: Any, expected: Any, place: str = "") -> str:
    """The first place where two fingerprints differ; empty if there is none."""
    if got == expected:
        return ""
    nested = got[0] == expected[0] in ("dict", "list", "tuple") and len(got[1]) == len(expected[1])
    if not nested:
        shown = [repr(x[:3] if x[0] == "tensor" else x)[:100] for x in (got, expected)]
        return f"{place}: got {shown[0]}, expected {shown[1]}"
    for index, (one, other) in enumerate(zip(got[1], expected[1], strict=True)):
        if got[0] == "dict" and one[0] != other[0]:
            return f"{place}: got {one[0]}, expected {other[0]}"
        name, pair = (one[0], (one[1], other[1])) if got[0] == "dict" else (str(index), (one, other))
        if found := difference(*pair, f"{place}/{name}"):
            return found
    raise AssertionError("unequal and equal")


def has_one_thread() -> bool:
    """Whether the process has no other threads, those of C++ included, on Linux: Python's may end a moment later."""
    deadline = time.monotonic() + 5
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
