"""A rule, a codec and a kind of shard are added in the number of files that docs/extending.md says."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import band_shard
import shardopt
from band_shard import band_of
from helpers import CASES
from ranks.layouts import values
from ranks.pool import Pool
from ranks.snapshot import assert_same, snapshot
from shardopt.layout import shard_of

ROOT = Path(__file__).parents[2]

RULE_HEADER = """#pragma once

#include "core/numeric.h"
#include "core/rule.h"

SHARDOPT_BEGIN_NAMESPACE

// Steps against the average gradient.
struct Toy {
  static constexpr const char* kName = "toy";
  using Kept = Moments<MomentKind::kSigned>;
  static constexpr const char* kHyper[] = {"lr", "beta"};

  float lr, one_minus_beta;

  SHARDOPT_HD static Toy make(const double* hyper, double) {
    Toy rule;
    rule.lr = static_cast<float>(hyper[0]);
    rule.one_minus_beta = static_cast<float>(1.0 - hyper[1]);
    return rule;
  }

  template <class F>
  SHARDOPT_HD void update(F& param, F gradient, F* moment, F&) const {
    moment[0] = fma(one_minus_beta, gradient - moment[0], moment[0]);
    param = fma(-lr, moment[0], param);
  }
};

SHARDOPT_END_NAMESPACE
"""

RULE_CLASS = '''"""A toy."""

from shardopt.codec import Moment
from shardopt.optim.base import ShardedOptimizer
from shardopt.state.rule import Rule


class Toy(ShardedOptimizer):
    only_rule = Rule("toy", (Moment("average", signed=True),))

    def __init__(self, params, lr=0.1, beta=0.5, **options):
        super().__init__(params, {"lr": lr, "beta": beta}, options)


class Toy8bit(Toy, codec="log8"):
    pass
'''

CODEC_HEADER = """#pragma once

#include "codecs/companded8.h"

SHARDOPT_BEGIN_NAMESPACE

struct ToyCodec : Companded8 {
  static constexpr const char* kName = "toy8";
};

SHARDOPT_END_NAMESPACE
"""

CODEC_CLASS = '''"""A toy."""

from shardopt.codec.companded8 import Companded8


class ToyCodec(Companded8):
    name = "toy8"
'''

#: The new files, and what is written over in lists: (file, old text, new text).
NEW_FILES = {
    "csrc/rules/toy.h": RULE_HEADER,
    "shardopt/optim/toy.py": RULE_CLASS,
    "csrc/codecs/toy.h": CODEC_HEADER,
    "shardopt/codec/toy.py": CODEC_CLASS,
}
IN_LISTS = (
    ("csrc/step/instances.h", '#include "rules/sgd.h"\n', '#include "rules/sgd.h"\n#include "rules/toy.h"\n'),
    ("csrc/step/instances.h", "OtherRules = List<Sgd,", "OtherRules = List<Toy, Sgd,"),
    ("csrc/step/instances.h", '#include "codecs/plain.h"\n', '#include "codecs/plain.h"\n#include "codecs/toy.h"\n'),
    ("csrc/step/instances.h", "OtherCodecs = List<Companded16>", "OtherCodecs = List<Companded16, ToyCodec>"),
    ("shardopt/optim/__init__.py", '["ShardedOptimizer"]\n', '["ShardedOptimizer", "Toy", "Toy8bit"]\n'),
    (
        "shardopt/optim/__init__.py",
        "import Prodigy, Prodigy8bit\n",
        "import Prodigy, Prodigy8bit\nfrom shardopt.optim.toy import Toy, Toy8bit\n",
    ),
    ("shardopt/codec/__init__.py", "BFloat16(), Float32())", "BFloat16(), Float32(), ToyCodec())"),
    (
        "shardopt/codec/__init__.py",
        "import BFloat16, Float32\n",
        "import BFloat16, Float32\nfrom .toy import ToyCodec\n",
    ),
)

#: A step by hand, in every block size and dtype; a file; and the names that come with the list.
USE = """
import torch, shardopt, shardopt.estimate.ledger
from shardopt.sharding.deepspeed import hooks

assert hooks.TYPES["toy8bit"] is shardopt.Toy8bit and "toy" in shardopt.estimate.ledger.OPTIMIZERS
for codec in ("fp32", "log8", "toy8", "companded8"):
    param = torch.nn.Parameter(torch.linspace(-1, 1, 40 * 130).view(40, 130))
    optimizer = shardopt.Toy([param], codec=codec, min_quantized_numel=0)
    expected, average = param.detach().clone(), torch.zeros(40, 130)
    for step in range(3):
        param.grad = torch.sin(torch.arange(40 * 130.0) + step).view(40, 130)
        average += 0.5 * (param.grad - average)
        expected -= 0.1 * average
        optimizer.step()
    assert optimizer.state[param].keys() >= ({"average"} if codec == "fp32" else {"average_codes", "average_scales"})
    assert (param.detach() - expected).abs().max() < (1e-6 if codec == "fp32" else 0.02), codec
    if codec == "companded8":
        assert torch.equal(optimizer.state[param]["average_codes"], codes)
    codes = optimizer.state[param].get("average_codes")
    again = shardopt.Toy([param], codec=codec, min_quantized_numel=0)
    again.load_state_dict(optimizer.state_dict())
print("used")
"""


def compile_portable(tree: Path) -> None:
    """Builds the extension with the portable kernels only."""
    import pybind11

    include = [f"-I{folder}" for folder in (tree / "csrc", pybind11.get_include(), sysconfig.get_paths()["include"])]
    flags = ["-std=c++17", "-O1", "-fPIC", "-w", "-fvisibility=hidden", "-ffp-contract=off", "-fwrapv", *include]
    flags += ["-fno-math-errno", "-fno-trapping-math"]
    compiler = os.environ.get("CXX", "c++")
    step = tree / "csrc/step/cpu.cpp"
    only_portable = "#undef __x86_64__\n#undef __aarch64__\nnamespace shardopt {\nnamespace {\n"
    step.write_text(step.read_text().replace("namespace shardopt {\nnamespace {\n", only_portable, 1))
    sources = ("bindings", "inputs", "torch_tensor", "step/cpu", "threads/pool", "step/cpu_portable")

    def compile_one(name: str) -> str:
        target = tree / f"{name.replace('/', '_')}.o"
        source = tree / "csrc" / f"{name}.cpp"
        subprocess.run([compiler, *flags, "-c", source, "-o", target], check=True)
        return str(target)

    with ThreadPoolExecutor(2) as threads:
        objects = list(threads.map(compile_one, sources))
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    library = tree / "shardopt" / f"_C{suffix}"
    subprocess.run([compiler, "-shared", *objects, "-o", library, "-lpthread", "-ldl"], check=True)


@pytest.mark.slow
def test_a_rule_and_a_codec(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for folder in ("csrc", "shardopt"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    for name, text in NEW_FILES.items():
        assert not (tree / name).exists()
        (tree / name).write_text(text)
    for name, old, new in IN_LISTS:
        text = (tree / name).read_text()
        assert text.count(old) == 1, f"{name} has not {old!r} once"
        (tree / name).write_text(text.replace(old, new))
    # Two new files and two lists for each, of which one list is common.
    assert (len(NEW_FILES), len({name for name, *_ in IN_LISTS})) == (2 + 2, 2 + 2 - 1)
    compile_portable(tree)
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "used\n"), done.stderr


#: Blocks of 128: rows for three ranks and more; columns that end inside blocks, and at their ends; float32 state.
SHAPES = {"rows": (7, 130), "cut": (40, 300), "aligned": (9, 768), "few": (2, 257), "bias": (5,)}
STEPS = 2


ROWS = dict.fromkeys(SHAPES, 0)
COLUMNS = {**dict.fromkeys(SHAPES, 1), "bias": 0}


class Run:
    """Parameters in bands of a dimension each, or whole, and their optimizer."""

    def __init__(self, dims: Mapping[str, int] | None, rule: str, codec: str) -> None:
        self.model = nn.Module()
        for seed, (name, shape) in enumerate(SHAPES.items()):
            whole = values(shape, seed, torch.float32)
            param = Parameter(whole) if dims is None else band_of(whole, dims[name])
            self.model.register_parameter(name, param)
        self.optimizer = CASES[rule].make(self.model.parameters(), codec=codec, min_quantized_numel=64)

    def step(self, number: int) -> None:
        for seed, (name, param) in enumerate(self.model.named_parameters(), start=100 * (1 + number)):
            param.grad = shard_of(param).part(values(SHAPES[name], seed, torch.float32)).clone()
        self.optimizer.step()


def _train(dims: Mapping[str, int], case: tuple[str, str], path: Path) -> None:
    run = Run(dims, *case)
    for number in range(STEPS):
        run.step(number)
    shardopt.checkpoint.save(path, run.model, run.optimizer)


def _go_on(dims: Mapping[str, int], case: tuple[str, str], path: Path, saved: Path) -> None:
    run = Run(dims, *case)
    run.step(7)
    assert shardopt.checkpoint.load(path, run.model, run.optimizer).converted == {}
    run.step(STEPS)
    shardopt.checkpoint.save(saved, run.model, run.optimizer)


@pytest.mark.parametrize("case", [("lamb", "dynamic8"), ("muon", "log8")], ids=str)
@pytest.mark.parametrize(("dims", "others"), [(ROWS, COLUMNS), (COLUMNS, ROWS)], ids=["rows", "columns"])
def test_a_kind_of_shard(
    ranks: Pool, tmp_path: Path, dims: Mapping[str, int], others: Mapping[str, int], case: tuple[str, str]
) -> None:
    """Bands of rows and columns have the bits of whole parameters; checkpoints load in any other layout."""
    ranks.run(3, _train, dims, case, tmp_path / "saved")
    ranks.run(4, _go_on, others, case, tmp_path / "saved", tmp_path / "again")
    for path, steps in (("saved", STEPS), ("again", STEPS + 1)):
        expected, loaded = Run(None, *case), Run(None, *case)
        for number in range(steps):
            expected.step(number)
        shardopt.checkpoint.load(tmp_path / path, loaded.model, loaded.optimizer)
        got, wanted = (snapshot(dict(run.model.named_parameters()), run.optimizer) for run in (loaded, expected))
        assert_same(got, wanted)


def _import(dims: Mapping[str, int], state_dict: dict[str, Any], path: Path) -> None:
    run = Run(dims, "adamw", "log8")
    shardopt.checkpoint.import_state(run.optimizer, state_dict)
    shardopt.checkpoint.save(path, run.model, run.optimizer)


@pytest.mark.parametrize("dims", [ROWS, COLUMNS], ids=["rows", "columns"])
def test_a_kind_of_shard_imports(ranks: Pool, tmp_path: Path, dims: Mapping[str, int]) -> None:
    """State of PyTorch's optimizer is encoded in bands as in whole parameters."""
    expected, loaded = Run(None, "adamw", "log8"), Run(None, "adamw", "log8")
    theirs = torch.optim.AdamW(expected.model.parameters())
    for number, param in enumerate(expected.model.parameters()):
        param.grad = values(tuple(param.shape), number, torch.float32)
    theirs.step()
    ranks.run(3, _import, dims, theirs.state_dict(), tmp_path)
    shardopt.checkpoint.import_state(expected.optimizer, theirs.state_dict())
    shardopt.checkpoint.load(tmp_path, loaded.model, loaded.optimizer)
    for got, wanted in zip(loaded.model.parameters(), expected.model.parameters(), strict=True):
        assert_same(loaded.optimizer.state[got], expected.optimizer.state[wanted])


def test_a_kind_of_shard_is_one_file() -> None:
    """The file is short, and needs nothing of the package but the layout and the ranks' exchange."""
    source = Path(band_shard.__file__).read_text()
    assert len(source.splitlines()) <= 80
    imported = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name.startswith("shardopt")} == {
        "shardopt.layout",
        "shardopt.layout.partition",
        "shardopt.sharding.rank_group",
    }
    assert [path for path in (ROOT / "shardopt").rglob("*.py") if "band_shard" in path.read_text()] == []


def test_the_page_names_what_there_is() -> None:
    """Files that docs/extending.md tells to read or to change exist."""
    page = (ROOT / "docs/extending.md").read_text()
    named = {part for part in page.split("`") if "/" in part and "<" not in part and " " not in part}
    assert len(named) > 8
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_contributing_names_the_files_of_a_rule_and_a_codec() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith(("| a [rule]", "| a [codec]"))]
    named = {part.replace("<name>", "toy") for row in rows for part in row.split("|")[2].split("`")[1::2]}
    assert named == {*NEW_FILES, *(file for file, _, _ in IN_LISTS)}
