"""The memory report adds up what is allocated, and the bytes in the optimizers' docstrings are true."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import shardopt
from helpers import RULES

ROWS, COLS = 64, 1024


def stepped(rule: str, shape: tuple[int, ...] = (ROWS, COLS), dtype: torch.dtype = torch.float32, **options: Any):
    param = Parameter(torch.zeros(shape, dtype=dtype))
    param.grad = torch.ones_like(param)
    optimizer = RULES[rule].make([param], **options)
    optimizer.step()
    return optimizer


def test_short_blocks_and_small_parameters() -> None:
    params = [Parameter(torch.zeros(33, 130, dtype=torch.bfloat16)), Parameter(torch.zeros(33, dtype=torch.bfloat16))]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = shardopt.AdamW8bit(params)
    optimizer.step()
    report = shardopt.memory_report(optimizer)
    matrix, bias = 33 * 130, 33
    assert report.host.state == 2 * matrix + 2 * 4 * bias + 2 * 4
    assert report.host.scales == 33 * 2 * (4 + 8)  # two blocks per row
    assert report.host.parameters == report.host.gradients == 2 * (matrix + bias)
    use = report.host
    assert use.total == use.parameters + use.gradients + use.state + use.scales
    assert use.master_weights == report.device.total == 0
    assert report.numel == matrix + bias


@pytest.mark.parametrize(("bits", "total"), [(None, 6.09), (24, 7.09), (32, 8.09)])
def test_master_weights(bits: int | None, total: float) -> None:
    """The bytes per parameter that the README states for bfloat16 weights and gradients."""
    report = shardopt.memory_report(stepped("adamw", dtype=torch.bfloat16, master_weight_bits=bits))
    assert report.host.master_weights == ROWS * COLS * {None: 0, 24: 1, 32: 2}[bits]
    assert round(report.bytes_per_parameter()["total"], 2) == total
    assert report.host.state == 2 * ROWS * COLS + 4


@pytest.mark.parametrize(
    ("rule", "codec", "statement"),
    [
        ("adamw", "fp32", r"parameter: 8 with ``codec=\"fp32\"``"),
        ("adamw", "log8", r"that is 2\.094 with \"log8\""),
        ("lion", "log8", r"1\.031 with an 8-bit codec"),
        ("momentum", "log8", r"1\.031 with an 8-bit codec"),
        ("sgd", "log8", r"none\s+without momentum"),
        ("prodigy", "fp32", r"parameter: 16 with ``codec=\"fp32\"``"),
    ],
)
def test_docstrings_tell_the_bytes(rule: str, codec: str, statement: str) -> None:
    said = re.search(statement, RULES[rule].optimizer.__base__.__doc__ or "")  # type: ignore[union-attr]
    assert said, f"{statement} is not in the docstring"
    number = re.search(r"\d+(\.\d+)?", said[0])
    found = shardopt.memory_report(stepped(rule, codec=codec)).bytes_per_parameter()
    expected = (float(number[0]) if number else 0) + 4 / (ROWS * COLS)  # the step count
    assert found["state"] + found["scales"] == pytest.approx(expected, abs=5e-4)


def test_other_optimizers_and_other_things() -> None:
    """An engine of DeepSpeed is no optimizer: its message says which part of it to pass."""
    theirs = torch.optim.AdamW([param := Parameter(torch.zeros(ROWS, COLS))])
    before = shardopt.memory_report(shardopt.AdamW8bit([param])).host
    assert before.state == before.scales == before.gradients == 0
    param.grad = torch.ones_like(param)
    theirs.step()
    assert shardopt.memory_report(theirs).host.state == 8 * param.numel() + 4
    with pytest.raises(TypeError, match=r"got Linear, expected an optimizer or a DeepSpeed engine"):
        shardopt.memory_report(torch.nn.Linear(2, 2))


def test_shared_storage_counts_once() -> None:
    buffer = torch.zeros(2 * ROWS * COLS)
    report = shardopt.memory_report(shardopt.AdamW8bit([Parameter(half.view(ROWS, COLS)) for half in buffer.chunk(2)]))
    assert report.host.parameters == 4 * report.numel == 4 * buffer.numel()
