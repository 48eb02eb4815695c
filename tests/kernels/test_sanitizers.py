"""The address and undefined-behaviour sanitizers see nothing wrong in the CUDA kernels' source, run on the CPU.

tests/kernels/test_cuda_emulated.py runs in a process that has the sanitizers loaded. Shared memory has red zones around
each variable, not between the warps' parts of one. Lanes' stacks have none for frames that a switch between lanes
leaves open, since the sanitizer forgets them there; indices into arrays are checked anywhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cuda_emulated

ROOT = Path(__file__).parents[2]
#: Of the compiler.
SANITIZERS = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

pytestmark = pytest.mark.slow

#: Steps a problem whose gradient, in memory of its own, ends some bytes early.
SHORT_GRADIENT = """
import sys, tempfile
sys.path[:0] = ["tests/support"]
from pathlib import Path
import pytest, torch
import cuda_emulated
from shardopt.kernels.dispatch_cuda import CudaCall
from step_tables import Piece, Problem

rows, cols, short = map(int, sys.argv[1:])
problem = Problem("adam", "log8", "bf16", Piece(rows, cols), 128, torch.device("cpu"))
gradient = torch.zeros(2 * rows * cols - short, dtype=torch.uint8)
problem.kernel_rows[0]["gradient"] = gradient.data_ptr()
with pytest.MonkeyPatch.context() as monkeypatch:
    cuda_emulated.use(cuda_emulated.build(Path()), monkeypatch)
    print("skipped elements:", problem.run(CudaCall, steps=1))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a process that loads the extension built with the sanitizers."""
    library = cuda_emulated.compile_library(tmp_path_factory.mktemp("sanitized"), *SANITIZERS)
    compiler = os.environ.get("CXX", "c++")
    runtimes = []
    for name in ("libasan.so", "libstdc++.so"):  # the latter for the sanitizer to find what it stands in for
        asked = [compiler, f"-print-file-name={name}"]
        found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        assert Path(found).is_absolute(), f"{compiler} has no {name}: got {found!r}, expected its path; set CXX=g++"
        runtimes.append(found)
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps memory until it ends
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
        "CUDA_EMULATED": str(library),
    }


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600, check=False)


def test_cuda_kernels(environment: dict[str, str]) -> None:
    tests = "tests/kernels/test_cuda_emulated.py"
    # -s: the sanitizer ends the process, and with it what pytest has kept back.
    options = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "", "-k", "source"]
    done = run(environment, "-m", "pytest", *options, tests)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert " passed" in done.stdout


#: Rows and columns, the bytes that the gradient lacks, and functions that read them. Of a word that lacks a part only,
#: the rest comes as NaN, so the staged kernel leaves the chunk to the general one, which reads elements.
CAUGHT = {
    "aligned, a word": (8, 128, 16, ("AlignedStepper", "__pipeline_wait_prior")),
    "staged, a word": (8, 130, 32, ("StagedStepper", "__pipeline_wait_prior")),
    "staged, an element": (8, 130, 2, ("WarpStepper", "load_gradients")),
}


@pytest.mark.parametrize("case", CAUGHT)
def test_a_read_beyond_a_tensor_is_caught(environment: dict[str, str], case: str) -> None:
    rows, cols, short, readers = CAUGHT[case]
    done = run(environment, "-c", SHORT_GRADIENT, str(rows), str(cols), str(short))
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    for reader in readers:
        assert reader in done.stderr
