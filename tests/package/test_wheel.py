"""A wheel of launch/wheel.sh in an environment with nothing but what pip installs with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TRAIN = """
import shardopt, torch
assert ".venv" in shardopt.__file__, shardopt.__file__
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
optimizer = shardopt.AdamW8bit(model.parameters(), lr=1e-3)
inputs = torch.randn(256, 64)
losses = []
for _ in range(60):
    optimizer.zero_grad()
    loss = (model(inputs) - inputs.flip(1)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 2, losses
assert optimizer.state[model[0].weight]["exp_avg_codes"].dtype == torch.uint8
shardopt.checkpoint.save("checkpoint", model, optimizer)
shardopt.checkpoint.load("checkpoint", model, optimizer)
"""


def run(*command: object, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="manylinux wheels")
def test_a_wheel_in_an_empty_environment(tmp_path: Path) -> None:
    run("bash", ROOT / "launch/wheel.sh", "--python", sys.executable, "--out", tmp_path / "dist", cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert re.fullmatch(r"shardopt-[\d.]+-(cp3\d+)-\1-(manylinux[\w.]+)\.whl", wheel.name), wheel.name
    assert list((tmp_path / "dist").glob("shardopt-*.tar.gz"))
    python = tmp_path / ".venv/bin/python"
    run(sys.executable, "-m", "venv", tmp_path / ".venv", cwd=tmp_path)
    requirements = ROOT / "launch/requirements.txt"
    run(python, "-m", "pip", "install", "-q", "-c", requirements, wheel, cwd=tmp_path)
    run(python, "-c", TRAIN, cwd=tmp_path)
    assert "no fault" in run(python, "-m", "shardopt", "doctor", cwd=tmp_path).lower()
