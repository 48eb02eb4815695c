"""The study of training quality resumes, pairs runs by seed, computes intervals rightly, and runs from end to end."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

import quality
from quality import choices, intervals, records, report, run
from quality.task import Problem, Task
from quality.training import CURVE_POINTS, train

FOLDER = Path(quality.__file__).parent


class Line(Problem):
    """A linear map from noise to noise."""

    fingerprint = "line"

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Linear(64, 64)

    def loss(self, model: nn.Module, seed: int, step: int) -> Tensor:
        draw = Generator().manual_seed(1000 * seed + step)
        x = torch.randn(16, 64, generator=draw)
        return (model(x) - x.flip(1)).square().mean()

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": float(self.loss(model, 0, 0))}


def line(settings: Mapping[str, Any], cache: Path) -> Line:
    return Line()


def task(**changes: Any) -> Task:
    return Task(**{"name": "line", "settings": {}, "steps": 40, "lr": 1e-2, "load": line, **changes})


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[run.Job]:
    for name in ("fp32", "log8"):
        monkeypatch.setitem(choices.CHOICES, name, _anywhere(choices.CHOICES[name]))
    return run.study([task()], ["fp32", "log8"], 2, "cpu", (tmp_path, tmp_path))


def _anywhere(choice: choices.Choice) -> choices.Choice:
    return choice


def _run(jobs: list[run.Job]) -> list[str]:
    ran = []
    for job, record in run.finished(run.pending(jobs), workers=1):
        records.append(job.path, record)
        ran.append(f"{job.optimizer} {job.seed}")
    return ran
