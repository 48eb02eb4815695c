"""The source distribution builds a wheel that works where it is installed, without a GPU, a driver or the checkout."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

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


#: Distributions that are not called as the module that they hold.
DISTRIBUTIONS = {"yaml": "pyyaml"}


def third_party(folder: Path, own: set[str], on_import: bool) -> set[str]:
    """The distributions that the files of a folder import.

    Args:
        folder: where the files are.
        own: names of top-level modules that are the project's.
        on_import: leave out what functions import when they are called, and clients, which nothing else imports.
    """
    paths = [path for path in folder.rglob("*.py") if not (on_import and path.parent.name == "clients")]
    names = {name for path in paths for name in top_level_imports(path, on_import)}
    return {DISTRIBUTIONS.get(name, name) for name in names - own - sys.stdlib_module_names}


def top_level_imports(path: Path, on_import: bool) -> Iterator[str]:
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
        if not (on_import and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            pending += ast.iter_child_nodes(node)


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement)[0].lower().replace("-", "_") for requirement in requirements}


def test_all_that_is_imported_is_declared() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python >= 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = names_of(project["dependencies"])
    extras = set().union(*(names_of(e) for name, e in project["optional-dependencies"].items() if name != "test"))
    assert third_party(ROOT / "shardopt", {"shardopt"}, on_import=True) == needed
    assert third_party(ROOT / "shardopt", {"shardopt"}, on_import=False) <= needed | extras
    assert third_party(ROOT / "launch", {"shardopt", "lm"}, on_import=False) <= needed | extras


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


def test_pytest_in_a_source_tree_that_is_not_built_says_so_once(tmp_path: Path) -> None:
    copy_source(tmp_path)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "tests/optim/test_options.py",
        "tests/codec/test_codecs.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 4
    assert (done.stdout + done.stderr).count("is not built for") == 1


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
