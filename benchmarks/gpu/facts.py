"""The machine; CPU = CUDA bit for bit in a minute; every reciprocal and root."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import time
from importlib import metadata
from pathlib import Path

import torch

import shardopt
from gpu.common import CARRIED, DEVICE, FAKE, ROOT, TOOLS, Left, Report, synchronize, text_of


def facts(report: Report, left: Left, part: int, parts: int) -> None:
    """The machine: GPU, driver, tools, versions."""
    query = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,clocks.mem,power.limit,"
    query += "pcie.link.gen.current,pcie.link.width.current,ecc.mode.current,temperature.gpu"
    report.put("nvidia-smi", text_of("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"))
    report.put("python", sys.version)
    report.put("libc", " ".join(platform.libc_ver()))
    report.put("cores", os.cpu_count())
    tools = ("nvcc", "g++", "ncu", "compute-sanitizer", "cuobjdump", "nvdisasm")
    report.put("tools", {tool: shutil.which(tool, path=TOOLS) for tool in tools})
    report.put("nvcc", text_of("nvcc", "--version", env={**os.environ, "PATH": TOOLS})[-120:])
    report.put("Python.h", Path(sysconfig.get_path("include"), "Python.h").exists())
    versions = {}
    for name in ("torch", "triton", "numpy", "pytest", "setuptools", "bitsandbytes", "torchao", "flashoptim"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    report.put("versions", versions)
    report.put("cpu", text_of("sh", "-c", "grep -m1 'model name' /proc/cpuinfo"))
    report.put("memory", text_of("free", "-g"))
    report.put("locked memory", text_of("sh", "-c", "ulimit -l"))
    device = {"name": "CPU in place of a GPU"}
    if not FAKE:
        p = torch.cuda.get_device_properties(0)
        device = {k: str(getattr(p, k)) for k in dir(p) if not k.startswith("_") and not callable(getattr(p, k))}
    report.put("device", device)


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
            synchronize()
            seconds = time.perf_counter() - began
            snapshots.append(params + [x for p in params for x in optimizer.state[p].values()])
        report.put(f"{codec}, {dtype}", compared(*snapshots))
        report.put("seconds of three steps", round(seconds, 3))


def compared(wanted: list[torch.Tensor], got: list[torch.Tensor]) -> str:
    """Whether tensors have the same bits."""
    pairs = [[x.detach().cpu().reshape(-1).view(torch.uint8) for x in pair] for pair in zip(wanted, got, strict=True)]
    wrong = sum(not torch.equal(*pair) for pair in pairs)
    return f"{wrong} of {len(pairs)} tensors differ" if wrong else "same bits"


def numbers(report: Report, left: Left, part: int, parts: int) -> None:
    """Every significand of the roots and reciprocals without guards: a program made beforehand, or here."""
    program = Path(tempfile.mkdtemp(), "quick_numbers")
    if (CARRIED / "quick_numbers").exists():
        shutil.copy(CARRIED / "quick_numbers", program)
        program.chmod(0o755)
        said = text_of(str(program), seconds=max(left(), 3))
        report.put("carried program", said)
        if "at 2^" in said or FAKE:
            return
    flags = ["-std=c++17", "-O3", "--fmad=false", "-arch=sm_90", "-I", str(ROOT / "csrc"), "-o", str(program)]
    source = str(Path(__file__).with_name("quick_numbers.cu"))
    if not FAKE:
        report.put("nvcc", text_of("nvcc", *flags, source, seconds=left() - 3, env={**os.environ, "PATH": TOOLS}))
        report.put("built here", text_of(str(program), seconds=max(left(), 3)))
