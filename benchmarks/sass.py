"""Counts the instructions of the CUDA kernels of usual blocks, as nvcc makes them: no GPU is needed.

Per combination of rule, codec and weights the main loop over aligned blocks is taken from the kernel's disassembly:
instructions per element, those that move data (shared memory, copies to it, stores, shuffles), registers, bytes
spilled. Figures are those of the compiler, not times: how many issue slots an element costs (a goal is met if it has no
more).

--columns counts the loops that stage rows of other lengths too. Such loops take a chunk of rows in turns: of long
blocks, of short ones. A chunk costs its own instructions (copies in and out, edges, addresses: all of the outer loop,
both sides of its branches), those of each turn, and of a short turn only the windows that a block of that length has.
All of it is divided by the elements of the chunk: idle lanes, elements stepped twice and the narrow stores at both
edges count fully. Sectors of 32 bytes are those that a chunk touches, averaged over all alignments of its first
element, over those of its bytes alone; scales are left out.

    pip install nvidia-cuda-nvdisasm     # where the toolkit has no nvdisasm; nvcc must be on PATH
    python benchmarks/sass.py --arch 90 100
    python benchmarks/sass.py --rules adam lion --codecs log8 --weights bf16 --columns 130 257 33 1000
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import results
from results import Cell, Column, Goal

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
template __global__ void step_usual_tasks<{rule}, {codec}, WeightFormat::{weight}, DType::{gradient}>(
    CudaCall, CudaBatch);
}}
"""


@dataclass
class Counts:
    """A kernel's main loop over aligned blocks; instructions are per element."""

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

    @property
    def name(self) -> str:
        return f"{self.rule}, {self.codec}, {self.weights}{'' if self.arch == 90 else f', sm_{self.arch}'}"


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


@dataclass
class Kernel:
    """A kernel's instructions, which of them labels stand before, and the assembler's report."""

    found: list[str]
    labels: dict[str, int]
    report: str

    def loops(self) -> list[tuple[int, int]]:
        """From the targets of backward branches to the branches."""
        ends = []
        for i, instruction in enumerate(self.found):
            target = re.search(r"\.L_\w+", instruction)
            if "BRA" in instruction and target and self.labels.get(target[0], i) < i:
                ends.append((self.labels[target[0]], i + 1))
        return ends

    def number(self, begin: int, end: int, *names: str) -> int:
        return sum(opcode(instruction) in names for instruction in self.found[begin:end])

    def registers(self) -> tuple[int, int]:
        """Registers, and bytes spilled."""
        spilled = re.findall(r"(\d+) bytes spill stores", self.report)[0]
        return int(re.findall(r"Used (\d+) registers", self.report)[0]), int(spilled)


def opcode(instruction: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0].split(".")[0]


@cache
def compiled(arch: int, rule: str, codec: str, weights: str, nvdisasm: str) -> Kernel:
    """Compiles a kernel, once."""
    weight, gradient = WEIGHTS[weights]
    names = {"rule": RULES[rule], "codec": CODECS[codec], "weight": weight, "gradient": gradient}
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
        source.write_text(KERNEL.format(**names))
        flags = ["-std=c++17", "-O3", "--fmad=false", f"-arch=sm_{arch}", "-I", str(ROOT / "csrc"), "-Xptxas=-v"]
        made = subprocess.run(
            ["nvcc", *flags, "-cubin", "-o", str(cubin), str(source)], check=True, capture_output=True, text=True
        )
        listing = subprocess.run([nvdisasm, "-c", str(cubin)], check=True, capture_output=True, text=True).stdout
    symbol = re.findall(r"\n\.text\.(\S*step_usual_tasks\S*):", listing)[0]
    return Kernel(*instructions(listing, symbol), made.stderr.split("step_usual_tasks", 1)[1])


def count(arch: int, rule: str, codec: str, weights: str, nvdisasm: str) -> Counts:
    """Counts one combination's loop over aligned blocks."""
    kernel = compiled(arch, rule, codec, weights, nvdisasm)
    own = [(b, e) for b, e in kernel.loops() if kernel.number(b, e, "LDGSTS") and not kernel.number(b, e, "STS")]
    begin, end = max(own, key=lambda loop: loop[1] - loop[0])
    kinds = Counter(opcode(instruction) for instruction in kernel.found[begin:end])

    def per_element(*names: str) -> float:
        return sum(kinds[name] for name in names) / ELEMENTS

    moves = (per_element(name) for name in ("LDS", "LDGSTS", "STG", "SHFL"))
    return Counts(
        arch, rule, codec, weights, (end - begin) / ELEMENTS, *moves, per_element("LDL", "STL"), *kernel.registers()
    )


@dataclass
class Staged:
    """A kernel's loops that stage rows; instructions are of a lane.

    Attributes:
        chunk: instructions of a chunk, without its turns.
        long: of a turn of long blocks.
        short: of a turn of short blocks, with all windows.
        windows: per pass over a short block, the instructions that it saves where it has no window of 8, of 4, 2 and 1
            together, of 4, of 2, of 1.
        local: loads and stores of spilled registers in the loops of turns, per element of a long block.
        streams: bytes per element of the tensors that are read, and of those that are written.
    """

    chunk: int
    long: int
    short: int
    windows: list[list[int]]
    local: float
    streams: list[int]

    def short_turn(self, elements: int) -> int:
        """Instructions of a turn of short blocks of so many elements."""
        full, saved = (elements - 1) // 4, 0
        for eight, rest, *each in self.windows:
            saved += 0 if full & 8 else eight
            saved += sum(n for n, bit in zip(each, (4, 2, 1), strict=True) if not full & bit) if full & 7 else rest
        return self.short - saved

    def per_element(self, columns: int) -> float:
        rows, long, short = chunk_of(columns)
        turns = -(-rows * long // 4) * self.long
        if short:
            turns += -(-rows // 8) * self.short_turn(short)
        return 32 * (self.chunk + turns) / (rows * columns)

    def sectors(self, columns: int) -> float:
        elements = chunk_of(columns)[0] * columns
        touched = whole = 0.0
        for size in self.streams:
            starts = range(0, 32, size)
            touched += sum(-(-(at + elements * size) // 32) for at in starts) / len(starts)
            whole += elements * size / 32
        return touched / whole


def chunk_of(columns: int) -> tuple[int, int, int]:
    """RowShape in csrc/step/cuda_chunk.h: rows of a chunk, long blocks of a row, elements of its short one or 0."""
    blocks, rest = -(-columns // 128), columns % 128
    short = rest if rest < 64 else 0
    long = blocks - (short > 0)
    rows = min(1056 // columns, 32 // blocks)
    unit = 8 if long == 0 else {1: 4, 2: 2, 3: 4, 0: 1}[long % 4]
    return rows - rows % unit if rows > unit else rows, long, short


def count_staged(arch: int, rule: str, codec: str, weights: str, nvdisasm: str) -> Staged:
    """Counts one combination's loops over staged rows."""
    kernel = compiled(arch, rule, codec, weights, nvdisasm)
    found, labels, number, ends = kernel.found, kernel.labels, kernel.number, kernel.loops()
    stepping = [(b, e) for b, e in ends if number(b, e, "LDS") >= 48 and number(b, e, "STS") > 16]
    innermost = [a for a in stepping if not any(a[0] <= b[0] and b[1] <= a[1] and a != b for b in stepping)]
    # Branches back from cold code behind the kernel end in the midst of a turn.
    whole = [a for a in innermost if not any(b[0] < a[0] < b[1] < a[1] for b in stepping)]
    turns = sorted(whole, key=lambda turn: number(*turn, "LDS"))[-2:]
    short, long = sorted(turns, key=lambda turn: number(*turn, "BRA"), reverse=True)
    around = min(short[0], long[0]), max(short[1], long[1])
    chunk = min((e - b, b, e) for b, e in ends if b < around[0] and e > around[1] and number(b, e, "LDGSTS"))
    skips = []
    for i in range(*short):
        target = re.search(r"BRA.*(\.L_\w+)", found[i])
        if found[i].startswith("@") and target and i < labels[target[1]] <= short[1]:
            skips.append((labels[target[1]] - i - 1, number(i, labels[target[1]], "LDS", "STS")))
    windows = []
    for i in range(len(skips) - 1):
        slot = skips[i][1] // 8  # what a slot moves in this pass
        if slot and [moved for _, moved in skips[i : i + 2]] == [8 * slot, 7 * slot]:
            within = {moved // slot: n for n, moved in skips[i + 2 : i + 5]}  # few instructions need no branch
            windows.append([skips[i][0], skips[i + 1][0], *(within.get(width, 0) for width in (4, 2, 1))])
    if len(windows) != 3:
        raise ValueError(f"sm_{arch} {rule} {codec} {weights}: got {len(windows)} passes over short blocks, expected 3")
    lengths = [e - b for b, e in (long, short)]
    local = number(*long, "LDL", "STL") + number(*short, "LDL", "STL")
    size, low = {"fp32": (4, 0), "bf16+8": (2, 1), "bf16+16": (2, 2)}.get(weights, (2, 0))
    kept = [size, *([low] if low else []), *([1, 1] if rule == "adam" else [1])]
    return Staged(chunk[0] - sum(lengths), *lengths, windows, local / ELEMENTS, [size, *kept, *kept])


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=[90])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument(
        "--columns", type=int, nargs="+", default=[], help="lengths of staged rows to count, up to 1056"
    )
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time (default: %(default)s)")
    args = parser.parse_args()
    nvdisasm = find_nvdisasm()
    if shutil.which("nvcc") is None or nvdisasm is None:
        sys.exit("needs nvcc and nvdisasm on PATH; nvdisasm is also in the package nvidia-cuda-nvdisasm")
    cases = list(product(args.arch, args.rules, args.codecs, args.weights))
    with ThreadPoolExecutor(args.jobs) as pool:
        found = list(pool.map(lambda case: count(*case, nvdisasm), cases))
        staged = list(pool.map(lambda case: count_staged(*case, nvdisasm), cases if args.columns else []))
    heads = [Column("rule, codec, weights"), Column("instructions", digits=1)]
    heads += [Column(name, digits=2) for name in ("LDS", "LDGSTS", "STG", "SHFL", "local")]
    heads += [Column("registers", digits=0), Column("spilled", "bytes", 0)]
    rows: list[list[Cell]] = []
    goals = []
    for c in found:
        rows.append([c.name, c.instructions, c.shared_loads, c.copies, c.stores, c.shuffles, c.local])
        rows[-1] += [c.registers, c.spilled]
        goal = GOALS.get((c.rule, c.codec, c.weights)) if c.arch == 90 else None
        if goal is not None:
            text = f"{c.name} {c.instructions:.1f}, at most {goal:g}, no spills in the loop"
            goals.append(Goal(text, c.instructions <= goal and c.local == 0))
    release = re.findall(r"release (\d+)", subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout)
    device = f"CUDA {release[0]}, no GPU"
    notes = ["By nvdisasm, in the loop over aligned blocks; no GPU was used."]
    title = "CUDA: instructions per element"
    results.report(args.json, "sass", title, heads, rows, goals=goals, notes=notes, device=device)
    if staged:
        heads = [Column("rule, codec, weights, columns"), Column("instructions", digits=1)]
        heads += [Column(name, digits=2) for name in ("over aligned", "sectors", "local")]
        cases_and_rows = product(zip(found, staged, strict=True), args.columns)
        figures: list[list[Cell]] = []
        for (c, s), row in cases_and_rows:
            ratio = s.per_element(row) / c.instructions
            figures.append([f"{c.name}, {row}", s.per_element(row), ratio, s.sectors(row), s.local])
        title = "CUDA: instructions per element of rows of other lengths"
        notes = ["Over those of aligned blocks; sectors of 32 bytes over those of the bytes alone."]
        results.report(args.json, "sass_rows", title, heads, figures, notes=notes, device=device)
    sys.exit(0 if all(goal.met for goal in goals) else 1)


if __name__ == "__main__":
    main()
