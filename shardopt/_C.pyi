"""The compiled step of shardopt."""

import enum
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

class _Rule(TypedDict):
    index: int
    hyper: tuple[str, ...]
    moments: tuple[str, ...]

class _Codec(TypedDict):
    index: int
    code_bytes: int
    signed_scales: int
    unsigned_scales: int
    relative: bool

class DType(enum.IntEnum):
    float32 = ...
    bfloat16 = ...
    float16 = ...

class Phase(enum.IntEnum):
    step = ...
    relative = ...
    finish = ...

class NonFinite(enum.IntEnum):
    skip = ...
    propagate = ...

rules: dict[str, _Rule]
codecs: dict[str, _Codec]
tensor_entry: np.dtype[Any]
group_entry: np.dtype[Any]
max_block_size: int
max_moments: int
max_hyper: int
with_cuda: bool

max_rule_bytes: int  # with CUDA only, as the next two

def cuda_device_count() -> int: ...
def step_cuda(
    entries: int,
    groups: int,
    first_blocks: int,
    steps: int,
    tables: int,
    rules: int,
    grad_scale: int,
    found_inf: int,
    nonfinite: int,
    step_count: int,
    phase: Phase,
    batches: list[tuple[int, int, int, int, int]],
    stream: int,
) -> None: ...
def cpu_targets() -> list[str]: ...
def step_cpu(
    entries: npt.NDArray[Any],
    groups: npt.NDArray[Any],
    steps: npt.NDArray[np.uint64],
    tables: npt.NDArray[np.uint64],
    phase: Phase,
    threads: int,
    target: str,
) -> int: ...
