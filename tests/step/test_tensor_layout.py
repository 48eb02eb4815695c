"""A PyTorch whose tensors are not as the step reads them: it reads them through Python, with one warning.

Steps then have the same bits. A program fails the check of libtorch's C functions.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch

from helpers import everything
from programs import Programs
from shardopt import _C
from step_problem import make_strided as make
from step_problem import run as strided_run

BROKEN = """
import sys, warnings
from unittest.mock import patch
import torch
sys.path[:] = {path!r}
import shardopt
from shardopt import _C
with patch.object(torch.Tensor, 'data_ptr', lambda tensor: 1), warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    fault = _C.tensor_access_fault()
assert fault == (
    f"got PyTorch {{torch.__version__}} with another data_ptr in C than in Python, expected a build of "
    "PyTorch 2.6 to 2.15 for Linux"
), fault
text = fault + "; steps are slower, as they read tensors through Python: install one"
assert [(each.category, str(each.message)) for each in caught] == [(RuntimeWarning, text)], caught
warnings.simplefilter("error")  # no other warning
"""

STEPS = """
from test_tensor_layout import stepped
assert stepped() == {expected!r}
"""


def run(programs: Programs, folder: Path, rest: str) -> None:
    path = [str(Path(__file__).parent), *sys.path]
    programs.run(BROKEN.format(path=path) + rest, folder)


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


def test_same_bits_through_python(programs: Programs, tmp_path: Path) -> None:
    run(programs, tmp_path, STEPS.format(expected=stepped()))
