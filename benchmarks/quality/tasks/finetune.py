"""Fine-tuning of the byte-level model, which knows Python, on the C++ headers that PyTorch ships."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lm import data
from lm.model import ModelConfig, build
from quality.task import Task, lr_factor
from quality.tasks import bytes as pretraining
from quality.text import TextProblem

SMALL = {**pretraining.SMALL, "pretraining_steps": 1500, "pretraining_lr": 4e-3}
LARGE = {**pretraining.LARGE, "pretraining_steps": 20000, "pretraining_lr": 1e-3}


def load(settings: Mapping[str, Any], cache: Path, adapt: Callable[[nn.Module], None] | None = None) -> TextProblem:
    """The problem of a task.

    Args:
        settings: its settings.
        cache: folder of the pretrained weights, which are made once.
        adapt: changes the pretrained model before fine-tuning; its random numbers are of the run's seed.
    """
    include = Path(torch.__file__).parent / "include" / "c10"
    corpus = data.load(str(include), 0.1)
    weights = _pretrained(settings, cache)
    digest = hashlib.sha256(corpus.fingerprint.encode())
    for name, tensor in weights.items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    config = _config(settings)

    def make(seed: int) -> nn.Module:
        model = build(config, settings["context"], 0, torch.float32)
        model.load_state_dict(weights)
        if adapt is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                adapt(model)
        return model

    context, batch, heldout = (settings[name] for name in ("context", "batch", "heldout_windows"))
    return TextProblem(corpus, make, context, batch, heldout, digest.hexdigest())


def _config(settings: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(settings["dim"], settings["layers"], settings["heads"])


def _pretrained(settings: Mapping[str, Any], cache: Path) -> dict[str, torch.Tensor]:
    """Weights after training on Python's standard library with float32 state, seed 0."""
    problem = pretraining.load(settings, cache)
    key = f"{sorted(settings.items())} {problem.fingerprint} {torch.__version__}"
    path = cache / f"pretrained-{hashlib.sha256(key.encode()).hexdigest()[:16]}.pt"
    if not path.exists():
        model = problem.model(0)
        peak, steps = settings["pretraining_lr"], settings["pretraining_steps"]
        optimizer = torch.optim.AdamW(model.parameters(), lr=peak, fused=True)
        for step in range(1, steps + 1):
            optimizer.param_groups[0]["lr"] = peak * lr_factor(step, steps)
            problem.loss(model, 0, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        new = path.with_suffix(".new")
        torch.save(model.state_dict(), new)
        new.replace(path)
    weights: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return weights


def task(size: str) -> Task:
    if size == "large":
        return Task("finetune", LARGE, steps=1000, lr=3e-4, load=load)
    return Task("finetune", SMALL, steps=200, lr=4e-3, load=load)
