"""``shardopt run`` runs a program as python does, with shardopt's classes in others' places."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import shardopt
from needed import needs
from programs import Programs
from shardopt.__main__ import main

#: Writes the facts that a program sees.
PROGRAM = """
import json, os, pickle, sys
import torch
from torch.optim import SGD, AdamW
from torch.optim.adamw import AdamW as Defined

import beside

def function(): ...

assert pickle.loads(pickle.dumps(function)) is function
assert AdamW is Defined is torch.optim.AdamW
weight = torch.nn.Parameter(torch.ones(64, 64))
optimizer = AdamW([weight], lr=0.1, fused=True, foreach=False)
weight.grad = torch.ones(64, 64)
optimizer.step()
facts = [__name__, os.path.basename(sys.argv[0]), sys.argv[1:], f"{AdamW.__module__}.{AdamW.__name__}", SGD.__module__]
open("facts", "w").write(json.dumps(facts))
sys.exit(7)
"""
OURS, THEIRS = "shardopt.optim.adam.AdamW8bit", "torch.optim.adamw.AdamW"


def write_programs(folder: Path) -> None:
    (folder / "package").mkdir(exist_ok=True)
    for place in (folder / "package", folder):
        (place / "program.py").write_text(PROGRAM)
        (place / "beside.py").touch()
    (folder / "a-command").write_text(f"#!{sys.executable}\n{PROGRAM}")  # whose shebang does not count
    (folder / "a-command").chmod(0o755)


#: Runs the command in a folder, as torchrun starts it by ``-m shardopt run``, and prints its exit code.
COMMAND = """
import os, runpy, sys

os.chdir(FOLDER)
os.environ |= ENVIRONMENT
sys.argv = ["shardopt", "run", *ARGUMENTS]
try:
    runpy.run_module("shardopt", run_name="__main__", alter_sys=True)
except SystemExit as end:
    print("exit code", end.code)
"""


def output_of(programs: Programs, folder: Path, *arguments: str, **environment: str) -> str:
    """The output of the command, in a process that has imported torch already."""
    command = COMMAND
    for name, value in {"FOLDER": str(folder), "ENVIRONMENT": environment, "ARGUMENTS": arguments}.items():
        command = command.replace(name, repr(value))
    (folder / "command").mkdir()
    programs.run(command, folder / "command")
    return (folder / "command" / "output.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("package/program.py",), ["program.py", [], THEIRS]),
        (
            ("--replace", "AdamW=AdamW8bit", "package/program.py", "--replace", "x", "-m", "--help"),
            ["program.py", ["--replace", "x", "-m", "--help"], OURS],
        ),
        (("--replace=torch.optim.AdamW=AdamW8bit", "-m", "package.program", "a"), ["program.py", ["a"], OURS]),
        (("--replace", "AdamW=AdamW8bit", "a-command", "a"), ["a-command", ["a"], OURS]),
    ],
)
def test_a_program_runs_as_main(
    programs: Programs, arguments: tuple[str, ...], expected: list[Any], tmp_path: Path
) -> None:
    write_programs(tmp_path)
    output = output_of(programs, tmp_path, *arguments, PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert "exit code 7" in output, output
    name, argv, kind = expected
    assert json.loads((tmp_path / "facts").read_text()) == ["__main__", name, argv, kind, "torch.optim.sgd"]


UNUSED = """
import torch

weight = torch.nn.Parameter(torch.ones(3))
for kind in (torch.optim.SGD, torch.optim.AdamW):
    weight.grad = torch.ones(3)
    kind([weight], lr=0.1).step()
"""


def test_a_replacement_that_replaces_nothing_is_named(programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "unused.py").write_text(UNUSED)
    output = output_of(programs, tmp_path, "--replace", "Adam=Adam8bit", "--replace", "AdamW=AdamW8bit", "unused.py")
    said = [line for line in output.splitlines() if line.startswith("shardopt run: ")]
    assert said == [
        "shardopt run: --replace torch.optim.Adam=Adam8bit replaced nothing: the program stepped "
        "shardopt.optim.adam.AdamW8bit, torch.optim.sgd.SGD; name the class that it uses, with its package"
    ]


def test_a_class_of_another_package_is_replaced(programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "__init__.py").write_text("class FusedAdam: ...\n")
    (tmp_path / "using.py").write_text("from other import FusedAdam\nprint(FusedAdam)\n")
    assert OURS in output_of(programs, tmp_path, "--replace", "other.FusedAdam=AdamW8bit", "using.py")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--replace", "AdamW=Adamw8bit", "program.py"), "expected an optimizer of shardopt after ="),
        (("--replace", "AdamW", "program.py"), "expected an optimizer of shardopt after ="),
        (("--replace", "AdamV=AdamW8bit", __file__), "got torch.optim.AdamV, expected a class that exists"),
        (("--replace", "Optimizer=AdamW8bit", __file__), "got Optimizer, expected an optimizer of torch.optim"),
        (("--replace", "json.FusedAdm=AdamW8bit", __file__), "got json.FusedAdm, expected a class that exists"),
        (("missing.py",), "got missing.py, expected a file or a command on PATH"),
    ],
)
def test_mistakes(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments])
    assert message in f"{ended.value.code}{capsys.readouterr().err}"
    assert ended.value.code != 0


@pytest.mark.parametrize(("before", "own"), [((), ("--", "-x")), (("--",), ("a", "--", "--", "-m"))])
def test_dashes_are_the_programs_own(
    before: tuple[str, ...], own: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, argv = tmp_path / "program.py", sys.argv
    program.write_text("import sys; print(sys.argv[1:])")
    try:
        main(["run", *before, str(program), *own])
    finally:
        sys.argv = argv
    assert capsys.readouterr().out == f"{list(own)}\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"shardopt {shardopt.__version__}\n")


def test_errors_of_programs_are_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "broken.py").write_text("raise BrokenPipeError('the worker is gone')\n")
    with pytest.raises(BrokenPipeError, match="the worker is gone"):
        main(["run", str(tmp_path / "broken.py")])


def test_a_reader_that_has_seen_enough_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["estimate", "7B"]) == 141
        monkeypatch.undo()


DEEPSPEED = """
import deepspeed, shardopt, torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes a minute to compile
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True},
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}}
model = torch.nn.Linear(64, 64)
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
for _ in range(2):
    engine.backward(engine(torch.ones(1, 64, dtype=torch.bfloat16)).float().square().mean())
    engine.step()
assert shardopt.memory_report(engine).host.scales > 0
print(type(engine.basic_optimizer), "exp_avg_codes" in engine.basic_optimizer.state_dict()["state"][0])
"""


@needs("deepspeed")
def test_deepspeeds_type_of_that_name(programs: Programs, tmp_path: Path) -> None:
    """Trainers such as OpenRLHF write "AdamW" into DeepSpeed's config."""
    (tmp_path / "engine.py").write_text(DEEPSPEED)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    output = output_of(programs, tmp_path, "--replace", "AdamW=AdamW8bit", "engine.py", **alone, DS_ACCELERATOR="cpu")
    assert f"<class '{OURS}'> True" in output, output
    assert "shardopt: AdamW8bit, state of large matrices: codec log8 in blocks of 128, 2.094 bytes per" in output
