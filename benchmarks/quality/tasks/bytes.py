"""Byte-level language model of launch/lm, on the text of Python's standard library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lm import data
from lm.model import ModelConfig, build
from quality.task import Task
from quality.text import TextProblem

SMALL = {"dim": 128, "layers": 2, "heads": 4, "context": 64, "batch": 8, "heldout_windows": 256}
LARGE = {"dim": 512, "layers": 8, "heads": 8, "context": 512, "batch": 32, "heldout_windows": 512}


def load(settings: Mapping[str, Any], cache: Path) -> TextProblem:
    corpus = data.load(None, 0.1)
    config = ModelConfig(settings["dim"], settings["layers"], settings["heads"])
    context = settings["context"]
    return TextProblem(
        corpus,
        lambda seed: build(config, context, seed, torch.float32),
        context,
        settings["batch"],
        settings["heldout_windows"],
        corpus.fingerprint,
    )


def task(size: str) -> Task:
    if size == "large":
        return Task("bytes", LARGE, steps=5000, lr=1e-3, load=load)
    return Task("bytes", SMALL, steps=250, lr=2e-3, load=load)
