"""The command ``shardopt doctor``: checks the installation on this machine, and proposes a remedy for each fault."""

from __future__ import annotations

import argparse
import contextlib
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import shardopt
from shardopt import _C
from shardopt.clients.names import VERSIONS as TRANSFORMERS
from shardopt.kernels.dispatch import cpu_target, use_cpu_target
from shardopt.sharding.deepspeed.hooks import VERSIONS as DEEPSPEED
from shardopt.sharding.hooks import PACKAGES, hooked_packages, is_within

#: Versions of PyTorch that shardopt was tested with: from the first, to before the second.
TORCH = ((2, 6), (2, 16))
#: Packages whose installed versions the report lists, as a bug report needs them.
CLIENTS = (
    "deepspeed", "transformers", "accelerate", "peft", "trl", "lightning", "torchtitan", "megatron-core", "verl",
    "axolotl", "llamafactory", "ms-swift", "nemo-automodel",
)  # fmt: skip
#: The oldest compute capability that the CUDA kernels can be compiled for.
OLDEST_GPU = (7, 5)


class Finding(NamedTuple):
    """A line of the report: what was observed, what the user can do about it (or ""), and whether it is a fault."""

    text: str
    remedy: str = ""
    is_fault: bool = False


class Gpu(NamedTuple):
    """A GPU that PyTorch sees; ``failure`` describes how a trial step on it went wrong, "" if it did not."""

    name: str
    capability: tuple[int, int]
    failure: str = ""


def add_parser(commands: Any) -> None:
    """Adds the subcommand ``doctor`` to the result of ``argparse.ArgumentParser.add_subparsers``."""
    parser = commands.add_parser(
        "doctor",
        help="the build, the machine, versions, and a remedy for each fault",
        description="Reports the build, instruction sets, GPUs and versions, and takes a trial step on each device. "
        "Ends with 1 if something does not work.",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    """Prints the report. Returns the exit status: 1 if there is a fault."""
    findings = all_findings()
    print(f"shardopt {shardopt.__version__} in {shardopt.__path__[0]}, Python {platform.python_version()}")
    print(report(findings))
    return int(any(finding.is_fault for finding in findings))


def report(findings: Sequence[Finding]) -> str:
    """Formats findings as text: a line per finding, a line per remedy, and at last the number of faults."""
    lines = []
    for text, remedy, is_fault in findings:
        lines.append(f"{'FAULT' if is_fault else 'note' if remedy else 'ok':7}{text}")
        lines += [f"{'':7}-> {remedy}"] if remedy else []
    faults = sum(finding.is_fault for finding in findings)
    return "\n".join([*lines, f"{faults or 'no'} fault{'' if faults == 1 else 's'} found"])


def all_findings() -> list[Finding]:
    """Inspects this machine, and compares trial steps by each CPU instruction set and on each GPU bit for bit."""
    expected = _weight_after_steps("cpu")
    differing = []
    for target in _C.cpu_targets():
        with use_cpu_target(target):
            if not torch.equal(_weight_after_steps("cpu"), expected):
                differing.append(target)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = []
    for index in range(count):
        failure = _failure_on(f"cuda:{index}", expected) if _C.with_cuda else ""
        gpus.append(Gpu(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), failure))
    packages = {}
    for name in CLIENTS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return [
        *torch_findings(torch.__version__, torch.version.cuda),
        *cpu_findings(_C.cpu_targets(), cpu_target(), differing),
        *gpu_findings(gpus, with_cuda=_C.with_cuda),
        *package_findings(packages),
        hook_finding(hooked_packages()),
    ]


def torch_findings(version: str, cuda: str | None) -> list[Finding]:
    """Reports the versions of PyTorch, CUDA and NumPy; a PyTorch too old is a fault, an untested newer one a note."""
    text = f"PyTorch {version}, CUDA {cuda or 'not in it'}; NumPy {np.__version__}"
    tried = f"{_dotted(TORCH[0])} to before {_dotted(TORCH[1])}"
    if is_within(version, ((0,), TORCH[0])):
        return [Finding(text, f"install PyTorch {tried}", is_fault=True)]
    return [Finding(text, "" if is_within(version, TORCH) else f"this version was not tried; tried are {tried}")]


def cpu_findings(targets: Sequence[str], target: str, differing: Sequence[str]) -> list[Finding]:
    """Reports the instruction sets that this CPU can run, best first, and the one in use.

    A fault if a trial step by some of them (``differing``) had other bits than by the one in use.
    """
    slow = "steps are several times slower than with AVX2 or NEON" if list(targets) == ["portable"] else ""
    findings = [Finding(f"CPU kernels: {target} in use, available are {', '.join(targets)}", slow)]
    if differing:
        remedy = "build again with an unchanged CFLAGS (no -ffast-math), and report this with the compiler's version"
        text = f"a step by {', '.join(differing)} has other bits than by {target}"
        return [*findings, Finding(text, remedy, is_fault=True)]
    return [*findings, Finding("a trial step on the CPU has the same bits by each of them")]


def gpu_findings(gpus: Sequence[Gpu], *, with_cuda: bool) -> list[Finding]:
    """Reports whether this build has CUDA kernels, which GPUs need, and for each GPU how a trial step on it went."""
    kernels = Finding("CUDA kernels are in this build")
    if not with_cuda:
        remedy = "to get them, put nvcc on PATH and run SHARDOPT_CUDA=1 pip install --force-reinstall ."
        kernels = Finding("CUDA kernels are left out of this build", remedy if gpus else "", is_fault=bool(gpus))
    if not gpus:
        why = "if there is one, python -c 'import torch; torch.zeros(1, device=\"cuda\")' names the reason"
        return [Finding("PyTorch sees no GPU", why if with_cuda else ""), kernels]
    findings = [kernels]
    for index, (name, capability, failure) in enumerate(gpus):
        text, arch = f"cuda:{index}: {name}, compute capability {_dotted(capability)}", "".join(map(str, capability))
        remedy = f"build for it: SHARDOPT_CUDA=1 SHARDOPT_CUDA_ARCHS={arch} pip install --force-reinstall ."
        if capability < OLDEST_GPU:
            remedy = f"kernels begin at compute capability {_dotted(OLDEST_GPU)}; keep its parameters on the CPU"
        if failure:
            findings.append(Finding(f"{text}; {failure}", remedy, is_fault=True))
        else:
            findings.append(Finding(f"{text}; a trial step has the CPU's bits" if with_cuda else text))
    return findings


def package_findings(packages: Mapping[str, str]) -> list[Finding]:
    """Reports installed packages by name and version, with a remedy for versions that shardopt does not support."""
    findings = []
    for name, version in packages.items():
        remedy = ""
        if name == "deepspeed" and not is_within(version, DEEPSPEED):
            first, end = map(_dotted, DEEPSPEED)
            remedy = f"pip install 'deepspeed>={first},<{end}'; others are refused"
        if name == "transformers" and not is_within(version, TRANSFORMERS):
            remedy = "optim= takes no names of ours in this version; pass optimizer_cls_and_kwargs to Trainer"
        findings.append(Finding(f"{name} {version}", remedy, is_fault=bool(remedy) and name == "deepspeed"))
    return findings


def hook_finding(hooked: Sequence[str]) -> Finding:
    """Reports which packages ``import shardopt`` has hooked into; the variable SHARDOPT_HOOKS can leave some out."""
    text = f"hooks into {', '.join(hooked) or 'no other package'}"
    return Finding(text, "" if set(hooked) == set(PACKAGES) else "unset SHARDOPT_HOOKS for all hooks")


def _weight_after_steps(device: str) -> Tensor:
    """Takes two trial steps of AdamW8bit on a device, always with the same numbers; returns the weight, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 200, generator=generator, device="cpu").to(device))
    optimizer = shardopt.AdamW8bit([weight], lr=1e-2)
    for _ in range(2):
        weight.grad = torch.randn(64, 200, generator=generator, device="cpu").to(device)
        optimizer.step()
    return weight.detach().cpu()


def _failure_on(device: str, expected: Tensor) -> str:
    """Takes trial steps on a device. Returns how they failed, or "" if the weight has exactly the expected bits."""
    try:
        is_equal = torch.equal(_weight_after_steps(device), expected)
        return "" if is_equal else "a trial step has other bits than on the CPU"
    except RuntimeError as error:
        return f"a trial step failed: {str(error).splitlines()[0]}"


def _dotted(version: Sequence[int]) -> str:
    """Formats (2, 9) as "2.9"."""
    return ".".join(map(str, version))
