"""The compiled step of shardopt."""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypedDict

import numpy as np
import numpy.typing as npt

class _Rule(TypedDict):
    index: int
    hyper: tuple[str, ...]
    moments: tuple[str, ...]
    sums: int
    totals: bool
    repays: bool
    shares_codes: bool

class _Codec(TypedDict):
    index: int
    code_bytes: int
    signed_scales: int
    unsigned_scales: int
    relative: bool
    shared: bool

class DType(enum.IntEnum):
    float32 = ...
    bfloat16 = ...
    float16 = ...

class WeightFormat(enum.IntEnum):
    float32 = ...
    bfloat16 = ...
    float16 = ...
    bfloat16_plus8 = ...
    bfloat16_plus16 = ...
    bfloat16_stochastic = ...
    float16_plus8 = ...
    float16_plus16 = ...

class Phase(enum.IntEnum):
    sums = ...
    step = ...
    relative = ...
    finish = ...

class NormPass(enum.IntEnum):
    squares = ...
    largest = ...
    scale = ...

class NonFinite(enum.IntEnum):
    skip = ...
    propagate = ...

rules: dict[str, _Rule]
codecs: dict[str, _Codec]
kernel_row: np.dtype[Any]
group_row: np.dtype[Any]
max_block_size: int
max_moments: int
max_hyper: int
sum_lowest_bit: int
sum_words: int
with_cuda: bool

# With CUDA only, up to unpin_cuda.
cuda_prepared_bytes: int
cuda_launched_gradients: int
cuda_norm_task: int

def cuda_device_count() -> int: ...
def cuda_tasks(
    kernel_rows: npt.NDArray[Any], groups: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]: ...
def copy_cuda(
    device: int,
    to: npt.NDArray[np.uint64],
    source: npt.NDArray[np.uint64],
    nbytes: npt.NDArray[np.int64],
    stream: int,
) -> None: ...
def step_cuda(
    device: int,
    kernel_rows: int,
    gradients: int,
    groups: int,
    tasks: int,
    steps: int,
    tables: int,
    prepared: int,
    grad_scale: int,
    factor: int,
    found_inf: int,
    nonfinite: int,
    row_count: int,
    step_count: int,
    phase: Phase,
    batches: npt.NDArray[Any],
    stream: int,
) -> None: ...
def norm_cuda(
    kernel_rows: int, tasks: int, task_count: int, norm_pass: NormPass, factor: int, device: int, stream: int
) -> None: ...
def clip_cuda(words: int, is_magnitude: bool, max_norm: float, clip: int, device: int, stream: int) -> None: ...
def pin_cuda(device: int, address: int, nbytes: int) -> int: ...
def unpin_cuda(device: int, address: int) -> None: ...
def cpu_targets() -> list[str]: ...
def power(base: float, exponent: float) -> float: ...
def sum_value(words: npt.NDArray[np.int64]) -> float: ...
def norm(kernel_rows: npt.NDArray[Any], norm_pass: NormPass, factor: float, threads: int, target: str) -> None: ...
def clip(words: int, is_magnitude: bool, max_norm: float, clip: int) -> None: ...

class CpuStep:
    """Steps of the same kernel rows on the CPU."""

    def __init__(
        self, kernel_rows: npt.NDArray[Any], steps: npt.NDArray[np.uint64], tables: npt.NDArray[np.uint64]
    ) -> None: ...
    def prepare(self, groups: npt.NDArray[Any], threads: int, target: str) -> None: ...
    def run(self, phase: Phase) -> int: ...

def increment_versions(tensors: list[Any]) -> None:
    """torch.autograd.graph.increment_version of each tensor."""

class Inputs:
    """The tensors that a cached kernel table points to."""

    no_gradient: ClassVar[int]
    strided: ClassVar[int]

    def __init__(
        self,
        param_groups: list[Any],
        state: Mapping[Any, Any],
        shards: list[Any],
        entries: list[frozenset[str] | None],
        shard_of: Callable[[Any], object],
        read_gradient: Callable[[int, Any], object],
    ) -> None: ...
    def read(
        self, param_groups: Sequence[Any], state: Mapping[Any, Any], parts: Mapping[int, Any] | None
    ) -> tuple[list[Any], list[Any]] | None: ...
    def gradient_kinds(self) -> bytes: ...
    def changed_groups(self, param_groups: Sequence[Any]) -> dict[int, float | None] | None: ...
    def fill(self, rows: npt.NDArray[Any], tensors: npt.NDArray[np.int64], elements: npt.NDArray[np.int64]) -> bool: ...
