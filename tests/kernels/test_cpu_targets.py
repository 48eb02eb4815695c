"""The CPU kernels of all instruction sets leave the same bits and touch nothing beyond the end of a tensor.

cpu_targets/digests.cpp takes the steps in buffers before pages that cannot be read. Kernels of another processor are
run in an emulator.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardopt import _C
from shardopt.codec import CODECS

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "csrc"
FLAGS = ("-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fwrapv", f"-I{SOURCES}")

#: The address and undefined-behaviour sanitizers.
SANITIZED = ("-O1", "-g1", "-fno-wrapv", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512")
#: Flags of the kernels that processors of this kind run.
TARGETS = {
    "portable": (),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": AVX512,
    "avx512vbmi": (*AVX512, "-mavx512vbmi"),
}
USABLE = [
    pytest.param(each, marks=pytest.mark.skipif(each not in _C.cpu_targets(), reason=f"no {each} in this processor"))
    for each in TARGETS
]
EACH_TARGET = pytest.mark.parametrize("target", USABLE)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The codecs' tables, for the program."""
    path = tmp_path_factory.mktemp("tables") / "tables"
    with path.open("wb") as file:
        for name in _C.codecs:
            table = CODECS[name].table
            values = [] if table is None else table.tolist()
            file.write(struct.pack(f"<q{len(values)}f", len(values), *values))
    return path


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name}: apt install g++ g++-aarch64-linux-gnu qemu-user-static")
    return found


def build(folder: Path, compiler: str, target: str, *flags: str) -> Path:
    """The program with the kernels of one instruction set."""
    sources = [SOURCES / f"step/cpu_{target}.cpp", ROOT / "tests/kernels/cpu_targets/digests.cpp"]
    program = folder / f"digests_{target}"
    run([compiler, *FLAGS, *flags, f"-DSHARDOPT_KERNELS={target}", *sources, "-o", program])
    return program


def run(command: Sequence[str | Path]) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def expected(tables: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests of the portable kernels' results, a line per case."""
    program = build(tmp_path_factory.mktemp("portable"), tool("g++"), "portable", "-O2")
    return run([program, tables]).splitlines()


@EACH_TARGET
@pytest.mark.parametrize("flags", [("-O2",), SANITIZED], ids=["optimized", "sanitized"])
def test_steps(tables: Path, expected: list[str], target: str, flags: Sequence[str], tmp_path: Path) -> None:
    """The sanitizers find nothing in the kernels, either."""
    program = build(tmp_path, tool("g++"), target, *flags, *TARGETS[target])
    assert run([program, tables]).splitlines() == expected


def test_neon(tables: Path, expected: list[str], tmp_path: Path) -> None:
    """AArch64's, in an emulator."""
    emulator = tool("qemu-aarch64-static")
    program = build(tmp_path, tool("aarch64-linux-gnu-g++"), "neon", "-O2", "-static")
    assert run([emulator, program, tables]).splitlines() == expected


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        (SANITIZED, ["fork"]),
        (("-O1", "-g1", "-fsanitize=thread"), []),  # whose run-time cannot follow a fork of several threads
    ],
    ids=["address", "thread"],
)
def test_threads(flags: Sequence[str], arguments: Sequence[str], tmp_path: Path) -> None:
    """The sanitizers find nothing in the pool of threads."""
    sources = [SOURCES / "threads/pool.cpp", ROOT / "tests/kernels/cpu_targets/threads.cpp"]
    program = tmp_path / "threads"
    run([tool("g++"), *FLAGS, *flags, *sources, "-o", program, "-pthread"])
    assert run([program, *arguments]) == "done\n"
