"""The machine; CPU = CUDA bit for bit in a minute; every reciprocal and root."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import platform
import shutil
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import torch

import shardopt
from gpu.common import CARRIED, DEVICE, FAKE, ROOT, TOOLS, Left, Report, text_of


def facts(report: Report, left: Left, part: int, parts: int) -> None:
    """The machine: GPU, driver, tools, versions."""
    query = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,clocks.mem,power.limit,"
    query += "pcie.link.gen.current,pcie.link.width.current,ecc.mode.current,temperature.gpu"
    report.put("nvidia-smi", text_of("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"))
    report.put("python", sys.version)
    report.put("libc", " ".join(platform.libc_ver()))
    report.put("cores", os.cpu_count())
    tools = ("nvcc", "g++", "ncu", "compute-sanitizer", "cuobjdump", "nvdisasm")
    where = {tool: shutil.which(tool, path=TOOLS) for tool in tools}
    report.put("tools", where)
    if where["nvcc"]:
        report.put("nvcc", text_of(where["nvcc"], "--version")[-120:])
    include = Path(importlib.import_module("sysconfig").get_path("include"), "Python.h")
    report.put("Python.h", include.exists())
    names = "torch triton numpy pytest pytest-xdist pybind11 setuptools bitsandbytes torchao flashoptim deepspeed"
    versions = {}
    for name in names.split():
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    report.put("versions", versions)
    if torch.cuda.is_available():
        p = torch.cuda.get_device_properties(0)
        report.put(
            "device", {k: str(getattr(p, k)) for k in dir(p) if not k.startswith("_") and not callable(getattr(p, k))}
        )
    report.put(
        "host", {"cpu": text_of("sh", "-c", "grep -m1 'model name' /proc/cpuinfo"), "memory": text_of("free", "-g")}
    )
    report.put("locked memory", text_of("sh", "-c", "ulimit -l"))


def smoke(report: Report, left: Left, part: int, parts: int) -> None:
    """A step of some codecs on some shapes, bit for bit; the first thing to know."""
    from shardopt import _C

    report.put("with_cuda", bool(_C.with_cuda))
    if _C.with_cuda:
        report.put("kernels see devices", _C.cuda_device_count())
    shapes = ((256, 512), (97, 130), (1, 4099), (257,), (33, 33))
    for codec, dtype in itertools.product(("log8", "companded8", "fp32", "dynamic8"), (torch.float32, torch.bfloat16)):
        snapshots, seconds = [], 0.0
        for device in ("cpu", DEVICE):
            generator = torch.Generator().manual_seed(0)
            params = [
                torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype).to(device)) for shape in shapes
            ]
            optimizer = shardopt.AdamW8bit(params, lr=1e-2, weight_decay=0.1, codec=codec, min_quantized_numel=0)
            began = time.perf_counter()
            for _ in range(3):
                for param in params:
                    param.grad = (torch.randn(param.shape, generator=generator) * 1e-2).to(dtype).to(device)
                optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            values = [param.detach().cpu() for param in params]
            values += [x.cpu() for param in params for x in optimizer.state[param].values()]
            snapshots.append(values)
        pairs = zip(*snapshots, strict=True)
        wrong = sum(not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)) for a, b in pairs)
        report.put(f"{codec}, {dtype}", "same bits" if not wrong else f"{wrong} of {len(snapshots[0])} differ")
        report.put("seconds of three steps", round(seconds, 3))


def numbers(report: Report, left: Left, part: int, parts: int) -> None:
    """Every significand of the roots and reciprocals without guards: a program made beforehand, or here."""
    program = Path(tempfile.mkdtemp(), "quick_numbers")
    carried = CARRIED / "quick_numbers"
    if carried.exists():
        shutil.copy(carried, program)
        program.chmod(0o755)
        said = text_of(str(program), seconds=max(left(), 3))
        if "at 2^" in said:
            report.put("carried program", said)
            return
        report.put("carried program failed", said)
    if FAKE:
        return
    flags = ["-std=c++17", "-O3", "--fmad=false", "-arch=sm_90", "-I", str(ROOT / "csrc"), "-o", str(program)]
    source = str(ROOT / "tests/gpu/quick_numbers.cu")
    report.put("nvcc", text_of("nvcc", *flags, source, seconds=left() - 3, env={**os.environ, "PATH": TOOLS}))
    report.put("built here", text_of(str(program), seconds=max(left(), 3)))
