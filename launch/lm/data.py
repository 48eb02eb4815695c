"""Text as bytes: reading, splitting into training and held-out text, and sampling the windows of a step."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.errors import UserError

Bytes = NDArray[np.uint8]

# Ends every file, so that the model can tell where the next file begins.
_SEPARATOR = b"\0"


@dataclass(frozen=True)
class Corpus:
    """Text for training, text held out from other files (or the end of a single one), and a line for people."""

    train: Bytes
    heldout: Bytes
    description: str

    @classmethod
    def of(cls, train: bytes, heldout: bytes, description: str) -> Corpus:
        """Makes a corpus of two texts."""
        return cls(np.frombuffer(train, np.uint8), np.frombuffer(heldout, np.uint8), description)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of both texts, to tell one corpus from another."""
        digest = hashlib.sha256(self.train.tobytes())
        digest.update(self.heldout.tobytes())
        return digest.hexdigest()


def load(source: str | None, heldout: float) -> Corpus:
    """Reads a corpus.

    Args:
        source: a file, a folder (all its files but hidden ones), or None for the ``*.py`` files of
            Python's standard library.
        heldout: share of the text to hold out. The path of a file alone decides whether the file is held out; a
            single file is cut in two at a byte.

    Raises:
        UserError: the source does not exist, cannot be read, or is a folder with fewer than two files of text.
    """
    path = Path(sysconfig.get_path("stdlib") if source is None else source)
    try:
        if path.is_file():
            text = path.read_bytes()
            cut = len(text) - int(len(text) * heldout)
            return Corpus.of(text[:cut], text[cut:], f"{path}: the bytes from {cut} on are held out of {len(text)}")
        if path.is_dir():
            is_wanted = _is_library_source if source is None else _is_shown
            files = [file.relative_to(path) for file in path.rglob("*")]
            names = sorted(file.as_posix() for file in files if is_wanted(file) and (path / file).is_file())
            return _of_files(path, {name: (path / name).read_bytes() for name in names}, heldout)
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error
    raise UserError(f"data {source} not found: give a file or a folder of text")


def _of_files(folder: Path, texts: dict[str, bytes], heldout: float) -> Corpus:
    """Divides files, which are sorted by name, into those to train on and those held out."""
    names = [name for name, text in texts.items() if text]
    if len(names) < 2:
        raise UserError(f"data {folder} has {len(names)} files with text: at least 2 are needed")
    out = {name for name in names if _draw(name) < heldout} or {min(names, key=_draw)}
    if len(out) == len(names):
        out.remove(max(names, key=_draw))
    train, held = (b"".join(texts[n] + _SEPARATOR for n in names if (n in out) == is_held) for is_held in (0, 1))
    said = (
        f"{len(names) - len(out)} files ({len(train):,} bytes) to train on, {len(out)} ({len(held):,} bytes) held out"
    )
    return Corpus.of(train, held, f"{folder}: {said}")


def _is_shown(path: Path) -> bool:
    return not any(part.startswith(".") for part in path.parts)


def _is_library_source(path: Path) -> bool:
    foreign = {"site-packages", "dist-packages", "__pycache__"}
    return _is_shown(path) and path.suffix == ".py" and not foreign.intersection(path.parts)


def _draw(name: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2.0**48


def seed_of(seed: int, step: int, micro_batch: int) -> int:
    """A seed for a micro-batch's random numbers, such as dropout's: a function of these, not of the ranks."""
    (state,) = np.random.SeedSequence((seed, step, micro_batch, 1)).generate_state(1, np.uint64)  # 1: not the data's
    return int(state)


def train_offsets(corpus: Corpus, context: int, batch: int, seed: int, step: int) -> list[int]:
    """The offsets of a step's windows in the training text: a function of seed and step (from 1), not of the ranks.

    A window has `context` input bytes, and its last target is one byte further; `batch` windows are those of all ranks.
    """
    draw = np.random.default_rng((seed, step))
    return [int(offset) for offset in draw.integers(0, len(corpus.train) - context, size=batch)]


def heldout_offsets(corpus: Corpus, context: int, count: int) -> list[int]:
    """The offsets of the held-out windows: at most `count`, evenly spread, without overlap."""
    count = min(count, (len(corpus.heldout) - 1) // context)
    last = len(corpus.heldout) - context - 1
    return [index * last // max(1, count - 1) for index in range(count)]


def windows(text: Bytes, offsets: list[int], context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64, each (len(offsets), context)."""
    rows = np.stack([text[offset : offset + context + 1] for offset in offsets]).astype(np.int64)
    tokens = torch.from_numpy(rows)
    return tokens[:, :-1], tokens[:, 1:]
