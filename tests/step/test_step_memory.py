"""A step makes no temporaries: the resident memory's peak hardly rises, however many parameters there are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import ctypes
import sys

import torch

import shardopt


def resident(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))


param = torch.nn.Parameter(torch.zeros(20_000, 1000, dtype=getattr(torch, sys.argv[2])))
param.grad = torch.full_like(param, 1e-3)
optimizer = shardopt.AdamW([param], codec=sys.argv[1])
optimizer.step()
try:  # else what the first step freed would hide what the second takes
    ctypes.CDLL(None).malloc_trim(0)
except AttributeError:
    pass  # not glibc
with open("/proc/self/clear_refs", "w") as control:
    control.write("5")  # sets the peak back to what is resident now
before = resident("VmRSS")
optimizer.step()
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("codec", "dtype"), [("log8", "float32"), pytest.param("dynamic8", "bfloat16", marks=pytest.mark.slow)]
)
def test_a_step_on_20m_parameters_needs_no_memory(codec: str, dtype: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PROGRAM, codec, dtype]
    # Away from the source tree, whose `shardopt` is not the installed one.
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, cwd=tmp_path)
    growth = int(run.stdout)
    assert growth < 2**20
