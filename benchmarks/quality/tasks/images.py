"""Convolutional classifier of scikit-learn's digits: 1,797 images of 8 x 8 pixels, shifted and with noise added."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from quality.task import Problem, Task, device_of

#: Every fourth image is held out, in `heldout_copies` versions with noise of their own. Noise keeps the held-out loss
#: away from zero, where a difference in % would mean little.
SMALL = {"width": 32, "batch": 32, "noise": 0.3, "heldout_copies": 4}
LARGE = {"width": 256, "batch": 128, "noise": 0.3, "heldout_copies": 16}
CLASSES = 10
_SIDE = 8


class Net(nn.Module):
    """Three convolutions, the second of stride 2, and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.second = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.third = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.head = nn.Linear(2 * width * (_SIDE // 2) ** 2, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """images: (batch, 1, 8, 8)."""
        x = F.relu(self.first(images))
        x = F.relu(self.second(x))
        x = F.relu(self.third(x))
        out: Tensor = self.head(x.flatten(1))
        return out


class Digits(Problem):
    def __init__(self, settings: Mapping[str, Any]) -> None:
        images, labels = _read()
        self.fingerprint = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
        self._settings = settings
        pixels = torch.from_numpy(images).view(-1, 1, _SIDE, _SIDE) / 16
        classes = torch.from_numpy(labels)
        held = torch.arange(len(classes)) % 4 == 3
        self._train = pixels[~held], classes[~held]
        copies = settings["heldout_copies"]
        generator = Generator().manual_seed(0)
        self._heldout = self._noisy(pixels[held].repeat(copies, 1, 1, 1), generator), classes[held].repeat(copies)

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Net(self._settings["width"])

    def loss(self, model: nn.Module, seed: int, step: int) -> Tensor:
        images, labels = self._train
        generator = Generator().manual_seed(int(np.random.SeedSequence((seed, step)).generate_state(1)[0]))
        chosen = torch.randint(len(labels), (self._settings["batch"],), generator=generator)
        device = device_of(model)
        batch = self._noisy(images[chosen], generator).to(device)
        return F.cross_entropy(model(batch), labels[chosen].to(device))

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        images, labels = (tensor.to(device_of(model)) for tensor in self._heldout)
        logits = torch.cat([model(part) for part in images.split(256)])
        right = (logits.argmax(1) == labels).double().mean()
        return {"loss": float(F.cross_entropy(logits, labels)), "accuracy": float(right)}

    def _noisy(self, images: Tensor, generator: Generator) -> Tensor:
        """Each image shifted by up to one pixel, with normal noise."""
        padded = F.pad(images, (1, 1, 1, 1))
        corners = torch.randint(3, (len(images), 2), generator=generator).tolist()
        shifted = torch.stack(
            [image[:, y : y + _SIDE, x : x + _SIDE] for image, (y, x) in zip(padded, corners, strict=True)]
        )
        return shifted + self._settings["noise"] * torch.randn(shifted.shape, generator=generator)


def _read() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Pixels, float32 (1797, 64) from 0 to 16, and labels, int64, from the file in the installed package."""
    path = Path(_folder("sklearn"), "datasets", "data", "digits.csv.gz")
    with gzip.open(path, "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.float32)
    return rows[:, :-1].copy(), rows[:, -1].astype(np.int64)


def _folder(package: str) -> str:
    """Where a package is installed; found without importing it, which would take seconds.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"{package}: not installed, and has the images; pip install scikit-learn")
    return next(iter(found.submodule_search_locations))


def load(settings: Mapping[str, Any], cache: Path) -> Digits:
    return Digits(settings)


def task(size: str) -> Task:
    if size == "large":
        return Task("images", LARGE, steps=3000, lr=1e-3, load=load, package="sklearn")
    return Task("images", SMALL, steps=250, lr=8e-3, load=load, package="sklearn", seeds=60)
