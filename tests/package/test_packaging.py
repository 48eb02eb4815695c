"""The package's declarations, and its errors where it is not built, cannot be loaded or has no CUDA kernels."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]

#: Distributions that are not called as the module that they hold.
DISTRIBUTIONS = {"megatron": "megatron_core", "swift": "ms_swift", "yaml": "pyyaml"}


def third_party(folder: Path) -> set[str]:
    """The distributions that the files of a folder import."""
    names = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return {DISTRIBUTIONS.get(name, name) for name in names - {"shardopt", "lm", "train"} - sys.stdlib_module_names}


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement)[0].lower().replace("-", "_") for requirement in requirements}


def test_all_that_is_imported_is_declared() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python >= 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = names_of(project["dependencies"])
    extras = set().union(*(names_of(e) for name, e in project["optional-dependencies"].items() if name != "test"))
    assert needed <= third_party(ROOT / "shardopt") <= needed | extras
    # Whoever starts the job on a Ray cluster has Ray.
    assert third_party(ROOT / "launch") - {"ray"} <= needed | extras


def test_the_tested_versions_are_those_of_the_workflow() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    matrix = jobs["versions"]["strategy"]["matrix"]
    pairs = [{"python": python, "torch": torch} for torch in matrix["torch"] for python in matrix["python"]]
    pairs = [pair for pair in pairs if pair not in matrix["exclude"]] + matrix["include"]
    (pinned,) = (step["with"]["python-version"] for step in jobs["pinned"]["steps"] if "setup-python" in str(step))
    pin = re.findall(r"^torch==([\d.]+)", (ROOT / "launch/requirements.txt").read_text(), re.MULTILINE)
    pairs.append({"python": pinned, "torch": pin[0]})
    rows = re.findall(r"\| PyTorch (\S+) \| Python (.*) \|", (ROOT / "tests/clients/README.md").read_text())
    found = [{"python": python, "torch": torch} for torch, pythons in rows for python in pythons.split(", ")]
    assert sorted(map(str, found)) == sorted(map(str, pairs))
    said = f"PyTorch {rows[0][0][:-2]} to {rows[-1][0][:-2]}, Python {matrix['python'][0]} to {matrix['python'][-1]}"
    assert said in (ROOT / "docs/how_it_works.md").read_text()


def copy_source(folder: Path) -> Path:
    """The source of the package without its extension, as a checkout has it."""
    compiled = shutil.ignore_patterns("*.so", "__pycache__")
    return shutil.copytree(ROOT / "shardopt", folder / "shardopt", ignore=compiled)


def import_error(folder: Path) -> str:
    """The last line of what `import shardopt` says in a folder."""
    done = subprocess.run([sys.executable, "-c", "import shardopt"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_a_source_tree_that_is_not_built_says_so(tmp_path: Path) -> None:
    source = copy_source(tmp_path)
    line = import_error(tmp_path)
    assert line.startswith(f"ImportError: shardopt in {source} is not built for {sys.implementation.cache_tag}: ")
    for remedy in ("python setup.py build_ext --inplace", "pip install .", "run pytest, not python -m pytest"):
        assert remedy in line


def test_an_extension_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    source = copy_source(tmp_path)
    extension = source / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    extension.write_bytes(b"no library")
    line = import_error(tmp_path)
    assert line.startswith("ImportError: ")
    assert str(extension) in line
    assert "not built" not in line


def script(path: Path, *lines: str) -> None:
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)


def cuda_build(folder: Path, monkeypatch: pytest.MonkeyPatch, *, gpu: bool, nvcc: bool, wanted: str | None) -> object:
    """Which kernels setup.py decides on where PATH has a stand-in for nvidia-smi, and for nvcc.

    Returns:
        ``True`` for CUDA kernels, else the reason that the build prints; empty if it prints none.
    """
    (folder / "bin").mkdir()
    (folder / "lib64").mkdir()
    (folder / "lib64/libcudart_static.a").touch()
    script(folder / "bin/nvidia-smi", "echo 'GPU 0: a GPU'" if gpu else "exit 9")
    if nvcc:
        script(folder / "bin/nvcc")
    monkeypatch.setenv("PATH", str(folder / "bin"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("SHARDOPT_CUDA", raising=False)
    if wanted is not None:
        monkeypatch.setenv("SHARDOPT_CUDA", wanted)
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    decided = runpy.run_path(str(ROOT / "setup.py"))
    return True if decided["toolkit"] is not None else decided["left_out"]


def test_a_build_says_first_what_it_compiles(tmp_path: Path) -> None:
    """With a compiler that fails at once."""
    environment = {**os.environ, "CC": "false", "CXX": "false", "SHARDOPT_CUDA": "0"}
    folders = ("--build-temp", tmp_path / "temp", "--build-lib", tmp_path / "lib")
    command = [sys.executable, "setup.py", "build_ext", *map(str, folders)]
    build = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert build.returncode != 0
    assert re.search(r"^shardopt: compiling \d+ files for \w+, about \d+ min on \d+ cores$", build.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("gpu", "nvcc", "wanted", "built"),
    [
        (True, True, None, True),
        (False, True, None, "nvidia-smi lists no GPU"),
        (True, False, None, "no nvcc was found"),
        (False, True, "1", True),
        (True, True, "0", ""),
    ],
)
def test_cuda_kernels_by_default_where_a_gpu_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool, nvcc: bool, wanted: str | None, built: object
) -> None:
    assert cuda_build(tmp_path, monkeypatch, gpu=gpu, nvcc=nvcc, wanted=wanted) == built
    if nvcc and wanted == "1":
        (tmp_path / "bin/nvcc").unlink()
        with pytest.raises(SystemExit, match="SHARDOPT_CUDA=1, but no nvcc was found; set CUDA_HOME"):
            runpy.run_path(str(ROOT / "setup.py"))
