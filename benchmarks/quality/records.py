"""Results on disk: one JSON line per run, appended when the run ends."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Key = tuple[str, int, str, str, float]


def key_of(record: Record) -> Key:
    """The identity of a run: optimizer, seed, digest of the task, options of the optimizer, learning rate."""
    options = json.dumps(record["options"], sort_keys=True)
    return record["optimizer"], record["seed"], record["digest"], options, record["lr"]


def read(path: Path) -> list[Record]:
    """The runs in a file, none if there is no such file. A last line that was cut off is left out.

    Raises:
        ValueError: another line is not JSON.
    """
    if not path.exists():
        return []
    found: list[Record] = []
    *lines, _ = path.read_text().split("\n")
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: got no JSON ({error}); remove the line") from error
    return found


def repair(path: Path) -> None:
    """Removes a last line that was cut off, so that the next one starts on a line of its own."""
    if not path.exists():
        return
    text = path.read_bytes()
    if text and not text.endswith(b"\n"):
        os.truncate(path, text.rfind(b"\n") + 1)


def append(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def drop(path: Path, optimizers: Iterable[str]) -> None:
    """Removes the runs of optimizers whose code changed, through a second file and one rename."""
    names = set(optimizers)
    kept = [record for record in read(path) if record["optimizer"] not in names]
    if path.exists():
        new = path.with_suffix(".new")
        new.write_text("".join(json.dumps(record) + "\n" for record in kept))
        new.replace(path)
