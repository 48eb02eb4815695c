"""A wheel of launch/wheel.sh in an environment with nothing but what pip installs with it, and one of the sdist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
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


def run(*command: object, cwd: Path, **more: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")} | more
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files_of(folder: Path) -> set[str]:
    """Files of the package in a folder that holds `shardopt`, without what a build or an interpreter leaves there."""
    left = ("*.so", "*.pyc")
    paths = (path for path in (folder / "shardopt").rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix() for path in paths if not any(path.match(each) for each in left)}


def check_contents(wheel: Path, build: Path) -> None:
    """The package and nothing else, with its types and its licence, and without paths of the machine that built it."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        (extension,) = (name for name in names if name.endswith(".so"))
        code = archive.read(extension)
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    described = {name for name in names if name.startswith("shardopt-")}
    assert names - described == files_of(ROOT) | {extension}
    assert {"shardopt/py.typed", "shardopt/_C.pyi"} <= names
    assert any(name.endswith("/LICENSE") for name in described), described
    for folder in (ROOT, build, Path(sys.prefix)):
        assert f"{folder}/".encode() not in code
    (build / "_C.so").write_bytes(code)
    assert not re.search("R(UN)?PATH", run("readelf", "--dynamic", build / "_C.so", cwd=build))
    fields = Parser().parsestr(metadata)
    assert fields["Requires-Python"] == ">=3.10"
    assert fields["License"] == "Apache-2.0"
    assert fields["Description-Content-Type"] == "text/markdown"
    assert fields.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    assert f"Programming Language :: Python :: 3.{sys.version_info.minor}" in fields.get_all("Classifier", [])
    needed = [each.partition(";")[0] for each in fields.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert sorted(each.replace("_", "-") for each in needed) == ["numpy", "torch>=2.6", "typing-extensions"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="manylinux wheels")
def test_a_wheel_and_the_source_in_an_empty_environment(tmp_path: Path) -> None:
    build = tmp_path / "build"
    build.mkdir()
    script = ROOT / "launch/wheel.sh"
    run("bash", script, "--python", sys.executable, "--out", "dist", cwd=tmp_path, TMPDIR=str(build))
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert re.fullmatch(r"shardopt-[\d.]+-(cp3\d+)-\1-(manylinux[\w.]+)\.whl", wheel.name), wheel.name
    check_contents(wheel, build)
    (sdist,) = (tmp_path / "dist").glob("shardopt-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert files_of(ROOT) | sources | {"LICENSE", "README.md"} <= names
    python = tmp_path / ".venv/bin/python"
    run(sys.executable, "-m", "venv", tmp_path / ".venv", cwd=tmp_path)
    requirements = ROOT / "launch/requirements.txt"
    run(python, "-m", "pip", "install", "-q", "-c", requirements, wheel, cwd=tmp_path)
    run(python, "-c", TRAIN, cwd=tmp_path)
    assert "no fault" in run(python, "-m", "shardopt", "doctor", cwd=tmp_path).lower()
    # The source distribution builds a wheel as well, without the checkout, a GPU or a driver.
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", tmp_path, sdist, cwd=tmp_path, SHARDOPT_CUDA="0")
    (built,) = tmp_path.glob("shardopt-*.whl")
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", built, cwd=tmp_path)
    run(python, "-c", TRAIN, cwd=tmp_path)
