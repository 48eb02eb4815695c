"""A PyTorch whose tensors are not as the step reads them is refused by name. A program fails the check."""

from __future__ import annotations

import sys
from pathlib import Path

from programs import Programs

BROKEN = """
import sys
from unittest.mock import patch
import torch
sys.path[:] = {path!r}
from shardopt import _C
with patch.object(torch.Tensor, "data_ptr", lambda tensor: 1):
    try:
        _C.increment_versions([])
    except RuntimeError as error:
        assert str(error) == (
            f"got PyTorch {{torch.__version__}} with another data_ptr in C than in Python, expected a build of "
            "PyTorch 2.6 to 2.15 for Linux; install one"
        ), error
    else:
        raise AssertionError("no error")
"""


def test_another_build_is_refused(programs: Programs, tmp_path: Path) -> None:
    programs.run(BROKEN.format(path=sys.path), tmp_path)
