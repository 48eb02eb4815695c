"""Sections that run programs: offload, Nsight Compute, compute-sanitizer."""

from __future__ import annotations

import csv
import os
import re
import shutil
import sys

import torch

from gpu.common import FAKE, ROOT, TOOLS, Left, Report, synchronize, text_of
from gpu.speed import CONTENDERS, one, parameters


def offload(report: Report, left: Left, part: int, parts: int) -> None:
    """benchmarks/offload_cuda.py, shortened: it stands in a process of its own."""
    command = [sys.executable, str(ROOT / "benchmarks/offload_cuda.py"), "--millions", "200", "--rounds", "6"]
    if FAKE:
        command = [*TARGET, "offload", "--millions", "0.2", "--rounds", "2"]
    report.put("said", text_of(*command, seconds=left() - 2))


def offload_on_a_stand_in() -> int:
    """Steps of offload_cuda.py on tests/support/late_streams.py, a GPU but for its backward pass."""
    import offload_cuda
    from late_streams import late_device

    offload_cuda.SIZE, offload_cuda.COPY_BYTES, offload_cuda.KINDS = 256, 1 << 16, {"step": offload_cuda.KINDS["step"]}
    torch.cuda.is_available, torch.cuda.get_device_name = lambda: True, lambda: "a stand-in"
    with late_device("early"):
        offload_cuda.main()
    return 0


TARGET = (sys.executable, "-m", "gpu.tools")
TARGETS = {"log8 bf16": 2, "log8 fp32": 2, "companded8 bf16": 2, "dynamic8 bf16": 2}  # steps of each


def target(numel: int) -> int:
    """Some steps of each codec, for tools to look at."""
    for name, steps in TARGETS.items():
        shapes = one(numel) if numel > 10**6 else [(numel // 512, 512), (97, 130), (1, 4099), (33, 33)]
        params = parameters(shapes, getattr(torch, CONTENDERS[name].dtype))
        optimizer = CONTENDERS[name].make(params)
        for _ in range(steps + 1):
            optimizer.step()
        synchronize()
    print("target done")
    return 0


def ncu(report: Report, left: Left, part: int, parts: int) -> None:
    """Bounds of the step's kernels. The third launch of each contender is past the first steps' zeros."""
    tool = shutil.which("ncu", path=TOOLS)
    if tool is None:
        report.put("left out", "no ncu")
        return
    sections = (
        "SpeedOfLight Occupancy LaunchStats WarpStateStats SchedulerStats MemoryWorkloadAnalysis InstructionStats"
    )
    metrics = (
        "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active,"
        "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active,"
        "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active,"
        "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active,"
        "sm__issue_active.avg.pct_of_peak_sustained_active,"
        "dram__throughput.avg.pct_of_peak_sustained_elapsed,dram__bytes_read.sum,dram__bytes_write.sum,"
        "l1tex__data_bank_conflicts_pipe_lsu.sum,smsp__inst_executed.sum,gpu__time_duration.sum"
    )
    command = [tool, "--clock-control", "none", "--kernel-name", "regex:step_usual_tasks", "--csv", "--page", "raw"]
    command += [word for section in sections.split() for word in ("--section", section)]
    command += ["--metrics", metrics, *TARGET, str(2 * 10**8)]
    said = text_of(*command, seconds=left() - 2, tail=400_000)
    report.put("rows", [row for row in csv_rows(said) if "step_usual_tasks" in row.get("Kernel Name", "")])
    report.put("said", said[-600:])


def csv_rows(text: str) -> list[dict[str, str]]:
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if not lines:
        return []
    head, units, *rest = list(csv.reader(lines))
    wanted = "Kernel Name|Grid Size|Block Size|gpu__time|pct_of_peak|dram__bytes|registers|shared_mem|occupancy"
    wanted += "|inst_executed|bank_conflicts|issue|stall|warps_active"
    keep = [i for i, name in enumerate(head) if re.search(wanted, name)]
    return [{head[i]: f"{row[i]} {units[i]}".strip()[:120] for i in keep} for row in rest]


def sanitizer(report: Report, left: Left, part: int, parts: int) -> None:
    tool = shutil.which("compute-sanitizer", path=TOOLS)
    if tool is None:
        report.put("left out", "no compute-sanitizer")
        report.put("without it", text_of(*TARGET, "40000", seconds=left()))
        return
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for kind in ("memcheck", "racecheck"):
        if left() < 15:
            report.put(kind, "left out: no time left")
            continue
        command = [tool, "--tool", kind, "--error-exitcode", "86", *TARGET, "40000"]
        report.put(kind, text_of(*command, seconds=left() / (2 if kind == "memcheck" else 1), tail=1500, env=env))


if __name__ == "__main__":
    given = sys.argv.pop(1)
    sys.exit(offload_on_a_stand_in() if given == "offload" else target(int(given)))
