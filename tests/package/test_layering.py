"""Imports and includes go one way only, files do not import each other in a circle, and no file grows long.

launch, clients -> shardopt -> sharding, release, report, checkpoint, estimate, wrapper, comm, clients.names -> optim ->
step -> state, unit -> layout -> codec -> kernels -> _C
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 600  # a hint: a file is long when a reader would divide it

#: From the bottom up. Rooms in one line may import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("shardopt._C", "shardopt.removed"),
    ("shardopt.kernels",),
    ("shardopt.codec",),
    ("shardopt.layout",),
    ("shardopt.state", "shardopt.unit"),
    ("shardopt.step",),
    ("shardopt.optim",),
    (
        "shardopt.sharding",
        "shardopt.release",
        "shardopt.report",
        "shardopt.checkpoint",
        "shardopt.estimate",
        "shardopt.wrapper",
        "shardopt.comm",
        "shardopt.clients.names",
    ),
    ("shardopt",),
    ("shardopt.doctor", "shardopt.program"),
    ("shardopt.__main__", "shardopt.clients", "launch"),
)
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}
SHARDING_LEVEL = LEVELS["shardopt.sharding"]
SHARDING = ("torch.distributed", "deepspeed")
#: Integrations register what checkpoints need to know of a framework; checkpoints name none of them.
FRAMEWORKS = ("accelerate", "deepspeed", "lightning", "megatron", "torchtitan", "transformers", "shardopt.sharding")
NO_FRAMEWORK = "shardopt.sharding.rank_group"

#: Folders of csrc and those that they may include.
INCLUDES = {
    "core": {"core"},
    "rules": {"core", "rules"},
    "codecs": {"core", "codecs"},
    "threads": {"threads"},
    "step": {"core", "rules", "codecs", "step", "threads"},
    "norm": {"core", "step", "norm", "threads"},
}
TORCH_HEADER = re.compile(r"^(torch|ATen|c10|caffe2)/")
#: Not for kernels, whose objects the wheels of all Pythons share: headers of Python, and those of bindings.
PYTHON_HEADER = re.compile(r"^(pybind11/|Python\.h|(bindings\w*|inputs|torch_tensor)\.h)")


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def level_of(module: str) -> int | None:
    """The level of a module by its full name; None for other people's."""
    packages = [package for package in LEVELS if within(module, package)]
    return LEVELS[max(packages, key=len)] if packages else None


def python_files(root: Path) -> Iterator[tuple[str, Path]]:
    """The modules of shardopt and launch, with their full names."""
    for top in ("shardopt", "launch"):
        for path in sorted((root / top).rglob("*.py*")):
            if path.suffix in (".py", ".pyi"):
                parts = path.relative_to(root).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def top_modules_of_launch(root: Path) -> set[str]:
    """The modules and packages in launch, which its files import by these names."""
    return {path.stem for path in (root / "launch").glob("*") if path.suffix in ("", ".py")}


def imported(module: str, path: Path, launch_modules: set[str]) -> Iterator[str]:
    """Full names of all that a file imports, each imported name included: ``from a import b`` gives ``a.b``.

    Imports within functions count, and so do those under ``if TYPE_CHECKING:``.
    """
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, [base, node.module]))
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in ("torch", "shardopt"):
                names = [f"{node.value.id}.{node.attr}"]
        elif isinstance(node, ast.Name) and node.id == "DTensor":
            names = ["torch.distributed.tensor.DTensor"]
        for name in names:
            yield f"launch.{name}" if name.partition(".")[0] in launch_modules else name


def python_faults(root: Path) -> list[str]:
    """Imports that run against the arrow, and torch.distributed and frameworks where they do not belong."""
    faults = []
    launch_modules = top_modules_of_launch(root)
    for module, path in python_files(root):
        own = level_of(module)
        assert own is not None
        for name in sorted(set(imported(module, path, launch_modules))):
            level = level_of(name)
            # A name that is no module of ours is something that the package itself defines, such as shardopt.AdamW.
            if level is not None and level > own:
                faults.append(f"{module} imports {name}")
            if own < SHARDING_LEVEL and any(within(name, package) for package in SHARDING):
                faults.append(f"{module} uses {name}")
            is_framework = any(within(name, framework) for framework in FRAMEWORKS) and not within(name, NO_FRAMEWORK)
            if within(module, "shardopt.checkpoint") and is_framework:
                faults.append(f"{module} names {name}")
    return faults


def import_graph(root: Path) -> dict[str, set[str]]:
    """The files that each file imports, at its top, within functions or for types, by their modules' full names.

    ``from package import name`` is an import of the module ``package.name`` where there is one, else of the package.
    That importing a module runs the ``__init__.py`` of its packages first does not count.
    """
    files = dict(python_files(root))
    launch_modules = top_modules_of_launch(root)
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        graph[module] = set()
        for name in imported(module, path, launch_modules):
            while name and name not in files:
                name = name.rpartition(".")[0]
            if name and name != module:
                graph[module].add(name)
    return graph


def circles(root: Path) -> list[str]:
    """A circle of imports, if there is any."""
    try:
        TopologicalSorter(import_graph(root)).prepare()
    except CycleError as error:
        return [" imports ".join(reversed(error.args[1]))]
    return []


def include_faults(root: Path) -> list[str]:
    """Includes that run against the arrow, torch headers, and Python's headers in kernels."""
    faults = []
    for path in sorted((root / "csrc").rglob("*")):
        if path.suffix not in (".h", ".cpp", ".cu", ".cuh"):
            continue
        name = path.relative_to(root / "csrc")
        for header in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE):
            folder = header.partition("/")[0]
            allowed = INCLUDES.get(name.parts[0], set(INCLUDES))
            of_python = name.parts[0] in INCLUDES and PYTHON_HEADER.match(header)
            if TORCH_HEADER.match(header) or of_python or (folder in INCLUDES and folder not in allowed):
                faults.append(f"{name} includes {header}")
    return faults


def long_files(root: Path) -> list[str]:
    found = []
    for path in sorted(path for top in ("shardopt", "launch", "csrc") for path in (root / top).rglob("*.*")):
        is_code = path.suffix in (".py", ".pyi", ".h", ".cpp", ".cu", ".cuh")
        if is_code and (lines := len(path.read_text().splitlines())) > MAX_LINES:
            found.append(f"{path.relative_to(root)} has {lines} lines")
    return found


CHECKS = (python_faults, circles, include_faults, long_files)


@pytest.mark.parametrize("check", CHECKS)
def test_the_project(check: Callable[[Path], list[str]]) -> None:
    assert check(ROOT) == []


def test_only_the_tables_of_a_step_know_of_muon() -> None:
    """The other optimizers' way through shardopt.step does not pass through Muon's room."""
    graph = import_graph(ROOT)
    users = {module for module, names in graph.items() for name in names if within(name, "shardopt.step.muon")}
    users = {module for module in users if not within(module, "shardopt.step.muon")}
    assert users == {"shardopt.step.tables", "shardopt.optim.muon"}


def test_every_folder_has_a_layer() -> None:
    packages = {f"shardopt.{path.name}" for path in (ROOT / "shardopt").iterdir() if (path / "__init__.py").exists()}
    assert packages <= set(LEVELS)
    assert {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()} == set(INCLUDES)


def faults(root: Path, files: dict[str, str]) -> list[str]:
    """Faults of a project after these files were written."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [fault for check in CHECKS for fault in check(root)]


GOOD = {
    "shardopt/__init__.py": "from shardopt import sharding\nfrom shardopt.optim import Adam\n",
    "shardopt/kernels/__init__.py": "from shardopt import _C\nimport torch\n",
    "shardopt/codec/__init__.py": "from ..kernels import numeric\n",
    "shardopt/codec/log8.py": "import shardopt.codec.base\n",
    "shardopt/codec/base.py": "from shardopt.codec import bf16\n",
    "shardopt/optim/adam.py": "import torch.optim\nfrom shardopt.codec import Moment\nfrom .base import Base\n",
    "shardopt/sharding/dtensor.py": "import torch.distributed\nfrom shardopt.layout import Shard\n",
    "launch/train.py": "import shardopt\nimport torch.distributed\nfrom lm import model\n",
    "launch/lm/model.py": "import torch\n",
    "csrc/core/a.h": "#include <cstdint>\n",
    "csrc/step/cpu.cpp": '#include "rules/a.h"\n#include "codecs/b.h"\n',
}


#: Files with a fault each.
BAD = {
    "shardopt/kernels/above.py": "def f():\n    import shardopt.optim.adam as x\n",
    "shardopt/codec/relative.py": "from ..optim import adam\n",
    "shardopt/optim/typed.py": "if TYPE_CHECKING:\n    from torch.distributed.tensor import DTensor\n",
    "shardopt/codec/framework.py": "import deepspeed\n",
    "shardopt/checkpoint/job.py": "import lm.model\n",
    "shardopt/checkpoint/engine.py": "def f():\n    from shardopt.sharding.deepspeed.engine import open_engine\n",
    "csrc/rules/upward.h": '#include "step/cpu.h"\n',
    "csrc/bindings.cpp": "#include <torch/extension.h>\n",
    "csrc/step/python.cpp": "#include <pybind11/pybind11.h>\n",
    "shardopt/optim/long.py": "x = 1\n" * (MAX_LINES + 1),
    "launch/lm/model.py": "if TYPE_CHECKING:\n    import train\n",
}


def test_a_name_of_a_class_has_one_meaning() -> None:
    trees = [ast.parse(path.read_text()) for path in (ROOT / "shardopt").rglob("*.py")]
    names = Counter(x.name.lstrip("_") for tree in trees for x in ast.walk(tree) if isinstance(x, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_a_client_is_one_file() -> None:
    """Clients import no other client but the names that several use."""
    for path in (ROOT / "shardopt/clients").glob("*.py"):
        imported = re.findall(r"^(?:from|import) shardopt\.clients(?:\.| import )(\w+)", path.read_text(), re.MULTILINE)
        assert {*imported} <= {"names"}, path


def test_the_checks_find_faults(tmp_path: Path) -> None:
    assert faults(tmp_path, GOOD) == []
    found = faults(tmp_path, BAD)
    assert [name for name in BAD if not any(Path(name).stem in fault for fault in found)] == []
