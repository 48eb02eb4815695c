"""A PyTorch whose tensors are not as the step reads them is refused at the first step, which changes no parameter."""

from __future__ import annotations

from pathlib import Path

import pytest

from programs import Programs

PROGRAM = """
import contextlib, torch, shardopt
{change}
param = torch.nn.Parameter(torch.ones(8, 8))
optimizer = shardopt.AdamW([param], min_quantized_numel=0)
param.grad = torch.ones(8, 8)
for _ in range(2):
    try:
        optimizer.step()
    except RuntimeError as error:
        assert str(error) == (
            f"got PyTorch {{torch.__version__}} with a tensor's implementation of another layout, expected a build of "
            "PyTorch 2.6 to 2.15 for Linux; install one"
        ), error
    else:
        raise AssertionError("got a step, expected an error")
assert torch.equal(param, torch.ones(8, 8))
"""

#: Tensors that the words are checked with, made like the one that they are compared with.
CHANGES = {
    "negative views": "torch._neg_view = lambda tensor: tensor",
    "sparse tensors": "torch.Tensor.to_sparse = lambda tensor: tensor",
    "tensors of inference mode": "torch.inference_mode = lambda mode: contextlib.nullcontext()",
    "strides": "torch.Tensor.t = lambda tensor: tensor",
    "offsets": "torch.Tensor.__getitem__ = lambda tensor, index: tensor.select(0, 0)",
    "dtypes": "of = torch.empty; torch.empty = lambda *sizes, dtype=None, **more: of(*sizes, **more)",
    "devices": "of = torch.empty; torch.empty = lambda *sizes, device=None, **more: of(*sizes, **more)",
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_another_layout_is_refused(change: str, programs: Programs, tmp_path: Path) -> None:
    programs.run(PROGRAM.format(change=CHANGES[change]), tmp_path)
