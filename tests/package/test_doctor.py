"""``shardopt doctor`` reports this machine, and names each fault with a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardopt import _C, doctor
from shardopt.__main__ import main
from shardopt.doctor import (
    Finding,
    Gpu,
    cpu_findings,
    gpu_findings,
    hook_finding,
    package_findings,
    report,
    torch_findings,
)
from shardopt.sharding.hooks import PACKAGES

ROOT = Path(__file__).parents[2]
H100 = Gpu("NVIDIA H100", (9, 0))


@pytest.mark.parametrize(
    ("findings", "text"),
    [
        (torch_findings("2.13.0+cu130", "13.0"), "PyTorch 2.13.0+cu130, CUDA 13.0"),
        (cpu_findings(("avx512", "avx2", "portable"), "avx512", ()), "avx512 in use"),
        (gpu_findings([H100], with_cuda=True), "NVIDIA H100, compute capability 9.0; a trial step has the CPU's bits"),
        (gpu_findings([], with_cuda=False), "PyTorch sees no GPU"),
        (package_findings({"deepspeed": "0.19.8", "peft": "0.21", "transformers": "5.24.0"}), "deepspeed 0.19.8"),
        ([hook_finding(PACKAGES)], "hooks into torch, deepspeed"),
    ],
)
def test_what_is_sound(findings: list[Finding], text: str) -> None:
    said = report(findings)
    assert text in said
    assert said.endswith("\nno faults found")
    assert "->" not in said


@pytest.mark.parametrize(
    ("is_fault", "findings", "remedy"),
    [
        (True, torch_findings("2.5.1", None), "install PyTorch 2.6 to before 2.16"),
        (True, cpu_findings(("avx2", "portable"), "avx2", ("portable",)), "no -ffast-math"),
        (True, gpu_findings([H100], with_cuda=False), "SHARDOPT_CUDA=1"),
        (True, gpu_findings([H100._replace(failure="no kernel image")], with_cuda=True), "SHARDOPT_CUDA_ARCHS=90 "),
        (True, gpu_findings([Gpu("Tesla P100", (6, 0), "no")], with_cuda=True), "begin at compute capability 7.5"),
        (True, package_findings({"deepspeed": "0.18.2"}), "pip install 'deepspeed>=0.19.8,<0.20'"),
        (False, torch_findings("2.16.0", None), "not tried"),
        (False, cpu_findings(("portable",), "portable", ()), "AVX2 or NEON"),
        (False, gpu_findings([], with_cuda=True), "names the reason"),
        (False, package_findings({"transformers": "6.0.0"}), "optim= takes no names of ours in this version"),
        (False, package_findings({"transformers": "4.56"}), "pass optimizer_cls_and_kwargs to Trainer"),
        (False, [hook_finding(("torch",))], "unset SHARDOPT_HOOKS"),
    ],
)
def test_faults_and_advice_have_a_remedy(is_fault: bool, findings: list[Finding], remedy: str) -> None:
    assert [finding.is_fault for finding in findings if remedy in finding.remedy] == [is_fault]
    said = report(findings)
    assert remedy in said
    assert said.endswith("1 fault found" if is_fault else "no faults found")
    assert ("FAULT" in said) == is_fault


def test_a_trial_step_notices_other_bits_and_failures() -> None:
    expected = doctor._weight_after_steps("cpu")
    assert doctor._failure_on("cpu", expected) == ""
    assert "other bits" in doctor._failure_on("cpu", expected.nextafter(torch.tensor(9.0)))
    assert doctor._failure_on("meta", expected).startswith("a trial step failed: ")


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    said = capsys.readouterr().out
    assert (code == 0) == ("no faults found" in said), said
    assert f"PyTorch {torch.__version__}" in said
    assert f"available are {', '.join(_C.cpu_targets())}" in said
    assert "has the same bits by each of them" in said


def test_versions_are_those_of_the_project() -> None:
    assert f'"torch>={".".join(map(str, doctor.TORCH[0]))}"' in (ROOT / "pyproject.toml").read_text()
