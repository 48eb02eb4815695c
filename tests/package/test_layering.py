"""Imports and includes go one way only, and no file grows long.

launch, shardopt.__main__ -> shardopt -> integrations, checkpoint, estimate -> optim -> layout -> codec -> kernels -> _C
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 420

#: From the bottom up. What stands in one line may import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("shardopt._C",),
    ("shardopt.kernels",),
    ("shardopt.codec",),
    ("shardopt.layout",),
    ("shardopt.optim",),
    ("shardopt.integrations", "shardopt.checkpoint", "shardopt.estimate"),
    ("shardopt",),
    ("shardopt.__main__", "launch"),
)
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}
SHARDING_LEVEL = LEVELS["shardopt.integrations"]
SHARDING = ("torch.distributed", "deepspeed")

#: Folders of csrc and those that they may include.
INCLUDES = {
    "core": {"core"},
    "rules": {"core", "rules"},
    "codecs": {"core", "codecs"},
    "step": {"core", "rules", "codecs", "step"},
}
TORCH_HEADER = re.compile(r"^(torch|ATen|c10|caffe2)/")


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


def imported(module: str, path: Path, launch_modules: set[str]) -> Iterator[str]:
    """Full names of all that a file imports, each imported name included: ``from a import b`` gives ``a.b``."""
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
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
    """Imports that run against the arrow, and torch.distributed where it does not belong."""
    faults = []
    launch_modules = {path.stem for path in (root / "launch").glob("*") if path.suffix in ("", ".py")}
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
    return faults


def include_faults(root: Path) -> list[str]:
    """Includes that run against the arrow, and torch headers."""
    faults = []
    for path in sorted((root / "csrc").rglob("*")):
        if path.suffix not in (".h", ".cpp", ".cu", ".cuh"):
            continue
        name = path.relative_to(root / "csrc")
        for header in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE):
            folder = header.partition("/")[0]
            allowed = INCLUDES.get(name.parts[0], set(INCLUDES))
            if TORCH_HEADER.match(header) or (folder in INCLUDES and folder not in allowed):
                faults.append(f"{name} includes {header}")
    return faults


def long_files(root: Path) -> list[str]:
    found = []
    for top, kinds in (("shardopt", (".py", ".pyi")), ("csrc", (".h", ".cpp", ".cu", ".cuh"))):
        for path in sorted((root / top).rglob("*")):
            if path.suffix in kinds and (lines := len(path.read_text().splitlines())) > MAX_LINES:
                found.append(f"{path.relative_to(root)} has {lines} lines")
    return found


def test_imports_go_one_way() -> None:
    assert len(list(python_files(ROOT))) > 20
    assert python_faults(ROOT) == []


def test_includes_go_one_way() -> None:
    assert include_faults(ROOT) == []


def test_no_file_is_long() -> None:
    assert long_files(ROOT) == []


def test_every_folder_has_a_layer() -> None:
    packages = {f"shardopt.{path.name}" for path in (ROOT / "shardopt").iterdir() if (path / "__init__.py").exists()}
    assert packages <= set(LEVELS)
    assert {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()} == set(INCLUDES)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


GOOD = {
    "shardopt/__init__.py": "from shardopt import integrations\nfrom shardopt.optim import Adam\n",
    "shardopt/kernels/__init__.py": "from shardopt import _C\nimport torch\n",
    "shardopt/codec/__init__.py": "from ..kernels import numeric\n",
    "shardopt/optim/adam.py": "import torch.optim\nfrom shardopt.codec import Moment\nfrom .base import Base\n",
    "shardopt/integrations/dtensor.py": "import torch.distributed\nfrom shardopt.layout import Shard\n",
    "launch/train.py": "import shardopt\nimport torch.distributed\nfrom lm import model\n",
    "launch/lm/model.py": "import torch\n",
    "csrc/core/a.h": "#include <cstdint>\n",
    "csrc/step/cpu.cpp": '#include "rules/a.h"\n#include "codecs/b.h"\n',
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shardopt/kernels/a.py", "from shardopt.codec import Codec\n"),
        ("shardopt/kernels/a.py", "from shardopt import codec\n"),
        ("shardopt/kernels/a.py", "from ..codec import base\n"),
        ("shardopt/kernels/a.py", "def f():\n    import shardopt.optim.adam as x\n"),
        ("shardopt/layout/a.py", "from shardopt.integrations import dtensor\n"),
        ("shardopt/optim/a.py", "import shardopt\n"),
        ("shardopt/optim/a.py", "if TYPE_CHECKING:\n    from torch.distributed.tensor import DTensor\n"),
        ("shardopt/optim/a.py", "import torch\nx = torch.distributed.get_rank()\n"),
        ("shardopt/layout/a.py", "from torch import distributed as dist\n"),
        ("shardopt/codec/a.py", "import deepspeed\n"),
        ("shardopt/checkpoint/a.py", "import lm.model\n"),
        ("shardopt/estimate/a.py", "from train import main\n"),
        ("shardopt/estimate/a.py", "from shardopt import __main__\n"),
        ("csrc/codecs/a.h", '#include "rules/b.h"\n'),
        ("csrc/rules/a.h", '#  include "codecs/b.h"\n'),
        ("csrc/core/a.h", '#include "codecs/b.h"\n'),
        ("csrc/rules/a.h", '#include "step/cpu.h"\n'),
        ("csrc/bindings.cpp", "#include <torch/extension.h>\n"),
        ("csrc/step/x.cu", "#include <ATen/ATen.h>\n"),
        ("shardopt/optim/long.py", "x = 1\n" * (MAX_LINES + 1)),
        ("csrc/step/long.cu", "\n" * (MAX_LINES + 1)),
    ],
)
def test_the_checks_find_faults(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path, GOOD)
    assert python_faults(tmp_path) + include_faults(tmp_path) + long_files(tmp_path) == []
    write(tmp_path, {name: text})
    (fault,) = python_faults(tmp_path) + include_faults(tmp_path) + long_files(tmp_path)
    assert Path(name).stem in fault
