"""A PyTorch whose tensors are not as the step reads them: it reads them through Python, with one warning.

Steps then have the same bits, and notice the same changes. A program fails the check of the tensors' layout on purpose.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest
import torch

from helpers import everything
from programs import Programs
from shardopt import _C
from strided_problem import make
from strided_problem import run as strided_run

BROKEN = """
import contextlib, sys, warnings
from unittest.mock import patch
import torch
sys.path[:] = {path!r}
import shardopt
from shardopt import _C
with {patched}, warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    fault = _C.tensor_access_fault()
assert fault == (
    f"got PyTorch {{torch.__version__}} with a tensor's implementation of another layout, expected a build of "
    "PyTorch 2.6 to 2.15 for Linux"
), fault
text = fault + "; steps are slower, as they read tensors through Python: install one"
assert [(each.category, str(each.message)) for each in caught] == [(RuntimeWarning, text)], caught
warnings.simplefilter("error")  # no other warning
"""

#: Functions that make the tensors which the layout is checked with, and others that make the tensor compared with them.
PATCHES = {
    "negative views": "patch.object(torch, '_neg_view', lambda tensor: tensor)",
    "strides": "patch.object(torch.Tensor, 't', lambda tensor: tensor)",
    "dtypes": "patch.object(torch, 'empty', lambda *size, dtype=0, of=torch.empty, **more: of(*size, **more))",
    "devices": "patch.object(torch, 'empty', lambda *size, device=0, of=torch.empty, **more: of(*size, **more))",
}
STEPS = """
from test_tensor_layout import stepped
assert stepped() == {expected!r}
"""
CHANGES = """
from step_changes import CHANGES
from step_problem import assert_noticed, make
for change in list(CHANGES.values())[::3]:
    assert_noticed(change, make())
"""


def run(programs: Programs, folder: Path, patched: str, rest: str) -> None:
    path = [str(Path(__file__).parent), *sys.path]
    programs.run(BROKEN.format(path=path, patched=patched) + rest, folder)


def stepped() -> str:
    """Takes steps, and returns a digest of the parameters and their state."""
    optimizer = strided_run(make(dtype=torch.bfloat16, master_weight_bits=24))
    digest = hashlib.sha256()
    for tensor in everything(optimizer).values():
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    assert all(param._version > 0 for group in optimizer.param_groups for param in group["params"])
    return digest.hexdigest()


def test_this_pytorch_is_read_without_python() -> None:
    assert _C.tensor_access_fault() == ""


@pytest.mark.parametrize("patched", PATCHES.values(), ids=PATCHES)
def test_a_fault_is_found(patched: str, programs: Programs, tmp_path: Path) -> None:
    run(programs, tmp_path, patched, "")


def test_same_bits_and_changes_through_python(programs: Programs, tmp_path: Path) -> None:
    run(programs, tmp_path, PATCHES["strides"], STEPS.format(expected=stepped()) + CHANGES)
