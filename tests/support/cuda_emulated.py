"""The CUDA kernels on the CPU, called as on a GPU; here their source is built by the host compiler."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pybind11
import pytest
import torch
from torch import Tensor

import shardopt
from helpers import Named, at_odd_offset
from kernel_problem import run
from ranks.snapshot import assert_same
from shardopt import _C, clip_grad_norm_
from shardopt.kernels import dispatch_cuda, norms
from shardopt.step import batch, gradient_norm

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("tests/kernels/cuda_emulation/emulate.cpp", "csrc/bindings_cuda.cpp", "csrc/step/cuda_tasks.cpp")
NAMES = ("cuda_tasks", "step_cuda", "norm_cuda", "cuda_norm_task", "cuda_prepared_bytes", "cuda_launched_gradients")
EXACT = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")


def build(folder: Path) -> ModuleType:
    """A stand-in for the CUDA part of ``shardopt._C``, built in the folder."""
    compiler = os.environ.get("CXX", "c++")
    library = folder / "cuda_emulated.so"
    headers = ["tests/kernels/cuda_emulation", "csrc", pybind11.get_include(), sysconfig.get_paths()["include"]]
    # -O0: at -O1 the compiler takes half a minute more, and the tests ten seconds less.
    # Types under names of their own: a build with CUDA has registered those of the real ones with NumPy.
    renamed = ["-DCudaTask=EmulatedCudaTask"]
    flags = [*renamed, "-std=c++17", "-O0", *EXACT, "-fPIC", "-shared", "-fvisibility=hidden", "-Wno-unknown-pragmas"]
    command = [compiler, *flags, *(f"-I{h}" for h in headers), *SOURCES, "-o", str(library)]
    subprocess.run(command, cwd=ROOT, check=True)
    spec = importlib.util.spec_from_file_location("cuda_emulated", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def use(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets optimizers step tensors on the CPU as if they were on a GPU."""
    for name in NAMES:
        monkeypatch.setattr(_C, name, getattr(module, name), raising=False)
    monkeypatch.setattr(dispatch_cuda, "_pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(dispatch_cuda, "_on", lambda table, device: table.clone())
    monkeypatch.setattr(dispatch_cuda, "_is_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(batch, "make_call", dispatch_cuda.CudaCall)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(norms, "_pinned", lambda table: torch.from_numpy(table.reshape(-1).view(np.uint8)))
    monkeypatch.setattr(gradient_norm, "make_norm_call", norms.CudaNormCall)


def clipped(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Norms, clipped gradients, and parameters and moments after a step that clips."""
    found = []
    for late in (False, True):
        params = [torch.nn.Parameter(torch.ones_like(gradient)) for gradient in gradients]
        optimizer = shardopt.SGD8bit(params, lr=0.5, momentum=0.9)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = at_odd_offset(gradient) if gradient.storage_offset() else gradient.clone()
        found += [clip_grad_norm_(params, 0.5, kind, optimizer=optimizer if late else None) for kind in (math.inf, 2.0)]
        if late:
            optimizer.step()
        found += [param.detach() if late else param.grad for param in params]
    return found


def compare(module: ModuleType, rule: str, codec: str, initial: Named, steps: list[Named], **options: object) -> None:
    """Steps optimizers on the CPU and as if on a GPU: parameters, state and skipped elements have the same bits."""
    wanted, wanted_skips = run(rule, codec, initial, steps, **options)
    with pytest.MonkeyPatch.context() as monkeypatch:
        use(module, monkeypatch)
        actual, skips = run(rule, codec, initial, steps, **options)
    assert_same(actual, wanted)
    assert skips == wanted_skips
