"""The source distribution builds a wheel that works where it is installed, without a GPU, a driver or the checkout."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

STEP = """
import torch, shardopt
assert shardopt.__file__.startswith({site!r}), shardopt.__file__
weight = torch.nn.Parameter(torch.randn(64, 128))
weight.grad = torch.randn(64, 128)
optimizer = shardopt.AdamW8bit([weight])
optimizer.step()
assert optimizer.state[weight]["exp_avg_codes"].any()
"""


def run(*command: object, cwd: Path) -> None:
    environment = {**os.environ, "SHARDOPT_CUDA": "0"}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_sdist_and_wheel(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--sdist", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    (sdist,) = tmp_path.glob("shardopt-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {Path(*Path(name).parts[1:]).as_posix() for name in archive.getnames()}
    tracked = {p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    assert tracked <= names
    assert {"LICENSE", "README.md", "shardopt/py.typed", "shardopt/_C.pyi"} <= names

    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", tmp_path, sdist, cwd=tmp_path)
    (wheel,) = tmp_path.glob("shardopt-*.whl")
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", site, wheel, cwd=tmp_path)
    code = f"import sys; sys.path.insert(0, {str(site)!r})\n" + STEP.format(site=str(site))
    run(sys.executable, "-c", code, cwd=tmp_path)
