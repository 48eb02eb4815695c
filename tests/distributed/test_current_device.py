"""Messages of a checkpoint go through the GPU that holds the model, whichever is the current one."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shardopt


class _Entered(Exception):
    """Raised with the device that becomes the current one."""


def _enter(device: torch.device) -> Any:
    raise _Entered(device)


@pytest.mark.parametrize("call", [shardopt.checkpoint.save, shardopt.checkpoint.async_save, shardopt.checkpoint.load])
def test_the_models_gpu_becomes_the_current_one(call: Any, tmp_path: Path) -> None:
    second = torch.device("cuda", 1)
    with FakeTensorMode():
        model = nn.LayerNorm(4, device=second)
    with patch.object(torch.cuda, "device", _enter), pytest.raises(_Entered) as caught:
        call(tmp_path, model)
    assert caught.value.args == (second,)
