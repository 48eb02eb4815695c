"""Language model over 8,192 words of Python's standard library: most rows of its embedding are rare."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lm import data
from lm.model import ModelConfig, Transformer
from quality.task import Task
from quality.text import TextProblem

SMALL = {"rows": 8192, "dim": 128, "layers": 1, "heads": 4, "context": 32, "batch": 6, "heldout_windows": 96}
LARGE = {"rows": 32768, "dim": 512, "layers": 8, "heads": 8, "context": 256, "batch": 32, "heldout_windows": 512}

#: A token is a run of letters, of blanks or of line ends, or any other single byte.
_TOKEN = re.compile(rb"[A-Za-z]+| +|\n+|.", re.DOTALL)
_OTHER = 0


class TokenModel(Transformer):
    """launch/lm's transformer with an embedding and an output matrix of `rows` rows."""

    def __init__(self, config: ModelConfig, context: int, rows: int) -> None:
        super().__init__(config, context)
        self.embedding = nn.Embedding(rows, config.dim)
        self.head = nn.Linear(config.dim, rows, bias=False)
        self.init_weights(config)


def load(settings: Mapping[str, Any], cache: Path) -> TextProblem:
    rows, context = settings["rows"], settings["context"]
    text = data.load(None, 0.1)
    # The arrays hold token numbers, of 16 bits, in place of bytes.
    corpus = data.Corpus(*_tokens(text, rows, cache), text.description)
    config = ModelConfig(settings["dim"], settings["layers"], settings["heads"])

    def make(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return TokenModel(config, context, rows)

    batch, heldout = settings["batch"], settings["heldout_windows"]
    return TextProblem(corpus, make, context, batch, heldout, corpus.fingerprint)


def _tokens(text: data.Corpus, rows: int, cache: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Training and held-out text as numbers of tokens, uint16; cached, since it takes most of a minute."""
    name = hashlib.sha256(f"{text.fingerprint} {rows} {_TOKEN.pattern!r}".encode()).hexdigest()[:16]
    path = cache / f"tokens-{name}.npz"
    if not path.exists():
        train, heldout = (_TOKEN.findall(part.tobytes()) for part in (text.train, text.heldout))
        numbers = vocabulary(Counter(train), rows)
        arrays = {
            part: np.array([numbers.get(token, _OTHER) for token in tokens], dtype=np.uint16)
            for part, tokens in (("train", train), ("heldout", heldout))
        }
        new = path.with_suffix(".new.npz")
        np.savez(new, **arrays)
        new.replace(path)
    with np.load(path) as arrays:
        return arrays["train"], arrays["heldout"]


def vocabulary(counts: Mapping[bytes, int], rows: int) -> dict[bytes, int]:
    """Numbers of the most frequent tokens, from 1; ties in the order of bytes. 0 stands for all others."""
    frequent = sorted(counts, key=lambda token: (-counts[token], token))[: rows - 1]
    return {token: number for number, token in enumerate(frequent, 1)}


def task(size: str) -> Task:
    if size == "large":
        return Task("tokens", LARGE, steps=5000, lr=1e-3, load=load)
    return Task("tokens", SMALL, steps=150, lr=4e-3, load=load)
