"""The public face: names, signatures, defaults, docstrings, and what importing costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import shardopt
from shardopt.optim import ShardedOptimizer
from shardopt.state.options import DEFAULTS, Options

OPTIONS: dict[str, Any] = {
    **{"maximize": False, "codec": "fp32", "block_size": 128, "min_quantized_numel": 4096, "nonfinite": "skip"},
    **{"master_weight_bits": None, "stochastic_rounding": False, "stochastic_rounding_seed": 0},
    **{"offload": None, "foreach": None, "fused": None, "capturable": False, "differentiable": False},
}


def defaults_of_torch(name: str) -> dict[str, Any]:
    """The arguments of torch's class by position, without those that are options here."""
    theirs = inspect.signature(getattr(torch.optim, name).__init__).parameters
    left_out = {"self", "params", *OPTIONS, *(["decoupled_weight_decay"] if name == "Adam" else [])}
    return {p: theirs[p].default for p in theirs if p not in left_out}


OF_TORCH = ("AdamW", "Adam", "SGD", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop")
ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{name: defaults_of_torch(name) for name in OF_TORCH},
    "Lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
    "AdEMAMix": {
        **{"lr": 1e-3, "betas": (0.9, 0.999, 0.9999), "alpha": 5.0},
        **{"alpha_steps": None, "beta3_steps": None, "eps": 1e-8, "weight_decay": 1e-2},
    },
    "ADOPT": {**ADAM, "betas": (0.9, 0.9999), "eps": 1e-6, "weight_decay": 0.0, "decoupled_weight_decay": False},
    "Adan": {**ADAM, "betas": (0.98, 0.92, 0.99), "weight_decay": 0.0, "no_prox": False},
    "Prodigy": {
        **{"lr": 1.0, "betas": (0.9, 0.999), "beta3": None, "eps": 1e-8, "weight_decay": 0, "decouple": True},
        **{"use_bias_correction": False, "safeguard_warmup": False},
        **{"d0": 1e-6, "d_coef": 1.0, "growth_rate": float("inf")},
    },
    "Signum": {"lr": 1e-4, "momentum": 0.9, "weight_decay": 0.0},
    "LAMB": {**ADAM, "eps": 1e-6},
    "LARS": {"lr": 1.0, "momentum": 0.9, "weight_decay": 0.0, "trust_coefficient": 1e-3},
    "Muon": {
        **{"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True},
        **{"ns_coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-7, "ns_steps": 5, "adjust_lr_fn": None},
    },
    "StableAdamW": {**ADAM, "betas": (0.9, 0.99)},
}
OPTIMIZERS["NorMuon"] = OPTIMIZERS["Muon"]
#: Hyper-parameters that torch.optim's classes have not, by keyword only.
CAUTIOUS = {"cautious": False, "cautious_weight_decay": False}
BY_KEYWORD: dict[str, dict[str, Any]] = {
    "AdamW": {**CAUTIOUS, "repay": None},
    "Adam": {"cautious": False, "repay": None},
    "Lion": CAUTIOUS,
    "Muon": {"algorithm": "muon", "normalize": None, "beta2": 0.95, "split": None, "betas": (0.9, 0.95)},
}
#: The arguments that are in param groups.
BY_KEYWORD["NorMuon"] = BY_KEYWORD["Muon"]
IN_GROUPS = {**BY_KEYWORD, "Adam": BY_KEYWORD["AdamW"], "NorMuon": {**BY_KEYWORD["Muon"], "normalize": "rows"}}
#: Values in param groups that steps change: no arguments.
ESTIMATES: dict[str, dict[str, Any]] = {
    "NAdam": {"past_mu": (0, 1.0, None)},
    "Prodigy": {"d": 1e-6, "d_max": 1e-6, "d_numerator": 0.0, "k": 0},
}
PRESETS = {f"{name}8bit": name for name in OPTIMIZERS} | {f"{name}4bit": name for name in ("Adam", "AdamW")}
OTHERS = (
    *("GradientRelease", "MemoryReport", "ParamGroups", "ShardedOptimizer", "StableEmbedding", "clip_grad_norm_"),
    *("memory_report", "muon_groups", "param_groups", "quantize_state", "register", "release_gradients"),
)


def one() -> list[Parameter]:
    return [Parameter(torch.zeros(2, 64))]


def test_names() -> None:
    assert sorted(shardopt.__all__) == sorted([*OPTIMIZERS, *PRESETS, *OTHERS])
    assert all(hasattr(shardopt, name) for name in shardopt.__all__)
    assert shardopt.__version__


@pytest.mark.parametrize("name", [*OPTIMIZERS, *PRESETS])
def test_signatures_and_groups(name: str) -> None:
    """Positional parameters and defaults are torch.optim's; the options are keyword-only; groups have every default."""
    _, params, *own, options = inspect.signature(getattr(shardopt, name).__init__).parameters.values()
    assert params.name == "params"
    rule = PRESETS.get(name, name)
    by_keyword = {p.name: p.default for p in own if p.kind is inspect.Parameter.KEYWORD_ONLY}
    positional = {p.name: p.default for p in own if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert (positional, by_keyword) == (OPTIMIZERS[rule], BY_KEYWORD.get(rule, {}))
    assert list(positional) == list(OPTIMIZERS[rule])
    assert options.kind is inspect.Parameter.VAR_KEYWORD
    assert "Options" in str(options.annotation)
    optimizer = getattr(shardopt, name)(one())
    expected = {**OPTIMIZERS[rule], **IN_GROUPS.get(rule, {}), **ESTIMATES.get(rule, {}), **OPTIONS}
    expected["codec"] = {"4": "log4", "8": "log8"}.get(name.removesuffix("bit")[-1], "fp32")
    assert {key: value for key, value in optimizer.param_groups[0].items() if key != "params"} == expected
    assert optimizer.defaults == expected
    assert isinstance(optimizer, getattr(shardopt, rule))
    assert getattr(shardopt, name)(one(), codec="companded8").param_groups[0]["codec"] == "companded8"


def test_clipping_has_torchs_signature() -> None:
    *ours, optimizer = inspect.signature(shardopt.clip_grad_norm_).parameters.values()
    theirs = inspect.signature(torch.nn.utils.clip_grad_norm_).parameters.values()
    assert [(p.name, p.default, p.kind) for p in ours] == [(p.name, p.default, p.kind) for p in theirs]
    assert optimizer.kind is inspect.Parameter.KEYWORD_ONLY


def test_options() -> None:
    assert DEFAULTS == OPTIONS
    assert set(Options.__annotations__) == set(OPTIONS)
    assert Options.__doc__ is not None
    page = (Path(__file__).parents[2] / "docs/options.md").read_text()
    for option in OPTIONS:
        assert f"        {option}: " in Options.__doc__, f"{option} is not documented"
        assert f"`{option}" in page or f"{option}=" in page, f"{option} is not in docs/options.md"


def public_things() -> list[tuple[str, Any]]:
    """Classes and functions in shardopt.__all__, and the public methods that they define themselves."""
    found = [(name, getattr(shardopt, name)) for name in shardopt.__all__]
    classes = [thing for _, thing in found if inspect.isclass(thing)] + [ShardedOptimizer]
    for cls in classes:
        for name, member in vars(cls).items():
            inherited = any(hasattr(base, name) for base in cls.__mro__[1:])
            if not name.startswith("_") and not inherited and (callable(member) or isinstance(member, property)):
                found.append((f"{cls.__name__}.{name}", member))
    return found


def test_docstrings() -> None:
    assert [name for name, thing in public_things() if not (thing.__doc__ or "").strip()] == []


def run(code: str) -> str:
    """Output of a fresh interpreter that does not see the source tree."""
    with tempfile.TemporaryDirectory() as elsewhere:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_is_light_and_silent() -> None:
    """No deepspeed, no FSDP, no shardopt.unit, no compiler, no network, no warning, no output."""
    code = """
import sys, socket, warnings
warnings.simplefilter("error")
import torch
before = set(sys.modules)
def refuse(*args, **kwargs):
    raise AssertionError("a socket was opened")
socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
import shardopt
distributed = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint")
heavy = ("deepspeed", "torch._dynamo", "shardopt.unit", *distributed)
loaded = [name for name in set(sys.modules) - before if name.startswith(heavy)]
assert not loaded, loaded
assert not torch.distributed.is_initialized()
"""
    assert run(code) == ""
