"""A PyTorch whose tensors are not as the step reads them: it reads them through Python, with one warning.

Steps then have the same bits, and notice the same changes. A program fails the check of libtorch's C functions.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
from programs import Programs
from ranks.layouts import values
from shardopt import _C

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
CHANGES = """
from step_changes import CHANGES
from step_problem import assert_noticed, make
for change in list(CHANGES.values())[::3]:
    assert_noticed(change, make())
"""


def run(programs: Programs, folder: Path, rest: str) -> None:
    path = [str(Path(__file__).parent), *sys.path]
    programs.run(BROKEN.format(path=path) + rest, folder)


def stepped() -> str:
    """Takes steps, and returns a digest of the parameters and their state."""
    params = [
        Parameter(values((24, 200), 1, torch.float32)),
        Parameter(values((200, 24), 2, torch.float32).T),
        Parameter(values((4, 2, 2, 2, 2, 40), 3, torch.bfloat16)),
        Parameter(values((7,), 4, torch.float32)),
        Parameter(values((0, 8), 5, torch.float32)),
    ]
    optimizer = shardopt.AdamW8bit(params, lr=1e-2, master_weight_bits=24, min_quantized_numel=64)
    versions = [param._version for param in params]
    for t in range(3):
        for k, param in enumerate(params):
            param.grad = values(tuple(param.shape), 10 * t + k, param.dtype)
        params[0].grad = values((200, 24), 10 * t, torch.float32).T
        params[3].grad = torch.complex(params[3].detach(), values((7,), t, torch.float32)).conj().imag
        optimizer.step()
    assert [param._version > version for param, version in zip(params, versions, strict=True)] == [True] * 5
    state: list[Tensor] = [entry for param in params for entry in optimizer.state[param].values()]
    digest = hashlib.sha256()
    for tensor in (*params, *state):
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_this_pytorch_is_read_without_python() -> None:
    assert _C.tensor_access_fault() == ""


def test_same_bits_and_changes_through_python(programs: Programs, tmp_path: Path) -> None:
    run(programs, tmp_path, STEPS.format(expected=stepped()) + CHANGES)
