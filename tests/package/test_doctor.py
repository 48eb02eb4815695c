"""``shardopt doctor`` reports this machine, and names each fault with a remedy."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardopt import _C, doctor
from shardopt.doctor import Facts, judge, report

ROOT = Path(__file__).parents[2]
H100 = ("NVIDIA H100", (9, 0))
SOUND = Facts(
    torch="2.13.0+cu130",
    torch_cuda="13.0",
    machine="x86_64",
    targets=("avx512", "avx2", "portable"),
    target="avx512",
    with_cuda=True,
    driver=(13, 0),
    driver_gpus=1,
    torch_gpus=(H100,),
    kernel_gpus=1,
    gpu_steps=("",),
    packages={"deepspeed": "0.19.8", "peft": "0.21", "transformers": "5.24.0"},
)


def remedies(facts: Facts, *, faults: bool) -> list[str]:
    return [finding.remedy for finding in judge(facts) if finding.remedy and finding.is_fault == faults]


def test_a_sound_machine() -> None:
    assert remedies(SOUND, faults=True) == remedies(SOUND, faults=False) == []
    text = report(judge(SOUND))
    for part in (
        "PyTorch 2.13.0+cu130",
        "avx512 in use",
        "CUDA 13.0, 1 GPUs",
        "NVIDIA H100",
        '0.19.8: "optimizer": {"type": "AdamW8bit"}',
        'transformers 5.24.0: TrainingArguments(optim="shardopt_adamw_8bit") after import shardopt',
        "hooks into torch, deepspeed",
        "no faults",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"torch": "2.5.1"}, "install PyTorch 2.6 to before 2.16"),
        ({"differing": ("avx2",)}, "no -ffast-math"),
        ({"torch_gpus": (), "gpu_steps": (), "driver": (12, 4)}, "update the driver, or install PyTorch for CUDA 12"),
        ({"torch_gpus": (), "gpu_steps": ()}, "which names the reason"),
        ({"with_cuda": False, "kernel_gpus": 0, "gpu_steps": ()}, "SHARDOPT_CUDA=1"),
        (
            {"kernel_gpus": 0, "gpu_steps": ("a trial step failed: no device",)},
            "newer CUDA than the driver: build with CUDA 13",
        ),
        ({"gpu_steps": ("a trial step failed: no kernel image",)}, "SHARDOPT_CUDA_ARCHS=90 "),
        ({"gpu_steps": ("no",), "torch_gpus": (("Tesla P100", (6, 0)),)}, "begin at compute capability 7.5"),
        ({"packages": {"deepspeed": "0.18.2"}}, "pip install 'deepspeed>=0.19.8,<0.20'"),
    ],
)
def test_a_fault_has_a_remedy(changes: dict[str, Any], remedy: str) -> None:
    found = remedies(replace(SOUND, **changes), faults=True)
    assert any(remedy in each for each in found), found
    assert "FAULT" in report(judge(replace(SOUND, **changes)))


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"torch": "2.16.0"}, "not tried"),
        ({"targets": ("portable",), "target": "portable"}, "AVX2 or NEON"),
        ({"driver_gpus": 0, "torch_gpus": (), "gpu_steps": (), "kernel_gpus": 0}, "CUDA_VISIBLE_DEVICES"),
        ({"torch_cuda": None, "torch_gpus": (), "gpu_steps": (), "kernel_gpus": 0}, "install PyTorch for CUDA"),
        ({"with_cuda": False, "driver": None, "torch_gpus": (), "gpu_steps": ()}, "run SHARDOPT_CUDA=1 pip install"),
        ({"with_cuda": False, "driver_gpus": 0, "torch_gpus": (), "gpu_steps": ()}, "run SHARDOPT_CUDA=1 pip install"),
        ({"packages": {"peft": "0.9"}}, "tried from 0.18 on"),
        ({"packages": {"transformers": "6.0.0"}}, "optim= takes no names of ours in this version"),
        ({"packages": {"transformers": "4.56"}}, "pass optimizer_cls_and_kwargs to Trainer"),
        ({"tensor_access_fault": "got PyTorch 2.14 with a storage of another layout"}, "read tensors through Python"),
        ({"hooked": ("torch",)}, "unset SHARDOPT_HOOKS"),
        ({"hooked": ()}, "unset SHARDOPT_HOOKS"),
    ],
)
def test_advice_is_no_fault(changes: dict[str, Any], remedy: str) -> None:
    facts = replace(SOUND, **changes)
    assert remedies(facts, faults=True) == []
    assert any(remedy in each for each in remedies(facts, faults=False))


def test_without_a_driver_cuda_is_not_judged() -> None:
    facts = replace(SOUND, driver=None, driver_gpus=0, torch_gpus=(), gpu_steps=(), kernel_gpus=0)
    assert remedies(facts, faults=True) == remedies(facts, faults=False) == []


def test_this_machine() -> None:
    facts = doctor.observe()
    assert list(facts.targets) == _C.cpu_targets()
    assert facts.differing == []
    assert facts.torch == torch.__version__
    assert facts.tensor_access_fault == ""
    assert len(facts.gpu_steps) in (0, torch.cuda.device_count())


def test_a_trial_step_notices_other_bits_and_failures() -> None:
    expected = doctor._stepped("cpu")
    assert doctor._tried("cpu", expected) == ""
    assert "other bits" in doctor._tried("cpu", expected.nextafter(torch.tensor(9.0)))
    assert doctor._tried("meta", expected).startswith("a trial step failed: ")


def test_command(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "shardopt", "doctor"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode == 0) == ("no faults found" in done.stdout), done.stdout + done.stderr
    assert _C.cpu_targets()[0] in done.stdout


def test_versions_are_those_of_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for name, (oldest, _) in doctor.CLIENTS.items():
        assert re.search(rf'^{name} = \[.*"{name}>={re.escape(oldest)}[",;<]', project, re.MULTILINE), name
    assert f'"torch>={".".join(map(str, doctor.TORCH[0]))}"' in project
