"""Counts the instructions of the CUDA kernels of aligned blocks, as nvcc makes them: no GPU is needed.

Per combination of rule, codec and weights the main loop is taken from the disassembly: instructions per element, those
that move data (shared memory, copies to it, stores, shuffles), registers, bytes spilled. Figures are those of the
compiler, not times: how many issue slots an element costs (a goal is met if it has no more).

    pip install nvidia-cuda-nvdisasm     # where the toolkit has no nvdisasm; nvcc must be on PATH
    python benchmarks/sass.py --arch 90 100
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ELEMENTS = 16  # of a lane in a turn of the loop: kEach in csrc/step/cuda_aligned.h

RULES = {"adam": "Adam", "lion": "Lion", "momentum": "Momentum"}
CODECS = {"log8": "Log8", "companded8": "Companded8", "dynamic8": "Dynamic8"}
#: The weight format and the gradients' dtype.
WEIGHTS = {
    "fp32": ("kFloat32", "kFloat32"),
    "bf16": ("kBFloat16", "kBFloat16"),
    "bf16+8": ("kBFloat16Plus8", "kBFloat16"),
    "bf16+16": ("kBFloat16Plus16", "kBFloat16"),
    "bf16 stochastic": ("kBFloat16Stochastic", "kBFloat16"),
}
#: Instructions per element on sm_90, at most.
GOALS = {
    ("adam", "log8", "bf16"): 52.0,
    ("adam", "companded8", "bf16"): 50.0,
    ("lion", "log8", "bf16"): 35.0,
    ("adam", "log8", "bf16+8"): 58.0,
}

KERNEL = """
#define SHARDOPT_TARGET cuda
#include <cuda_runtime.h>
#include "step/cuda_kernel.h"
namespace shardopt::cuda {{
template __global__ void step_aligned_tasks<{rule}, {codec}, WeightFormat::{weight}, DType::{gradient}>(
    CudaCall, CudaBatch);
}}
"""


@dataclass
class Counts:
    """A kernel's main loop; instructions are per element."""

    arch: int
    rule: str
    codec: str
    weights: str
    instructions: float
    shared_loads: float
    copies: float
    stores: float
    shuffles: float
    local: float  # loads and stores of spilled registers
    registers: int
    spilled: int  # bytes, anywhere in the kernel


def find_nvdisasm() -> str | None:
    """On PATH, or where the package of that name puts it."""
    found = shutil.which("nvdisasm")
    packages = [Path(folder) for folder in sys.path if folder.endswith("-packages")]
    return found or next((str(p) for folder in packages for p in folder.glob("nvidia/*/bin/nvdisasm")), None)


def instructions(listing: str, symbol: str) -> tuple[list[str], dict[str, int]]:
    """A function's instructions, and which of them labels stand before."""
    found: list[str] = []
    labels: dict[str, int] = {}
    body = listing.split(f"\n.text.{symbol}", 1)[1]
    for line in body.split("\n")[1:]:
        if re.match(r"^\$|^\s*\.section", line):
            break
        if label := re.match(r"^(\.L_\w+):", line):
            labels[label[1]] = len(found)
        elif instruction := re.match(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            found.append(re.sub(r"\s{3,}.*", "", instruction[1].strip()))
    return found, labels


def largest_loop(found: list[str], labels: dict[str, int]) -> list[str]:
    """From the target of the longest backward branch to the branch."""
    loops = []
    for i, instruction in enumerate(found):
        target = re.search(r"\.L_\w+", instruction)
        if "BRA" in instruction and target and labels.get(target[0], i) < i:
            loops.append((labels[target[0]], i + 1))
    begin, end = max(loops, key=lambda loop: loop[1] - loop[0])
    return found[begin:end]


def opcode(instruction: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0].split(".")[0]


def count(arch: int, rule: str, codec: str, weights: str, nvdisasm: str) -> Counts:
    """Compiles one combination for one architecture and counts."""
    weight, gradient = WEIGHTS[weights]
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
        source.write_text(KERNEL.format(rule=RULES[rule], codec=CODECS[codec], weight=weight, gradient=gradient))
        flags = ["-std=c++17", "-O3", "--fmad=false", f"-arch=sm_{arch}", "-I", str(ROOT / "csrc"), "-Xptxas=-v"]
        made = subprocess.run(
            ["nvcc", *flags, "-cubin", "-o", str(cubin), str(source)], check=True, capture_output=True, text=True
        )
        listing = subprocess.run([nvdisasm, "-c", str(cubin)], check=True, capture_output=True, text=True).stdout
    report = made.stderr.split("step_aligned_tasks", 1)[1]
    symbol = re.findall(r"\n\.text\.(\S*step_aligned_tasks\S*):", listing)[0]
    loop = largest_loop(*instructions(listing, symbol))
    kinds = Counter(opcode(instruction) for instruction in loop)

    def per_element(*names: str) -> float:
        return sum(kinds[name] for name in names) / ELEMENTS

    return Counts(
        arch,
        rule,
        codec,
        weights,
        len(loop) / ELEMENTS,
        per_element("LDS"),
        per_element("LDGSTS"),
        per_element("STG"),
        per_element("SHFL"),
        per_element("LDL", "STL"),
        int(re.findall(r"Used (\d+) registers", report)[0]),
        int(re.findall(r"(\d+) bytes spill stores", report)[0]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", default=[90])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the counts there")
    args = parser.parse_args()
    nvdisasm = find_nvdisasm()
    if shutil.which("nvcc") is None or nvdisasm is None:
        sys.exit("needs nvcc and nvdisasm on PATH; nvdisasm is also in the package nvidia-cuda-nvdisasm")
    cases = list(product(args.arch, args.rules, args.codecs, args.weights))
    with ThreadPoolExecutor(args.jobs) as pool:
        found = list(pool.map(lambda case: count(*case, nvdisasm), cases))
    columns = ("sm", "rule", "codec", "weights", "per element", "LDS", "LDGSTS", "STG", "SHFL", "local", "registers")
    print(" ".join(f"{name:>15}" for name in (*columns, "bytes spilled", "goal")))
    missed = False
    for c in found:
        goal = GOALS.get((c.rule, c.codec, c.weights)) if c.arch == 90 else None
        met = goal is None or (c.instructions <= goal and c.local == 0)
        missed |= not met
        said = "" if goal is None else f"{goal:.0f}, {'met' if met else 'MISSED'}"
        moves = (c.shared_loads, c.copies, c.stores, c.shuffles, c.local)
        figures = (f"{c.instructions:.1f}", *(f"{x:.2f}" for x in moves), c.registers, c.spilled, said)
        print(" ".join(f"{x!s:>15}" for x in (c.arch, c.rule, c.codec, c.weights, *figures)))
    if args.json:
        args.json.write_text(json.dumps([asdict(c) for c in found], indent=2))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
