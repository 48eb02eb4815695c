"""Recommender on synthetic clicks: sparse gradients, since users and items follow a power law, with heavy tails.

Clicks follow known probabilities. Each training example has a weight, such as a watch time, from a Pareto distribution
of mean 1 and infinite variance, so that single examples dominate gradients. The held-out loss is the expected one, by
the known probabilities, and unweighted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quality.task import Problem, Task, device_of

SMALL = {"rows": 8192, "dim": 32, "hidden": 128, "batch": 256, "power": 1.05, "tail": 1.5, "heldout": 20000}
LARGE = {"rows": 2**20, "dim": 64, "hidden": 512, "batch": 8192, "power": 1.05, "tail": 1.5, "heldout": 2**20}
_TRUE_DIM = 8


class Net(nn.Module):
    """A row per user and per item, and two hidden layers over both and their product."""

    def __init__(self, rows: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.users = nn.Embedding(rows, dim)
        self.items = nn.Embedding(rows, dim)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)
        self.first = nn.Linear(3 * dim, hidden)
        self.second = nn.Linear(hidden, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Logits of a click, (batch,); both inputs int64, (batch,)."""
        u, i = self.users(users), self.items(items)
        x = F.relu(self.first(torch.cat([u, i, u * i], 1)))
        logits: Tensor = self.out(F.relu(self.second(x))).squeeze(1)
        return logits


class Clicks(Problem):
    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.fingerprint = hashlib.sha256(json.dumps([dict(settings), np.__version__]).encode()).hexdigest()
        self._settings = settings
        draw = np.random.default_rng(0)
        rows = settings["rows"]
        self._users, self._items = (draw.standard_normal((rows, _TRUE_DIM)) for _ in range(2))
        self._bias = draw.standard_normal(rows)
        shares = np.arange(1, rows + 1) ** -float(settings["power"])
        self._cumulated = np.cumsum(shares) / shares.sum()
        self._heldout = self._pairs(draw, settings["heldout"])

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Net(self._settings["rows"], self._settings["dim"], self._settings["hidden"])

    def loss(self, model: nn.Module, seed: int, step: int) -> Tensor:
        draw, size, tail = np.random.default_rng((seed, step)), self._settings["batch"], self._settings["tail"]
        users, items, chances = self._pairs(draw, size)
        device = device_of(model)
        clicks = (torch.from_numpy(draw.random(size)) < chances).float().to(device)
        weights = torch.from_numpy((draw.pareto(tail, size) + 1) * (tail - 1) / tail).float().to(device)
        logits = model(users.to(device), items.to(device))
        return F.binary_cross_entropy_with_logits(logits, clicks, weights)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        users, items, chances = (tensor.to(device_of(model)) for tensor in self._heldout)
        return float(F.binary_cross_entropy_with_logits(model(users, items), chances.float()))

    def _pairs(self, draw: np.random.Generator, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Users and items by the power law, int64, and the probabilities that they click, float64; each (count,)."""
        users, items = (np.searchsorted(self._cumulated, draw.random(count)) for _ in range(2))
        logits = 2 * (self._users[users] * self._items[items]).sum(1) / _TRUE_DIM**0.5 + self._bias[items]
        return torch.from_numpy(users), torch.from_numpy(items), torch.from_numpy(1 / (1 + np.exp(-logits)))


def load(settings: Mapping[str, Any], cache: Path) -> Clicks:
    return Clicks(settings)


def task(size: str) -> Task:
    if size == "large":
        return Task("recommender", LARGE, steps=5000, lr=2e-3, load=load)
    return Task("recommender", SMALL, steps=400, lr=1e-2, load=load)
