"""The command ``shardopt doctor``: the build, the machine, versions, and a remedy for each fault."""

from __future__ import annotations

import argparse
import ctypes
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import shardopt
from shardopt import _C
from shardopt.clients.names import is_known as knows_names
from shardopt.kernels.dispatch import cpu_target, use_cpu_target
from shardopt.sharding.deepspeed.hooks import VERSIONS as DEEPSPEED
from shardopt.sharding.deepspeed.hooks import is_known
from shardopt.sharding.hooks import PACKAGES, hooked_packages

#: Versions of PyTorch that were tried: [first, end).
TORCH = ((2, 6), (2, 16))


class Client(NamedTuple):
    """A framework that trains with our optimizers.

    Attributes:
        oldest: the oldest version that was tried.
        naming: how it names an optimizer of ours.
    """

    oldest: str
    naming: str


#: Frameworks by package.
CLIENTS = {
    "accelerate": Client("1.13", "accelerator.prepare(model, shardopt.AdamW8bit(...))"),
    "axolotl": Client("0.19", "plugins: [shardopt.clients.axolotl.Names], optimizer: shardopt_adamw_8bit"),
    "lightning": Client("2.6", "configure_optimizers returns shardopt.AdamW8bit(...)"),
    "llamafactory": Client("0.9.5", "optim: shardopt_adamw_8bit, shardopt run -m llamafactory.launcher config.yml"),
    "megatron-core": Client(
        "0.16", "shardopt.clients.megatron.replace_adam(get_megatron_optimizer(...), shardopt.AdamW8bit)"
    ),
    "ms-swift": Client(
        "4.6", "--optimizer shardopt_adamw_8bit --external_plugins, a file: import shardopt.clients.swift"
    ),
    "nemo-automodel": Client("0.7", "optimizer: {_target_: shardopt.AdamW8bit}"),
    "peft": Client("0.18", "as the trainer does"),
    "torchtitan": Client("0.3", "config.optimizer = shardopt.clients.torchtitan.adamw8bit(...)"),
    "transformers": Client("4.57", 'TrainingArguments(optim="shardopt_adamw_8bit") after import shardopt'),
    "trl": Client("0.24", 'SFTConfig(optim="shardopt_adamw_8bit") after import shardopt'),
    "verl": Client("0.9.1", "optimizer_impl: shardopt, optimizer: AdamW8bit, external_lib: shardopt"),
}
#: Packages that single functions use.
OPTIONAL = ("matplotlib", "safetensors")
#: Compute capabilities that the build knows, from the oldest on.
OLDEST_GPU = (7, 5)


class Finding(NamedTuple):
    """A line of the report.

    Attributes:
        text: the observation.
        remedy: advice for the user; empty if nothing needs to be done.
        is_fault: whether something does not work.
    """

    text: str
    remedy: str = ""
    is_fault: bool = False


def _fault(text: str, remedy: str) -> Finding:
    return Finding(text, remedy, is_fault=True)


@dataclass
class Facts:
    """Observations of a machine and an installation.

    Attributes:
        torch: version of PyTorch.
        torch_cuda: version of CUDA that PyTorch was made with; None for a build without.
        machine: the processor's architecture, as in ``platform.machine()``.
        tensor_access_fault: the reason why steps read tensors through Python; empty if they do not.
        targets: instruction sets of the CPU kernels that this processor can run, the best first.
        target: the instruction set in use.
        differing: targets whose step on the CPU has other bits than the target in use.
        with_cuda: whether this build has CUDA kernels.
        driver: the newest version of CUDA that the NVIDIA driver supports, as (major, minor); None without a driver.
        driver_gpus: GPUs that the driver sees.
        torch_gpus: name and compute capability of GPUs that PyTorch sees.
        kernel_gpus: GPUs that the CUDA runtime in this build sees.
        gpu_steps: result of a trial step on each GPU: "" for the CPU's bits, else the fault.
        packages: versions of installed optional packages, by name.
        hooked: packages that hooks are installed into.
    """

    torch: str
    torch_cuda: str | None
    machine: str
    targets: Sequence[str]
    target: str
    tensor_access_fault: str = ""
    differing: Sequence[str] = ()
    with_cuda: bool = False
    driver: tuple[int, int] | None = None
    driver_gpus: int = 0
    torch_gpus: Sequence[tuple[str, tuple[int, int]]] = ()
    kernel_gpus: int = 0
    gpu_steps: Sequence[str] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    hooked: Sequence[str] = PACKAGES


def add_parser(commands: Any) -> None:
    """Adds the command to the result of ``argparse.ArgumentParser.add_subparsers``."""
    parser = commands.add_parser(
        "doctor",
        help="the build, the machine, versions, and a remedy for each fault",
        description="Reports the build, instruction sets, GPUs, driver and versions, and takes a trial step on each "
        "device. Ends with 1 if something does not work.",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    findings = judge(observe())
    print(f"shardopt {shardopt.__version__} in {shardopt.__path__[0]}, Python {platform.python_version()}")
    print(report(findings))
    return int(any(finding.is_fault for finding in findings))


def report(findings: Sequence[Finding]) -> str:
    """The findings as text: a line per finding, and one per remedy."""
    lines = []
    for text, remedy, is_fault in findings:
        lines.append(f"{'FAULT' if is_fault else 'note' if remedy else 'ok':7}{text}")
        lines += [f"{'':7}-> {remedy}"] if remedy else []
    faults = sum(finding.is_fault for finding in findings)
    return "\n".join([*lines, f"{faults or 'no'} fault{'' if faults == 1 else 's'} found"])


def observe() -> Facts:
    """Observes this machine, and steps a small parameter on each of its devices."""
    expected = _stepped("cpu")
    differing = []
    for target in _C.cpu_targets():
        with use_cpu_target(target):
            if not torch.equal(_stepped("cpu"), expected):
                differing.append(target)
    driver, driver_gpus = _driver()
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return Facts(
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        machine=platform.machine(),
        tensor_access_fault=_C.tensor_access_fault(),
        targets=_C.cpu_targets(),
        target=cpu_target(),
        differing=differing,
        with_cuda=_C.with_cuda,
        driver=driver,
        driver_gpus=driver_gpus,
        torch_gpus=[(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in gpus],
        kernel_gpus=_C.cuda_device_count() if _C.with_cuda else 0,
        gpu_steps=[_tried(f"cuda:{i}", expected) for i in gpus] if _C.with_cuda else [],
        packages={name: version for name in ("deepspeed", *CLIENTS, *OPTIONAL) if (version := _version_of(name))},
        hooked=hooked_packages(),
    )


def judge(facts: Facts) -> list[Finding]:
    """The findings, in the order of the report."""
    return [*_of_torch(facts), *_of_cpu(facts), *_of_cuda(facts), *_of_packages(facts), _of_hooks(facts)]


def _of_torch(facts: Facts) -> list[Finding]:
    text = f"PyTorch {facts.torch}, CUDA {facts.torch_cuda or 'not in it'}; NumPy {np.__version__}"
    tried = f"{_dotted(TORCH[0])} to before {_dotted(TORCH[1])}"
    if _numbers(facts.torch) < TORCH[0]:
        return [_fault(text, f"install PyTorch {tried}")]
    is_newer = _numbers(facts.torch) >= TORCH[1]
    findings = [Finding(text, f"this version was not tried; tried are {tried}" if is_newer else "")]
    if facts.tensor_access_fault:
        remedy = "steps read tensors through Python, which takes some microseconds each; bits stay the same"
        findings.append(Finding(facts.tensor_access_fault, remedy))
    return findings


def _of_cpu(facts: Facts) -> list[Finding]:
    findings = [Finding(f"CPU kernels: {facts.target} in use, available are {', '.join(facts.targets)}")]
    if list(facts.targets) == ["portable"]:
        remedy = "steps are several times slower than with AVX2 or NEON; use a processor with one of these"
        findings = [Finding(f"CPU kernels: only portable ones run on this {facts.machine}", remedy)]
    if facts.differing:
        remedy = "build again with an unchanged CFLAGS (no -ffast-math), and report this with the compiler's version"
        text = f"a step by {', '.join(facts.differing)} has other bits than by {facts.target}"
        return [*findings, _fault(text, remedy)]
    return [*findings, Finding("a trial step on the CPU has the same bits by each of them")]


def _of_cuda(facts: Facts) -> list[Finding]:
    kernels = Finding("CUDA kernels are in this build")
    if not facts.with_cuda:
        remedy = "to get them, put nvcc on PATH and run SHARDOPT_CUDA=1 pip install --force-reinstall ."
        kernels = Finding("CUDA kernels are left out of this build", remedy, is_fault=bool(facts.torch_gpus))
    if facts.driver is None:
        return [Finding("no NVIDIA driver"), kernels]
    findings = [Finding(f"NVIDIA driver for CUDA {_dotted(facts.driver)}, {facts.driver_gpus} GPUs"), kernels]
    if facts.driver_gpus == 0:
        remedy = "check nvidia-smi and CUDA_VISIBLE_DEVICES if this machine should have a GPU"
        return [findings[0]._replace(remedy=remedy), kernels]
    if facts.torch_cuda is None:
        remedy = "install PyTorch for CUDA to use the GPUs: https://pytorch.org/get-started/locally"
        findings.append(Finding("PyTorch has no CUDA, though there are GPUs", remedy))
    elif not facts.torch_gpus:
        remedy = (
            f"update the driver, or install PyTorch for CUDA {facts.driver[0]}; it needs a driver of its major version"
        )
        if facts.driver[0] >= _numbers(facts.torch_cuda)[0]:
            remedy = "run python -c 'import torch; torch.zeros(1, device=\"cuda\")', which names the reason"
        findings.append(_fault(f"PyTorch for CUDA {facts.torch_cuda} sees no GPU", remedy))
    if not facts.with_cuda:
        return findings
    if facts.kernel_gpus < len(facts.torch_gpus):
        remedy = (
            f"this build is of a newer CUDA than the driver: build with CUDA {facts.driver[0]} or older, or update "
            "the driver"
        )
        findings.append(_fault(f"the CUDA runtime in this build sees {facts.kernel_gpus} GPUs", remedy))
    for index, ((name, capability), failure) in enumerate(zip(facts.torch_gpus, facts.gpu_steps, strict=True)):
        text = f"cuda:{index}: {name}, compute capability {_dotted(capability)}"
        if not failure:
            findings.append(Finding(f"{text}; a trial step has the CPU's bits"))
        elif capability < OLDEST_GPU:
            remedy = (
                f"kernels begin at compute capability {_dotted(OLDEST_GPU)}; keep parameters of this GPU on the CPU"
            )
            findings.append(_fault(f"{text}; {failure}", remedy))
        else:
            arch = "".join(map(str, capability))
            remedy = f"build for this GPU: SHARDOPT_CUDA=1 SHARDOPT_CUDA_ARCHS={arch} pip install --force-reinstall ."
            findings.append(_fault(f"{text}; {failure}", remedy))
    return findings


def _of_packages(facts: Facts) -> list[Finding]:
    findings = []
    deepspeed = facts.packages.get("deepspeed")
    if deepspeed is not None:
        first, end = map(_dotted, DEEPSPEED)
        text, remedy = (
            f'DeepSpeed {deepspeed}: "optimizer": {{"type": "AdamW8bit"}}',
            f"pip install 'deepspeed>={first},<{end}'; others are refused",
        )
        findings.append(Finding(text) if is_known(deepspeed) else _fault(text, remedy))
    for name, (oldest, naming) in CLIENTS.items():
        if (version := facts.packages.get(name)) is not None:
            remedy = ""
            if name == "transformers" and not knows_names(version):
                remedy = "optim= takes no names of ours in this version; pass optimizer_cls_and_kwargs to Trainer"
            elif _numbers(version) < _numbers(oldest):
                remedy = f"tried from {oldest} on; if something fails, pip install '{name}>={oldest}'"
            findings.append(Finding(f"{name} {version}: {naming}", remedy))
    findings += [Finding(f"{name} {facts.packages[name]}") for name in OPTIONAL if name in facts.packages]
    missing = [name for name in ("deepspeed", *CLIENTS, *OPTIONAL) if name not in facts.packages]
    return [*findings, *([Finding(f"not installed, and not needed: {', '.join(missing)}")] if missing else [])]


def _of_hooks(facts: Facts) -> Finding:
    left_out = [package for package in PACKAGES if package not in facts.hooked]
    text = f"hooks into {', '.join(facts.hooked) or 'no other package'}"
    if not left_out:
        return Finding(text)
    return Finding(f"{text}; SHARDOPT_HOOKS leaves out {', '.join(left_out)}", "unset SHARDOPT_HOOKS for all hooks")


def _stepped(device: str) -> Tensor:
    """A parameter after two steps: float32, (64, 200), on the CPU."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 200, generator=generator, device="cpu").to(device))
    optimizer = shardopt.AdamW8bit([weight], lr=1e-2)
    for _ in range(2):
        weight.grad = torch.randn(64, 200, generator=generator, device="cpu").to(device)
        optimizer.step()
    return weight.detach().cpu()


def _tried(device: str, expected: Tensor) -> str:
    """Takes a step on a device. Returns a description of the fault; "" if the bits are the expected ones."""
    try:
        return "" if torch.equal(_stepped(device), expected) else "a trial step has other bits than on the CPU"
    except RuntimeError as error:
        return f"a trial step failed: {str(error).splitlines()[0]}"


def _driver() -> tuple[tuple[int, int] | None, int]:
    """The newest CUDA that the NVIDIA driver supports, and its number of GPUs; None and 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, 0
    version, count = ctypes.c_int(), ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)):
        return None, 0
    if driver.cuInit(0) == 0:
        driver.cuDeviceGetCount(ctypes.byref(count))
    return (version.value // 1000, version.value % 1000 // 10), count.value


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The first numbers of a version, at most three."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
