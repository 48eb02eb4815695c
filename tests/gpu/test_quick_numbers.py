"""Square roots and reciprocals without guards are correctly rounded on this GPU: every significand."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from cuda_device import needs_gpu

ROOT = Path(__file__).resolve().parents[2]


@needs_gpu
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
def test_every_significand(tmp_path: Path) -> None:
    """Shows that the roots and reciprocals of the kernels are correctly rounded."""
    program = tmp_path / "quick_numbers"
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    flags = ["-std=c++17", "-O3", "--fmad=false", f"-arch={arch}", "-I", str(ROOT / "csrc")]
    source = Path(__file__).with_name("quick_numbers.cu")
    subprocess.run(["nvcc", *flags, "-o", str(program), str(source)], check=True)
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
