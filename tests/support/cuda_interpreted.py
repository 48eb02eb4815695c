"""The CUDA kernels as nvcc compiles them, run by the interpreter of PTX in tests/ptx, whose README says how."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pybind11
import pytest
import torch
from filelock import FileLock
from torch import Tensor

import kernel_problem
from helpers import Named
from ranks.snapshot import assert_same
from shardopt import _C
from shardopt.kernels import dispatch_cuda, norms
from shardopt.step import batch, gradient_norm

ROOT = Path(__file__).resolve().parents[2]
INTERPRETER = ROOT / "tests/ptx"
KERNELS = ("csrc/step/cuda", "csrc/step/cuda_rules", "csrc/step/cuda_sum_rules", "csrc/norm/cuda")
HOST = ("csrc/bindings_cuda.cpp", "csrc/step/cuda_tasks.cpp")
#: sm_80 and sm_90 have the same PTX, and so have those from sm_100 on.
ARCHS = ("75", "90", "120")
#: As nvcc compiles the kernels for an architecture, and with the interpreter's options.
KINDS: dict[str, tuple[str, dict[str, object]]] = {f"ptx{arch}": (arch, {}) for arch in ARCHS}
#: Warps interrupt each other, diverged lanes go on in any order, approximations are as wrong as they may be.
KINDS["ptx90-adverse"] = ("90", {"turn": 50, "any_path": True, "any_order": True, "approximate": "random"})
BUILD = ROOT / "build/ptx"
#: Names in ``shardopt._C`` that the interpreter replaces.
NAMES = ("cuda_tasks", "step_cuda", "norm_cuda", "cuda_norm_task", "cuda_prepared_bytes", "cuda_launched_gradients")
# -fno-gnu-unique: each architecture's module has variables of its own.
FLAGS = ("-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-Wno-unknown-pragmas")
EXACT = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno")


def has_nvcc() -> bool:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin" if home else None) is not None


def ptx_of(kernel_object: Path, arch: str) -> str | None:
    """PTX for an architecture in an object of nvcc, which has it as text if it was made with --no-compress."""
    for text in re.findall(rb"\.version [^\0]*", kernel_object.read_bytes()):
        if re.search(rb"^\.target sm_%b\b" % arch.encode(), text, re.MULTILINE):
            return str(text.decode())
    return None


@cache
def build(arch: str, few: bool) -> ModuleType:
    """The CUDA part of ``shardopt._C`` for a virtual architecture; ``ptx`` has the modules' texts.

    Args:
        arch: one of :data:`ARCHS`.
        few: half of the kernels will do (csrc/step/instances.h).
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    kept = [Path(sys.prefix) / "objects" / f"{name}.cu.o" for name in KERNELS]
    with FileLock(BUILD / f"lock-{arch}"):
        has_kept = all(path.exists() and path.stat().st_mtime > _changed() and ptx_of(path, arch) for path in kept)
        defined = "-DSHARDOPT_FEW_KERNELS" if few and not has_kept else ""
        objects = kept if has_kept else _kernel_objects(arch, defined)
    with FileLock(BUILD / "lock"):
        library = _link(arch, objects, defined)
    texts = [ptx_of(path, arch) for path in objects]
    spec = importlib.util.spec_from_file_location("cuda_interpreted", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ptx = texts
    module.arch = arch
    module.options = {}
    module.load(texts)
    return module


def _digest(paths: Iterable[Path], *settings: str) -> str:
    digest = hashlib.sha256("\0".join(settings).encode())
    for path in sorted(paths):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _sources() -> list[Path]:
    """The sources of the CUDA part: csrc without files that only the CPU's kernels include."""
    found = (path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    return [path for path in found if not path.name.startswith(("cpu", "lanes", "bindings.cpp"))]


def _changed() -> float:
    return max(path.stat().st_mtime for path in _sources())


def _kernel_objects(arch: str, defined: str) -> list[Path]:
    """The kernels' objects, compiled once for the same sources."""
    settings = {"SHARDOPT_CUDA": "1", "SHARDOPT_CUDA_ARCHS": f"{arch}-virtual"}
    settings["NVCC_APPEND_FLAGS"] = f"--no-compress {defined}"
    with mock.patch.dict(os.environ, settings), mock.patch("setuptools.setup"):
        toolkit = runpy.run_path(str(ROOT / "setup.py"))["toolkit"]
        version = subprocess.run([toolkit.nvcc, "--version"], capture_output=True, text=True, check=True).stdout
        folder = BUILD / f"kernels-{_digest([*_sources(), ROOT / 'setup.py'], arch, defined, version)}"

        def compile_kernels(name: str) -> Path:
            path = folder / f"{name}.cu.o"
            if not path.exists():
                made = path.with_suffix(".new.o")
                toolkit.compile(str(ROOT / f"{name}.cu"), made, str(ROOT / "csrc"))
                made.rename(path)
            return path

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(compile_kernels, KERNELS))


def _link(arch: str, kernel_objects: list[Path], defined: str) -> Path:
    """The extension, of the kernels' objects, the host's part and the interpreter."""
    compiler = os.environ.get("CXX", "c++")
    torch_folder = Path(torch.__file__).parent
    headers = [pybind11.get_include(), sysconfig.get_paths()["include"], str(torch_folder / "include")]
    include = [f"-I{ROOT / 'csrc'}", *(f"-isystem{h}" for h in headers)]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    # Types under names of their own: a build with CUDA has registered those of the real ones with NumPy.
    renamed = f"-DCudaTask=InterpretedCudaTask{arch}"
    sources = sorted(INTERPRETER.glob("*.cpp"))
    own = _digest([*sources, *INTERPRETER.glob("*.h")], compiler, abi, torch.__version__, *EXACT)
    bindings = _digest([*_sources(), *kernel_objects], own, renamed, defined)
    commands: list[tuple[Path, list[str]]] = []
    for source in sources:
        commands.append((BUILD / f"{source.stem}-{own}.o", ["-std=c++20", *EXACT, str(source)]))
    for name in HOST:
        arguments = ["-std=c++17", "-O1", renamed, *defined.split(), str(ROOT / name)]
        commands.append((BUILD / f"{Path(name).stem}-{bindings}.o", arguments))

    def compile_to(path: Path, arguments: list[str]) -> None:
        if not path.exists():
            made = path.with_suffix(".new")
            subprocess.run([compiler, *FLAGS, abi, *include, *arguments, "-c", "-o", str(made)], check=True)
            made.rename(path)

    with ThreadPoolExecutor(2) as pool:  # another process of the tests waits for the library
        list(pool.map(compile_to, *zip(*commands, strict=True)))
    library = BUILD / f"cuda_interpreted_{arch}-{bindings}.so"
    if not library.exists():
        made = library.with_suffix(".new")
        objects = [str(path) for path in (*(path for path, _ in commands), *kernel_objects)]
        c10 = [f"-L{torch_folder / 'lib'}", "-lc10", f"-Wl,-rpath,{torch_folder / 'lib'}"]
        subprocess.run([compiler, "-shared", "-Wl,-Bsymbolic", *objects, *c10, "-o", str(made)], check=True)
        made.rename(library)
    return library


@contextmanager
def checked(kernels: ModuleType, **options: object) -> Iterator[None]:
    """Lets kernels use tensors made meanwhile, and no others; with further options, of tests/ptx/machine.h."""
    for cached in (kernel_problem.start, kernel_problem.gradients):
        cached.cache_clear()
    kernels.set_options(loads_for_copies=int(kernels.arch) < 80, **kernels.options, **options)
    kernels.take_reports()
    kernels.check_allocations(True)
    try:
        yield
    finally:
        kernels.check_allocations(False)


def use(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets optimizers step tensors on the CPU as if they were on a GPU."""
    for name in NAMES:
        monkeypatch.setattr(_C, name, getattr(module, name), raising=False)
    monkeypatch.setattr(dispatch_cuda, "_pinned_buffer", lambda size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(dispatch_cuda, "_device_copy", lambda table, device: table.clone())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(batch, "make_call", dispatch_cuda.CudaCall)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(gradient_norm, "make_norm_call", lambda *given: norms.CudaNormCall(*given).run)


def compare(module: ModuleType, rule: str, codec: str, initial: Named, steps: list[Named], **options: object) -> None:
    """Steps optimizers on the CPU and as if on a GPU: parameters, state and skipped elements have the same bits."""
    wanted, wanted_skips = kernel_problem.run(rule, codec, initial, steps, **options)
    with pytest.MonkeyPatch.context() as monkeypatch:
        use(module, monkeypatch)
        actual, skips = kernel_problem.run(rule, codec, initial, steps, **options)
    assert_same(actual, wanted)
    assert skips == wanted_skips


if __name__ == "__main__":  # beside other tests: compiles what those of tests/ptx will need
    os.nice(10)
    build("90", few=True)
