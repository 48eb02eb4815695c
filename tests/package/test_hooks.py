"""Hooks into other packages: installed once a module is imported, in either order, and left out by SHARDOPT_HOOKS."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from needed import needs
from programs import Programs
from shardopt.sharding.hooks import HOOKS, PACKAGES, hooked_packages

#: In a world of one rank; FSDP1 needs a process group, and says on one rank that it shards nothing.
WRAPPED_BEFORE = """
import warnings, torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

warnings.simplefilter("ignore")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = FullyShardedDataParallel(torch.nn.Linear(64, 96), device_id=torch.device("cpu"))
import shardopt

optimizer = shardopt.AdamW8bit(model.parameters())
model(torch.ones(2, 64)).sum().backward()
try:
    optimizer.step()
except RuntimeError as error:
    assert "import shardopt before wrapping the model, or call optimizer.attach(model)" in str(error), error
else:
    raise AssertionError("it stepped")
optimizer.attach(model)
optimizer.step()
"""


def test_fsdp1_wrapped_before_the_import(programs: Programs, tmp_path: Path) -> None:
    """Nobody told the parameters: the error says what to do, and that helps."""
    programs.run(WRAPPED_BEFORE, tmp_path)


def test_accelerate_without_deepspeed(programs: Programs, tmp_path: Path) -> None:
    """The module lacks the function that the hook replaces."""
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").touch()
    (tmp_path / "accelerate" / "accelerator.py").write_text("def prepare(optimizer):\n    return optimizer\n")
    programs.run("import shardopt, accelerate.accelerator", tmp_path)


#: By what SHARDOPT_HOOKS says, and whether they were imported before, the packages that importing shardopt changes.
CASES = {
    (None, False): "accelerate,deepspeed,torch,transformers",
    ("0", False): "",
    (None, True): "accelerate,deepspeed,torch,transformers",
    ("torch, accelerate", True): "accelerate,torch",
}

#: Prints them. Each case has a process, forked before.
CHANGED_PACKAGES = """
import importlib, os, sys, torch
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.pop("SHARDOPT_HOOKS", None)

def contents(name):
    module = importlib.import_module(name)
    classes = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == name]
    classes += [vars(module)[name] for name in ("FullyShardedDataParallel",) if name in vars(module)]
    return [dict(vars(each)) for each in (module, *classes)]

before = {}
for setting, is_first in CASES:
    if is_first and not before:
        before = {name: contents(name) for name in MODULES}
    if not os.fork():
        os.environ |= {} if setting is None else {"SHARDOPT_HOOKS": setting}
        break
    assert os.wait()[1] == 0, setting
else:
    sys.exit()
finders = list(sys.meta_path)
import shardopt
left = {name.partition(".")[0] for name, old in before.items() if contents(name) != old}
left |= {finder._name.partition(".")[0] for finder in sys.meta_path if finder not in finders}
print(*sorted(left), sep=",")
"""


@needs("deepspeed")
def test_settings(tmp_path: Path) -> None:
    """Modules that were imported before shardopt stay as they are; for others no finder waits."""
    modules = sorted({module for package in ("torch", "deepspeed") for module, _ in HOOKS[package]})
    program = CHANGED_PACKAGES
    for name, value in {"MODULES": modules, "CASES": list(CASES)}.items():
        program = program.replace(name, repr(value))
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-len(CASES) :] == [*CASES.values()]


@pytest.mark.parametrize("setting", ["1", "torch,,accelerate", "0,torch"])
def test_unknown_setting(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDOPT_HOOKS", setting)
    expected = f"got '{setting}', expected 0 for no hooks, or some of {', '.join(PACKAGES)}, .*; unset it for all"
    with pytest.raises(ValueError, match=f"SHARDOPT_HOOKS: {expected}"):
        hooked_packages()
